"""Server-sent events: one `data:` line an event, an error told in the stream once it has begun, and comments,
which every client ignores, while there is nothing else to say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from starlette.background import BackgroundTask
from starlette.responses import Response

from octavo.api.disconnect import ClientDisconnected, until_disconnect
from octavo.engine.fault import describe

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger("octavo.api")

DONE = b"[DONE]"

FIRST_COMMENT_AFTER = 2.0
"""Seconds of a stream."""

COMMENT_EVERY = 5.0
"""Seconds between two looks for something to comment on: half of what proxies and people become uneasy
after."""


class EventStream(Response):
    """Sends each item of `events` (one line of JSON, bytes) as it comes.

    `on_error` turns an exception of the generator into the last event, since the status has gone out by then.
    `on_close` is called once at the end, however it ended: also when the client left before the first event
    was asked for, where a `finally` inside the generator would never run.
    `comment` is asked FIRST_COMMENT_AFTER seconds after the start and then every COMMENT_EVERY, and returns
    lines that begin with a colon, or None: nothing an event costs anything for.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_error: Callable[[Exception], bytes],
        on_close: Callable[[], None],
        comment: Callable[[], bytes | None],
    ) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self.events = events
        self.on_error = on_error
        self.on_close = on_close
        self.comment = comment
        # Proxies that buffer would turn a stream into one late block.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send(send))
        except (ClientDisconnected, OSError):  # servers raise OSError from send() when the client has gone
            return
        finally:
            self.on_close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        commenting = asyncio.ensure_future(self._comment(send))
        try:
            try:
                async for event in self.events:
                    await send(_data(event))
            except OSError:
                raise
            except Exception as error:
                await send(_data(self.on_error(error)))
        finally:
            commenting.cancel()
            await asyncio.gather(commenting, return_exceptions=True)
            await self.events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _comment(self, send: Send) -> None:
        """Beside the events: a server writes each message whole."""
        await asyncio.sleep(FIRST_COMMENT_AFTER)
        while True:
            try:
                lines = self.comment()
            except Exception as error:  # a fault of ours, and no reason to end anybody's stream
                logger.error("a comment in a stream failed\n%s", describe(error, log_content=False))
                return
            if lines is not None:
                await send({"type": "http.response.body", "body": lines + b"\n\n", "more_body": True})
            await asyncio.sleep(COMMENT_EVERY)


def _data(event: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True}
