"""Nobody computes what is known, and nobody waits for what is being computed."""

from __future__ import annotations

import random

import pytest

from paged_model import PagedServer, solo

DOCUMENT = list(range(512))


@pytest.mark.parametrize("budget", [64, 100, 128, 256, 300])
def test_t04_a_later_reader_of_a_document_computes_only_its_own_tail(budget: int) -> None:
    server = PagedServer(200, 16, max_num_batched_tokens=budget)
    a_prompt, b_prompt = [*DOCUMENT, 1001, 1002, 1003], [*DOCUMENT, 2001, 2002]
    a = server.add("a", a_prompt, 40)
    while a.num_computed_tokens < 256:
        server.step()
    b = server.add("b", b_prompt, 20)
    server.run()
    prompts_computed = server.model.num_computed - 39 - 19
    assert prompts_computed <= 512 + 3 + 2 + 16
    assert b.num_cached_tokens == 512
    assert a.token_ids == solo(a_prompt, 40)
    assert b.token_ids == solo(b_prompt, 20)


def test_eight_readers_that_arrive_together_compute_the_document_once() -> None:
    server = PagedServer(200, 16, max_num_batched_tokens=256)
    prompts = [[*DOCUMENT, 1000 + number] for number in range(8)]
    readers = [server.add(f"{number}", prompt, 2) for number, prompt in enumerate(prompts)]
    server.run()
    assert server.model.num_computed == 512 + 8 + 8
    assert [reader.num_cached_tokens for reader in readers] == [0] + [512] * 7
    assert readers[7].token_ids == solo(prompts[7], 2)
    assert server.num_steps <= 5


def test_a_block_of_this_step_is_adopted_in_this_step() -> None:
    server = PagedServer(100, 16, max_num_batched_tokens=256)
    server.add("a", list(range(64)), 2)
    server.add("b", [*range(64), 9], 2)
    plan = server.step()
    assert [(chunk.start, chunk.num_tokens) for chunk in plan.chunks] == [(0, 64), (64, 1)]


def test_one_half_way_through_its_prompt_adopts_what_another_computed_ahead_of_it() -> None:
    server = PagedServer(200, 16, max_num_batched_tokens=64)
    b_prompt = [*DOCUMENT, 7]
    b = server.add("b", b_prompt, 4)
    server.step()
    b.held = True
    a = server.add("a", [*DOCUMENT, 8], 4)
    while a.num_computed_tokens < 500:
        server.step()
    assert a.num_cached_tokens == 64
    b.held = False
    server.run()
    assert b.num_cached_tokens >= 512 - 64 - 16
    assert b.token_ids == solo(b_prompt, 4)
    assert server.model.num_computed <= 512 + 2 + 16 + 2 * 3


def test_a_follow_up_finds_the_question_and_the_answer() -> None:
    server = PagedServer(100, 16)
    first = server.add("first", list(range(30)), 40)
    server.run()
    follow_up = server.add("follow-up", [*first.token_ids, 5, 6, 7], 4)
    server.run()
    # The last token of an answer is never computed. The half block it was left in is written on.
    assert follow_up.num_cached_tokens == 69
    assert server.model.num_copies == 0


def test_identical_streams_side_by_side_hold_one_set_of_blocks() -> None:
    server = PagedServer(100, 16)
    prompt = list(range(50))
    twins = [server.add(f"{number}", prompt, 80) for number in range(4)]
    for _ in range(60):
        server.step()
    # 50 prompt and 59 generated tokens computed: six whole blocks once, and one partial block each.
    assert server.cache.num_used == 6 + 4
    server.run()
    assert {tuple(twin.token_ids) for twin in twins} == {tuple(solo(prompt, 80))}


def test_equal_tokens_under_two_salts_share_nothing() -> None:
    server = PagedServer(100, 16)
    prompt = list(range(64))
    mine = server.add("mine", prompt, 4, salt="mine")
    yours = server.add("yours", prompt, 4, salt="yours")
    server.step()
    assert server.cache.num_shared == 0
    server.run()
    assert mine.num_cached_tokens == yours.num_cached_tokens == 0
    assert server.cache.prefix_hits == 0
    assert mine.token_ids == solo(prompt, 4, salt="mine")
    assert yours.token_ids == solo(prompt, 4, salt="yours")


