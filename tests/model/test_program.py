"""Whole tiny models: the same logits, byte for byte, however a text is cut, laid out and shared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_kv import same_bytes
from kernels.paths import EVERY_ARITHMETIC, FUSED, paths_like
from model.ragged import Floats, PagedText, Piece, ints
from octavo.kernels import Sampler
from octavo.kv.layout import KV_DTYPES
from octavo.model.batch import RaggedBatch
from octavo.model.errors import ModelFileError
from octavo.model.model import ROW_TILE, Model

BLOCK_SIZES = (8, 16, 32)
CHUNKS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 64, 100, 255, 256, 257, 512)
# Every coding, and shapes whose heads and widths fill vectors, tiles and tasks differently.
MODELS = [
    pytest.param({"weight_type": "Q4_0"}, id="q4_0"),
    pytest.param({"weight_type": "Q4_1"}, id="q4_1"),
    pytest.param({"weight_type": "Q8_0"}, id="q8_0"),
    pytest.param({"weight_type": "F32"}, id="f32"),
    pytest.param({"weight_type": "F16"}, id="f16"),
    pytest.param({"weight_type": "BF16"}, id="bf16"),
    pytest.param({"weight_type": "Q4_0", "embedding_type": "F16", "tied": True}, id="tied-f16-head"),
    pytest.param({"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}, id="smollm2-heads"),
    pytest.param({"num_heads": 16, "num_kv_heads": 1, "head_dim": 48, "rope_dim": 32}, id="one-kv-head"),
    pytest.param(
        {"weight_type": "F32", "hidden_size": 36, "intermediate_size": 37, "head_dim": 32},
        id="widths-of-no-vector",
    ),
]


@pytest.fixture(scope="module")
def load(make_tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Model]]:
    """`load(threads=1, instruction_set="", **changes)`: a tiny model, loaded once."""
    loaded: dict[str, Model] = {}

    def load_once(*, threads: int = 1, instruction_set: str = "", **changes: Any) -> Model:
        key = repr((threads, instruction_set, sorted(changes.items())))
        if key not in loaded:
            loaded[key] = Model.load(
                make_tiny_model(**changes), num_threads=threads, instruction_set=instruction_set
            )
        return loaded[key]

    yield load_once
    for model in loaded.values():
        model.close()


def text_of(model: Model, length: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, model.config.vocab_size, length).tolist()
    return ids


def alone(model: Model, text: Sequence[int]) -> Floats:
    """The logits of a text that is the only one, at once."""
    return PagedText(model, [text]).logits(Piece(0, 0, len(text)))[0]


# --- Paged: the same bytes


@EVERY_ARITHMETIC
@pytest.mark.parametrize("changes", MODELS)
def test_chunks_blocks_threads_and_instructions_change_no_byte(
    load: Callable[..., Model], changes: dict[str, Any], instruction_set: str
) -> None:
    """300 tokens: more than a row tile, more than a run of attention."""
    model = load(instruction_set=instruction_set, **changes)
    text = text_of(model, 300)
    expected = alone(model, text)
    assert np.isfinite(expected).all()
    for order, chunk in enumerate(CHUNKS):
        block_size = BLOCK_SIZES[order % 3]
        paged = PagedText(model, [text], block_size=block_size, order=order)
        assert same_bytes(paged.logits_in_chunks(chunk), expected), (chunk, block_size)
    for threads in (2, 3):
        paged = PagedText(load(threads=threads, instruction_set=instruction_set, **changes), [text])
        for chunk in (300, 17):
            assert same_bytes(paged.logits_in_chunks(chunk), expected), (threads, chunk)
    for name in paths_like(instruction_set):
        paged = PagedText(load(instruction_set=name, threads=2, **changes), [text[:70]])
        for chunk in (70, 9):
            assert same_bytes(paged.logits_in_chunks(chunk), expected[:70]), (name, chunk)


def steps_of(lengths: Sequence[int], seed: int) -> list[list[tuple[int, int]]]:
    """Steps of (text, tokens), as a scheduler might take them, until all texts are computed."""
    random = np.random.default_rng(seed)
    left = dict(enumerate(lengths))
    steps = []
    while left:
        step = []
        for text in random.permutation(sorted(left)).tolist():
            if random.random() < 0.7:
                count = min(left[text], int(random.choice([1, 1, 1, 4, 16, 50, 200, 400])))
                step.append((text, count))
                left[text] -= count
        left = {text: count for text, count in left.items() if count}
        if step:
            steps.append(step)
    return steps


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    block_size=st.sampled_from(BLOCK_SIZES),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25)
def test_any_schedule_gives_every_text_the_logits_it_has_alone(
    load: Callable[..., Model], lengths: list[int], block_size: int, seed: int
) -> None:
    """Prefill chunks and decodes of several texts in one step, often of several row tiles."""
    model = load(threads=2)
    texts = [text_of(model, length, seed + i) for i, length in enumerate(lengths)]
    paged = PagedText(model, texts, block_size=block_size, order=seed)
    found: list[list[Floats]] = [[] for _ in texts]
    done = [0] * len(texts)
    for step in steps_of(lengths, seed):
        pieces = [Piece(text, done[text], count) for text, count in step]
        for piece, rows in zip(pieces, paged.logits(*pieces), strict=True):
            found[piece.sequence].append(rows)
            done[piece.sequence] += piece.num_tokens
    for text, parts in zip(texts, found, strict=True):
        assert same_bytes(np.concatenate(parts), alone(model, text))


# --- Shared blocks


def adopt(paged: PagedText, adopter: int, source: int, blocks: int) -> None:
    """The adopter's first blocks are the source's from now on."""
    paged.tables[adopter][:blocks] = paged.tables[source][:blocks]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(
    ("computed_before", "shared"),
    [
        pytest.param(0, 64, id="all-in-this-step"),
        pytest.param(33, 64, id="half-before"),
        pytest.param(0, ROW_TILE - 32, id="adopter-straddles-the-row-tile"),
        pytest.param(0, ROW_TILE, id="adopter-in-the-next-row-tile"),
        pytest.param(0, ROW_TILE + 64, id="source-straddles-the-row-tile"),
        pytest.param(100, 2 * ROW_TILE + 32, id="over-three-row-tiles"),
    ],
)
def test_an_adopter_reads_blocks_that_the_same_step_writes(
    load: Callable[..., Model], computed_before: int, shared: int, block_size: int, threads: int
) -> None:
    """The second text begins like the first and starts behind what they share; a third begins like both."""
    model = load(threads=threads)
    prefix = text_of(model, shared)
    texts = [prefix + text_of(model, 9 + 40 * i, seed=i + 1) for i in range(3)]
    expected = [alone(model, text) for text in texts]
    paged = PagedText(model, texts, block_size=block_size)
    for adopter in (1, 2):
        adopt(paged, adopter, 0, shared // block_size)
    if computed_before:
        paged.logits(Piece(0, 0, computed_before))

    first, second, third = paged.logits(
        Piece(0, computed_before, len(texts[0]) - computed_before),
        Piece(1, shared, len(texts[1]) - shared),
        Piece(2, shared, len(texts[2]) - shared),
    )

    assert same_bytes(first, expected[0][computed_before:])
    assert same_bytes(second, expected[1][shared:])
    assert same_bytes(third, expected[2][shared:])


def test_an_adopter_of_an_adopter_reads_what_both_write(load: Callable[..., Model]) -> None:
    model = load(threads=2)
    first = text_of(model, 40)
    second = first[:32] + text_of(model, 60, seed=1)
    third = second[:80] + text_of(model, 5, seed=2)
    paged = PagedText(model, [first, second, third], block_size=16)
    adopt(paged, 1, 0, 2)
    adopt(paged, 2, 1, 5)
    outs = paged.logits(Piece(0, 0, 40), Piece(1, 32, 60), Piece(2, 80, 5))
    for text, start, rows in zip((first, second, third), (0, 32, 80), outs, strict=True):
        assert same_bytes(rows, alone(model, text)[start:])


def test_a_step_writes_no_slot_but_its_own(load: Callable[..., Model]) -> None:
    model = load(threads=2)
    texts = [text_of(model, 60, seed=i) for i in range(3)]
    paged = PagedText(model, texts)
    paged.logits(*(Piece(i, 0, 40) for i in range(3)))
    before = paged.memory().copy()
    paged.logits(Piece(1, 40, 8))  # the last 8 of block 2 of text 1
    changed = np.flatnonzero((paged.memory() != before).any(axis=1))
    assert changed.tolist() == [paged.tables[1][2]]


# --- Steps


def test_a_step_samples_from_the_last_row_of_each_chunk_that_asks(load: Callable[..., Model]) -> None:
    """Across row tiles; None where nothing is asked; the logits are those of every other call."""
    model = load(threads=2)
    texts = [text_of(model, length, seed=length) for length in (1, 300, 40, 7)]
    pieces = [Piece(i, 0, len(text)) for i, text in enumerate(texts)]
    size = model.config.vocab_size
    asks = [True, True, False, True]

    def samplers() -> list[Sampler | None]:
        return [
            Sampler(size, temperature=0.8, seed=i, num_logprobs=3) if ask else None
            for i, ask in enumerate(asks)
        ]

    sampled = model.step(PagedText(model, texts).batch(pieces, samplers()))

    assert [result is not None for result in sampled] == asks
    for text, result, sampler in zip(texts, sampled, samplers(), strict=True):
        if result is None or sampler is None:
            continue
        expected = sampler.sample(alone(model, text)[-1])
        assert result.token_id == expected.token_id
        assert result.logprob == expected.logprob
        assert result.top_logprobs == expected.top_logprobs


def test_a_text_can_be_generated_token_by_token(load: Callable[..., Model]) -> None:
    """Greedy: what each step samples is fed to the next, and equals the text read back at once."""
    model = load(threads=2)
    text = text_of(model, 20)
    paged = PagedText(model, [text + [0] * 40])
    start, count = 0, 20
    while len(text) < 60:
        paged.texts = [text]
        batch = paged.batch([Piece(0, start, count)], [Sampler(model.config.vocab_size, temperature=0.0)])
        (result,) = model.step(batch)
        assert result is not None
        text.append(result.token_id)
        start, count = start + count, 1
    assert text[20:] == alone(model, text)[19:-1].argmax(axis=1).tolist()


def test_an_empty_batch_is_no_work(load: Callable[..., Model]) -> None:
    model = load()
    paged = PagedText(model, [[1, 2, 3]])
    assert model.step(paged.batch([])) == []


def test_a_text_that_is_not_finite_fails_alone(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Token -1 for the request whose logits are not numbers, the same bytes for its neighbours."""
    path = tmp_path / "spoiled.gguf"
    path.write_bytes(make_tiny_model(weight_type="F32", tied=False).read_bytes())
    reader = gguf.GGUFReader(path, "r+")
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    embedding.data[7, 3] = np.nan
    reader.data.flush()
    del reader, embedding
    model = Model.load(path, num_threads=2)
    healthy, spoiled = [5, 6, 8, 9] * 5, [5, 6, 7, 8, 9] * 4
    expected = alone(model, healthy)
    paged = PagedText(model, [healthy, spoiled, healthy])
    pieces = [Piece(i, 0, 20) for i in range(3)]
    before, between, after = paged.logits(*pieces)
    samplers = [Sampler(model.config.vocab_size, temperature=0.0) for _ in pieces]
    sampled = model.step(paged.batch(pieces, samplers))
    model.close()

    assert same_bytes(before, expected)
    assert same_bytes(after, expected)
    assert same_bytes(between[:2], expected[:2])
    assert np.isnan(between[2:]).all()
    best = int(expected[-1].argmax())
    assert [result and result.token_id for result in sampled] == [best, -1, best]


