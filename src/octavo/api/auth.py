"""The optional API key: `Authorization: Bearer KEY` on every route but `/health`."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from octavo.api.errors import APIError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health"})
"""Supervisors ask this without a secret, and it tells them one bit."""


KEY_DIGEST = "octavo.key_digest"
"""Where the scope of an admitted request says by which key: 16 bytes that tell keys apart and no key."""


class BearerAuth:
    """Answers 401 where the key is missing or wrong; compared in constant time."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self.app = app
        self.api_key = api_key.encode()
        self.key_digest = hashlib.blake2b(self.api_key, digest_size=16).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        if self._admits(Headers(scope=scope)):
            await self.app({**scope, KEY_DIGEST: self.key_digest}, receive, send)
            return
        refusal = APIError(
            401,
            "This server needs its API key as 'Authorization: Bearer KEY', and none or another was given.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Header bytes arrive as latin-1, so a key outside ASCII is compared by the bytes that were sent.
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self.api_key)
