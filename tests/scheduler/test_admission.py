"""Who is let in, and what is reserved for whom: nothing."""

from __future__ import annotations

import pytest

from octavo.scheduler.limits import RequestTooLong
from octavo.scheduler.sequence import Sequence, SequenceStatus
from paged_model import PagedServer, solo


def test_t01_one_request_may_fill_the_whole_pool() -> None:
    server = PagedServer(64, 16, max_num_seqs=4)
    assert server.scheduler.limit == 1024
    prompt = list(range(900))
    sequence = server.add("a", prompt, 50)
    server.run()
    assert sequence.token_ids == solo(prompt, 50)
    assert sequence.num_preemptions == 0


def test_a_request_of_exactly_the_limit_is_served_to_its_last_token() -> None:
    server = PagedServer(8, 16)
    prompt = list(range(100))
    sequence = server.add("a", prompt, 28)
    server.run()
    assert sequence.num_tokens == server.scheduler.limit == 128
    assert sequence.token_ids == solo(prompt, 28)


def test_t02_blocks_in_use_are_those_of_the_tokens_that_are_there() -> None:
    server = PagedServer(64, 16, max_num_batched_tokens=512)
    for length, max_tokens in ((37, 1), (100, 700), (5, 1000), (250, 10)):
        server.add(f"{length}", [length] * length, max_tokens + 1)
    server.step()
    assert server.cache.num_used == 3 + 7 + 1 + 16
    assert server.cache.num_free == 64 - 27


def test_t03_nothing_is_reserved_ahead() -> None:
    server = PagedServer(32, 16, max_num_seqs=8, max_num_batched_tokens=512)
    sequences = [server.add(f"{number}", list(range(number, number + 40)), 400) for number in range(8)]
    plan = server.step()
    assert len(plan.chunks) == 8
    for _ in range(9):
        assert len(server.step().chunks) == 8
    assert all(server.num_generated(sequence) == 10 for sequence in sequences)
    assert server.scheduler.num_preemptions == 0
    for sequence in sequences:
        server.finish(sequence)
    assert server.cache.num_used == 0


@pytest.mark.parametrize(("length", "needed"), [(127, None), (128, 129), (129, 130), (5000, 5001)])
def test_a_prompt_that_can_never_generate_is_refused_with_both_numbers(
    length: int, needed: int | None
) -> None:
    server = PagedServer(8, 16)
    if needed is None:
        server.add("fits", [1] * length, 1)
        return
    with pytest.raises(RequestTooLong) as refusal:
        server.add("too long", [1] * length, 1)
    assert (refusal.value.num_tokens, refusal.value.limit) == (needed, 128)
    assert server.scheduler.num_waiting == 0


def test_the_limit_is_the_models_context_if_that_is_shorter() -> None:
    server = PagedServer(64, 16, max_model_len=100)
    assert server.scheduler.limit == 100
    server.scheduler.add(Sequence("fits", [1] * 99), 0.0)
    with pytest.raises(RequestTooLong, match=r"101 tokens needed.*limit is 100"):
        server.scheduler.add(Sequence("too long", [1] * 100), 0.0)


def test_a_prompt_that_fits_later_waits_and_loses_nothing() -> None:
    server = PagedServer(20, 16, max_num_batched_tokens=512)
    first = server.add("first", list(range(200)), 20)
    prompt = list(range(500, 700))
    second = server.add("second", prompt, 20)
    server.step()
    assert list(server.scheduler.waiting) == [second]
    server.run()
    # Letting it in earlier would have computed blocks that the first one needs a little later.
    assert (first.num_preemptions, second.num_preemptions) == (0, 0)
    assert second.token_ids == solo(prompt, 20)


def test_what_running_prompts_still_need_is_not_given_to_newcomers() -> None:
    server = PagedServer(12, 16, max_num_batched_tokens=60)
    first = server.add("first", list(range(180)), 4)
    # It fits into the tokens that the first one's whole blocks leave over, and into the free blocks.
    short = server.add("short", [1] * 8, 1)
    while first.num_computed_tokens < 180:
        server.step()
        assert short in server.scheduler.waiting
    server.run()
    assert short.num_preemptions == 0


