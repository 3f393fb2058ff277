"""Reading generations to their end, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from octavo.engine.engine import Engine
from octavo.engine.generation import Generation
from octavo.engine.sampling_params import SamplingParams


def params(max_tokens: int | None = 16, **changes: object) -> SamplingParams:
    """Greedy, and `max_tokens` of it."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)  # type: ignore[arg-type]


def read(generation: Generation) -> tuple[list[int], str | None]:
    """All tokens and the finish reason (None if the stream was cancelled)."""
    token_ids: list[int] = []
    reason = None
    for delta in generation:
        assert reason is None, "a delta after the last one"
        token_ids += delta.token_ids
        reason = delta.finish_reason
    return token_ids, reason


async def read_async(generation: Generation) -> tuple[list[int], str | None]:
    """The same on an event loop."""
    token_ids: list[int] = []
    reason = None
    async for delta in generation:
        assert reason is None, "a delta after the last one"
        token_ids += delta.token_ids
        reason = delta.finish_reason
    return token_ids, reason


def read_all(generations: Iterable[Generation]) -> list[list[int]]:
    """The tokens of several generations, one after the other, each of which must end by itself."""
    answers = []
    for generation in generations:
        token_ids, reason = read(generation)
        assert reason is not None
        answers.append(token_ids)
    return answers


def wait_until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Raises AssertionError if `condition` stays false."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def pause_at_every_border(engine: Engine, generation: Generation) -> list[int]:
    """Whenever the request has come to a new block, take half of its blocks, as a preemption would.

    Call before `engine.start`. Returns: the number of tokens known at each pause, filled in as they happen.
    """
    loop, sequence = engine._loop, generation._request.sequence
    size, take_tokens = loop._cache.block_size, loop._take_tokens
    pauses: list[int] = []

    def take_tokens_and_pause(plan: Any, drawn: Any, entered_at: float, returned_at: float) -> None:
        take_tokens(plan, drawn, entered_at, returned_at)
        if generation._request.outcome is not None or sequence.num_computed_tokens < sequence.num_tokens - 1:
            return
        border = sequence.num_tokens // size
        if border and (not pauses or border > pauses[-1] // size):
            pauses.append(sequence.num_tokens)
            loop._cache.free_tail(sequence, border // 2)

    loop._take_tokens = take_tokens_and_pause  # type: ignore[method-assign]
    return pauses
