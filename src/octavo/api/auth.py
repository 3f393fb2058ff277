"""API keys at the door: `Authorization: Bearer KEY` or `x-api-key: KEY` on every route but `/health`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request

from octavo.api.errors import APIError
from octavo.api.key_limits import rate_limit_headers

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from octavo.api.keys import Keyring, LiveKey
    from octavo.api.rate_limit import TokenBucket

OPEN_PATHS = frozenset({"/health"})
"""Supervisors ask this without a secret, and it tells them one bit."""

_KEY = "octavo.key"
"""Where the scope of an admitted request has its key."""


def key_of(request: Request) -> LiveKey | None:
    """The key of a request; None where the server asks for none."""
    key: LiveKey | None = request.scope.get(_KEY)
    return key


class KeyAuth:
    """Answers 401 where keys are asked for and none of them was given; notes whose request it is.

    Every answer to a key with a limit of tokens says how many are left.
    """

    def __init__(self, app: ASGIApp, *, keyring: Keyring) -> None:
        self.app = app
        self.keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        self.keyring.refresh()
        if not self.keyring.keyed:
            await self.app(scope, receive, send)
            return
        key = self.keyring.find(_given(Headers(scope=scope)))
        if key is None:
            refusal = APIError(
                401,
                "This server needs one of its API keys as 'Authorization: Bearer KEY' or 'x-api-key: KEY', "
                "and none or another was given.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal.response()(scope, receive, send)
            return
        if key.bucket is not None:
            send = _telling_what_is_left(key.bucket, send)
        await self.app({**scope, _KEY: key}, receive, send)


def _given(headers: Headers) -> bytes:
    """The key as it was sent; empty where none was."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        key = headers.get("x-api-key", "")  # Anthropic's clients
    # Header bytes arrive as latin-1, so a key outside ASCII is known by the bytes that were sent. Only what
    # HTTP calls space is none of it: "à" ends with a byte that latin-1 calls a space too.
    return key.strip(" \t").encode("latin-1")


def _telling_what_is_left(bucket: TokenBucket, send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(rate_limit_headers(bucket))
        await send(message)

    return sending
