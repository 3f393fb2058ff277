"""uvicorn around the application, with an end that every open request survives or is told about."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from octavo.engine.engine import Engine

FINISH_SECONDS = 5.0
"""Time that open requests get to finish after the first signal; what is left then fails with an error."""

FAREWELL_SECONDS = 10.0
"""Time beyond it for the last step to return and the errors to reach their clients; then connections are
cut.
"""


KEEP_ALIVE_SECONDS = 60
"""Idle connections live this long: with uvicorn's 5 s, a client that pauses meets a closing one."""


class Server(uvicorn.Server):
    """Serves one application on one listening socket until SIGINT or SIGTERM.

    first signal   no new connections; the engine lets open requests finish for FINISH_SECONDS, fails the rest
    second signal  the process exits at once
    """

    def __init__(self, app: ASGIApp, engine: Engine, *, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(FINISH_SECONDS + FAREWELL_SECONDS),
            )
        )
        self._engine = engine
        self._on_ready = on_ready

    def serve_on(self, listener: socket.socket) -> None:
        """Blocks until the server has ended and the engine is closed. Raises what `Engine.close` raises."""
        asyncio.run(self.serve(sockets=[listener]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Together: the connections wait for streams that only the closing engine ends.
        closing = asyncio.create_task(asyncio.to_thread(self._engine.close, FINISH_SECONDS))
        await super().shutdown(sockets)
        await closing

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises the signal again at its end, which would make an orderly exit look like a crash."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.should_exit:
            print("octavo: stopped at once", file=sys.stderr, flush=True)
            os._exit(128 + sig)
        if self._engine.num_open:
            print(
                f"octavo: {self._engine.num_open} open requests may finish within {FINISH_SECONDS:.0f} s; "
                "once more stops at once",
                file=sys.stderr,
                flush=True,
            )
        self.should_exit = True
