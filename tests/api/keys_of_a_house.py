"""Keys for tests, and a source of them that a test may change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.api.keys import Key, digest_of


def key(name: str, secret: str | None = None, **settings: Any) -> Key:
    """The key of `name`: "key of NAME", unless it is another secret."""
    return replace(Key(name, digest_of((secret or f"key of {name}").encode())), **settings)


class Source:
    """A file that a test writes: `octavo.api.keys.KeySource`."""

    def __init__(self, *keys: Key) -> None:
        self.keys: tuple[Key, ...] | None = keys
        self._seen: tuple[Key, ...] | None = keys

    def changed(self) -> bool:
        before, self._seen = self._seen, self.keys
        return self._seen != before
