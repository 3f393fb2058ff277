"""What breaks fails exactly those it concerns, and everybody else goes on as if nothing had happened."""

from __future__ import annotations

import time

import pytest

from engine.fake_model import FakeModel, FakeTokenizer, answer, running_engine
from engine.reading import params, read, wait_until
from octavo.engine.engine import Engine, EngineConfig
from octavo.engine.fault import ENGINE_STOPPED, STEP_FAILED
from octavo.engine.generation import ThreadMailbox
from octavo.engine.request import Request, RequestFailed, RequestRefused
from octavo.kv.audit import AuditError
from octavo.model.batch import RaggedBatch

A = [(5 * i) % 997 for i in range(70)]
B = [(11 * i) % 997 for i in range(90)]
PROMPT_TEXT = "somebody's secret"


class Fails:
    """Raises the first `times` times it is called."""

    def __init__(self, times: int = 1, error: type[Exception] = RuntimeError) -> None:
        self.times = times
        self.error = error

    def __call__(self, _: RaggedBatch) -> None:
        if self.times:
            self.times -= 1
            raise self.error("the kernel raised")


@pytest.mark.parametrize("moment", ["before_step", "after_step"])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyError])
def test_a_step_that_raises_fails_its_own_requests_and_the_next_one_is_served(
    moment: str, error: type[Exception]
) -> None:
    """after_step: blocks were written and registered; they must not be found by the request that follows."""
    model = FakeModel()
    setattr(model, moment, Fails(error=error))
    with running_engine(model) as engine:
        with pytest.raises(RequestFailed) as failed:
            read(engine.submit(A, params()))
        assert failed.value.code == "step_failed"
        again = engine.submit(A, params())
        assert read(again) == (answer(A, 16), "length")
        assert again.stats.num_cached_tokens == 0
        assert engine.healthy()
        assert engine.metrics.finished == {"stop": 0, "length": 1, "abort": 0, "error": 1}


@pytest.mark.parametrize("log_content", [False, True])
@pytest.mark.parametrize("place", ["model", "planner", "add"])
def test_a_fault_of_ours_tells_clients_a_fixed_sentence_and_the_log_its_type(
    place: str, log_content: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise LookupError(PROMPT_TEXT)

    model = FakeModel()
    with running_engine(model, log_content=log_content, start=False) as engine:
        if place == "model":
            model.before_step = fail
        else:
            monkeypatch.setattr(engine._scheduler, "step" if place == "planner" else "add", fail)
        engine.start()
        with pytest.raises(RequestFailed) as failed:
            read(engine.submit(A, params()))
    assert failed.value.code == "step_failed"
    assert failed.value.message == STEP_FAILED
    assert "LookupError" in caplog.text
    assert "in fail" in caplog.text
    assert ("secret" in caplog.text) == log_content


def test_an_engine_that_stopped_tells_clients_nothing_of_its_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(FakeModel(), FakeTokenizer(), EngineConfig(num_blocks_override=64))

    def finish(_: object) -> None:
        raise LookupError(PROMPT_TEXT)

    monkeypatch.setattr(engine._scheduler, "finish", finish)
    engine.start()
    with pytest.raises(RequestFailed) as failed:
        read(engine.submit(A, params(1)))
    with pytest.raises(RequestRefused) as refused:
        engine.submit(A, params())
    assert failed.value.message == refused.value.message == ENGINE_STOPPED
    assert "LookupError" in caplog.text
    assert "secret" not in caplog.text
    with pytest.raises(LookupError):
        engine.close()


def test_who_was_not_in_the_failed_step_goes_on_from_where_it_was() -> None:
    """One sequence a step: the second request waits while the first one's step raises."""
    model = FakeModel()
    model.gate()
    with running_engine(model, max_num_seqs=1, start=False) as engine:
        first, second = engine.submit(A, params()), engine.submit(B, params())
        engine.start()
        model.let(3)
        model.arrive()
        model.before_step = Fails()
        model.open()
        assert read(second) == (answer(B, 16), "length")
        assert next(first).token_ids == answer(A, 3)
        with pytest.raises(RequestFailed):
            next(first)


def test_adopters_of_a_failed_steps_blocks_fail_with_it_and_nobody_finds_the_blocks() -> None:
    model = FakeModel()
    model.after_step = Fails()
    with running_engine(model, start=False) as engine:
        sharers = [engine.submit([*A, i], params()) for i in range(3)]
        engine.start()
        for generation in sharers:
            with pytest.raises(RequestFailed):
                read(generation)
        assert engine._loop._cache.num_used == 0
        assert engine._loop._cache.num_cached == 0
        assert read(engine.submit([*A, 0], params())) == (answer([*A, 0], 16), "length")


def test_tokens_before_the_failure_arrive_before_it_is_raised() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model) as engine:
        generation = engine.submit(A, params())
        model.let(5)
        model.arrive()
        model.before_step = Fails()
        model.open()
        wait_until(lambda: engine.num_open == 0)
        assert next(generation).token_ids == answer(A, 5)
        with pytest.raises(RequestFailed):
            next(generation)
        assert list(generation) == []


