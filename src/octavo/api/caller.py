"""Who sent a request: an API key, else an address, and a user there."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from starlette.requests import Request

from octavo.api.auth import key_of
from octavo.api.keys import LiveKey
from octavo.engine.conversations import Owner
from octavo.engine.request import Share


class Caller(NamedTuple):
    """name: of the key, else the address; for whoever runs the server. owner: who may see what is recorded of
    the request. share: on whose part of the machine it is computed. group: of people, who share cached
    content among them. key: its limits; None where no keys are asked for.
    """

    name: str
    owner: Owner
    share: Share
    group: str
    key: LiveKey | None = None

    @property
    def admin(self) -> bool:
        """Whether it may see and change what is everybody's."""
        return self.key is not None and self.key.settings.admin


def caller_of(request: Request, user: str | None, *, background: bool = False) -> Caller:
    """The caller of an HTTP request whose `user` field, or query parameter, says `user`; "" is none.

    background: the request asks for it itself; what a key is for stays background without being asked.

    Only a key that the server asked for counts: without one, clients send whatever their library wants, and
    two of them may send the same. The address is that of the connection, or what a proxy on this machine says
    in X-Forwarded-For (uvicorn's rule; FORWARDED_ALLOW_IPS names other proxies): behind one that says nothing
    everybody is one caller.

    A key's share goes by its name, which a new key for the same person takes over. Its records go by the key
    itself: whoever is called the same later reads nothing of before.
    """
    user_digest = _digest((user or "").encode("utf-8", "surrogatepass"))
    share_user = user_digest.hex() if user else ""
    key = key_of(request)
    if key is not None:
        mine = key.settings
        return Caller(
            mine.name,
            Owner(_digest(b"key " + mine.digest), user_digest),
            Share(mine.account, share_user, mine.weight, background=mine.background or background),
            mine.sharing_group,
            key,
        )
    host = request.client.host if request.client is not None else ""
    address = _digest(b"address " + host.encode())
    share = Share(f"address:{address.hex()}", share_user, background=background)
    return Caller(host, Owner(address, user_digest), share, group="")


def _digest(name: bytes) -> bytes:
    """Names may be of any length, and who is who is all that has to be known of them."""
    return hashlib.blake2b(name, digest_size=16).digest()
