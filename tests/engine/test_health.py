"""Healthy means: there is no work, or it progresses."""

from __future__ import annotations

import time

from engine.fake_model import FakeModel, running_engine
from engine.reading import params, read, wait_until

STALL = 0.15


def test_a_step_that_does_not_return_makes_the_engine_unhealthy_until_it_does() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, stall_timeout=STALL) as engine:
        assert engine.healthy()
        time.sleep(2 * STALL)
        generation = engine.submit([1, 2, 3], params(4))
        assert engine.healthy(), "time without work counts as a stall"
        model.arrive()
        wait_until(lambda: not engine.healthy(), timeout=2)
        model.open()
        read(generation)
        assert engine.healthy()


def test_requests_that_nobody_reads_are_no_stall() -> None:
    model = FakeModel()
    with running_engine(model, stall_timeout=STALL) as engine:
        generation = engine.submit([1, 2, 3], params(1000))
        wait_until(lambda: engine._loop.resting)
        time.sleep(2 * STALL)
        assert engine.healthy()
        model.gate()
        other = engine.submit([4, 5, 6], params(10))
        model.arrive()
        assert engine.healthy(), "the rest counts as a stall"
        model.open()
        read(other)
        read(generation)


def test_failing_steps_are_progress() -> None:
    model = FakeModel()

    def fail(_: object) -> None:
        time.sleep(0.01)
        raise RuntimeError("again")

    model.before_step = fail
    with running_engine(model, stall_timeout=STALL) as engine:
        deadline = time.monotonic() + 2 * STALL
        while time.monotonic() < deadline:
            generation = engine.submit([1, 2, 3], params(4))
            wait_until(lambda: engine.num_open == 0)
            assert generation.stats.finish_reason == "error"
            assert engine.healthy()
