"""`octavo.toml`: what a household sets once and is too long for flags.

[[keys]] ...                                  # who may use the server (`config_keys`)

[[kv-cache.pinned-prefixes]]                  # computed at the start, and never given up
system = "You are the house assistant."      # as a chat begins with it; or
text = "..."                                  # as a completion begins with it; or
system-file = "assistant.txt"                 # either from a file (text-file), beside this one
cache-salt = "kitchen"                        # optional: only for requests with this salt
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.config_place import BadConfig, Place

if TYPE_CHECKING:
    from octavo.api.keys import Key

_ROOMS = ("keys", "kv-cache")


def default_path() -> Path:
    """`$XDG_CONFIG_HOME/octavo/octavo.toml`, else `~/.config/octavo/octavo.toml`; need not be there."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification has relative paths ignored.
    root = Path(config) if os.path.isabs(config) else Path.home() / ".config"
    return root / "octavo" / "octavo.toml"


def is_there(path: Path) -> bool:
    """False only where there is no such file: one that cannot be looked at is there."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def parse(text: str, path: Path) -> dict[str, Any]:
    """The content of a file. Raises: BadConfig for what is no TOML, or what nobody knows."""
    import tomllib  # only where there is a file: start-up is counted

    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise BadConfig(f"{path} is nested too deeply to be read") from None
    except ValueError as error:  # also for a number of more digits than Python reads
        raise BadConfig(f"{path} is not TOML: {error}") from error
    Place(path, "").only_known(content, _ROOMS)
    return content


def read_text(path: Path) -> str:
    """Raises: BadConfig for a file that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadConfig(f"{path} cannot be read: {said}") from error


def read_keys(path: Path, beside: Sequence[Key] = ()) -> tuple[Key, ...] | None:
    """Only the keys of a file, as `config_keys.keys_of`: what else it says is read at the start. Raises:
    BadConfig."""
    from octavo.cli.config_keys import keys_of

    return keys_of(parse(read_text(path), path), path, beside)


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """The beginning of prompts. system: of a chat, through its template; else of a completion, as it is."""

    text: str
    system: bool
    cache_salt: str


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file says beside its keys; nothing where there is none."""

    pinned_prefixes: tuple[PinnedPrefix, ...] = ()

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Raises: BadConfig for a file that cannot be read, is no TOML, or says what nobody knows."""
        content = parse(read_text(path), path)
        kv_cache = Place(path, "").table(content, "kv-cache")
        inside = Place(path, "kv-cache")
        inside.only_known(kv_cache, ("pinned-prefixes",))
        return cls(tuple(_pinned_prefix(*one) for one in inside.tables(kv_cache, "pinned-prefixes")))


_SOURCES = ("system", "text", "system-file", "text-file")


def _pinned_prefix(place: Place, given: dict[str, Any]) -> PinnedPrefix:
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
