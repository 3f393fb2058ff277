"""A place in `octavo.toml`: its values, and the sentence for what is wrong there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LONGEST_SIZE = 64
"""Characters. Python converts no number of thousands of digits."""


class BadConfig(Exception):
    """One sentence: the file, the place in it and what is wrong there."""


@dataclass(frozen=True, slots=True)
class Place:
    """path: of a table in the file, as `keys[0]`; "" is the whole file. Every method raises BadConfig."""

    file: Path
    path: str

    def __str__(self) -> str:
        return f"{self.file}: {self.path}"

    def only_known(self, table: dict[str, Any], known: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                raise BadConfig(
                    f"{self.file}: '{self._at(key)}' means nothing here; there is {', '.join(known)}"
                )

    def table(self, parent: dict[str, Any], key: str) -> dict[str, Any]:
        value = parent.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "a table", value)
        return value

    def tables(self, parent: dict[str, Any], key: str) -> list[tuple[Place, dict[str, Any]]]:
        """Each table of a list, and its place."""
        given = parent.get(key, [])
        if not isinstance(given, list):
            raise self.wrong(key, "a list of tables", given)
        places = [Place(self.file, f"{self._at(key)}[{number}]") for number in range(len(given))]
        for place, one in zip(places, given, strict=True):
            if not isinstance(one, dict):
                raise place.wrong("", "a table", one)
        return list(zip(places, given, strict=True))

    def string(self, table: dict[str, Any], key: str, default: str | None = None) -> str:
        value = table.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "text", value)
        return value

    def boolean(self, table: dict[str, Any], key: str, default: bool) -> bool:
        value = table.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def number(self, table: dict[str, Any], key: str, default: float, *, most: float) -> float:
        """Above 0."""
        value = table.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number", value)
        if not 0 < value <= most:
            raise self.bad(key, f"must be a number above 0 and at most {most:,g}, not {_shown(value)}")
        return float(value)

    def count(self, table: dict[str, Any], key: str) -> int | None:
        """At least 1; None where it is not given."""
        value = table.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "a whole number", value)
        return self._within(key, value)

    def size(self, table: dict[str, Any], key: str) -> int | None:
        """Bytes, also as `512MiB`; None where it is not given."""
        from octavo.engine.memory import parse_bytes

        value = table.get(key)
        if not isinstance(value, str):
            return self.count(table, key)
        if len(value) > _LONGEST_SIZE:
            raise self.bad(key, f"has {len(value):,} characters and is not a size such as 512MiB")
        try:
            return self._within(key, parse_bytes(value))
        except ValueError as error:
            raise self.bad(key, f"is wrong: {error}") from None

    def wrong(self, key: str, wanted: str, value: Any) -> BadConfig:
        """What stands there is of another kind."""
        return self.bad(key, f"must be {wanted}, not {type(value).__name__}")

    def bad(self, key: str, sentence: str) -> BadConfig:
        return BadConfig(f"{self.file}: '{self._at(key)}' {sentence}")

    def _within(self, key: str, value: int) -> int:
        if not 1 <= value < 1 << 63:
            raise self.bad(key, f"must be from 1 to {(1 << 63) - 1}, not {_shown(value)}")
        return value

    def _at(self, key: str) -> str:
        return ".".join(part for part in (self.path, key) if part)


def _shown(value: float) -> str:
    """A number in a sentence: TOML writes numbers in hexadecimal that have too many digits for one."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"one of {value.bit_length():,} bits"
    return str(value)
