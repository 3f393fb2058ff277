"""A client that goes away ends its own work at once, whether or not it was streaming."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnected(Exception):
    """Nobody is there to read the answer."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelling it as soon as `receive` reports that the client closed the connection.

    The body must have been read whole. `work` frees what it holds in its `finally`; it has finished when this
    returns.
    Raises: ClientDisconnected, or whatever `work` raises.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnected
        return worker.result()
    finally:
        watcher.cancel()
        worker.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
