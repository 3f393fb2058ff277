"""The engine with the native model: no load, no paging and no thread count changes a single token id."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.reading import pause_at_every_border, read, read_all, read_async
from octavo.engine.engine import Engine, EngineConfig
from octavo.engine.sampling_params import SamplingParams
from octavo.kv.layout import KV_DTYPES
from octavo.model.model import Model
from octavo.text.tokenizer import Tokenizer

NUM_TOKENS = 32
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a house by the sea, there lived",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,",
    "Dear neighbours,\n\nthe heating will be off on Monday. " * 6,
    "To be, or not to be, that is the question:",
    "Ingredients: two eggs, 200 g of flour, a pinch of salt.\nMethod:",
    "Q: Why is the sky blue?\nA:",
]


@cache
def loaded(path: Path, threads: int) -> Model:
    return Model.load(path, num_threads=threads)


@cache
def prompts_for(path: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_gguf(loaded(path, 2).metadata)
    return [tokenizer.encode(text) for text in TEXTS]


def asked(index: int, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    """Every other request draws with a seed, and every fourth with penalties on top."""
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return SamplingParams(
        temperature=0.9,
        top_p=0.95,
        seed=index,
        max_tokens=num_tokens,
        ignore_eos=True,
        repetition_penalty=1.1 if index % 4 == 1 else 1.0,
    )


@contextmanager
def engine_on(
    path: Path,
    *,
    threads: int = 2,
    block_order: list[int] | None = None,
    start: bool = True,
    **config: Any,
) -> Iterator[Engine]:
    model = loaded(path, threads)
    engine = Engine(
        model, Tokenizer.from_gguf(model.metadata), EngineConfig(**config), block_order=block_order
    )
    if start:
        engine.start()
    try:
        yield engine
    finally:
        engine.close()


@cache
def solo(path: Path, kv_cache_dtype: str = "f16") -> list[list[int]]:
    """Each request alone on a fresh engine."""
    answers = []
    for index, prompt in enumerate(prompts_for(path)):
        with engine_on(path, num_blocks_override=64, kv_cache_dtype=kv_cache_dtype) as engine:
            answers += read_all([engine.submit(prompt, asked(index))])
    return answers


def together(engine: Engine, path: Path) -> list[list[int]]:
    return read_all([engine.submit(prompt, asked(i)) for i, prompt in enumerate(prompts_for(path))])


def path_of(request: pytest.FixtureRequest, name: str) -> Path:
    found: Path = request.getfixturevalue({"tiny": "tiny_model_path", "smollm2": "smollm2_path"}[name])
    return found


@pytest.fixture(params=["tiny", "smollm2"])
def path(request: pytest.FixtureRequest) -> Path:
    return path_of(request, request.param)


def test_the_answers_differ_from_each_other(path: Path) -> None:
    """Else the tests below would prove little."""
    assert len({tuple(tokens) for tokens in solo(path)}) == len(TEXTS)


def test_eight_streams_together_equal_each_alone(path: Path) -> None:
    async def everyone() -> list[list[int]]:
        generations = [engine.submit(prompt, asked(i)) for i, prompt in enumerate(prompts_for(path))]
        return [token_ids for token_ids, _ in await asyncio.gather(*map(read_async, generations))]

    with engine_on(path, num_blocks_override=128) as engine:
        assert asyncio.run(everyone()) == solo(path)


def test_a_pool_so_small_that_some_must_pause_changes_nothing(path: Path) -> None:
    longest = max(len(prompt) for prompt in prompts_for(path)) + NUM_TOKENS
    with engine_on(path, num_blocks_override=-(-longest // 16) + 2) as engine:
        assert together(engine, path) == solo(path)
        assert engine.num_preemptions > 0


@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 33, 128, 512])
def test_chunk_size_changes_nothing(tiny_model_path: Path, max_num_batched_tokens: int) -> None:
    max_num_seqs = min(8, max_num_batched_tokens)
    with engine_on(
        tiny_model_path,
        num_blocks_override=256,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    ) as engine:
        assert together(engine, tiny_model_path) == solo(tiny_model_path)


@pytest.mark.parametrize(
    ("name", "block_size", "threads"),
    [
        *(("tiny", size, threads) for size in (8, 16, 32) for threads in (1, 2)),
        ("smollm2", 8, 1),
        ("smollm2", 32, 2),
    ],
)
def test_block_size_block_order_and_threads_change_nothing(
    request: pytest.FixtureRequest, name: str, block_size: int, threads: int
) -> None:
    path = path_of(request, name)
    order = list(range(160))
    random.Random(100 * block_size + threads).shuffle(order)
    with engine_on(
        path,
        threads=threads,
        block_order=order,
        num_blocks_override=len(order),
        block_size=block_size,
        max_num_batched_tokens=64 + block_size,
    ) as engine:
        assert together(engine, path) == solo(path)


def test_a_prefix_found_in_the_cache_changes_nothing(path: Path) -> None:
    with engine_on(path, num_blocks_override=128) as engine:
        assert together(engine, path) == solo(path)
        again = [engine.submit(prompt, asked(i)) for i, prompt in enumerate(prompts_for(path))]
        assert read_all(again) == solo(path)
        assert again[4].stats.num_cached_tokens > 0


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_going_on_inside_a_block_that_others_began_changes_nothing(path: Path, dtype: str) -> None:
    """A long text, asked again up to any place in its blocks and with another ending: copies of half blocks,
    some of streams that still run, give what each would have got alone."""
    text = prompts_for(path)[4][:77]
    ends = [text[:length] + prompts_for(path)[1] for length in (77, 17, 33, 47, 48, 62, 71, 76)]
    alone, found = [], []
    for index, prompt in enumerate(ends):
        with engine_on(path, num_blocks_override=64, kv_cache_dtype=dtype) as engine:
            alone += read_all([engine.submit(prompt, asked(index))])
    with engine_on(path, num_blocks_override=128, kv_cache_dtype=dtype) as engine:
        first = engine.submit(ends[0], asked(0))
        while not first._request.tokens:
            time.sleep(0.001)
        others = [engine.submit(prompt, asked(i)) for i, prompt in enumerate(ends[1:], 1)]
        assert read_all([first, *others]) == alone
        found = [other.stats.num_cached_tokens for other in others]
        assert found == [17, 33, 47, 48, 62, 71, 76]
        assert engine._loop._cache.num_copied == 6


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 5, 64, 512])
def test_a_pause_at_every_block_border_changes_nothing(
    tiny_model_path: Path, threads: int, max_num_batched_tokens: int
) -> None:
    """T16 on real kernels: what was computed token by token comes back computed in chunks."""
    prompt = prompts_for(tiny_model_path)[0]
    with engine_on(
        tiny_model_path,
        threads=threads,
        num_blocks_override=64,
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_num_batched_tokens=max_num_batched_tokens,
        start=False,
    ) as engine:
        generation = engine.submit(prompt, asked(0))
        pauses = pause_at_every_border(engine, generation)
        engine.start()
        assert read(generation)[0] == solo(tiny_model_path)[0]
        assert len(pauses) >= 2


def test_q8_gives_the_same_bytes_together_alone_and_in_a_small_pool(path: Path) -> None:
    expected = solo(path, "q8")
    assert expected != solo(path), "eight bits changed nothing: were there any?"
    longest = max(len(prompt) for prompt in prompts_for(path)) + NUM_TOKENS
    for num_blocks in (128, -(-longest // 16) + 2):
        with engine_on(path, num_blocks_override=num_blocks, kv_cache_dtype="q8") as engine:
            assert together(engine, path) == expected
    assert engine.num_preemptions > 0


@dataclass(frozen=True)
class Shared:
    """Six requests of 16 tokens with an equal beginning of `num_common` tokens, computed together: their
    answers, and what attention read for them."""

    num_common: int
    answers: list[list[int]]
    bytes_read: int
    bytes_attended: int

    @classmethod
    def measured(cls, path: Path, **config: Any) -> Shared:
        common = (prompts_for(path)[4] * 9)[:600]
        with engine_on(path, num_blocks_override=256, start=False, **config) as engine:
            generations = [engine.submit([*common, 5 + i], asked(i, 16)) for i in range(6)]
            engine.start()
            answers = read_all(generations)
            read, attended = (
                engine.metrics.attention_kv_bytes_read,
                engine.metrics.attention_kv_bytes_attended,
            )
        return cls(len(common), answers, read, attended)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_reading_a_shared_beginning_once_changes_nothing_but_the_bytes_read(path: Path, dtype: str) -> None:
    once = Shared.measured(path, kv_cache_dtype=dtype)
    each = Shared.measured(path, kv_cache_dtype=dtype, shared_prefix_attention=False)
    assert once.answers == each.answers
    assert once.bytes_attended == each.bytes_attended == each.bytes_read
    # Five of six need not read the beginning in 15 steps, but for what is no whole block or run of it.
    bytes_per_token = loaded(path, 2).kv_layout(dtype=dtype).bytes_per_token
    assert each.bytes_read - once.bytes_read > 0.5 * 15 * 5 * once.num_common * bytes_per_token


def test_q8_reads_fewer_bytes_in_the_ratio_of_the_layouts(tiny_model_path: Path) -> None:
    """The steps are the same, whatever the tokens: nothing ends before its limit."""
    f16, q8 = (Shared.measured(tiny_model_path, kv_cache_dtype=dtype) for dtype in ("f16", "q8"))
    model = loaded(tiny_model_path, 2)
    f16_bytes, q8_bytes = (model.kv_layout(dtype=dtype).row_bytes for dtype in ("f16", "q8"))
    assert f16.bytes_attended * q8_bytes == q8.bytes_attended * f16_bytes > 0


def test_memory_grows_with_tokens_that_are_there_not_with_max_tokens(tiny_model_path: Path) -> None:
    """T02: resident pages of the pool after the same ten tokens, asked for with and without a large limit."""
    prompt, answer = prompts_for(tiny_model_path)[4], solo(tiny_model_path)[4][:10]
    assert answer.index(answer[-1]) == 9, "another token of this answer would stop it first"
    resident = []
    for max_tokens in (10, 1500):
        with engine_on(tiny_model_path, num_blocks_override=256) as engine:
            limits = SamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=(answer[-1],)
            )
            assert read(engine.submit(prompt, limits)) == (answer, "stop")
            resident.append(engine._arena.resident_bytes())
            extent = engine.memory.extent_bytes
    assert resident[0] == resident[1] == -(-(len(prompt) + 9) // 16) * extent
