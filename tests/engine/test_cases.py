"""The house's cases that concern the engine as a whole, by their numbers."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from engine.fake_model import FakeModel, answer, running_engine
from engine.reading import params, pause_at_every_border, read, read_all, wait_until
from octavo.engine.request import MAX_PAUSES_KEPT, Pause, RequestRefused
from octavo.scheduler.plan import Preemption, PreemptionReason
from octavo.scheduler.sequence import Sequence


def prompt(number: int, length: int) -> list[int]:
    return [(number * 271 + 31 * i) % 983 for i in range(length)]


def test_t01_one_request_may_use_the_whole_pool() -> None:
    """Four may run together, and still the limit is the pool's 1,024 tokens, not a quarter of it."""
    with running_engine(num_blocks_override=64, max_num_seqs=4) as engine:
        assert engine.memory.longest_request == 1024
        assert read(engine.submit(prompt(1, 900), params(50))) == (answer(prompt(1, 900), 50), "length")
        assert read(engine.submit(prompt(2, 900), params(None)))[0] == answer(prompt(2, 900), 124)


@pytest.mark.parametrize("max_tokens", [1, 500])
def test_t02_blocks_in_use_are_those_of_tokens_that_are_there(max_tokens: int) -> None:
    model = FakeModel()
    model.gate()
    lengths = (37, 100, 5, 250)
    with running_engine(model, num_blocks_override=64, max_num_batched_tokens=512, start=False) as engine:
        generations = [engine.submit(prompt(i, n), params(max_tokens)) for i, n in enumerate(lengths)]
        engine.start()
        model.arrive()
        blocks = [len(generation._request.sequence.block_table) for generation in generations]
        assert blocks == [3, 7, 1, 16]
        assert engine._loop._cache.num_used == 27
        for generation in generations:
            generation.cancel()
        model.open()


def test_t03_nothing_is_reserved_for_tokens_that_never_come() -> None:
    """Eight requests whose max_tokens add up to seven pools run together, because each stops after ten."""
    model = FakeModel()
    prompts = [prompt(i, 40) for i in range(8)]
    answers = [answer(p, 10) for p in prompts]
    with running_engine(model, num_blocks_override=32, max_num_batched_tokens=512, start=False) as engine:
        generations = [
            engine.submit(p, params(400, stop_token_ids=(a[-1],)))
            for p, a in zip(prompts, answers, strict=True)
        ]
        engine.start()
        for generation, expected in zip(generations, answers, strict=True):
            assert expected.index(expected[-1]) == 9, "another token of this answer would stop it first"
            assert read(generation) == (expected, "stop")
        assert engine._scheduler.num_preemptions == 0
    assert all(len(step.chunks) == 8 for step in model.steps)
    assert len(model.steps) == 10


@pytest.mark.parametrize("changed", [0, 20, 580])
def test_t07_what_stands_before_a_changing_line_is_found_to_the_token(changed: int) -> None:
    """And in copied blocks there are the bytes of those they were copied from."""
    with running_engine(num_blocks_override=400) as engine:
        for number in range(3):
            asked = prompt(1, 600)
            asked[changed] = 990 + number
            generation = engine.submit(asked, params(20))
            assert read(generation) == (answer(asked, 20), "length")
            assert generation.stats.num_cached_tokens == (changed if number else 0)
        assert engine._loop._cache.num_copied == (2 if changed else 0)


def test_t10_another_goes_on_where_one_that_still_runs_has_come_to() -> None:
    """Its prompt is all the other one knows: the same text twice, of which the first half runs."""
    model = FakeModel()
    model.gate()
    asked = prompt(1, 37)
    with running_engine(model, num_blocks_override=64, max_num_batched_tokens=512) as engine:
        first = engine.submit(asked, params(30))
        model.let(5)
        model.arrive()
        # 37 tokens and those of four steps are committed, one step is running.
        follow_up = [*asked, *answer(asked, 4), 5, 6]
        second = engine.submit(follow_up, params(10))
        model.open()
        assert read(second) == (answer(follow_up, 10), "length")
        assert read(first) == (answer(asked, 30), "length")
        assert second.stats.num_cached_tokens == 41
        assert engine._loop._cache.num_copied == 1