def test_hits_are_what_the_requests_were_told() -> None:
    server = PagedServer(14, 16, max_num_batched_tokens=64)
    prompts = [[*range(40 + 10 * (number % 3)), number] for number in range(9)]
    sequences = [server.add(f"{number}", prompt, 30) for number, prompt in enumerate(prompts)]
    server.run()
    assert server.scheduler.num_preemptions > 0
    assert server.cache.prefix_hits == sum(sequence.num_cached_tokens for sequence in sequences)
    assert server.cache.prefix_queries == sum(len(prompt) for prompt in prompts)


def test_sharing_off_gives_the_same_output() -> None:
    outputs = []
    for sharing in (True, False):
        server = PagedServer(60, 16, max_num_batched_tokens=64, enable_prefix_caching=sharing)
        sequences = [server.add(f"{number}", [*range(70), number], 40) for number in range(6)]
        server.run()
        outputs.append([sequence.token_ids for sequence in sequences])
        assert (server.cache.prefix_hits > 0) == sharing
    assert outputs[0] == outputs[1]


def test_four_users_of_one_document_compute_it_once() -> None:
    """2,000 tokens in common and a question each; at most 1.05 times the tokens of one of them."""
    document = [number % 997 for number in range(2000)]
    prompts = [[*document, *range(5000 + 20 * user, 5020 + 20 * user)] for user in range(4)]
    server = PagedServer(300, 16, max_num_batched_tokens=256)
    users = [server.add(f"{user}", prompt, 1) for user, prompt in enumerate(prompts)]
    server.run()
    assert server.model.num_computed <= 1.05 * len(prompts[0])
    assert [user.num_cached_tokens for user in users] == [0, 2000, 2000, 2000]


def test_five_agents_on_four_seats_are_never_prefilled_again() -> None:
    """They take turns; each round an agent's history grows by its answer and a tool's result."""
    server = PagedServer(1000, 16, max_num_seqs=4, max_num_batched_tokens=256)
    system = list(range(300))
    histories = [[*system, *range(10_000 * agent, 10_000 * agent + 400)] for agent in range(1, 6)]
    known = [0] * 5
    for round_number in range(6):
        turns = [server.add(f"{agent}", history, 30) for agent, history in enumerate(histories)]
        server.run()
        for agent, turn in enumerate(turns):
            if round_number:
                assert turn.num_cached_tokens == known[agent]
            known[agent] = turn.num_tokens - 1
            histories[agent] = [*turn.token_ids, *range(500, 550)]


def test_slots_hold_tokens() -> None:
    """A mixed load of prompts of 8 to 600 tokens, mean about 200, on 16 seats: of the slots of blocks in use,
    each counted once however often it is shared, at least 96 of 100 hold a token."""
    server = PagedServer(400, 16, max_num_seqs=16, max_num_batched_tokens=256)
    rng = random.Random(4)
    system = list(range(60))
    filled = slots = 0
    lengths = []
    for number in range(120):
        prompt = [rng.randrange(900) for _ in range(int(rng.triangular(8, 600, 60)))]
        if number % 3 == 0:
            prompt = [*system, *prompt]
        server.add(f"{number}", prompt, rng.randrange(10, 120))
    while server.has_work:
        server.step()
        held: dict[int, int] = {}
        for sequence in server.sequences:
            for position, block_id in enumerate(sequence.block_table.block_ids):
                inside = sequence.num_computed_tokens - 16 * position
                held[block_id] = max(held.get(block_id, 0), min(16, inside))
            if sequence.block_table.block_ids:
                lengths.append(sequence.num_computed_tokens)
        filled += sum(held.values())
        slots += 16 * len(held)
    assert sum(lengths) / len(lengths) >= 190
    assert filled / slots >= 0.96
