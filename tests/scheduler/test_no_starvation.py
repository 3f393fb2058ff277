"""Everybody ends: thousands of seeded crowds on pools that are too small for them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from octavo.kv.kv_cache import KVCache
from octavo.scheduler.cost_model import CostModel
from octavo.scheduler.limits import SchedulerConfig, SchedulingPolicy
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence, SequenceStatus
from octavo.scheduler.share import Share
from paged_model import PagedServer


def run(seed: int) -> tuple[int, int]:
    """A crowd that comes, is held up and goes. Returns: steps, and preemptions.

    Raises: AssertionError, if a step plans nothing while there is work, or not everybody has ended after as
        many steps as computing each alone, one token a step, and all of it five times would take.
    """
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    num_blocks = rng.randrange(4, 40)
    seats = rng.randrange(1, 8)
    cache = KVCache(num_blocks, block_size, enable_prefix_caching=rng.random() < 0.8)
    config = SchedulerConfig(
        seats,
        seats + rng.randrange(0, 40),
        10_000,
        rng.choice(list(SchedulingPolicy)),
        rng.choice([None, 0.02]),
    )
    scheduler = Scheduler(cache, config, CostModel())
    shares = [
        Share(f"{number % 4}", f"{number % 3}", rng.choice([0.2, 1.0, 5.0]), background=rng.random() < 0.3)
        for number in range(6)
    ]
    limit = scheduler.limit
    left: dict[Sequence, int] = {}
    held: dict[Sequence, int] = {}
    now, num_steps, num_tokens, num_to_come = 0.0, 0, 0, rng.randrange(1, 16)
    while num_to_come or left:
        while num_to_come and (not left or rng.random() < 0.4):
            num_to_come -= 1
            length = rng.randrange(1, min(limit - 1, 60) + 1) if limit > 2 else 1
            output = rng.randrange(1, max(2, min(limit - length, 40) + 1))
            prompt = [rng.randrange(2) for _ in range(length)]
            one = Sequence(f"{num_to_come}", prompt, share=rng.choice(shares), priority=rng.randrange(-1, 2))
            scheduler.add(one, now)
            left[one] = output
            num_tokens += length + output
        for one in list(held):
            held[one] -= 1
            if held[one] <= 0:
                one.held = False
                del held[one]
        for one in list(left):
            if one.status is not SequenceStatus.WAITING and rng.random() < 0.01:
                one.held = True
                held[one] = rng.randrange(1, 10)
            elif rng.random() < 0.002:
                scheduler.finish(one)
                held.pop(one, None)
                del left[one]
        plan = scheduler.step(now)
        now += rng.choice([0.01, 0.05, 5.0])
        num_steps += 1
        if not plan.chunks:
            assert all(one.held for one in left), f"seed {seed}: work, and nothing planned"
            continue
        if rng.random() < 0.03:
            scheduler.rollback(plan)
            continue
        scheduler.commit(plan, 0.001 * plan.num_tokens * rng.choice([0.8, 1.0, 1.2, 10.0]))
        for chunk in plan.chunks:
            if chunk.samples:
                one = chunk.sequence
                one.append(rng.randrange(2))
                left[one] -= 1
                if not left[one]:
                    scheduler.finish(one)
                    held.pop(one, None)
                    del left[one]
        assert num_steps <= 200 + 5 * num_tokens, f"seed {seed}: {left} have not ended"
    assert cache.num_used == 0
    cache.audit([])
    return num_steps, scheduler.num_preemptions


def test_everybody_ends_in_a_few_hundred_crowds() -> None:
    outcomes = [run(seed) for seed in range(300)]
    assert sum(preemptions for _, preemptions in outcomes) > 300, "or the pools were not too small"


def test_whoever_goes_on_with_what_it_takes_from_another_does_not_count_it_as_room() -> None:
    run(2462)


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(10))
def test_everybody_ends_in_ten_thousand_crowds(thousand: int) -> None:
    for seed in range(1000 * thousand, 1000 * (thousand + 1)):
        run(seed)


def test_background_work_gets_a_chunk_every_half_minute_on_a_machine_that_is_never_idle() -> None:
    server = PagedServer(400, 16, max_num_seqs=4, max_num_batched_tokens=64)
    job = server.add("job", list(range(600)), 4, share=Share("night", background=True))
    served = [0.0]
    number = 0
    while server.clock < 95.0:
        while sum(one is not job for one in server.sequences) < 4:
            number += 1
            begin = 10_000 + 1000 * (number % 300)
            server.add(f"{number}", list(range(begin, begin + 500)), 2, share=Share(f"day {number % 2}"))
        if any(chunk.sequence is job for chunk in server.step().chunks):
            served.append(server.clock)
    gaps = [after - before for before, after in pairwise(served)]
    assert len(gaps) == 3
    assert max(gaps) <= 30.2
    assert min(gaps) >= 29.8, "or it was not the guard that let it in"
