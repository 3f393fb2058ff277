"""Prompts in chunks beside those who generate, in one visiting order."""

from __future__ import annotations

import random

import pytest

from octavo.scheduler.limits import SchedulerConfig
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.sequence import Sequence, SequenceStatus
from paged_model import PagedServer, solo


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [
        (chunk.sequence.sequence_id, chunk.start, chunk.num_tokens, chunk.samples) for chunk in plan.chunks
    ]


def test_everyone_who_generates_gets_a_token_and_a_prompt_the_rest() -> None:
    server = PagedServer(100, max_num_batched_tokens=64)
    server.add("a", list(range(20)), 20)
    server.add("b", list(range(100, 130)), 20)
    assert shape(server.step()) == [("a", 0, 20, True), ("b", 0, 30, True)]
    server.add("c", list(range(200, 300)), 20)
    # 62 tokens are left for the prompt; 48 of them are whole blocks.
    assert shape(server.step()) == [("a", 20, 1, True), ("b", 30, 1, True), ("c", 0, 48, False)]
    assert shape(server.step()) == [("a", 21, 1, True), ("b", 31, 1, True), ("c", 48, 52, True)]
    assert shape(server.step()) == [("a", 22, 1, True), ("b", 32, 1, True), ("c", 100, 1, True)]


def test_tokens_of_those_who_generate_are_set_aside_before_an_older_prompt_takes_the_rest() -> None:
    server = PagedServer(100, max_num_batched_tokens=32)
    long = server.add("long", list(range(100)), 20)
    short = server.add("short", list(range(200, 210)), 20)
    server.step()
    long.held = True
    assert shape(server.step()) == [("short", 0, 10, True)]
    long.held = False
    # "long" came first, yet leaves one token for "short".
    assert shape(server.step()) == [("short", 10, 1, True), ("long", 32, 16, False)]
    assert short.num_computed_tokens == 11


def test_prompts_are_served_in_order_of_arrival() -> None:
    server = PagedServer(100, max_num_batched_tokens=32)
    for name in "abc":
        server.add(name, [ord(name)] * 40, 2)
    order = []
    while server.has_work:
        order += [entry[0] for entry in shape(server.step()) if entry[1] == 0]
    assert order == ["a", "b", "c"]


def test_a_chunk_that_does_not_finish_its_prompt_ends_on_a_block_border() -> None:
    server = PagedServer(100, 16, max_num_batched_tokens=50)
    server.add("a", list(range(200)), 2)
    starts = [entry[1] for _ in range(4) for entry in shape(server.step())]
    assert starts == [0, 48, 96, 144]


def test_a_budget_below_a_block_still_moves_a_prompt() -> None:
    server = PagedServer(100, 16, max_num_batched_tokens=8)
    for number in range(7):
        server.add(f"stream {number}", [number], 60)
    for _ in range(3):
        server.step()
    prompt = list(range(500, 550))
    late = server.add("late", prompt, 4)
    server.run()
    assert late.token_ids == solo(prompt, 4)


def test_only_the_first_prompt_of_a_step_stops_inside_a_block() -> None:
    server = PagedServer(100, 16, max_num_batched_tokens=40)
    server.add("a", list(range(35)), 4)
    server.add("b", list(range(100, 140)), 4)
    assert shape(server.step()) == [("a", 0, 35, True)]
    assert shape(server.step()) == [("a", 35, 1, True), ("b", 0, 32, False)]


def test_no_more_sequences_are_computed_together_than_allowed() -> None:
    server = PagedServer(100, max_num_seqs=3)
    for number in range(7):
        server.add(f"{number}", [number] * 5, 6)
    assert len(server.step().chunks) == 3
    assert (server.scheduler.num_running, server.scheduler.num_waiting) == (3, 4)
    server.run()


def test_a_held_sequence_is_passed_over_and_goes_on_where_it_was() -> None:
    server = PagedServer(100, max_num_seqs=2)
    prompt = list(range(20))
    held = server.add("held", prompt, 10)
    server.add("other", [7] * 5, 40)
    server.add("third", [8] * 5, 40)
    server.step()
    server.step()
    held.held = True
    known = held.num_tokens
    # Nobody reads it, so it does not count against those who are computed together.
    assert [entry[0] for entry in shape(server.step())] == ["other", "third"]
    server.step()
    assert held.num_tokens == known
    held.held = False
    server.run()
    assert held.token_ids == solo(prompt, 10)


def test_a_sequence_held_before_it_began_does_not_stop_those_behind_it() -> None:
    server = PagedServer(100)
    held = server.add("held", [1, 2, 3], 4)
    held.held = True
    assert not server.has_work
    server.add("other", [4, 5, 6], 4)
    server.run()
    held.held = False
    server.run()
    assert held.token_ids == solo([1, 2, 3], 4)


def test_there_is_no_work_while_everybody_is_held() -> None:
    server = PagedServer(100)
    sequence = server.add("a", [1, 2, 3], 10)
    server.step()
    sequence.held = True
    assert not server.has_work
    assert server.plan().chunks == ()
    sequence.held = False
    assert server.has_work


def test_states_are_counted() -> None:
    server = PagedServer(100, max_num_seqs=1)
    scheduler = server.scheduler
    first, second = server.add("a", [1], 3), server.add("b", [2], 3)
    assert [sequence.status for sequence in (first, second)] == [SequenceStatus.WAITING] * 2
    assert list(scheduler.waiting) == [first, second]
    server.step()
    assert list(scheduler.running) == [first]
    assert list(scheduler.waiting) == [second]
    assert first.arrival < second.arrival
    server.run()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_paused) == (0, 0, 0)
    assert not server.has_work


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("chunk", [8, 9, 64, 512])
def test_output_does_not_depend_on_company_chunks_block_size_or_block_order(
    block_size: int, chunk: int
) -> None:
    num_blocks = 1600 // block_size
    order = list(range(num_blocks))
    random.Random(chunk).shuffle(order)
    server = PagedServer(num_blocks, block_size, max_num_batched_tokens=chunk, block_order=order)
    prompts = [list(range(start, start + 20 * number + 1)) for number, start in enumerate(range(0, 80, 10))]
    sequences = [server.add(f"{number}", prompt, 30) for number, prompt in enumerate(prompts)]
    server.run()
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.token_ids == solo(prompt, 30)
    assert server.cache.num_used == 0


def test_the_same_arrivals_give_the_same_plans() -> None:
    def plans() -> list[list[tuple[str, int, int, bool]]]:
        server = PagedServer(30, 16, max_num_batched_tokens=64)
        for number in range(6):
            server.add(f"{number}", list(range(number * 7, number * 7 + 50)), 60)
        return [shape(server.step()) for _ in range(100)]

    assert plans() == plans()


def test_a_step_without_room_for_everyone_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="is 7, below max_num_seqs, 8"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7, max_model_len=100)
    with pytest.raises(ValueError, match="max_model_len is 0"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8, max_model_len=0)


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        Sequence("nothing", [])
