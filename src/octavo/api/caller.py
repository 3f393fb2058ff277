"""Who sent a request: an API key, else an address, and a user there."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from starlette.requests import Request

from octavo.api.auth import KEY_DIGEST
from octavo.engine.conversations import Owner
from octavo.engine.request import Share


class Caller(NamedTuple):
    """owner: who may see what is recorded of the request. share: on whose part of the machine it is computed.
    group: of people, who share cached content among them. admin: may see numbers of everybody's requests."""

    owner: Owner
    share: Share
    group: str
    admin: bool = False


def caller_of(request: Request, user: str | None) -> Caller:
    """The caller of an HTTP request whose `user` field, or query parameter, says `user`; "" is none.

    Only a key that the server asked for counts: without one, clients send whatever their library wants, and
    two of them may send the same. The address is that of the connection, or what a proxy on this machine says
    in X-Forwarded-For (uvicorn's rule; FORWARDED_ALLOW_IPS names other proxies): behind one that says nothing
    everybody is one caller.
    """
    key_digest = request.scope.get(KEY_DIGEST)
    if key_digest is not None:
        account = b"key " + key_digest
    else:
        account = b"address " + (request.client.host.encode() if request.client is not None else b"")
    owner = Owner(_digest(account), _digest((user or "").encode("utf-8", "surrogatepass")))
    return Caller(owner, Share(owner.account.hex(), owner.user.hex() if user else ""), group="")


def _digest(name: bytes) -> bytes:
    """Names may be of any length, and who is who is all that has to be known of them."""
    return hashlib.blake2b(name, digest_size=16).digest()
