"""The keys of `octavo.toml`.

[[keys]]
name = "anna"                # 1 to 64 printable characters
hash = "sha256:9f86d0..."    # of the key, which stands nowhere; `octavo keys add anna` writes both
weight = 2.0                 # her part of the machine beside others', above 0 and at most 1,000; 1
class = "interactive"        # or "background": yields to everybody who is not
group = "household"          # who shares cached content with her; "private": nobody
kv-quota = "512MiB"          # of the KV cache, before others' content must go for hers; an equal part
tokens-per-minute = 20000    # computed; no limit
max-model-len = 4096         # tokens of her longest request, prompt and answer together; the server's
admin = false                # may use /admin
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.api.keys import FLAG_NAME, HOUSEHOLD, Key, digest_of
from octavo.cli.config_place import BadConfig, Place

MAX_NAME = 64
"""Characters of a name, and of a group's."""

MAX_WEIGHT = 1000.0

CLASSES = ("interactive", "background")

_FIELDS = (
    "name",
    "hash",
    "weight",
    "class",
    "group",
    "kv-quota",
    "tokens-per-minute",
    "max-model-len",
    "admin",
)


def keys_of(content: dict[str, Any], file: Path, beside: Sequence[Key] = ()) -> tuple[Key, ...] | None:
    """The keys that a file speaks of, in its order. None where it has no `keys`; empty where that has none.

    beside: keys from elsewhere, which the file's may not equal.

    Raises: BadConfig.
    """
    if "keys" not in content:
        return None
    keys: list[Key] = []
    for place, given in Place(file, "").tables(content, "keys"):
        key = _key(place, given)
        for number, other in enumerate(keys):
            if other.name == key.name:
                raise BadConfig(f"{place}.name is '{key.name}', and so is keys[{number}].name")
            if other.digest == key.digest:
                raise BadConfig(f"{place}.hash is that of keys[{number}], '{other.name}', too")
        for other in beside:
            if other.digest == key.digest:
                raise BadConfig(f"{place}.hash is that of the key that --{other.name} gives")
        keys.append(key)
    return tuple(keys)


def _key(place: Place, given: dict[str, Any]) -> Key:
    place.only_known(given, _FIELDS)
    name = _name(place, "name", place.string(given, "name"))
    if name == FLAG_NAME:
        raise place.bad("name", f"must not be '{FLAG_NAME}', which is the key that --{FLAG_NAME} gives")
    of_work = place.string(given, "class", CLASSES[0])
    if of_work not in CLASSES:
        raise place.bad("class", f"must be {' or '.join(CLASSES)}, not '{of_work[:MAX_NAME]}'")
    return Key(
        name,
        _digest(place, place.string(given, "hash")),
        weight=place.number(given, "weight", 1.0, most=MAX_WEIGHT),
        background=of_work == "background",
        group=_name(place, "group", place.string(given, "group", "") or HOUSEHOLD),
        kv_quota=place.size(given, "kv-quota"),
        tokens_per_minute=place.count(given, "tokens-per-minute"),
        max_model_len=place.count(given, "max-model-len"),
        admin=place.boolean(given, "admin", False),
    )


def _name(place: Place, field: str, name: str) -> str:
    if not 1 <= len(name) <= MAX_NAME:
        raise place.bad(field, f"must have from 1 to {MAX_NAME} characters, not {len(name)}")
    if not name.isprintable() or name != name.strip():
        raise place.bad(field, f"must be printable, without spaces at its ends, and not {name!a}")
    return name


def _digest(place: Place, given: str) -> bytes:
    match = re.fullmatch(r"sha256:([0-9a-fA-F]{64})", given)
    if match is None:
        raise place.bad(
            "hash",
            f"must be 'sha256:' and 64 hexadecimal digits, 71 characters, and has {len(given)}; "
            "'octavo keys add NAME' makes a key and writes its hash",
        )
    digest = bytes.fromhex(match[1])
    if digest == digest_of(b""):
        raise place.bad("hash", "is that of no key at all: everybody would get in")
    return digest
