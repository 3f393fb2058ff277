"""API keys: what each allows, which are valid now, and which one a request has shown.

    octavo.toml --source--> | Keyring | --find(what was sent)--> LiveKey: settings, and its tokens a minute
    --api-key ------------> |         | --quotas, at each change--> the engine

One thread: the event loop's.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.api.rate_limit import TokenBucket

logger = logging.getLogger("octavo.keys")

HOUSEHOLD = "household"
"""The group of keys that name none, and of everybody where no keys are asked for."""

PRIVATE = "private"
"""The group of one key alone."""

FLAG_NAME = "api-key"
"""The name of the key that `--api-key` gives."""


def new_key() -> str:
    """A key nobody can guess: 256 random bits as 43 base64url characters behind `octavo-`."""
    return f"octavo-{secrets.token_urlsafe(32)}"


def digest_of(key: bytes) -> bytes:
    """32 bytes by which a key is known here.

    A plain SHA-256. Slow hashes (scrypt, Argon2) make guessing words costly; here there is nothing to guess
    but 256 random bits, and a slow one would be paid by every request.
    """
    return hashlib.sha256(key).digest()


@dataclass(frozen=True, slots=True)
class Key:
    """One person's or program's key and what it allows.

    digest: of the key (`digest_of`). weight: its part of the machine beside others'. background: everybody
    else's work comes first. group: keys of one group find each other's cached content; `PRIVATE`: nobody's.
    kv_quota: bytes of the cache that are its own before others' content must go for it; None: an equal part.
    tokens_per_minute, max_model_len: computed tokens, and tokens of the longest request, prompt and answer
    together; None: no limit but the server's. admin: may use /admin.
    """

    name: str
    digest: bytes
    weight: float = 1.0
    background: bool = False
    group: str = HOUSEHOLD
    kv_quota: int | None = None
    tokens_per_minute: int | None = None
    max_model_len: int | None = None
    admin: bool = False

    @classmethod
    def of_flag(cls, key: str) -> Key:
        """What `--api-key KEY` means."""
        return cls(FLAG_NAME, digest_of(key.encode("utf-8", "surrogateescape")), admin=True)

    @property
    def account(self) -> str:
        """Whose the work is for the engine. No address and no other key's name gives the same."""
        return f"key:{self.name}"

    @property
    def sharing_group(self) -> str:
        """The engine's name of the group. That of a private key is made of its hash, so that no name that a
        file can give is equal, nor a later key of the same name."""
        if self.group == HOUSEHOLD:
            return ""
        return f"key:{self.digest.hex()}" if self.group == PRIVATE else f"group:{self.group}"

    def described(self) -> dict[str, object]:
        """Its settings for JSON; the hash is not among them."""
        return {
            "name": self.name,
            "weight": self.weight,
            "class": "background" if self.background else "interactive",
            "group": self.group,
            "kv_quota": self.kv_quota,
            "tokens_per_minute": self.tokens_per_minute,
            "max_model_len": self.max_model_len,
            "admin": self.admin,
        }


class LiveKey(NamedTuple):
    """A key of a running server. bucket: its tokens of this minute; None where they are not limited."""

    settings: Key
    bucket: TokenBucket | None


class KeySource(Protocol):
    """Keys that may change while the server runs."""

    @property
    def keys(self) -> tuple[Key, ...] | None:
        """None: it does not speak of keys. Empty: there are none (any more)."""

    def changed(self) -> bool:
        """Look. Returns: whether `keys` is another now than when it was last asked."""


class Keyring:
    """The keys that are valid now.

    A server that has ever asked for keys goes on asking: where the source stops speaking of them, nobody gets
    in. Open again is only a server that is started again.

    source: looked at on every request, so that a revoked key is refused from the next one on; one `stat`, 2
    microseconds. flag_key: valid besides, whatever the source says.
    """

    def __init__(
        self,
        source: KeySource | None = None,
        *,
        flag_key: Key | None = None,
        new_bucket: Callable[[int], TokenBucket] = TokenBucket,
    ) -> None:
        self._source = source
        self._flag_keys = () if flag_key is None else (flag_key,)
        self._new_bucket = new_bucket
        self._live: dict[bytes, LiveKey] | None = None
        self._tell_quotas: Callable[[Mapping[str, int]], None] = lambda _: None
        self._quotas: dict[str, int] = {}
        self._take()

    @property
    def keyed(self) -> bool:
        """Whether a request needs a key."""
        return self._live is not None

    @property
    def live(self) -> tuple[LiveKey, ...]:
        """All keys, in the order of the source."""
        return tuple((self._live or {}).values())

    def tell_quotas(self, listener: Callable[[Mapping[str, int]], None]) -> None:
        """Call `listener` with the bytes of each account that has a quota: now, if there is one, and whenever
        they change."""
        self._tell_quotas = listener
        if self._quotas:
            listener(self._quotas)

    def refresh(self) -> None:
        """Look whether the source has changed. For every request, before `keyed` and `find`."""
        if self._source is not None and self._source.changed():
            self._take()

    def find(self, given: bytes) -> LiveKey | None:
        """The key that was sent. Constant time: hashes are compared, every one, to their last byte."""
        digest = digest_of(given)
        found = None
        for live in self.live:
            if hmac.compare_digest(live.settings.digest, digest):
                found = live
        return found

    def _take(self) -> None:
        keys = self._source.keys if self._source is not None else None
        before = self._live
        if keys is None and not self._flag_keys and before is None:
            return
        wanted = (*self._flag_keys, *(keys or ()))
        self._live = {key.digest: LiveKey(key, self._bucket(key, before or {})) for key in wanted}
        if not self._live:
            logger.warning("there is no API key (any more): nobody gets in")
        quotas = {key.account: key.kv_quota for key in wanted if key.kv_quota is not None}
        if quotas != self._quotas:
            self._quotas = quotas
            self._tell_quotas(quotas)

    def _bucket(self, key: Key, before: Mapping[bytes, LiveKey]) -> TokenBucket | None:
        """What a key has used stays used when the file changes."""
        if key.tokens_per_minute is None:
            return None
        earlier = before.get(key.digest)
        if earlier is None or earlier.bucket is None:
            return self._new_bucket(key.tokens_per_minute)
        earlier.bucket.limit_to(key.tokens_per_minute)
        return earlier.bucket