def test_t13_four_choices_share_all_but_the_last_block_of_their_prompt() -> None:
    model = FakeModel()
    with running_engine(model, num_blocks_override=64, max_num_batched_tokens=512, start=False) as engine:
        choices = [engine.submit(prompt(1, 100), params(3), choice_index=i) for i in range(4)]
        model.gate()
        engine.start()
        model.arrive()
        tables = [list(choice._request.sequence.block_table.block_ids) for choice in choices]
        assert all(table[:6] == tables[0][:6] for table in tables)
        assert len({table[6] for table in tables}) == 4
        cache = engine._loop._cache
        assert (cache.num_used, cache.num_shared) == (6 + 4, 6)
        model.open()
        assert read_all(choices) == [answer(prompt(1, 100), 3)] * 4
        assert cache.num_used == 0


def test_a_pinned_prefix_is_held_until_the_engine_closes() -> None:
    with running_engine(num_blocks_override=40) as engine:
        system = prompt(1, 100)
        assert engine.pin_prefix(system) == 96
        for number in range(10):
            read(engine.submit(prompt(number + 2, 300), params(20)))
        again = engine.submit([*system, 5], params(5))
        assert read(again) == (answer([*system, 5], 5), "length")
        assert again.stats.num_cached_tokens >= 96
        assert engine._loop._cache.num_used == 6
        # Six of forty blocks are nobody else's.
        with pytest.raises(RequestRefused, match=r"600 tokens .* the longest request is 544 tokens"):
            engine.submit(prompt(1, 500), params(100))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_t14_a_full_pool_pauses_some_and_fails_nobody(prefix_caching: bool) -> None:
    model = FakeModel()
    with running_engine(
        model, num_blocks_override=32, enable_prefix_caching=prefix_caching, start=False
    ) as engine:
        generations = [engine.submit(prompt(i, 64), params(128)) for i in range(4)]
        engine.start()
        assert read_all(generations) == [answer(prompt(i, 64), 128) for i in range(4)]
        preemptions = [generation.stats.num_preemptions for generation in generations]
        assert engine._scheduler.num_preemptions == sum(preemptions)
    # 32 blocks hold two whole requests and two thirds of the others: the first two never pause.
    assert preemptions[:2] == [0, 0]
    assert sum(preemptions) > 0
    lost = sum(generation.stats.num_lost_tokens for generation in generations)
    computed = sum(step.num_tokens for step in model.steps)
    assert computed <= 4 * (64 + 127) + lost


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_t14_each_is_told_when_it_paused_why_and_what_it_lost(prefix_caching: bool) -> None:
    model = FakeModel()
    with running_engine(
        model, num_blocks_override=32, enable_prefix_caching=prefix_caching, start=False
    ) as engine:
        generations = [engine.submit(prompt(i, 64), params(128)) for i in range(4)]
        engine.start()
        read_all(generations)
        stats = [generation.stats for generation in generations]
        assert engine.num_lost_tokens == sum(one.num_lost_tokens for one in stats) > 0
    for one in stats:
        assert one.total_time is not None
        times = [pause.at for pause in one.pauses]
        assert len(times) == one.num_preemptions
        assert sum(pause.tokens_lost for pause in one.pauses) == one.num_lost_tokens
        assert times == sorted(times)
        assert all(0 < at < one.total_time for at in times)
        assert {pause.reason for pause in one.pauses} <= set(PreemptionReason)
    assert sum(one.num_computed_tokens for one in stats) == sum(step.num_tokens for step in model.steps)
    # Without a cache, what was lost is computed again, all of it and nothing else.
    if not prefix_caching:
        for one in stats:
            assert one.num_computed_tokens == 64 + 127 + one.num_lost_tokens


def test_the_numbers_of_a_request_grow_while_it_lives_and_are_complete_at_its_end() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, num_blocks_override=64, max_num_batched_tokens=64) as engine:
        generation = engine.submit(prompt(1, 150), params(5))
        model.arrive()
        assert generation.status == "running"
        assert generation.progress().num_computed_tokens == 0
        model.let()
        model.arrive()
        assert generation.progress().num_computed_tokens == 64
        assert generation.stats.queue_time is not None
        model.let(3)
        model.arrive()
        numbers = generation.progress()
        assert (numbers.num_computed_tokens, numbers.num_output_tokens) == (151, 2)
        assert (numbers.finish_reason, numbers.first_token_time is None) == (None, False)
        assert numbers.tokens_per_second > 0
        waiting = engine.submit(prompt(2, 30), params(5))
        assert waiting.status == "waiting"
        model.open()
        read_all([generation, waiting])
        assert generation.progress() is generation.stats
        assert (generation.status, generation.stats.num_computed_tokens) == ("finished", 154)


