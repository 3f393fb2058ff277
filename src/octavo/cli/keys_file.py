"""Writing keys into `octavo.toml`: everything else in it, comments and order too, stays as it was.

lock the folder -> read -> edit (tomlkit) -> check the result as a server would -> rename into place
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.config_file import is_there, parse, read_text
from octavo.cli.config_keys import keys_of

if TYPE_CHECKING:
    from octavo.api.keys import Key

NEW_FILE_MODE = 0o600
NEW_FOLDER_MODE = 0o700

NOBODY = "keys = []  # nobody gets in"
"""What the file says when its last key has been revoked: with no word of keys a server asks for none."""


class NoSuchKey(Exception):
    """One sentence: which keys there are."""


def add_key(path: Path, fields: Mapping[str, Any]) -> tuple[Key, ...]:
    """Write another key behind those that are there; the file and its folder are made where they are missing.

    fields: as the file names them. Returns: the keys before.
    Raises: BadConfig, and writes nothing, where the file is wrong or would be; OSError.
    """
    return _edit(path, lambda text, _: _with(text, fields))


def revoke_key(path: Path, name: str) -> tuple[Key, ...]:
    """Take a key out of the file. Where none is left the file says so, and nobody gets in.

    Returns: the keys before. Raises: NoSuchKey; BadConfig and OSError as `add_key`.
    """

    if not is_there(path):  # and no folder is made for it
        raise NoSuchKey(f"{path} has no key named '{name}'; there is no such file")

    def revoke(text: str, keys: tuple[Key, ...]) -> str:
        numbers = [number for number, key in enumerate(keys) if key.name == name]
        if not numbers:
            there = ", ".join(f"'{key.name}'" for key in keys) or "none"
            raise NoSuchKey(f"{path} has no key named '{name}'; there is {there}")
        return _without(text, numbers[0])

    return _edit(path, revoke)


def _edit(path: Path, change: Callable[[str, tuple[Key, ...]], str]) -> tuple[Key, ...]:
    real = Path(os.path.realpath(path))  # the file itself is replaced, not a link to it
    with _locked(real.parent):
        text = read_text(path) if is_there(path) else ""
        before = keys_of(parse(text, path), path) or ()
        changed = change(text, before)
        keys_of(parse(changed, path), path)
        _replace(real, changed, newline=_newline(real))
    return before


def _with(text: str, fields: Mapping[str, Any]) -> str:
    import tomlkit

    document = tomlkit.parse(text if text.endswith("\n") or not text else text + "\n")
    keys: Any = document.get("keys")
    if isinstance(keys, tomlkit.items.Array) and keys:  # keys = [{...}, {...}]
        one = tomlkit.inline_table()
        one.update(fields)
        keys.append(one)
        return document.as_string()
    entry = tomlkit.table()
    for field, value in fields.items():
        entry.add(field, value)
    if keys:
        # What follows the last key, a comment above the next table perhaps, goes on following it.
        entry.value.body.extend(_cut_end(keys[-1].value.body))
    else:
        if keys is not None:
            del document["keys"]
        keys = tomlkit.aot()
        document.append("keys", keys)
    rest = document.as_string()
    if rest.strip() and not rest.endswith("\n\n"):
        entry.trivia.indent = "\n"
    keys.append(entry)
    return document.as_string().lstrip("\n")


def _without(text: str, number: int) -> str:
    import tomlkit

    document = tomlkit.parse(text)
    keys: Any = document["keys"]
    if isinstance(keys, tomlkit.items.Array):
        del keys[number]
        return document.as_string()
    # tomlkit would take the comments behind the key along, which speak of what follows. So the key's own
    # lines become one that can be found, and that and the header above it are cut out of the text.
    body = keys[number].value.body
    end = _cut_end(body)
    mark = tomlkit.table()
    mark.add(f"revoked-{secrets.token_hex(8)}", 0)
    body[:] = [*mark.value.body, *end]
    lines = document.as_string().split("\n")
    at = next(at for at, line in enumerate(lines) if line.strip() == mark.as_string().strip())
    before, behind = lines[: at - 1], lines[at + 1 :]
    if len(keys) == 1:
        there = "\n".join((*before, NOBODY, *behind))
        # Behind the header of a table it would belong to that.
        return there if tomlkit.parse(there).get("keys") == [] else "\n".join((NOBODY, "", *before, *behind))
    if behind and not behind[0].strip() and not (before and before[-1].strip()):
        del behind[0]
    return "\n".join((*before, *behind))


def _cut_end(body: list[Any]) -> list[Any]:
    """Take what follows the last value, comments and empty lines, out of a table's body."""
    last = max((at for at, (key, _) in enumerate(body) if key is not None), default=-1)
    end = body[last + 1 :]
    del body[last + 1 :]
    return end


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time: two that read the same file would lose what one of them writes."""
    folder.mkdir(NEW_FOLDER_MODE, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _newline(path: Path) -> str:
    """How the lines of a file end."""
    return "\r\n" if is_there(path) and b"\r\n" in path.read_bytes() else "\n"


def _replace(path: Path, text: str, *, newline: str) -> None:
    """The whole file at once or not at all, with the mode and the owner that it had."""
    before = path.stat() if is_there(path) else None
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "w", encoding="utf-8", newline=newline) as file:
            file.write(text)
            os.fchmod(descriptor, NEW_FILE_MODE if before is None else before.st_mode & 0o7777)
            if before is not None and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(PermissionError):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