def test_two_models_step_at_once_in_one_process(make_tiny_model: Callable[..., Path]) -> None:
    paths = [make_tiny_model(weight_type=kind) for kind in ("Q4_0", "Q8_0")]

    def work(path: Path) -> bool:
        model = Model.load(path, num_threads=2)
        text = text_of(model, 100)
        expected = alone(model, text)
        same = all(
            same_bytes(PagedText(model, [text], order=i).logits_in_chunks(chunk), expected)
            for i, chunk in enumerate((1, 10, 33, 100))
        )
        model.close()
        return same

    with ThreadPoolExecutor(2) as two:
        assert list(two.map(work, paths)) == [True, True]


def test_memory_of_activations_does_not_depend_on_the_batch(load: Callable[..., Model]) -> None:
    model = load()
    before = model.buffer_bytes
    text = text_of(model, 1500)
    rows = alone(model, text)
    assert len(rows) == 1500
    assert model.buffer_bytes == before


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_decoded_token_attends_to_every_position_of_its_text_once(
    load: Callable[..., Model], dtype: str
) -> None:
    """Counted in bytes of all layers and KV heads, from the last `bind` on."""
    model = load()
    paged = PagedText(model, [text_of(model, 41), text_of(model, 9, seed=1)], dtype=dtype)
    assert (model.attention_kv_bytes_read, model.attention_kv_bytes_attended) == (0, 0)
    paged.logits(Piece(0, 0, 40), Piece(1, 0, 8))
    read, attended = model.attention_kv_bytes_read, model.attention_kv_bytes_attended
    assert read > 0
    paged.logits(Piece(0, 40, 1), Piece(1, 8, 1))
    expected = (41 + 9) * model.kv_layout(dtype=dtype).bytes_per_token
    assert model.attention_kv_bytes_read - read == expected
    assert model.attention_kv_bytes_attended - attended == expected


