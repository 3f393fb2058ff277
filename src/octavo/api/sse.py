"""Server-sent events: one `data:` line an event, and an error told in the stream once it has begun."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from starlette.background import BackgroundTask
from starlette.responses import Response

from octavo.api.disconnect import ClientDisconnected, until_disconnect

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

DONE = b"[DONE]"


class EventStream(Response):
    """Sends each item of `events` (one line of JSON, bytes) as it comes.

    `on_error` turns an exception of the generator into the last event, since the status has gone out by then.
    `on_close` is called once at the end, however it ended: also when the client left before the first event
    was asked for, where a `finally` inside the generator would never run.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_error: Callable[[Exception], bytes],
        on_close: Callable[[], None],
    ) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self.events = events
        self.on_error = on_error
        self.on_close = on_close
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
        try:
            try:
                async for event in self.events:
                    await send(_data(event))
            except OSError:
                raise
            except Exception as error:
                await send(_data(self.on_error(error)))
        finally:
            await self.events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _data(event: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True}
