"""What planning costs, in lines of Python."""

from __future__ import annotations

from collections.abc import Callable

from counted_lines import count_lines
from octavo.kv.kv_cache import KVCache
from octavo.scheduler.limits import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence


def eight_streams(num_blocks: int, prompt: int) -> Callable[[], None]:
    """A scheduler with eight generating sequences. Returns: one whole step of it."""
    cache = KVCache(num_blocks, 16)
    scheduler = Scheduler(cache, SchedulerConfig(8, 256, 100_000))
    sequences = [Sequence(f"{number}", [number, *range(prompt - 1)]) for number in range(8)]
    for sequence in sequences:
        scheduler.add(sequence, 0.0)

    def step() -> None:
        plan = scheduler.step(0.0)
        scheduler.commit(plan)
        for chunk in plan.chunks:
            if chunk.samples:
                chunk.sequence.append(chunk.start % 1000)

    while sequences[-1].num_tokens < prompt + 2:
        step()
    return step


def test_a_step_costs_the_same_however_long_the_sequences_and_however_large_the_pool() -> None:
    costs = set()
    for num_blocks, prompt in ((200, 100), (2000, 100), (2000, 3000), (20_000, 3000)):
        step = eight_streams(num_blocks, prompt)
        costs.add(sum(count_lines(step) for _ in range(32)))
    assert max(costs) <= 1.05 * min(costs)


def test_a_step_costs_the_same_however_much_is_cached() -> None:
    """Every block border of a stream forgets one of 100 or of 100,000 cached blocks, of one leaf each."""
    costs = []
    for num_cached in (100, 100_000):
        cache = KVCache(num_cached, 16)
        scheduler = Scheduler(cache, SchedulerConfig(8, 256, 2_000_000))
        for number in range(num_cached):
            gone = Sequence(f"{number}", [1_000 + number] * 16)
            cache.allocate(gone, 16)
            cache.register(gone, 16)
            cache.commit()
            gone.num_computed_tokens = 16
            cache.free(gone)
        assert cache.num_cached == num_cached
        stream = Sequence("stream", [7])
        scheduler.add(stream, 0.0)

        def step(scheduler: Scheduler = scheduler, stream: Sequence = stream) -> None:
            plan = scheduler.step(0.0)
            scheduler.commit(plan)
            stream.append(len(stream.token_ids) % 1000)

        step()
        costs.append(sum(count_lines(step) for _ in range(320)))
        assert cache.num_cached < num_cached
    assert costs[1] <= 1.05 * costs[0]


def test_a_long_prompt_that_waits_for_blocks_is_not_searched_for_in_every_step() -> None:
    costs = {}
    for prompt in (200, 3000):
        cache = KVCache(400, 16)
        scheduler = Scheduler(cache, SchedulerConfig(8, 256, 100_000))
        stream = Sequence("stream", list(range(6384)))
        scheduler.add(stream, 0.0)
        while stream.num_computed_tokens < 6384:
            scheduler.commit(scheduler.step(0.0))
        # It shares all it knows but its last block; and all blocks but one are taken.
        scheduler.add(Sequence("waits", list(range(prompt))), 0.0)

        def step(scheduler: Scheduler = scheduler, stream: Sequence = stream) -> None:
            stream.append(7)
            plan = scheduler.step(0.0)
            scheduler.commit(plan)
            assert [chunk.sequence for chunk in plan.chunks] == [stream]

        costs[prompt] = sum(count_lines(step) for _ in range(8))
    assert costs[3000] <= 1.1 * costs[200]


def test_planning_eight_streams_takes_little_python() -> None:
    """Two block borders of each stream are in 32 steps. The time is `octavo bench throughput`'s to tell."""
    step = eight_streams(2000, 1000)
    assert sum(count_lines(step) for _ in range(32)) / 32 < 860