# --- Refused


def refused(model: Model, batch: RaggedBatch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.step(batch)
    with pytest.raises(ValueError, match=message):
        model.logits(batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [1, 2, 3, 4, 99_999, 6]}, r"token 99999 is outside the vocabulary of \d+"),
        ({"token_ids": [1, -1, 3, 4, 5, 6]}, r"token -1 is outside the vocabulary of \d+"),
        ({"token_ids": [1, 2, 3, 4, 5]}, "chunks have 6 tokens, the batch 5"),
        ({"chunk_lens": [4, 1]}, "chunks have 5 tokens, the batch 6"),
        ({"chunk_lens": [4, 0]}, "chunk 1 has 0 tokens from 0"),
        ({"chunk_lens": [4, -2]}, "chunk 1 has -2 tokens from 0"),
        ({"chunk_starts": [-1, 0]}, "chunk 0 has 4 tokens from -1"),
        ({"chunk_starts": [14, 0]}, "chunk 0 ends at position 18 but its 1 blocks hold 16"),
        ({"chunk_starts": [2**31 - 1, 0]}, "chunk 0 ends at position 2147483651"),
        ({"block_tables": [0, 4]}, "block 4 is outside the pool of 4"),
        ({"block_tables": [-1, 1]}, "block -1 is outside the pool of 4"),
        ({"block_tables": [0]}, "offsets span 2 entries of 1"),
        ({"block_tables": [0, 1, 2]}, "offsets span 2 entries of 3"),
        ({"block_table_offsets": [1, 1, 2]}, "offsets"),
        ({"block_table_offsets": [0, 0, 2]}, "chunk 0 ends at position 4 but its 0 blocks hold 0"),
        ({"block_table_offsets": [0, 3, 2]}, "chunk 1 ends at position 2 but its -1 blocks hold 0"),
        ({"block_table_offsets": [0, 2]}, "2 sequences, .* block_table_offsets 2"),
        ({"chunk_lens": [6]}, "2 sequences, chunk_lens 1"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_its_numbers(
    load: Callable[..., Model], changes: dict[str, list[int]], message: str
) -> None:
    """Before any work: memory is as it was, and the next step is a step like any other."""
    model = load()
    texts = [text_of(model, 4), text_of(model, 2)]
    paged = PagedText(model, texts)
    batch = paged.batch([Piece(0, 0, 4), Piece(1, 0, 2)])
    expected = model.logits(batch)
    before = paged.memory().copy()
    arrays: dict[str, npt.NDArray[np.int32]] = {name: ints(values) for name, values in changes.items()}

    refused(model, replace(batch, **arrays), message)  # type: ignore[arg-type]

    assert np.array_equal(paged.memory(), before)
    assert same_bytes(model.logits(batch), expected)


def test_samplers_that_do_not_fit_are_refused_with_their_numbers(load: Callable[..., Model]) -> None:
    model = load()
    paged = PagedText(model, [[1, 2], [3]])
    pieces = [Piece(0, 0, 2), Piece(1, 0, 1)]
    with pytest.raises(ValueError, match="1 samplers for 2 sequences"):
        model.step(paged.batch(pieces, [None]))
    with pytest.raises(ValueError, match=r"vocabulary of 5 meets logits of \d+"):
        model.step(paged.batch(pieces, [None, Sampler(5)]))


def test_a_model_without_an_arena_refuses_to_step(tiny_model_path: Path) -> None:
    model = Model.load(tiny_model_path, num_threads=1)
    batch = RaggedBatch(ints([1]), ints([0]), ints([1]), ints([0, 1]), ints([0]), [None])
    with pytest.raises(ValueError, match="no arena is bound"):
        model.step(batch)
    model.close()
    model.close()
    with pytest.raises(RuntimeError, match="the model is closed"):
        model.step(batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 24}, "head size 24 is not a multiple of 16 up to 256"),
        ({"head_dim": 272, "num_heads": 2, "num_kv_heads": 1}, "head size 272 "),
        ({"num_heads": 50, "num_kv_heads": 1}, "50 query heads share a KV head; at most 48 can"),
    ],
)
def test_a_shape_that_the_kernels_do_not_have_is_a_fault_of_the_file(
    make_tiny_model: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    path = make_tiny_model(**changes)
    with pytest.raises(ModelFileError, match=message) as caught:
        Model.load(path)
    assert str(path) in str(caught.value)


# --- The real model


def test_smollm2_gives_the_same_bytes_on_every_path_with_fma(smollm2_path: Path) -> None:
    """40 tokens of a recorded answer: most at once, and the last eight one by one."""
    recorded = Path(__file__).parents[1] / "oracle" / "data" / "llamacpp_smollm2.json"
    answer = json.loads(recorded.read_text())["smollm2_q4_1_chat"][0]
    text = (answer["prompt_ids"] + answer["output_ids"])[:40]
    outs = []
    for name in FUSED:
        model = Model.load(smollm2_path, instruction_set=name)
        paged = PagedText(model, [text])
        at_once = paged.logits(Piece(0, 0, 32))[0]
        one_by_one = [paged.logits(Piece(0, position, 1))[0] for position in range(32, 40)]
        outs.append(np.concatenate([at_once, *one_by_one]))
        model.close()
    assert len(outs[0]) == 40
    for out in outs:
        assert same_bytes(out, outs[0])


@pytest.mark.slow
@EVERY_ARITHMETIC
def test_smollm2_gives_the_same_bytes_in_any_chunks_blocks_and_threads(
    smollm2_path: Path, instruction_set: str
) -> None:
    """520 tokens, three runs of attention and three row tiles."""
    recorded = json.loads(
        (Path(__file__).parents[1] / "oracle" / "data" / "llamacpp_smollm2.json").read_text()
    )
    answers = [*recorded["smollm2_q4_1_chat"], *recorded["smollm2_q4_1_raw"]]
    text = [token for answer in answers for token in answer["prompt_ids"] + answer["output_ids"]]
    text = (text * 2)[:520]
    one, two = (
        Model.load(smollm2_path, num_threads=threads, instruction_set=instruction_set) for threads in (1, 2)
    )
    expected = alone(two, text)
    for order, (model, block_size, chunk) in enumerate(
        [(two, 8, 512), (one, 32, 256), (two, 16, 100), (two, 32, 16), (one, 8, 7), (two, 16, 1)]
    ):
        found = PagedText(model, [text], block_size=block_size, order=order).logits_in_chunks(chunk)
        assert same_bytes(found, expected), (block_size, chunk)
    one.close()
    two.close()
