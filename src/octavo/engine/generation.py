"""The live stream of one choice, for asyncio and for plain threads.

The consumer reads the request's queues directly and only sleeps when they are empty. Before it sleeps it sets
`waiting` and looks once more; the engine thread appends first and looks at `waiting` after. So one of the two
always sees the other, without a lock, and a consumer that is busy costs the engine no wake-up at all: the
tokens it has not read yet come together in its next `Delta`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
import weakref
from collections import deque
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self

from octavo.engine.request import Delta, Request, RequestFailed, RequestStats, Standing

MAX_UNREAD_TOKENS = 256
"""Beyond this many unread tokens the sequence is held: a client that does not read must not take the pool."""

RESUME_UNREAD_TOKENS = MAX_UNREAD_TOKENS // 2
"""A held sequence goes on once its reader has come down to this; the distance keeps it from flapping."""


_write_keeping_the_interpreter = ctypes.PyDLL(None).write
_write_keeping_the_interpreter.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write_keeping_the_interpreter.restype = ctypes.c_ssize_t
_ONE = (1).to_bytes(8, sys.byteorder)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that this thread runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class LoopMailbox:
    """One asyncio event loop as the engine sees it: one wake-up a step for all its streams.

    `call_soon_threadsafe` writes to a socket and lets the interpreter go meanwhile; the loop it has just
    woken takes it, and the engine stands still until the loop has served its streams (0.15 ms a step,
    measured with one stream of SmolLM2). Here the loop watches an eventfd, and the write to it keeps the
    interpreter: the loop wakes at once and goes on when the native step begins. Linux, as the arena is.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """To be called on the loop's own thread."""
        self._loop = weakref.ref(loop)
        self._news: deque[list[Request]] = deque()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._eventfd)
        loop.add_reader(self._eventfd, self._deliver)

    def post(self, requests: list[Request]) -> None:
        """Wake the consumers of `requests` on their loop. Raises RuntimeError if the loop is closed."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            raise RuntimeError("the event loop is closed")
        self._news.append(requests)
        _write_keeping_the_interpreter(self._eventfd, _ONE, len(_ONE))

    def detach(self) -> None:
        """The engine has ended: the loop need not watch any more. From any thread."""
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed
                loop.call_soon_threadsafe(self._detach)

    def _detach(self) -> None:
        self._deliver()
        loop = self._loop()
        assert loop is not None
        loop.remove_reader(self._eventfd)

    def _deliver(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        while self._news:
            for request in self._news.popleft():
                waiter = request.waiter
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)


class ThreadMailbox:
    """Where one thread waits for news of any of the generations it watches.

    It keeps none of them alive: the engine keeps the mailbox while a request lives, and a generation that
    was dropped must end its request.
    """

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[list[Request]] = SimpleQueue()
        self._watched: weakref.WeakValueDictionary[Request, Generation] = weakref.WeakValueDictionary()

    def post(self, requests: list[Request]) -> None:
        """Called by the engine thread, once a step."""
        self._arrivals.put(requests)

    def watch(self, generation: Generation) -> None:
        """Announce the next news of `generation` in `wait`, once; news that is already there counts."""
        request = generation._request
        self._watched[request] = generation
        request.mailbox = self
        request.waiting = True
        if request.has_news:
            request.waiting = False
            self._arrivals.put([request])

    def wait(self) -> list[Generation]:
        """Sleep until something watched has news. A generation may be named with nothing new left to take;
        one that was dropped is not named.
        """
        named = map(self._watched.get, self._arrivals.get())
        return [generation for generation in named if generation is not None]


class EngineSide(Protocol):
    """What a generation asks of its engine; every call is thread-safe and returns at once."""

    def cancel(self, request: Request) -> None: ...

    def resume(self, request: Request) -> None: ...

    def standing(self, request: Request) -> Standing | None: ...

    def mailbox_of(self, loop: asyncio.AbstractEventLoop) -> LoopMailbox: ...


class Generation:
    """One choice's stream of `Delta`, made by `Engine.submit`.

    Iterate it with `async for` on an event loop or with `for` in a thread, in one place only. It ends after
    the delta that carries a finish_reason, or without one after `cancel`. Raises RequestFailed, after the
    tokens that came before the failure. Bounded: a consumer that stops reading holds its own sequence after
    MAX_UNREAD_TOKENS and nothing is dropped. A generation that is dropped unread is cancelled, and so is
    one left by its `with`.
    """

    def __init__(self, request: Request, engine: EngineSide) -> None:
        self._request = request
        self._engine = engine
        self._ended = False
        self._mailbox: ThreadMailbox | None = None

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.stats.num_prompt_tokens

    @property
    def stats(self) -> RequestStats:
        """Complete once the stream has ended; `progress` has the numbers before."""
        return self._request.stats

    @property
    def status(self) -> str:
        """ "waiting", "running", "paused" or "finished", as the engine thread has it."""
        return self._request.status

    def progress(self) -> RequestStats:
        """The numbers of this moment, from any thread."""
        return self._request.progress(time.monotonic())

    def standing(self) -> Standing | None:
        """Why it has no token yet, or stands still, from any thread; None once it generates, and after its
        end."""
        return self._engine.standing(self._request)

    def computed_output(self, count: int) -> list[int]:
        """The first `count` tokens of the answer, from any thread, but never the last one that there is: its
        keys have not been computed."""
        sequence = self._request.sequence
        return sequence.token_ids[sequence.num_prompt_tokens : -1][:count]

    def cancel(self, reason: str = "abort") -> None:
        """End the stream now and give its blocks back before the next step. Thread-safe and idempotent.

        A consumer that sleeps on the event loop of the thread that cancels wakes at once, others when the
        engine has seen it.

        reason: "abort" (the client went away) or "stop" (the consumer found a stop string).
        """
        if reason not in ("abort", "stop"):
            raise ValueError(f"a generation is cancelled with reason 'abort' or 'stop', not {reason!r}")
        request = self._request
        if request.outcome is None and request.cancelled is None:
            request.cancelled = reason
            self._engine.cancel(request)
            waiter = request.waiter
            if waiter is not None and not waiter.done() and waiter.get_loop() is _running_loop():
                waiter.set_result(None)

    def take(self) -> Delta | None:
        """Everything unread, at once, without waiting; None if there is nothing new (see `ended`).

        Raises: RequestFailed once the tokens before the failure have been taken.
        """
        request = self._request
        if self._ended or request.cancelled is not None:
            self._ended = True
            return None
        # The outcome first: whatever it says, every token before it is already in the queue.
        outcome = request.outcome
        count = len(request.tokens)
        popleft = request.tokens.popleft
        token_ids = [popleft() for _ in range(count)]
        logprobs = []
        if request.wants_logprobs:
            logprobs = [request.logprobs.popleft() for _ in range(count)]
        if request.sequence.held:
            self._engine.resume(request)
        if outcome is None or (isinstance(outcome, RequestFailed) and token_ids):
            return Delta(token_ids, logprobs) if token_ids else None
        self._ended = True
        if isinstance(outcome, RequestFailed):
            raise outcome
        return Delta(token_ids, logprobs, outcome, request.stop_token_id)

    @property
    def ended(self) -> bool:
        """True once `take` has returned the last delta, raised the failure, or seen the cancellation."""
        return self._ended

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while (delta := self.take()) is None:
            if self._ended:
                raise StopAsyncIteration
            await self._news()
        return delta

    async def _news(self) -> None:
        loop = asyncio.get_running_loop()
        request = self._request
        request.mailbox = self._engine.mailbox_of(loop)
        waiter = request.waiter = loop.create_future()
        request.waiting = True
        if not request.has_news:
            await waiter
        request.waiting = False
        request.waiter = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while (delta := self.take()) is None:
            if self._ended:
                raise StopIteration
            if self._mailbox is None:
                self._mailbox = ThreadMailbox()
            self._mailbox.watch(self)
            self._mailbox.wait()
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # A consumer that vanished without a word: nobody else can end its request.
        request = getattr(self, "_request", None)
        if request is not None and request.outcome is None and request.cancelled is None:
            self.cancel()
