"""Several streams at once: each is what it would be alone, read in whatever way."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading

import pytest

from engine.fake_model import VOCAB_SIZE, FakeModel, answer, running_engine
from engine.reading import params, read, read_all, read_async, wait_until
from octavo.engine.generation import MAX_UNREAD_TOKENS, LoopMailbox, ThreadMailbox
from octavo.engine.request import Delta, Request

PROMPTS = [[(7 * i + j * j) % VOCAB_SIZE for j in range(5 + 23 * i)] for i in range(8)]


def test_eight_threads_each_read_what_a_request_alone_would_get() -> None:
    answers: dict[int, list[int]] = {}
    with running_engine() as engine:

        def consume(index: int) -> None:
            answers[index] = read(engine.submit(PROMPTS[index], params(40)))[0]

        threads = [threading.Thread(target=consume, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert answers == {index: answer(prompt, 40) for index, prompt in enumerate(PROMPTS)}


def test_eight_tasks_each_read_what_a_request_alone_would_get() -> None:
    async def everyone() -> list[tuple[list[int], str | None]]:
        generations = [engine.submit(prompt, params(40)) for prompt in PROMPTS]
        return await asyncio.gather(*map(read_async, generations))

    with running_engine() as engine:
        results = asyncio.run(everyone())
    assert results == [(answer(prompt, 40), "length") for prompt in PROMPTS]


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("max_num_batched_tokens", [8, 13, 64, 512])
def test_chunk_size_block_size_and_block_order_change_no_token(
    block_size: int, max_num_batched_tokens: int
) -> None:
    order = list(range(128))
    random.Random(block_size * max_num_batched_tokens).shuffle(order)
    with running_engine(
        block_order=order,
        num_blocks_override=128,
        block_size=block_size,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
    ) as engine:
        answers = read_all([engine.submit(prompt, params(24)) for prompt in PROMPTS])
    assert answers == [answer(prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_shared_prefix_is_computed_once_and_changes_no_token(prefix_caching: bool) -> None:
    model = FakeModel()
    document = [(3 * i) % VOCAB_SIZE for i in range(512)]
    prompts = [[*document, i, i + 1, i + 2] for i in range(6)]
    with running_engine(model, start=False, enable_prefix_caching=prefix_caching) as engine:
        generations = [engine.submit(prompt, params(8)) for prompt in prompts]
        engine.start()
        assert read_all(generations) == [answer(prompt, 8) for prompt in prompts]
        cached = [generation.stats.num_cached_tokens for generation in generations]
    computed = sum(step.num_tokens for step in model.steps)
    if prefix_caching:
        assert cached == [0, 512, 512, 512, 512, 512]
        assert computed == 512 + 6 * (3 + 7)
    else:
        assert cached == [0] * 6
        assert computed == 6 * (515 + 7)


def test_another_salt_shares_nothing() -> None:
    prompt = PROMPTS[7]
    with running_engine() as engine:
        first = engine.submit(prompt, params(4), cache_salt="a")
        read(first)
        again, other = (engine.submit(prompt, params(4), cache_salt=salt) for salt in "ab")
        assert read(again) == read(other) == (answer(prompt, 4), "length")
    assert again.stats.num_cached_tokens == len(prompt) - 1
    assert other.stats.num_cached_tokens == 0


def test_tokens_that_were_not_read_come_together_in_one_delta() -> None:
    with running_engine() as engine:
        generation = engine.submit(PROMPTS[0], params(50))
        wait_until(lambda: engine.num_open == 0)
        deltas = list(generation)
    assert deltas == [Delta(answer(PROMPTS[0], 50), [], "length")]


def test_log_probabilities_come_with_their_tokens_however_the_deltas_are_cut() -> None:
    with running_engine() as engine:
        deltas = list(engine.submit(PROMPTS[0], params(50, logprobs=0)))
    for delta in deltas:
        assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
    assert [token for delta in deltas for token in delta.token_ids] == answer(PROMPTS[0], 50)


def test_a_client_that_does_not_read_is_held_and_nothing_is_dropped() -> None:
    model = FakeModel()
    with running_engine(model) as engine:
        slow = engine.submit(PROMPTS[1], params(700))
        other = engine.submit(PROMPTS[2], params(1000))
        tokens = []
        for delta in other:  # while it is read, the other comes to a halt
            tokens += delta.token_ids
        assert tokens == answer(PROMPTS[2], 1000)
        assert engine.num_open == 1
        assert len(slow._request.tokens) == MAX_UNREAD_TOKENS + 1
        steps = len(model.steps)
        assert engine.healthy()

        first = next(slow)
        assert first.token_ids == answer(PROMPTS[1], MAX_UNREAD_TOKENS + 1)
        rest, reason = read(slow)
    assert [*first.token_ids, *rest] == answer(PROMPTS[1], 700)
    assert reason == "length"
    assert len(model.steps) > steps


def test_a_held_request_gives_way_to_one_that_is_read() -> None:
    """Held blocks are robbed first, and the reader's return brings them back: same tokens."""
    with running_engine(num_blocks_override=32) as engine:  # 512 tokens
        slow = engine.submit(PROMPTS[0], params(400))
        wait_until(lambda: slow._request.sequence.held)
        other = engine.submit(PROMPTS[1], params(440))
        assert read(other) == (answer(PROMPTS[1], 440), "length")
        assert read(slow) == (answer(PROMPTS[0], 400), "length")
    assert slow.stats.num_preemptions > 0
    assert other.stats.num_preemptions == 0


