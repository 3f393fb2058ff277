"""Whose a request is: of the API key it came with, else of the address it came from, and of a user there."""

from __future__ import annotations

import hashlib

from starlette.requests import Request

from octavo.api.auth import KEY_DIGEST
from octavo.engine.conversations import Owner


def owner_of(request: Request, user: str | None) -> Owner:
    """The owner of an HTTP request whose `user` field, or query parameter, says `user`; "" is none.

    Only a key that the server asked for counts: without one, clients send whatever their library wants, and
    two of them may send the same. The address is that of the connection, or what a proxy on this machine says
    in X-Forwarded-For (uvicorn's rule; FORWARDED_ALLOW_IPS names other proxies): behind one that says nothing
    everybody is one owner.
    """
    key_digest = request.scope.get(KEY_DIGEST)
    if key_digest is not None:
        account = b"key " + key_digest
    else:
        account = b"address " + (request.client.host.encode() if request.client is not None else b"")
    return Owner(_digest(account), _digest((user or "").encode("utf-8", "surrogatepass")))


def _digest(name: bytes) -> bytes:
    """Names may be of any length, and who is who is all that has to be known of them."""
    return hashlib.blake2b(name, digest_size=16).digest()