def test_of_many_pauses_the_latest_are_kept_and_all_are_counted() -> None:
    sequence = Sequence("0", [1, 2, 3])
    with running_engine(start=False) as engine:
        request = engine.submit([1, 2, 3], params(5))._request
        before = request.progress(request.arrived_at)
        for number in range(MAX_PAUSES_KEPT + 10):
            step = Preemption(sequence, PreemptionReason.KV_FULL, 0, True)
            request.note_preemption(step, request.arrived_at + number)
            request.note_preemption(Preemption(sequence, PreemptionReason.KV, number, False), 1e9)
    assert not before.pauses, "numbers of a moment have changed afterwards"
    kept = [Pause(number, PreemptionReason.KV, number) for number in range(10, MAX_PAUSES_KEPT + 10)]
    assert [(round(at), *rest) for at, *rest in request.stats.pauses] == [tuple(pause) for pause in kept]


def test_t15_one_of_high_priority_comes_last_is_never_paused_and_ends_first() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, num_blocks_override=32, max_num_batched_tokens=512) as engine:
        others = [engine.submit(prompt(i, 64), params(128)) for i in range(3)]
        model.let(90)
        model.arrive()
        assert engine._loop._cache.num_available < 8
        urgent = engine.submit(prompt(9, 64), params(20), priority=-1)
        model.open()
        assert read(urgent) == (answer(prompt(9, 64), 20), "length")
        assert read_all(others) == [answer(prompt(i, 64), 128) for i in range(3)]
    ends = [one._request.arrived_at + (one.stats.total_time or 0) for one in (urgent, *others)]
    assert min(ends) == ends[0]
    assert urgent.stats.num_preemptions == 0
    assert sum(other.stats.num_preemptions for other in others) > 0


@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 16, 64, 512])
def test_t16_a_pause_at_every_block_border_changes_no_token(max_num_batched_tokens: int) -> None:
    watched = prompt(1, 40)
    with running_engine(max_num_seqs=1, max_num_batched_tokens=max_num_batched_tokens, start=False) as engine:
        generation = engine.submit(watched, params(64))
        pauses = pause_at_every_border(engine, generation)
        engine.start()
        assert read(generation) == (answer(watched, 64), "length")
        assert len(pauses) == (40 + 64 - 1) // 16 - 40 // 16 + 1


def _cpu_seconds(thread_id: int) -> float:
    fields = Path(f"/proc/self/task/{thread_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_t26_an_idle_engine_takes_no_processor_time_and_keeps_its_cache() -> None:
    model = FakeModel()
    with running_engine(model) as engine:
        first = engine.submit(prompt(1, 160), params(4))
        read(first)
        wait_until(lambda: engine._loop.resting)
        assert engine._thread is not None
        assert engine._thread.native_id is not None
        switches = Path(f"/proc/self/task/{engine._thread.native_id}/status")

        def voluntary() -> int:
            lines = switches.read_text().splitlines()
            return int(next(line for line in lines if line.startswith("voluntary")).split()[1])

        time.sleep(1.5)  # past the one audit of an idle engine
        before, wakes = _cpu_seconds(engine._thread.native_id), voluntary()
        time.sleep(1.0)
        assert _cpu_seconds(engine._thread.native_id) - before <= 0.01
        assert voluntary() == wakes, "something woke the idle engine"
        assert engine.healthy()
        again = engine.submit(prompt(1, 160), params(4))
        assert read(again) == (answer(prompt(1, 160), 4), "length")
        assert again.stats.num_cached_tokens == 159


def test_the_books_are_proven_once_when_the_engine_has_been_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_AUDIT", "0")
    monkeypatch.setattr("octavo.engine.step_loop.IDLE_AUDIT_AFTER", 0.01)
    audited = threading.Semaphore(0)
    with running_engine() as engine:
        cache = engine._loop._cache
        prove = cache.audit

        def audit(sequences: object) -> None:
            prove(sequences)  # type: ignore[arg-type]
            audited.release()

        monkeypatch.setattr(cache, "audit", audit)
        read(engine.submit(prompt(1, 20), params(4)))
        assert audited.acquire(timeout=5)
        assert not audited.acquire(timeout=0.1), "an idle engine went on auditing"
