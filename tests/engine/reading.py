"""Reading generations to their end, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

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