def test_one_loop_is_woken_once_a_step_however_many_streams_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    wakes = 0

    post = LoopMailbox.post

    def counted(mailbox: LoopMailbox, requests: list[Request]) -> None:
        nonlocal wakes
        wakes += 1
        post(mailbox, requests)

    monkeypatch.setattr(LoopMailbox, "post", counted)

    async def everyone() -> None:
        await asyncio.gather(*(read_async(engine.submit(prompt, params(100))) for prompt in PROMPTS))

    with running_engine(model) as engine:
        asyncio.run(everyone())
    assert 0 < wakes <= len(model.steps)


def test_an_engine_leaves_nothing_in_a_loop_that_lives_on() -> None:
    """A program may open and close many engines on one event loop; each must take its eventfd away again."""

    async def program() -> tuple[int, int]:
        await one_engine()
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            await one_engine()
        gc.collect()
        return before, len(os.listdir("/proc/self/fd"))

    async def one_engine() -> None:
        with running_engine() as engine:
            assert await read_async(engine.submit(PROMPTS[0], params(3))) == (answer(PROMPTS[0], 3), "length")
        await asyncio.sleep(0)

    before, after = asyncio.run(program())
    assert after == before


def test_a_loop_that_ends_takes_its_eventfd_along() -> None:
    with running_engine() as engine:

        def once() -> int:
            asyncio.run(read_async(engine.submit(PROMPTS[0], params(3))))
            gc.collect()
            return len(os.listdir("/proc/self/fd"))

        first = once()
        assert [once() for _ in range(4)] == [first] * 4


@pytest.mark.timeout(20)
def test_news_that_comes_while_a_task_is_about_to_sleep_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model) as engine:
        plain = engine.mailbox_of

        def mailbox_of(loop: asyncio.AbstractEventLoop) -> LoopMailbox:
            """Between the reader's look at the empty queue and its sleep, everything happens."""
            if model.gated:
                model.open()
                wait_until(lambda: engine.num_open == 0)
            return plain(loop)

        monkeypatch.setattr(engine, "mailbox_of", mailbox_of)
        generation = engine.submit(PROMPTS[0], params(3))
        assert asyncio.run(read_async(generation)) == (answer(PROMPTS[0], 3), "length")


@pytest.mark.timeout(20)
def test_news_that_is_there_before_a_thread_watches_is_not_missed() -> None:
    mailbox = ThreadMailbox()
    with running_engine() as engine:
        generation = engine.submit(PROMPTS[0], params(3))
        wait_until(lambda: engine.num_open == 0)
        mailbox.watch(generation)
        assert mailbox.wait() == [generation]
        assert generation.take() == Delta(answer(PROMPTS[0], 3), [], "length")


@pytest.mark.timeout(20)
def test_a_generation_dropped_in_the_middle_of_a_loop_is_cancelled_and_returns_its_blocks() -> None:
    with running_engine() as engine:
        generation = engine.submit(PROMPTS[0], params(4000))
        for delta in generation:
            assert delta.token_ids == answer(PROMPTS[0], len(delta.token_ids))
            break
        assert engine.num_open == 1
        del generation
        gc.collect()
        wait_until(lambda: engine.num_open == 0, timeout=1.0)
        assert engine._loop._cache.num_used == 0
        assert engine.metrics.finished["abort"] == 1


@pytest.mark.timeout(20)
def test_a_generation_dropped_while_watched_is_cancelled_and_not_named() -> None:
    model = FakeModel()
    model.gate()
    mailbox = ThreadMailbox()
    with running_engine(model) as engine:
        dropped, kept = engine.submit(PROMPTS[0], params(4000)), engine.submit(PROMPTS[1], params(3))
        mailbox.watch(dropped)
        mailbox.watch(kept)
        del dropped
        gc.collect()
        model.open()
        while kept not in (named := mailbox.wait()):
            assert named == []
        assert read(kept) == (answer(PROMPTS[1], 3), "length")
        wait_until(lambda: engine.num_open == 0, timeout=1.0)


def test_choices_of_one_prompt_share_its_blocks() -> None:
    model = FakeModel()
    model.gate()
    prompt = [i % VOCAB_SIZE for i in range(100)]
    with running_engine(model, start=False) as engine:
        choices = [engine.submit(prompt, params(8), choice_index=index) for index in range(4)]
        engine.start()
        model.let()
        model.arrive()  # the first step is over: six full blocks in four tables, and four last partial ones
        used, shared = engine._loop._cache.num_used, engine._loop._cache.num_shared
        model.open()
        assert read_all(choices) == [answer(prompt, 8)] * 4
    assert (used, shared) == (6 + 4, 6)
    assert sum(step.num_tokens for step in model.steps) == 100 + 3 * 4 + 4 * 7
