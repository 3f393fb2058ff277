"""Clients that go away, in every state a request can be in (T25)."""

from __future__ import annotations

import asyncio
import gc

import pytest

from engine.fake_model import FakeModel, answer, running_engine
from engine.reading import params, read, read_async, wait_until
from octavo.engine.engine import Engine
from octavo.engine.generation import Generation
from octavo.scheduler.sequence import SequenceStatus

OTHER = [(13 * i) % 991 for i in range(40)]


def prompt(number: int, length: int) -> list[int]:
    return [(number * 101 + 17 * i) % 991 for i in range(length)]


def used(engine: Engine) -> int:
    return engine._loop._cache.num_used


def test_t25_one_running_one_prefilling_one_waiting_each_client_goes_away() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, max_num_seqs=3, max_num_batched_tokens=64, start=False) as engine:
        other = engine.submit(OTHER, params(60))
        running = engine.submit(prompt(1, 16), params(200))
        prefilling = engine.submit(prompt(2, 900), params(200))
        waiting = engine.submit(prompt(3, 50), params(200), priority=1)
        engine.start()
        model.let(3)
        model.arrive()
        assert running._request.sequence.status is SequenceStatus.RUNNING
        assert 0 < prefilling._request.sequence.num_computed_tokens < 900
        assert waiting._request.sequence.status is SequenceStatus.WAITING
        for gone in (running, prefilling, waiting):
            gone.cancel()
        model.let()  # the step under way ends; the cancels apply before the next one
        model.arrive()
        only = -(-(len(OTHER) + 4) // 16)
        assert used(engine) == only
        assert engine.num_open == 1
        model.open()
        assert read(other) == (answer(OTHER, 60), "length")
        for gone in (running, prefilling, waiting):
            assert list(gone) == []
            assert gone.stats.finish_reason == "abort"
        # What was computed for them stays findable.
        assert read(engine.submit(prompt(1, 16) + answer(prompt(1, 16), 2), params(3)))[0] == answer(
            prompt(1, 16) + answer(prompt(1, 16), 2), 3
        )


def test_a_paused_request_can_be_cancelled() -> None:
    with running_engine(num_blocks_override=16, max_num_seqs=4, start=False) as engine:
        generations = [engine.submit(prompt(i, 60), params(120)) for i in range(3)]
        model = engine._loop._model
        assert isinstance(model, FakeModel)
        paused: list[Generation] = []

        def cancel_the_first_paused(_: object) -> None:
            for generation in generations:
                if not paused and generation._request.sequence.status is SequenceStatus.PAUSED:
                    paused.append(generation)
                    generation.cancel()

        model.before_step = cancel_the_first_paused
        engine.start()
        results = [read(generation) for generation in generations]
        (gone,) = paused
        for index, (generation, result) in enumerate(zip(generations, results, strict=True)):
            if generation is not gone:
                assert result == (answer(prompt(index, 60), 120), "length")
        assert gone.stats.finish_reason == "abort"
        assert used(engine) == 0


def test_a_held_request_can_be_cancelled() -> None:
    with running_engine() as engine:
        held = engine.submit(OTHER, params(1000))
        wait_until(lambda: held._request.sequence.held)
        held.cancel()
        wait_until(lambda: engine.num_open == 0)
        assert used(engine) == 0
        assert list(held) == []


def test_a_shared_block_stays_with_who_is_left() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, start=False) as engine:
        stays, goes = (engine.submit(prompt(1, 64), params(40)) for _ in range(2))
        engine.start()
        model.let(2)
        model.arrive()
        goes.cancel()
        model.open()
        assert read(stays) == (answer(prompt(1, 64), 40), "length")


def test_a_stop_string_ends_a_stream_as_stop() -> None:
    with running_engine() as engine:
        generation = engine.submit(OTHER, params(1000))
        next(generation)
        generation.cancel(reason="stop")
        generation.cancel()
        assert list(generation) == []
        wait_until(lambda: engine.num_open == 0)
        assert generation.stats.finish_reason == "stop"
        assert engine.metrics.finished["stop"] == 1
        with pytest.raises(ValueError, match="'length'"):
            generation.cancel(reason="length")


def test_cancelling_after_the_end_changes_nothing() -> None:
    with running_engine() as engine:
        generation = engine.submit(OTHER, params(3))
        assert read(generation) == (answer(OTHER, 3), "length")
        generation.cancel()
        read(engine.submit(OTHER, params(3)))
        assert generation.stats.finish_reason == "length"
        assert engine.metrics.finished == {"stop": 0, "length": 2, "abort": 0, "error": 0}


def test_leaving_the_with_statement_early_cancels() -> None:
    with running_engine() as engine:
        with engine.submit(OTHER, params(5000 - 1000)) as generation:
            next(generation)
        wait_until(lambda: engine.num_open == 0)
    assert generation.stats.finish_reason == "abort"


def test_a_generation_that_is_dropped_unread_is_cancelled() -> None:
    with running_engine() as engine:
        generation = engine.submit(OTHER, params(2000))
        stats = generation.stats
        del generation
        gc.collect()
        wait_until(lambda: engine.num_open == 0)
    assert stats.finish_reason == "abort"


def test_a_consumer_task_that_is_cancelled_while_it_waits_frees_its_request() -> None:
    model = FakeModel()
    model.gate()

    async def client() -> None:
        with engine.submit(OTHER, params(100)) as generation:
            await read_async(generation)

    async def main() -> None:
        task = asyncio.create_task(client())
        await asyncio.to_thread(model.arrive)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        model.open()
        await asyncio.to_thread(wait_until, lambda: engine.num_open == 0)

    with running_engine(model) as engine:
        asyncio.run(main())
        assert used(engine) == 0


def test_another_task_can_end_a_stream_that_is_being_waited_for() -> None:
    model = FakeModel()
    model.gate()

    async def main() -> None:
        generation = engine.submit(OTHER, params(100))
        reader = asyncio.create_task(read_async(generation))
        await asyncio.to_thread(model.arrive)
        generation.cancel()
        model.open()
        assert await asyncio.wait_for(reader, 10) == ([], None)

    with running_engine(model) as engine:
        asyncio.run(main())


def test_an_event_loop_that_was_closed_under_its_streams_does_not_harm_the_engine() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, start=False) as engine:
        generations = [engine.submit(prompt(i, 20), params(100)) for i in range(2)]
        other = engine.submit(OTHER, params(100))

        loop = asyncio.new_event_loop()
        readers = [loop.create_task(read_async(generation)) for generation in generations]
        loop.run_until_complete(asyncio.sleep(0))
        assert all(generation._request.waiting for generation in generations)
        loop.close()
        engine.start()
        model.arrive()
        model.open()
        assert read(other) == (answer(OTHER, 100), "length")
        wait_until(lambda: engine.num_open == 0)
        assert {generation.stats.finish_reason for generation in generations} == {"abort"}
    for reader in readers:  # that they never ended is the point
        reader._log_destroy_pending = False  # type: ignore[attr-defined]
