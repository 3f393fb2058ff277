"""The lower a priority, the more entitled: visited earlier, robbed later, never by what is above it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.scheduler.plan import StepPlan
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.share import Share
from paged_model import PagedServer, solo


def stream(
    server: PagedServer,
    number: int,
    priority: int,
    length: int = 64,
    max_tokens: int = 128,
    *,
    background: bool = False,
) -> Sequence:
    prompt = list(range(1000 * number, 1000 * number + length))
    sequence = Sequence(f"{number}", prompt, priority=priority, share=Share(background=background))
    server.admit(sequence, max_tokens)
    return sequence


def run(server: PagedServer) -> list[StepPlan]:
    plans = []
    while server.has_work:
        plans.append(server.step())
        assert len(plans) < 5000
    return plans


def ended(plans: list[StepPlan], sequence: Sequence) -> int:
    """The last step that computed something for it."""
    return max(i for i, plan in enumerate(plans) if any(chunk.sequence is sequence for chunk in plan.chunks))


@pytest.mark.parametrize("place", range(4))
def test_t15_one_of_high_priority_is_never_paused_and_ends_first(place: int) -> None:
    """T14's four requests in 32 blocks, each growing from 64 to 192 tokens."""
    server = PagedServer(32, 16)
    streams = [stream(server, number, -1 if number == place else 0) for number in range(4)]
    plans = run(server)
    assert server.scheduler.num_preemptions > 0
    assert streams[place].num_preemptions == 0
    assert all(
        ended(plans, streams[place]) <= ended(plans, one) for one in streams if one is not streams[place]
    )
    for number, sequence in enumerate(streams):
        assert sequence.token_ids == solo(list(range(1000 * number, 1000 * number + 64)), 128)


def test_t15_while_one_is_paused_the_others_lose_no_step() -> None:
    server = PagedServer(32, 16)
    streams = [stream(server, number, -1 if number == 3 else 0) for number in range(4)]
    last: dict[Sequence, int] = {}
    paused: set[Sequence] = set()
    for step, plan in enumerate(run(server)):
        paused = (paused | set(plan.preempted)) - {chunk.sequence for chunk in plan.chunks}
        for chunk in plan.chunks:
            if chunk.sequence in last and chunk.sequence.num_preemptions == 0:
                assert step - last[chunk.sequence] <= 2
            last[chunk.sequence] = step
    assert streams[3].num_preemptions == 0


def test_one_that_comes_to_a_full_pool_takes_blocks_of_lower_priorities() -> None:
    server = PagedServer(16, 16)
    low = [stream(server, number, 5, max_tokens=60) for number in range(4)]
    for _ in range(3):
        server.step()
    urgent = stream(server, 9, 0, length=100, max_tokens=20)
    plan = server.step()
    assert urgent in [chunk.sequence for chunk in plan.chunks]
    assert urgent in server.scheduler.running
    assert server.scheduler.in_order[0] is urgent
    plans = run(server)
    assert urgent.num_preemptions == 0
    assert all(ended(plans, urgent) < ended(plans, one) for one in low)
    assert all(one.token_ids == solo(one.token_ids[:64], 60) for one in low)


def test_a_second_urgent_one_need_not_wait_for_lower_priorities_to_end() -> None:
    server = PagedServer(16, 16)
    low = [stream(server, number, 5, max_tokens=100) for number in range(3)]
    for _ in range(30):
        server.step()
    first, second = (stream(server, number, 0, length=80, max_tokens=30) for number in (8, 9))
    plans = run(server)
    assert first.num_preemptions == second.num_preemptions == 0
    assert max(ended(plans, first), ended(plans, second)) < min(ended(plans, one) for one in low)


def test_an_urgent_one_takes_a_seat() -> None:
    server = PagedServer(100, 16, max_num_seqs=2)
    low = [stream(server, number, 1, max_tokens=30) for number in range(2)]
    server.step()
    urgent = stream(server, 9, 0, max_tokens=5)
    plans = run(server)
    assert ended(plans, urgent) <= 6
    assert [one.num_preemptions for one in low] == [0, 0]
    assert all(one.token_ids == solo(one.token_ids[:64], 30) for one in low)


def test_equal_priorities_are_first_come_first_served() -> None:
    server = PagedServer(100, 16, max_num_seqs=8)
    streams = [stream(server, number, priority) for number, priority in enumerate((3, 0, 3, 0, -2))]
    plan = server.step()
    assert [chunk.sequence for chunk in plan.chunks][:4] == [streams[i] for i in (4, 1, 3, 0)]


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(-2, 2), st.integers(1, 30), st.integers(1, 30)),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(16, 40),
    seats=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_whatever_the_priorities_everybody_ends_with_its_own_answer(
    arrivals: list[tuple[int, int, int, int]], num_blocks: int, seats: int
) -> None:
    server = PagedServer(num_blocks, 4, max_num_seqs=seats, max_num_batched_tokens=seats + 16)
    asked: list[tuple[Sequence, int]] = []
    for number, (steps, priority, length, max_tokens) in enumerate(arrivals):
        for _ in range(steps):
            server.step()
        asked.append((stream(server, number, priority, length, max_tokens), max_tokens))
        ranks = [sequence.rank for sequence in server.scheduler.in_order]
        assert ranks == sorted(ranks)
    run(server)
    assert server.cache.num_used == 0
    for sequence, max_tokens in asked:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert sequence.token_ids == solo(prompt, max_tokens)


def test_background_work_makes_room_for_everybody_else_whatever_its_priority() -> None:
    server = PagedServer(16, 16)
    jobs = [stream(server, number, -9, max_tokens=60, background=True) for number in range(4)]
    for _ in range(3):
        server.step()
    chat = stream(server, 9, 5, length=100, max_tokens=20)
    plan = server.step()
    assert chat in [chunk.sequence for chunk in plan.chunks]
    plans = run(server)
    assert chat.num_preemptions == 0
    assert all(ended(plans, chat) < ended(plans, job) for job in jobs)
    assert all(job.token_ids == solo(job.token_ids[:64], 60) for job in jobs)


def test_the_prompt_of_a_chat_goes_before_that_of_a_background_job_which_came_first() -> None:
    server = PagedServer(200, 16, max_num_batched_tokens=64)
    job = stream(server, 1, 0, length=1000, max_tokens=2, background=True)
    server.step()
    chat = stream(server, 2, 0, length=150, max_tokens=2)
    for _ in range(3):
        server.step()
    assert chat.num_tokens == 151
    assert job.num_computed_tokens < 150
    run(server)
    assert job.token_ids == solo(job.token_ids[:1000], 2)
