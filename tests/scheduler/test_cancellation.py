"""A client goes away, or a step fails: only what was theirs goes."""

from __future__ import annotations

import pytest

from octavo.scheduler.sequence import Sequence, SequenceStatus
from paged_model import PagedServer, solo

PROMPTS = {name: list(range(start, start + 100)) for name, start in (("a", 0), ("b", 200), ("c", 400))}


def three_in_three_states() -> tuple[PagedServer, dict[str, Sequence]]:
    """a generates, b is half-way through its prompt, c waits."""
    server = PagedServer(40, 16, max_num_seqs=2, max_num_batched_tokens=64)
    sequences = {"a": server.add("a", PROMPTS["a"], 20)}
    server.step()
    server.step()
    sequences |= {name: server.add(name, PROMPTS[name], 20) for name in "bc"}
    server.step()
    return server, sequences


@pytest.mark.parametrize("gone", ["a", "b", "c"])
def test_t25_a_client_that_leaves_takes_only_its_own_blocks(gone: str) -> None:
    server, sequences = three_in_three_states()
    assert server.num_generated(sequences["a"]) == 2
    assert 0 < sequences["b"].num_computed_tokens < 100
    assert sequences["c"].status is SequenceStatus.WAITING
    before = server.cache.num_used
    own = len(sequences[gone].block_table)
    server.finish(sequences[gone])
    assert server.cache.num_used == before - own
    server.run()
    for name, sequence in sequences.items():
        if name != gone:
            assert sequence.token_ids == solo(PROMPTS[name], 20)
    assert server.cache.num_used == 0


def test_a_paused_one_may_leave() -> None:
    server = PagedServer(12, 16, max_num_batched_tokens=512)
    sequences = [server.add(f"{n}", list(range(n * 100, n * 100 + 48)), 80) for n in range(3)]
    while not server.scheduler.num_paused:
        server.step()
    assert sequences[2].status is SequenceStatus.PAUSED
    server.finish(sequences[2])
    server.run()
    assert sequences[0].token_ids == solo(list(range(48)), 80)


def test_a_held_one_may_leave() -> None:
    server, sequences = three_in_three_states()
    sequences["a"].held = True
    server.finish(sequences["a"])
    server.run()
    assert server.cache.num_used == 0


def test_leaving_twice_is_leaving_once() -> None:
    server, sequences = three_in_three_states()
    for _ in range(2):
        server.finish(sequences["a"])
    assert list(server.scheduler.running) == [sequences["b"]]


def test_one_who_computes_a_shared_block_may_leave_before_those_who_adopted_it() -> None:
    server = PagedServer(100, 16)
    document = list(range(200))
    first = server.add("first", document, 50)
    second = server.add("second", [*document, 7], 20)
    server.step()
    server.finish(first)
    server.run()
    assert second.token_ids == solo([*document, 7], 20)


def test_nobody_leaves_while_a_step_is_running() -> None:
    server, sequences = three_in_three_states()
    plan = server.plan()
    with pytest.raises(AssertionError, match="while a step is running"):
        server.scheduler.finish(sequences["a"])
    server.end(plan)
    server.finish(sequences["a"])


def test_a_step_is_committed_or_rolled_back_before_the_next() -> None:
    server, _ = three_in_three_states()
    plan = server.plan()
    with pytest.raises(AssertionError, match="neither been committed nor rolled back"):
        server.scheduler.step(0.0)
    server.end(plan)
    with pytest.raises(AssertionError, match="not the one that is running"):
        server.scheduler.commit(plan)


def test_one_may_arrive_while_a_step_is_running() -> None:
    server, _ = three_in_three_states()
    plan = server.plan()
    late = server.add("late", [1, 2, 3], 4)
    server.end(plan)
    server.run()
    assert late.token_ids == solo([1, 2, 3], 4)


def test_a_failed_step_undoes_its_blocks_and_those_who_adopted_them() -> None:
    server = PagedServer(100, 16)
    document = list(range(64))
    sequences = [server.add(f"{number}", [*document, number], 10) for number in range(4)]
    server.fail(server.plan())
    assert [sequence.num_computed_tokens for sequence in sequences] == [0] * 4
    assert [sequence.num_cached_tokens for sequence in sequences] == [0] * 4
    assert (server.cache.num_used, server.cache.num_cached) == (0, 0)
    # The engine fails those of the step; whoever comes next finds nothing of it.
    for sequence in sequences[:3]:
        server.finish(sequence)
    late = server.add("late", [*document, 99], 10)
    server.run()
    assert late.token_ids == solo([*document, 99], 10)
    assert sequences[3].token_ids == solo([*document, 3], 10)


@pytest.mark.parametrize("every", [2, 3, 5])
def test_steps_that_fail_now_and_then_cost_time_only(every: int) -> None:
    server = PagedServer(16, 16, max_num_batched_tokens=64)
    prompts = [[*range(40), number] for number in range(5)]
    sequences = [server.add(f"{number}", prompt, 60) for number, prompt in enumerate(prompts)]
    for number in range(1, 3000):
        if not server.has_work:
            break
        plan = server.plan()
        if number % every == 0:
            server.fail(plan)
        else:
            server.end(plan)
    assert not server.has_work
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.token_ids == solo(prompt, 60)