def test_non_finite_logits_fail_that_request_only() -> None:
    model = FakeModel()
    poisoned = answer(A, 4)[3]
    model.tokens = lambda _, token_id: -1 if token_id == poisoned else token_id
    assert poisoned not in answer(B, 16)
    with running_engine(model, start=False) as engine:
        sick, sound = engine.submit(A, params()), engine.submit(B, params())
        engine.start()
        assert read(sound) == (answer(B, 16), "length")
        assert next(sick).token_ids == answer(A, 3)
        with pytest.raises(RequestFailed) as failed:
            next(sick)
    assert failed.value.code == "non_finite_logits"


def test_a_model_that_answers_for_too_few_sequences_fails_the_step_not_the_engine() -> None:
    model = FakeModel()
    step = model.step
    with running_engine(model) as engine:
        model.step = lambda batch: step(batch)[:-1]  # type: ignore[method-assign]
        with pytest.raises(RequestFailed, match="failed to compute a step"):
            read(engine.submit(A, params()))
        model.step = step  # type: ignore[method-assign]
        assert read(engine.submit(A, params())) == (answer(A, 16), "length")


def test_a_planner_that_raises_fails_everyone_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine(start=False) as engine:
        scheduler = engine._scheduler
        plan = scheduler._plan_chunk
        failures = [RuntimeError("the planner raised")]

        def plan_chunk(*args: object) -> object:
            planned = plan(*args)  # type: ignore[arg-type]
            if failures:  # blocks are allocated and registered by now
                raise failures.pop()
            return planned

        monkeypatch.setattr(scheduler, "_plan_chunk", plan_chunk)
        both = [engine.submit(A, params()), engine.submit(B, params())]
        engine.start()
        for generation in both:
            with pytest.raises(RequestFailed, match="failed to compute a step") as failed:
                read(generation)
            assert failed.value.code == "step_failed"
        assert read(engine.submit(A, params())) == (answer(A, 16), "length")
        assert engine.healthy()


def test_a_planner_that_always_raises_does_not_spin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError("the planner raised")

    with running_engine(start=False) as engine:
        monkeypatch.setattr(engine._scheduler, "step", step)
        engine.start()
        for _ in range(3):
            with pytest.raises(RequestFailed):
                read(engine.submit(A, params()))
        wait_until(lambda: engine._loop.resting)
        seen = calls
        time.sleep(0.05)
        assert calls == seen <= 5
        assert "no step could be planned" not in caplog.text


def test_a_mailbox_that_raises_loses_its_own_request_only() -> None:
    class Broken(ThreadMailbox):
        def post(self, requests: list[Request]) -> None:
            raise ValueError(f"{len(requests)} letters and no mailbox")

    with running_engine(start=False) as engine:
        lost, other = engine.submit(A, params(100)), engine.submit(B, params(100))
        Broken().watch(lost)
        engine.start()
        assert read(other) == (answer(B, 100), "length")
        wait_until(lambda: engine.num_open == 0)
        assert lost.stats.finish_reason == "abort"


def test_broken_accounting_stops_the_engine_and_tells_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving from blocks nobody can account for could show one person another one's conversation."""
    model = FakeModel()
    model.gate()
    engine = Engine(model, FakeTokenizer(), EngineConfig(num_blocks_override=64))
    engine.start()
    running = engine.submit(A, params())
    model.let(2)
    model.arrive()
    waiting = engine.submit(B, params())

    def audit(_: object) -> None:
        raise AuditError("made up")

    monkeypatch.setattr(engine._loop._cache, "audit", audit)
    model.open()
    wait_until(lambda: engine.num_open == 0)
    assert next(running).token_ids == answer(A, 3)
    for generation in (running, waiting):
        with pytest.raises(RequestFailed) as failed:
            next(generation)
        assert failed.value.code == "engine_failed"
    assert not engine.healthy()
    with pytest.raises(RequestRefused) as refused:
        engine.submit(A, params())
    assert refused.value.code == "engine_failed"
    with pytest.raises(AuditError, match="made up"):
        engine.close()