def test_the_watermark_keeps_room_for_those_who_run_but_not_for_nobody() -> None:
    server = PagedServer(4, 16)
    assert server.scheduler.watermark == 1
    server.add("first", [1] * 20, 40)
    server.step()
    late = server.add("late", [2] * 20, 4)
    server.step()
    # Two blocks are left, and it needs two: one must stay free.
    assert server.scheduler.num_waiting == 1
    server.run()
    assert late.num_tokens == 24

    alone = PagedServer(2, 16)
    sequence = alone.add("alone", [1] * 30, 1)
    alone.run()
    assert sequence.num_tokens == 31


def test_nobody_is_let_in_while_a_paused_one_waits_for_blocks() -> None:
    server = PagedServer(12, 16, max_num_batched_tokens=512)
    for number in range(3):
        server.add(f"{number}", list(range(number * 100, number * 100 + 48)), 80)
    while not server.scheduler.num_paused:
        server.step()
    late = server.add("late", [5], 2)
    while server.scheduler.num_paused:
        assert late not in server.scheduler.running
        server.step()
    server.run()
    assert late.num_tokens == 3


class PausedAndShortOfBlocks:
    """`late` was robbed and lacks six blocks, `last` lost its only one and lacks two; three are free."""

    def __init__(self) -> None:
        self.server = server = PagedServer(17, 16, max_num_batched_tokens=512)
        for number in range(2):
            server.add(f"hungry {number}", list(range(number * 100, number * 100 + 48)), 40)
        short = server.add("short", [3], 100)
        self.late = server.add("late", list(range(300, 396)), 50)
        self.last = server.add("last", [4], 40)
        while len(short.block_table) < 3 or len(self.late.block_table) > 2:
            server.step()
        server.finish(short)
        paused = [sequence for sequence in server.sequences if sequence.status is SequenceStatus.PAUSED]
        assert set(paused) == {self.late, self.last}
        assert [server.cache.blocks_missing(sequence) for sequence in (self.late, self.last)] == [6, 2]
        assert server.cache.num_available == 3


def test_nobody_is_let_in_past_a_paused_one_that_does_not_fit_yet() -> None:
    scene = PausedAndShortOfBlocks()
    new = scene.server.add("new", [1], 2)
    scene.server.step()
    assert new in scene.server.scheduler.waiting
    scene.server.run()


def test_a_paused_one_that_fits_does_not_pass_one_that_does_not_fit_yet() -> None:
    scene = PausedAndShortOfBlocks()
    scene.server.step()
    assert scene.last.status is SequenceStatus.PAUSED
    scene.server.run()
    assert scene.last.num_tokens == 41


def test_blocks_of_a_prefix_in_use_are_not_asked_for_again() -> None:
    server = PagedServer(20, 16, max_num_batched_tokens=512)
    document = list(range(240))
    server.add("first", document, 30)
    server.step()
    # Sixteen blocks are there, five are free: only because it shares fifteen does it fit.
    second = server.add("second", [*document, 9], 30)
    server.step()
    assert second in server.scheduler.running
    server.run()
    assert second.num_cached_tokens == 240


def test_a_waiting_one_gets_in_though_everyone_who_holds_the_pool_is_held() -> None:
    server = PagedServer(8, 16)
    prompt = list(range(60))
    slow = server.add("slow", prompt, 60)
    for _ in range(50):
        server.step()
    assert server.cache.num_used == 7
    slow.held = True
    other_prompt = list(range(500, 600))
    other = server.add("other", other_prompt, 20)
    server.run()
    assert other.token_ids == solo(other_prompt, 20)
    assert slow.num_preemptions > 0
    slow.held = False
    server.run()
    assert slow.token_ids == solo(prompt, 60)
