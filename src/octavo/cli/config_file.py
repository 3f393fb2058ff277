"""`octavo.toml`: what a household sets once and is too long for flags.

[[kv-cache.pinned-prefixes]]          # computed at the start, and never given up
system = "You are the house assistant."      # as a chat begins with it; or
text = "..."                                  # as a completion begins with it; or
system-file = "assistant.txt"                 # either from a file (text-file), beside this one
cache-salt = "kitchen"                        # optional: only for requests with this salt
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


class BadConfig(Exception):
    """One sentence: the file, the place in it and what is wrong there."""


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """The beginning of prompts. system: of a chat, through its template; else of a completion, as it is."""

    text: str
    system: bool
    cache_salt: str


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file says; nothing where there is none."""

    pinned_prefixes: tuple[PinnedPrefix, ...] = ()

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Raises: BadConfig for a file that cannot be read, is no TOML, or says what nobody knows."""
        import tomllib  # only where there is a file: start-up is counted

        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise BadConfig(f"{path} cannot be read: {said}") from error
        except tomllib.TOMLDecodeError as error:
            raise BadConfig(f"{path} is not TOML: {error}") from error
        place = _Place(path, "")
        place.only_known(content, ("kv-cache",))
        kv_cache = place.table(content, "kv-cache")
        inside = _Place(path, "kv-cache")
        inside.only_known(kv_cache, ("pinned-prefixes",))
        given = kv_cache.get("pinned-prefixes", [])
        if not isinstance(given, list):
            raise inside.wrong("pinned-prefixes", "a list of tables", given)
        return cls(
            tuple(
                _pinned_prefix(_Place(path, f"kv-cache.pinned-prefixes[{number}]"), one)
                for number, one in enumerate(given)
            )
        )


_SOURCES = ("system", "text", "system-file", "text-file")


def _pinned_prefix(place: _Place, given: Any) -> PinnedPrefix:
    if not isinstance(given, dict):
        raise place.wrong("", "a table", given)
    place.only_known(given, (*_SOURCES, "cache-salt"))
    named = [source for source in _SOURCES if source in given]
    if len(named) != 1:
        raise BadConfig(f"{place} needs one of {', '.join(_SOURCES)}, and has {len(named)} of them")
    source = named[0]
    text = place.string(given, source)
    if source.endswith("-file"):
        beside = place.file.parent / text
        try:
            text = beside.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadConfig(f"{place}.{source}: {beside} cannot be read: {error}") from error
    if not text:
        raise BadConfig(f"{place}.{source} is empty")
    return PinnedPrefix(text, source.startswith("system"), place.string(given, "cache-salt", ""))


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    path: str

    def __str__(self) -> str:
        return f"{self.file}: {self.path}"

    def only_known(self, table: dict[str, Any], known: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                where = f"{self.path}.{key}" if self.path else key
                raise BadConfig(f"{self.file}: '{where}' means nothing here; there is {', '.join(known)}")

    def table(self, parent: dict[str, Any], key: str) -> dict[str, Any]:
        value = parent.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "a table", value)
        return value

    def string(self, table: dict[str, Any], key: str, default: str | None = None) -> str:
        value = table.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "text", value)
        return value

    def wrong(self, key: str, wanted: str, value: Any) -> BadConfig:
        where = ".".join(part for part in (self.path, key) if part)
        return BadConfig(f"{self.file}: '{where}' must be {wanted}, not {type(value).__name__}")
