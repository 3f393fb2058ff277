"""A full pool ends nobody: it pauses some, in a stated order."""

from __future__ import annotations

import pytest

from octavo.scheduler.limits import SchedulingPolicy
from octavo.scheduler.plan import Preemption, PreemptionReason
from octavo.scheduler.preemption import exclusive_blocks, still_ones_first, take_tails
from octavo.scheduler.sequence import Sequence, SequenceStatus
from paged_model import PagedServer, solo


def streams(server: PagedServer, count: int, prompt: int, max_tokens: int) -> list[Sequence]:
    """Requests with nothing in common."""
    return [
        server.add(f"{number}", list(range(number * 1000, number * 1000 + prompt)), max_tokens)
        for number in range(count)
    ]


def assert_outputs_are_solo(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert sequence.token_ids == solo(prompt, sequence.num_tokens - len(prompt))


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("budget", [8, 64, 512])
def test_t14_four_that_outgrow_the_pool_all_finish(sharing: bool, budget: int) -> None:
    server = PagedServer(32, 16, max_num_batched_tokens=budget, enable_prefix_caching=sharing)
    sequences = streams(server, 4, 64, 128)
    server.run(max_steps=600)
    assert [sequence.num_tokens for sequence in sequences] == [192] * 4
    assert_outputs_are_solo(sequences)
    # 48 blocks are wanted of 32: somebody pauses, but never the first two, who have 24.
    assert server.scheduler.num_preemptions > 0
    assert [sequence.num_preemptions for sequence in sequences[:2]] == [0, 0]
    assert sum(sequence.num_preemptions for sequence in sequences) == server.scheduler.num_preemptions


def test_only_the_blocks_that_are_needed_are_taken_and_from_the_latest() -> None:
    server = PagedServer(32, 16, max_num_batched_tokens=512)
    sequences = streams(server, 4, 64, 128)
    while not server.scheduler.num_preemptions:
        plan = server.step()
    # At 129 tokens the first three need a block each, and the last has eight.
    assert plan.preempted == (sequences[3],)
    assert sequences[3].status is SequenceStatus.PAUSED
    assert len(sequences[3].block_table) == 5
    assert sequences[3].num_computed_tokens == 5 * 16
    assert sequences[3].num_lost_tokens == 3 * 16
    assert [chunk.sequence for chunk in plan.chunks] == sequences[:3]


def test_what_a_victim_keeps_is_not_computed_again_and_what_is_left_is_found() -> None:
    server = PagedServer(32, 16, max_num_batched_tokens=512)
    sequences = streams(server, 4, 64, 128)
    server.run()
    lost = sum(sequence.num_lost_tokens for sequence in sequences)
    solo_cost = 4 * 191
    assert solo_cost < server.model.num_computed <= solo_cost + lost


def test_a_stalled_one_resumes_only_when_all_it_knows_fits() -> None:
    server = PagedServer(32, 16, max_num_batched_tokens=512)
    sequences = streams(server, 4, 64, 128)
    pauses = dict.fromkeys(sequences, 0)
    was_paused = dict.fromkeys(sequences, False)
    while server.has_work:
        server.step()
        for sequence in sequences:
            paused = sequence.status is SequenceStatus.PAUSED
            pauses[sequence] += paused and not was_paused[sequence]
            was_paused[sequence] = paused
    # No to and fro: each of the two that do not fit stands still once.
    assert list(pauses.values()) == [0, 0, 1, 1]


@pytest.mark.parametrize("num_blocks", [16, 20, 32])
@pytest.mark.parametrize("budget", [8, 64, 512])
def test_a_preemption_is_a_transition_to_paused_and_nothing_else(num_blocks: int, budget: int) -> None:
    """Losing more blocks while paused is no second pause, and a pause without a loss is one."""
    server = PagedServer(num_blocks, 16, max_num_batched_tokens=budget)
    sequences = streams(server, 4, 64, 128)
    pauses = dict.fromkeys(sequences, 0)
    robbed = dict.fromkeys(sequences, 0)
    before = {sequence: sequence.status for sequence in sequences}
    while server.has_work:
        for victim in server.step().preempted:
            robbed[victim] += 1
        for sequence in sequences:
            if sequence.status is SequenceStatus.PAUSED and before[sequence] is SequenceStatus.RUNNING:
                pauses[sequence] += 1
            before[sequence] = sequence.status
    assert [sequence.num_preemptions for sequence in sequences] == list(pauses.values())
    assert server.scheduler.num_preemptions == sum(pauses.values()) > 0
    assert list(robbed.values()) != list(pauses.values()), "every step took from somebody who was running"
    assert_outputs_are_solo(sequences)


@pytest.mark.parametrize("num_blocks", [16, 20, 32])
@pytest.mark.parametrize("budget", [8, 64, 512])
def test_a_plan_says_who_stands_still_why_and_what_it_lost(num_blocks: int, budget: int) -> None:
    server = PagedServer(num_blocks, 16, max_num_batched_tokens=budget)
    sequences = streams(server, 4, 64, 128)
    lost = dict.fromkeys(sequences, 0)
    pauses = dict.fromkeys(sequences, 0)
    reasons = set()
    while server.has_work:
        status = {sequence: sequence.status for sequence in sequences}
        computed = {sequence: sequence.num_computed_tokens for sequence in sequences}
        plan = server.plan()
        for one in plan.preemptions:
            reasons.add(one.reason)
            assert one.pauses == (status[one.sequence] is not SequenceStatus.PAUSED)
            status[one.sequence] = SequenceStatus.PAUSED
            lost[one.sequence] += one.num_lost_tokens
            pauses[one.sequence] += one.pauses
            computed[one.sequence] -= one.num_lost_tokens
            assert one.num_lost_tokens > 0 or one.reason is PreemptionReason.KV_FULL
        for sequence in {one.sequence for one in plan.preemptions}:
            assert sequence.num_computed_tokens == computed[sequence]
        server.end(plan)
    assert list(lost.values()) == [sequence.num_lost_tokens for sequence in sequences]
    assert list(pauses.values()) == [sequence.num_preemptions for sequence in sequences]
    assert server.scheduler.num_lost_tokens == sum(lost.values()) > 0
    assert PreemptionReason.KV in reasons


def test_the_last_one_for_whom_no_block_is_left_stands_still_and_loses_nothing() -> None:
    server = PagedServer(5, 16, max_num_batched_tokens=512)
    first = server.add("first", list(range(31)), 20)
    second = server.add("second", list(range(100, 131)), 20)
    plans = [server.step() for _ in range(3)]
    # Each has filled two blocks: the first takes the fifth.
    assert [plan.preemptions for plan in plans[:2]] == [(), ()]
    assert [chunk.sequence for chunk in plans[2].chunks] == [first]
    assert plans[2].preemptions == (Preemption(second, PreemptionReason.KV_FULL, 0, True),)
    assert plans[2].preempted == ()
    assert (second.num_preemptions, second.num_lost_tokens, second.num_computed_tokens) == (1, 0, 32)
    # At 49 tokens the first takes from it: that is a loss, and no second pause.
    for _ in range(16):
        plan = server.step()
    assert plan.preemptions == (Preemption(second, PreemptionReason.KV, 16, False),)
    assert (second.num_preemptions, second.num_lost_tokens) == (1, 16)
    server.run()
    assert_outputs_are_solo([first, second])


def test_the_token_of_a_robbed_sequence_goes_to_others_in_the_same_step() -> None:
    server = PagedServer(9, 16, max_num_batched_tokens=17)
    first = server.add("first", list(range(1, 33)), 20)
    prompt = server.add("prompt", list(range(100, 160)), 20)
    victim = server.add("victim", list(range(200, 240)), 20)
    while prompt.num_computed_tokens < 32:
        server.step()
    prompt.held = True
    while first.num_computed_tokens < 48:
        server.step()
    assert victim.num_computed_tokens == victim.num_tokens - 1
    assert server.cache.num_available == 0
    prompt.held = False
    plan = server.step()
    assert plan.preempted == (victim,)
    assert [(chunk.sequence, chunk.num_tokens) for chunk in plan.chunks] == [(first, 1), (prompt, 16)]
    server.run()
    assert_outputs_are_solo([first, prompt, victim])


def test_the_first_may_take_the_whole_pool() -> None:
    server = PagedServer(16, 16, max_num_batched_tokens=64)
    sequences = streams(server, 4, 16, 239)
    server.run(max_steps=2000)
    assert [sequence.num_tokens for sequence in sequences] == [255] * 4
    assert sequences[0].num_preemptions == 0
    assert_outputs_are_solo(sequences)


def test_those_who_stand_still_are_robbed_before_those_who_run() -> None:
    server = PagedServer(100, 16, max_num_batched_tokens=512)
    first, paused, held, running, last = streams(server, 5, 40, 50)
    server.step()
    paused.status = SequenceStatus.PAUSED
    held.held = True
    assert still_ones_first([last, running, held, paused, first]) == [held, paused, last, running, first]


def test_a_beginner_takes_nothing_if_all_it_may_take_is_not_enough() -> None:
    server = PagedServer(12, 16, max_num_batched_tokens=512, policy=SchedulingPolicy.PRIORITY)
    equal = server.add("equal", list(range(100)), 20)
    low = server.add("low", list(range(500, 540)), 20, priority=1)
    server.step()
    assert server.cache.num_available == 2
    urgent = server.add("urgent", list(range(700, 796)), 20, priority=0)
    plan = server.step()
    assert plan.preemptions == ()
    assert [chunk.sequence for chunk in plan.chunks] == [equal, low]
    server.finish(urgent)
    short = server.add("short", list(range(700, 760)), 20, priority=0)
    plan = server.step()
    assert plan.preempted == (low,)
    assert [chunk.sequence for chunk in plan.chunks] == [equal, short]
    server.run()
    assert_outputs_are_solo([equal, low, short])


def test_what_a_robbery_would_gain_counts_each_block_that_nobody_else_shares() -> None:
    server = PagedServer(40, 16, max_num_batched_tokens=512)
    b, c = (server.add(name, [*range(160), number], 60) for number, name in enumerate("bc"))
    server.step()
    assert exclusive_blocks([b, c], 100) == 2
    assert exclusive_blocks([b, c], 1) == 1


def test_a_victim_is_robbed_down_to_nothing_before_the_next_one_is_touched() -> None:
    server = PagedServer(30, 16, max_num_batched_tokens=512)
    first, second, third = streams(server, 3, 100, 50)
    server.step()
    robbed = take_tails(server.cache, [third, second], server.cache.num_available + 8)
    assert list(robbed) == [third, second]
    # Seven blocks of a hundred tokens, and of the other one the last, with four.
    assert list(robbed.values()) == [third.num_lost_tokens, second.num_lost_tokens] == [100, 4]
    assert (len(third.block_table), len(second.block_table), len(first.block_table)) == (0, 6, 7)
    server.run()
    assert_outputs_are_solo([first, second, third])


def test_shared_blocks_are_taken_only_when_letting_go_frees_them() -> None:
    server = PagedServer(40, 16, max_num_batched_tokens=512)
    document = list(range(160))
    a, b, c = (server.add(name, [*document, number], 60) for number, name in enumerate("abc"))
    server.step()
    # One block each of their own, ten shared by all three.
    available = server.cache.num_available
    assert list(take_tails(server.cache, [c, b], available + 2)) == [c, b]
    assert server.cache.num_available == available + 2
    assert list(take_tails(server.cache, [c, b], available + 5)) == []
    assert (len(b.block_table), len(c.block_table)) == (10, 10)
    server.finish(a)
    # Now nobody but the two victims holds them: as many go as are needed.
    assert list(take_tails(server.cache, [c, b], server.cache.num_available + 3)) == [c, b]
    assert len(b.block_table) == 7
    server.run()
    assert_outputs_are_solo([b, c])


def test_blocks_that_nobody_shares_are_taken_before_shared_ones() -> None:
    server = PagedServer(40, 16, max_num_batched_tokens=512)
    b, c = (server.add(name, [*range(160), number], 60) for number, name in enumerate("bc"))
    server.step()
    available = server.cache.num_available
    assert list(take_tails(server.cache, [c, b], available + 2)) == [c, b]
    assert (len(b.block_table), len(c.block_table)) == (10, 10)


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 15, 16, 17, 31, 64, 100, 512])
def test_t16_a_pause_at_every_block_border_changes_nothing(chunk: int, sharing: bool) -> None:
    prompt = list(range(100))
    server = PagedServer(20, 16, max_num_seqs=1, max_num_batched_tokens=chunk, enable_prefix_caching=sharing)
    sequence = server.add("a", prompt, 60)
    borders = set()
    while server.has_work:
        border = sequence.num_computed_tokens // 16
        if border not in borders:
            borders.add(border)
            # Everything but one block is taken and, without sharing, must be computed again.
            take_tails(server.cache, [sequence], server.cache.num_available + max(border - 1, 0))
        server.step()
    assert borders >= {7, 8, 9}
    assert sequence.num_lost_tokens > 300
    assert sequence.token_ids == solo(prompt, 60)
    if sharing:
        assert sequence.num_cached_tokens == 0


def test_a_planned_sequence_is_never_a_victim_under_constant_pressure() -> None:
    server = PagedServer(10, 4, max_num_batched_tokens=16)
    sequences = streams(server, 8, 7, 30)
    # `PagedServer.plan` checks it in every step.
    server.run(max_steps=3000)
    assert server.scheduler.num_preemptions > 8
    assert_outputs_are_solo(sequences)
