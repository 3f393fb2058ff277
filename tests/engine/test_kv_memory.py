"""The pool's memory while an engine runs: given back, grown, shrunk, and every answer right all the while.

The fake model's keys are in the arena itself: an extent that is given back too early reads as zeros and
changes an answer.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.fake_model import FakeModel, FakeTokenizer, answer, running_engine
from engine.reading import params, read, read_all, wait_until
from octavo.engine.engine import Engine, EngineConfig
from octavo.engine.kv_memory import KVCacheRefused, KVCacheStatus
from octavo.engine.memory_pressure import PressureSources
from octavo.engine.request import RequestFailed, RequestRefused
from octavo.kv.arena import Arena
from octavo.kv.layout import PAGE_BYTES
from octavo.scheduler.share import Share

BLOCK = 16
EXTENT = PAGE_BYTES  # of the fake model


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 131 + 7 * i) % 1000 for i in range(length)]


def counts(status: KVCacheStatus) -> tuple[int, int, int]:
    assert status.num_used + status.num_cached + status.num_free == status.num_blocks
    return status.num_used, status.num_cached, status.num_free


def test_a_fresh_engine_takes_no_memory_for_its_pool_and_says_what_it_may_take() -> None:
    with running_engine(num_blocks_override=None, kv_cache_memory=1000 * EXTENT + 5) as engine:
        status = engine.kv_cache_status()
        assert (status.budget_bytes, status.target_blocks) == (1000 * EXTENT + 5, 1000)
        assert (status.block_bytes, status.extent_bytes, status.resident_bytes) == (1024, EXTENT, 0)
        assert counts(status) == (0, 0, 1000)


def test_release_gives_back_what_nobody_uses_and_answers_stay_right() -> None:
    with running_engine() as engine:
        for seed in range(3):
            read(engine.submit(prompt(seed, 100), params(10)))
        before = engine.kv_cache_status()
        assert counts(before) == (0, 21, 256 - 21)
        assert before.resident_bytes == 21 * EXTENT
        after = engine.release_kv_cache()
        assert counts(after) == (0, 0, 256)
        assert after.resident_bytes == 0
        assert engine._kv_memory.num_released == {"idle": 0, "pressure": 0, "admin": 21, "resize": 0}
        again = engine.submit(prompt(0, 100), params(10))
        assert read(again) == (answer(prompt(0, 100), 10), "length")
        assert again.stats.num_cached_tokens == 0
        assert counts(engine.release_kv_cache()) == (0, 0, 256)


def test_release_does_not_touch_requests_that_run_or_are_paused() -> None:
    model = FakeModel()
    with running_engine(model, num_blocks_override=20, start=False) as engine:
        prompts = [prompt(seed, 60) for seed in range(5)]
        generations = [engine.submit(one, params(60)) for one in prompts]
        model.before_step = lambda _: time.sleep(0.002)
        engine.start()
        while engine.num_open:
            status = engine.release_kv_cache()
            assert status.num_cached == 0 or engine.num_open < 5 or status.num_used
        assert read_all(generations) == [answer(one, 60) for one in prompts]
        assert engine.num_preemptions > 0
        assert engine._kv_memory.num_released["admin"] > 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_that_shrinks_and_grows_under_load_changes_no_answer(caching: bool) -> None:
    model = FakeModel()
    config: dict[str, Any] = {"num_blocks_override": 64, "enable_prefix_caching": caching, "max_num_seqs": 8}
    with running_engine(model, **config) as engine, ThreadPoolExecutor(8) as threads:
        model.before_step = lambda _: time.sleep(0.001)
        prompts = [prompt(seed % 7, 20 + 5 * seed) for seed in range(24)]  # the longest needs 12 blocks

        def ask(one: list[int]) -> list[int]:
            return read(engine.submit(one, params(50)))[0]

        answers = [threads.submit(ask, one) for one in prompts]
        sizes = [16, 64, 13, 80, 12, 40]
        for number in range(60):
            target = sizes[number % len(sizes)]
            status = engine.resize_kv_cache(target * EXTENT)
            assert status.target_blocks == target
            assert counts(status)[0] >= status.num_blocks - target
            assert engine.memory.longest_request == target * BLOCK
            if all(one.done() for one in answers):
                break
        assert [one.result() for one in answers] == [answer(one, 50) for one in prompts]
        assert counts(engine.resize_kv_cache(12 * EXTENT)) in [(0, used, 12 - used) for used in range(13)]
        assert engine.kv_cache_status().resident_bytes <= 12 * EXTENT


def test_a_smaller_pool_keeps_its_warmest_content() -> None:
    with running_engine() as engine:
        cold, warm = prompt(1, 160), prompt(2, 160)
        for one in (warm, cold, warm):
            read(engine.submit(one, params(1)))
        status = engine.resize_kv_cache(12 * EXTENT)
        assert (status.num_blocks, status.budget_bytes) == (12, 12 * EXTENT)
        assert status.resident_bytes <= 12 * EXTENT
        assert engine.longest_request == engine.memory.longest_request == 12 * BLOCK
        assert engine._scheduler.watermark == 1
        again = engine.submit(warm, params(1))
        assert read(again)[0] == answer(warm, 1)
        assert again.stats.num_cached_tokens == 159


def test_a_larger_pool_takes_longer_requests() -> None:
    with running_engine(num_blocks_override=4) as engine:
        long = prompt(1, 100)
        with pytest.raises(RequestRefused, match="64 tokens"):
            engine.submit(long, params(4))
        status = engine.resize_kv_cache(700 * EXTENT)
        assert counts(status) == (0, 0, 700)
        assert engine._scheduler.watermark == 7
        assert read(engine.submit(long, params(4)))[0] == answer(long, 4)
        assert engine.memory.longest_request == 8192, "the model's context"


def test_a_pool_below_what_an_open_request_may_need_is_refused_with_the_numbers() -> None:
    model = FakeModel()
    with running_engine(model) as engine:
        model.gate()
        generation = engine.submit(prompt(1, 40), params(60))
        model.arrive()
        with ThreadPoolExecutor(1) as threads:
            resized = threads.submit(engine.resize_kv_cache, 6 * EXTENT)
            wait_until(lambda: not engine._loop.commands.empty())
            model.open()
            with pytest.raises(
                KVCacheRefused, match=r"has 6 blocks, .* 0 of them, .* may need 7 for its 100"
            ) as refused:
                resized.result(timeout=20)
        assert refused.value.code == "kv_cache_in_use"
        assert engine.memory.num_blocks == engine._cache.target_blocks == 256
        assert engine.longest_request == engine._limit() == 256 * BLOCK
        assert read(generation)[0] == answer(prompt(1, 40), 60)
        assert counts(engine.resize_kv_cache(6 * EXTENT))[0] == 0


def test_no_request_slips_in_that_a_coming_size_could_not_hold() -> None:
    """It passes its checks while a smaller pool is on its way, and would be planned after it."""
    model = FakeModel()
    with running_engine(model) as engine:
        model.gate()
        running = engine.submit(prompt(1, 20), params(10))
        model.arrive()
        with ThreadPoolExecutor(1) as threads:
            resized = threads.submit(engine.resize_kv_cache, 4 * EXTENT)
            wait_until(lambda: bool(engine._limits_to_come))
            with pytest.raises(RequestRefused, match="the longest request is 64 tokens"):
                engine.submit(prompt(2, 70), params(10))
            short = engine.submit(prompt(2, 50), params(None))
            model.open()
            assert resized.result(20).target_blocks == 4
        assert engine._limits_to_come == []
        assert read(running)[0] == answer(prompt(1, 20), 10)
        assert read(short) == (answer(prompt(2, 50), 14), "length")


def test_blocks_in_use_leave_a_smaller_pool_as_their_requests_end() -> None:
    model = FakeModel()
    with running_engine(model, num_blocks_override=40, max_num_seqs=4) as engine:
        prompts = [prompt(seed, 100) for seed in range(4)]
        model.gate()
        generations = [engine.submit(one, params(12)) for one in prompts]
        model.let(2)
        model.open()
        status = engine.resize_kv_cache(8 * EXTENT)
        assert status.target_blocks == 8
        assert read_all(generations) == [answer(one, 12) for one in prompts]
        assert counts(engine.kv_cache_status()) in [(0, cached, 8 - cached) for cached in range(9)]
        assert engine.kv_cache_status().resident_bytes <= 8 * EXTENT


def test_what_is_pinned_stays_and_counts_when_the_pool_shrinks() -> None:
    with running_engine() as engine:
        document = prompt(1, 100)
        assert engine.pin_prefix(document) == 96
        with pytest.raises(KVCacheRefused, match=r"has 6 blocks, and the prefixes .* hold 6") as refused:
            engine.resize_kv_cache(6 * EXTENT)
        assert refused.value.code == "kv_cache_too_small"
        assert counts(engine.resize_kv_cache(10 * EXTENT)) in [(6, cached, 4 - cached) for cached in range(5)]
        assert engine.longest_request == 4 * BLOCK
        assert counts(engine.release_kv_cache()) == (6, 0, 4)
        engine.resize_kv_cache(20 * EXTENT)
        again = engine.submit([*document[:96], 5], params(4))
        assert read(again)[0] == answer([*document[:96], 5], 4)
        assert again.stats.num_cached_tokens == 96


@pytest.mark.parametrize(
    ("budget", "available", "code", "said"),
    [
        (EXTENT - 1, 1 << 40, "kv_cache_too_small", r"4,095 bytes is smaller than one block of 4,096"),
        (
            1 << 50,
            1 << 60,
            "kv_cache_too_large",
            r"1048576\.00 GiB has 274,877,906,944 blocks, .* was reserved",
        ),
        (
            1000 * EXTENT,
            990 * EXTENT - 1,
            "kv_cache_too_large",
            r"3\.9 MiB needs 3\.9 MiB beside the 40,960 bytes it takes already, but 3\.9 MiB are available",
        ),
    ],
)
def test_a_budget_that_cannot_be_had_changes_nothing_and_names_both_numbers(
    monkeypatch: pytest.MonkeyPatch, budget: int, available: int, code: str, said: str
) -> None:
    with running_engine() as engine:
        read(engine.submit(prompt(1, 158), params(2)))
        before = engine.kv_cache_status()
        monkeypatch.setattr("octavo.engine.kv_memory.available_memory", lambda: available)
        with pytest.raises(KVCacheRefused, match=said) as refused:
            engine.resize_kv_cache(budget)
        assert refused.value.code == code
        assert engine.kv_cache_status() == before
        if budget == 1000 * EXTENT:
            monkeypatch.setattr("octavo.engine.kv_memory.available_memory", lambda: available + 1)
            assert engine.resize_kv_cache(budget).num_blocks == 1000


def test_a_smaller_pool_is_not_refused_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine() as engine:
        monkeypatch.setattr("octavo.engine.kv_memory.available_memory", lambda: 0)
        assert engine.resize_kv_cache(200 * EXTENT).num_blocks == 200


def test_where_address_space_is_counted_the_pool_starts_and_can_only_shrink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = Arena.__init__

    def refuse_more_than_the_pool(self: Arena, extent_bytes: int, num_blocks: int) -> None:
        if num_blocks > 256:
            raise OSError(12, "Cannot allocate memory")
        make(self, extent_bytes, num_blocks)

    monkeypatch.setattr(Arena, "__init__", refuse_more_than_the_pool)
    with running_engine() as engine:
        with pytest.raises(KVCacheRefused, match=r"257 blocks, and address space for 256 was reserved"):
            engine.resize_kv_cache(257 * EXTENT)
        assert engine.resize_kv_cache(100 * EXTENT).num_blocks == 100
        assert engine.resize_kv_cache(256 * EXTENT).num_blocks == 256


def test_much_is_given_back_in_portions_with_steps_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.kv_memory.PORTION_BYTES", 4 * EXTENT)
    released: list[list[int]] = []
    give = Arena.release

    def note(self: Arena, block_ids: Any) -> None:
        released.append(list(block_ids))
        give(self, block_ids)

    monkeypatch.setattr(Arena, "release", note)
    model = FakeModel()
    with running_engine(model) as engine:
        read(engine.submit(prompt(1, 320), params(1)))
        model.gate()
        generation = engine.submit(prompt(2, 20), params(40))
        model.arrive()
        seen: list[int] = []
        model.before_step = lambda _: seen.append(len(released))
        opener = threading.Timer(0.05, model.open)
        opener.start()
        engine.release_kv_cache()
        opener.join()
        assert read(generation)[0] == answer(prompt(2, 20), 40)
    assert [len(ids) for ids in released[:5]] == [4, 4, 4, 4, 4]
    assert seen[:6] == [0, 1, 2, 3, 4, 5], "a step waited for more than a portion"


def test_an_idle_engine_gives_back_free_blocks_and_keeps_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.step_loop.IDLE_AUDIT_AFTER", 0.01)
    monkeypatch.setattr("octavo.engine.step_loop.IDLE_RELEASE_AFTER", 0.05)
    with running_engine(enable_prefix_caching=False) as engine:
        read(engine.submit(prompt(1, 160), params(4)))
        wait_until(lambda: engine._kv_memory.num_released["idle"] == 11)
        assert engine._kv_memory.resident_bytes() == 0
        assert engine._loop.resting
        assert read(engine.submit(prompt(1, 160), params(4)))[0] == answer(prompt(1, 160), 4)
    with running_engine() as engine:
        read(engine.submit(prompt(1, 160), params(4)))
        wait_until(lambda: engine._loop.resting)
        time.sleep(0.2)
        assert engine._kv_memory.num_released["idle"] == 0
        assert engine._kv_memory.resident_bytes() == 11 * EXTENT


def test_whoever_asks_an_engine_that_ends_or_has_failed_is_told() -> None:
    with running_engine(start=False) as engine, pytest.raises(RuntimeError, match="not been started"):
        engine.kv_cache_status()
    for ask in (engine.kv_cache_status, engine.release_kv_cache, lambda: engine.resize_kv_cache(EXTENT)):
        with pytest.raises(RequestRefused) as refused:
            ask()
        assert refused.value.code == "shutting_down"


def test_a_fault_of_the_engine_reaches_who_waits_for_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    engine = Engine(model, FakeTokenizer(), EngineConfig(num_blocks_override=64), pressure=None)
    engine.start()
    model.gate()
    generation = engine.submit(prompt(1, 20), params(4))
    model.arrive()

    def break_the_books(_: object) -> None:
        raise AssertionError("the books")

    monkeypatch.setattr(engine._cache, "audit", break_the_books)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(engine.release_kv_cache)
        wait_until(lambda: not engine._loop.commands.empty())
        model.open()
        with pytest.raises(RequestRefused) as refused:
            asked.result(20)
    assert refused.value.code == "engine_failed"
    with pytest.raises(RequestFailed):
        read(generation)
    with pytest.raises(AssertionError, match="the books"):
        engine.close()


# --- others need the memory -----------------------------------------------------------------------


class Machine:
    """A /proc whose free memory a test sets: 1,000 pages, of which `available` can be taken."""

    def __init__(self, folder: Path, available: int) -> None:
        self.proc = folder / "proc"
        self.proc.mkdir()
        self.set(available)

    def set(self, available: int) -> None:
        text = f"MemTotal: {4 * 1000} kB\nMemAvailable: {4 * available} kB\n"
        (self.proc / "new").write_text(text)
        (self.proc / "new").rename(self.proc / "meminfo")

    def sources(self) -> PressureSources:
        return PressureSources(self.proc, self.proc / "no-groups", interval=0.02)


def warm(engine: Engine) -> None:
    """Thirty cached blocks, in three conversations."""
    for seed in range(3):
        read(engine.submit(prompt(seed, 158), params(2)))


def test_t27_cold_cached_blocks_go_to_another_program_and_running_requests_are_untouched(
    tmp_path: Path,
) -> None:
    machine, model = Machine(tmp_path, available=400), FakeModel()
    with running_engine(model, pressure=machine.sources()) as engine:
        warm(engine)
        model.gate()
        generation = engine.submit(prompt(9, 100), params(30))
        model.let(3)
        used = engine._cache.num_used
        before = engine._kv_memory.resident_bytes()
        machine.set(40)  # ten pages fewer than the twentieth that others may count on
        wait_until(lambda: not engine._loop.commands.empty())
        machine.set(400)
        model.open()
        assert read(generation)[0] == answer(prompt(9, 100), 30)
        assert generation.stats.num_preemptions == 0
        released = engine._kv_memory.num_released["pressure"]
        assert released >= 10
        assert engine._kv_memory.resident_bytes() <= before - 10 * EXTENT + 2 * EXTENT, "two blocks are new"
        assert used == 7


def test_an_idle_engine_wakes_for_pressure_gives_back_the_coldest_and_sleeps_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=45)
    with running_engine(pressure=machine.sources()) as engine:
        machine.set(400)
        warm(engine)
        wait_until(lambda: engine._loop.resting)
        machine.set(45)
        wait_until(lambda: engine._kv_memory.num_released["pressure"] >= 5)
        machine.set(400)
        wait_until(lambda: engine._loop.resting and engine._loop.commands.empty())
        hottest = engine.submit(prompt(2, 158), params(2))
        read(hottest)
        coldest = engine.submit(prompt(0, 158), params(2))
        read(coldest)
        assert coldest.stats.num_cached_tokens <= 80
        assert hottest.stats.num_cached_tokens >= coldest.stats.num_cached_tokens


def test_lasting_pressure_takes_all_that_is_cold_and_then_leaves_the_engine_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=0)
    with running_engine(pressure=machine.sources()) as engine:
        warm(engine)
        wait_until(lambda: engine._kv_memory.num_cold == 0)
        wait_until(lambda: engine._kv_memory.resident_bytes() == 0)
        wait_until(lambda: engine._loop.resting)
        time.sleep(0.1)
        assert engine._loop.resting
        assert engine._loop.commands.empty()
        again = engine.submit(prompt(0, 158), params(2))
        assert read(again)[0] == answer(prompt(0, 158), 2)


def test_without_pressure_the_cache_stays(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=60)
    with running_engine(pressure=machine.sources()) as engine:
        warm(engine)
        time.sleep(0.2)
        assert engine._kv_memory.num_released["pressure"] == 0


def test_quotas_in_bytes_decide_whose_content_goes_from_the_next_step_on() -> None:
    with running_engine(num_blocks_override=64) as engine:

        def ask(account: str, seed: int) -> int:
            generation = engine.submit(prompt(seed, 160), params(1), share=Share(account))
            read(generation)
            return generation.stats.num_cached_tokens

        def kept(*, after_seed: int) -> int:
            """Tokens of Anna's 40 blocks that are left when an agent has read a lot."""
            for seed in (1, 2, 3, 4):
                ask("key:anna", seed)
            for seed in range(after_seed, after_seed + 30):
                ask("key:agent", seed)
            return sum(ask("key:anna", seed) for seed in (1, 2, 3, 4))

        everything = 4 * 159
        assert 0 < kept(after_seed=100) < everything, "an equal part is 32 blocks"
        # 8 blocks are left to the agent, which has more than that cached while it runs.
        engine.set_kv_quotas({"key:anna": 56 * EXTENT + EXTENT // 2})
        assert kept(after_seed=200) == everything
        engine.set_kv_quotas({"key:anna": 2 * EXTENT + EXTENT // 2})
        assert kept(after_seed=300) <= 2 * BLOCK
        engine.set_kv_quotas({})
        assert 2 * BLOCK < kept(after_seed=400) < everything
