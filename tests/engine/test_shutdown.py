"""Closing: everyone gets an answer, nothing is left behind."""

from __future__ import annotations

import threading
import time

import pytest

from engine.fake_model import FakeModel, FakeTokenizer, answer, running_engine
from engine.reading import params, read
from octavo.engine.engine import Engine, EngineConfig
from octavo.engine.request import RequestFailed, RequestRefused
from octavo.engine.step_loop import BlocksLeaked

PROMPT = [3, 1, 4, 1, 5]


def started(model: FakeModel | None = None) -> Engine:
    engine = Engine(
        model if model is not None else FakeModel(), FakeTokenizer(), EngineConfig(num_blocks_override=256)
    )
    engine.start()
    return engine


def test_open_requests_may_finish_and_new_ones_are_refused() -> None:
    model = FakeModel()
    model.gate()
    engine = started(model)
    generation = engine.submit(PROMPT, params(50))
    model.arrive()
    closing = threading.Thread(target=engine.close)
    closing.start()
    while engine._accepting:
        time.sleep(0.001)
    with pytest.raises(RequestRefused) as refused:
        engine.submit(PROMPT, params(1))
    assert refused.value.code == "shutting_down"
    model.open()
    assert read(generation) == (answer(PROMPT, 50), "length")
    closing.join(10)
    assert not closing.is_alive()


def test_what_cannot_finish_in_time_fails() -> None:
    model = FakeModel()
    model.before_step = lambda _: time.sleep(0.01)
    engine = started(model)
    generations = [engine.submit(PROMPT, params(2000)) for _ in range(2)]
    next(generations[0])
    engine.close(timeout=0.1)
    for generation in generations:
        with pytest.raises(RequestFailed) as failed:
            read(generation)
        assert failed.value.code == "shutting_down"


def test_a_client_that_never_reads_does_not_stop_the_shutdown() -> None:
    engine = started()
    generation = engine.submit(PROMPT, params(3000))
    while not generation._request.sequence.held:
        time.sleep(0.001)
    engine.close(timeout=0.05)
    assert generation.stats.finish_reason == "error"


def test_requests_submitted_before_a_start_that_never_came_fail() -> None:
    engine = Engine(FakeModel(), FakeTokenizer(), EngineConfig(num_blocks_override=8))
    generation = engine.submit(PROMPT, params(4))
    engine.close()
    with pytest.raises(RequestFailed) as failed:
        read(generation)
    assert failed.value.code == "shutting_down"


def test_closing_twice_and_starting_again() -> None:
    engine = started()
    with pytest.raises(RuntimeError, match="once"):
        engine.start()
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="once"):
        engine.start()


def test_a_leaked_block_is_found() -> None:
    engine = started()
    read(engine.submit(PROMPT, params(40)))
    engine._loop._cache._pool.take(1)
    with pytest.raises(BlocksLeaked, match="1 blocks are in use"):
        engine.close()


def test_a_step_that_never_returns_is_reported_and_the_pool_stays_mapped() -> None:
    """The native call may still be writing there."""
    model = FakeModel()
    model.gate()
    engine = started(model)
    generation = engine.submit(PROMPT, params(4))
    model.arrive()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.engine.engine.STOP_GRACE", 0.0)
        with pytest.raises(RuntimeError, match="has not returned"):
            engine.close(timeout=0.05)
    assert engine._arena.address
    model.open()
    with pytest.raises(RequestFailed):
        read(generation)


def test_two_engines_in_one_process_do_not_meet() -> None:
    with running_engine() as one, running_engine(block_size=8) as other:
        both = [
            (engine.submit([*PROMPT, i], params(30)), [*PROMPT, i])
            for i in range(6)
            for engine in (one, other)
        ]
        for generation, prompt in both:
            assert read(generation) == (answer(prompt, 30), "length")
        assert one.metrics.finished["length"] == other.metrics.finished["length"] == 6
