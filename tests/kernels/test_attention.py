"""Attention over blocks: as right as float32 can be, and the same bytes however it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_kv import (
    BLOCK_SIZES,
    INFINITY,
    KV,
    LARGEST,
    NAN,
    RUN,
    ZERO,
    Arena,
    Chunk,
    Floats,
    attend,
    float64_attention,
    random_chunk,
    random_kv,
    same_bytes,
)
from kernels.paths import EVERY_ARITHMETIC, EVERY_PATH, paths_like
from octavo.kernels import ThreadPool
from octavo.kernels._native import paged_attention

HEAD_SIZES = range(16, 257, 16)
# Runs end at multiples of 256, blocks at multiples of 8 to 64, vectors at multiples of 8.
BORDERS = [1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 256, 257, 258, 511, 512, 513, 769, 1500]


def close(chunk: Chunk, out: Floats) -> bool:
    expected, bound = float64_attention(chunk)
    return bool((np.abs(out - expected) <= bound).all())


@dataclass(frozen=True)
class Shape:
    head_dim: int
    group: int
    kv_heads: int
    spans: tuple[tuple[int, int], ...]
    """(tokens before, rows) of each chunk, each of a sequence of its own."""
    seed: int

    def chunks(self) -> list[Chunk]:
        random = np.random.default_rng(self.seed)
        return [
            random_chunk(
                random,
                random_kv(random, start + rows, self.kv_heads, self.head_dim),
                self.group,
                start,
                rows,
            )
            for start, rows in self.spans
        ]


def shapes(largest_work: int) -> st.SearchStrategy[Shape]:
    """Ragged batches of decodes and prefill chunks; at most `largest_work` multiply-adds, more or less."""
    starts = st.one_of(st.sampled_from([0, *BORDERS]), st.integers(0, 600))
    spans = st.tuples(starts, st.one_of(st.just(1), st.sampled_from([2, 5, 8, 13, 40]), st.integers(1, 300)))

    def fits(shape: Shape) -> bool:
        seen = sum(rows * (start + rows) for start, rows in shape.spans)
        return 2 * seen * shape.group * shape.kv_heads * shape.head_dim <= largest_work

    return st.builds(
        Shape,
        head_dim=st.sampled_from(HEAD_SIZES),
        group=st.one_of(st.integers(1, 16), st.sampled_from([24, 48])),
        kv_heads=st.integers(1, 8),
        spans=st.lists(spans, min_size=1, max_size=5).map(tuple),
        seed=st.integers(0, 2**32 - 1),
    ).filter(fits)


# --- Right


@EVERY_ARITHMETIC
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_every_head_size_is_close_to_float64(head_dim: int, instruction_set: str) -> None:
    shape = Shape(head_dim, 3, 2, ((299, 1), (0, 20), (250, 12)), seed=head_dim)
    chunks = shape.chunks()
    for chunk, out in zip(chunks, attend(chunks, instruction_set=instruction_set), strict=True):
        assert close(chunk, out)


@EVERY_ARITHMETIC
@pytest.mark.parametrize("group", [*range(1, 17), 48])
@pytest.mark.parametrize("kv_heads", [1, 2, 5, 8])
def test_every_grouping_of_heads_is_close_to_float64(group: int, kv_heads: int, instruction_set: str) -> None:
    chunks = Shape(32, group, kv_heads, ((260, 1), (60, 7)), seed=group).chunks()
    for chunk, out in zip(chunks, attend(chunks, instruction_set=instruction_set), strict=True):
        assert close(chunk, out)


@EVERY_ARITHMETIC
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("length", BORDERS)
def test_every_length_is_close_to_float64(length: int, block_size: int, instruction_set: str) -> None:
    chunks = Shape(48, 2, 2, ((length - 1, 1),), seed=length).chunks()
    assert close(chunks[0], attend(chunks, block_size=block_size, instruction_set=instruction_set)[0])


@EVERY_ARITHMETIC
@given(shape=shapes(4_000_000), block_size=st.sampled_from(BLOCK_SIZES), order=st.integers(0, 99))
@settings(max_examples=40)
def test_any_batch_is_close_to_float64(
    instruction_set: str, shape: Shape, block_size: int, order: int
) -> None:
    chunks = shape.chunks()
    outs = attend(chunks, block_size=block_size, order=order, instruction_set=instruction_set)
    for chunk, out in zip(chunks, outs, strict=True):
        assert close(chunk, out)


def test_scores_far_apart_choose_one_value() -> None:
    """A score 90 or more below the largest weighs less than float32 can add to it."""
    random = np.random.default_rng(0)
    kv = random_kv(random, 700, 1, 32)
    kv.keys[:, 0, 0] = -100.0
    kv.keys[300, 0, 0] = 100.0
    query = np.zeros((1, 4, 32), dtype=np.float32)
    query[..., 0] = 1.0

    out = attend([Chunk(kv, 699, query)])[0]

    assert same_bytes(out[0, 0], kv.values[300, 0].astype(np.float32))


def test_equal_scores_average_the_values() -> None:
    kv = random_kv(np.random.default_rng(1), 1000, 1, 16)
    out = attend([Chunk(kv, 999, np.zeros((1, 1, 16), dtype=np.float32))])[0]
    assert np.allclose(out[0, 0], kv.values.astype(np.float64).mean(axis=(0, 1)), rtol=0.0, atol=1e-6)


@EVERY_PATH
def test_a_weight_is_the_exponential_of_its_distance_within_two_ulp(instruction_set: str) -> None:
    """Two positions: the first weighs 1, the second e^x, and 1 + e^x is 1 here, so that the output is e^x."""
    distances = np.random.default_rng(0).uniform(-86.9, -17.5, (20, 384)).astype(np.float32)
    kv = KV(np.zeros((2, 8, 16), dtype=np.float16), np.zeros((2, 8, 16), dtype=np.float16))
    kv.keys[1, :, 0] = kv.values[1] = 1.0
    queries = np.zeros((20, 1, 384, 16), dtype=np.float32)
    queries[:, 0, :, 0] = distances
    outs = attend([Chunk(kv, 1, rows) for rows in queries], instruction_set=instruction_set)
    found = np.stack(outs)[:, 0, :, 0]
    exact = np.exp(distances.astype(np.float64))
    assert (np.abs(found - exact) <= 2.0 * np.spacing(exact.astype(np.float32))).all()


def test_a_distance_beyond_float32_weighs_nothing() -> None:
    kv = KV(np.zeros((2, 1, 16), dtype=np.float16), np.zeros((2, 1, 16), dtype=np.float16))
    kv.keys[1, 0, 0] = kv.values[1] = 1.0
    queries = np.zeros((1, 4, 16), dtype=np.float32)
    queries[0, :, 0] = [-87.5, -200.0, -1e30, -3e38]
    assert (attend([Chunk(kv, 1, queries)])[0] == 0.0).all()


@EVERY_PATH
@pytest.mark.parametrize("length", [1, 255, 256, 257, 600, 1500])
def test_values_are_summed_in_token_order_inside_runs_of_256_that_are_folded_left(
    length: int, instruction_set: str
) -> None:
    """The determinism rule itself. Zero queries weigh every value exactly 1: only the order is left."""
    kv = random_kv(np.random.default_rng(length), length, 1, 32)
    values = kv.values[:, 0].astype(np.float32)
    total = np.zeros(32, dtype=np.float32)
    for start in range(0, length, RUN):
        total += np.add.accumulate(values[start : start + RUN])[-1]
    zeros = np.zeros((1, 2, 32), dtype=np.float32)
    out = attend([Chunk(kv, length - 1, zeros)], threads=2, instruction_set=instruction_set)[0]
    assert same_bytes(out[0, 0], total / np.float32(length))
    assert same_bytes(out[0, 1], out[0, 0])


# --- The same bytes


def variants(chunks: list[Chunk], instruction_set: str) -> dict[str, list[Floats]]:
    asked: dict[str, dict[str, Any]] = {
        **{f"blocks of {size}": {"block_size": size} for size in BLOCK_SIZES},
        **{f"order {order}": {"order": order} for order in (1, 2)},
        **{f"{threads} threads": {"threads": threads} for threads in (2, 3)},
        **{name: {"instruction_set": name} for name in paths_like(instruction_set)},
    }
    return {
        name: attend(chunks, **{"instruction_set": instruction_set, **changes})
        for name, changes in asked.items()
    }


@EVERY_ARITHMETIC
@given(shape=shapes(6_000_000))
@settings(max_examples=25)
def test_blocks_order_threads_and_instructions_change_no_byte(instruction_set: str, shape: Shape) -> None:
    chunks = shape.chunks()
    expected = attend(chunks, instruction_set=instruction_set)
    for name, outs in variants(chunks, instruction_set).items():
        for out, plain in zip(outs, expected, strict=True):
            assert same_bytes(out, plain), name


@pytest.mark.slow
@EVERY_ARITHMETIC
@given(
    shape=shapes(60_000_000), block_size=st.sampled_from(BLOCK_SIZES), poison=st.sampled_from([NAN, INFINITY])
)
@settings(max_examples=300)
def test_larger_batches_are_right_and_the_same_everywhere(
    instruction_set: str, shape: Shape, block_size: int, poison: int
) -> None:
    chunks = shape.chunks()
    expected = attend(
        chunks, block_size=block_size, poison=poison, threads=2, instruction_set=instruction_set
    )
    for chunk, out in zip(chunks, expected, strict=True):
        assert close(chunk, out)
    for name, outs in variants(chunks, instruction_set).items():
        for out, plain in zip(outs, expected, strict=True):
            assert same_bytes(out, plain), name


@EVERY_ARITHMETIC
@given(shape=shapes(20_000_000), threads=st.integers(1, 3))
@settings(max_examples=25)
def test_neighbours_change_no_byte(instruction_set: str, shape: Shape, threads: int) -> None:
    chunks = shape.chunks()
    outs = attend(chunks, threads=threads, instruction_set=instruction_set)
    for chunk, out in zip(chunks, outs, strict=True):
        assert same_bytes(out, attend([chunk], instruction_set=instruction_set)[0])


def in_pieces(chunk: Chunk, size: int) -> list[Chunk]:
    return [
        Chunk(chunk.kv, chunk.start + at, chunk.queries[at : at + size])
        for at in range(0, len(chunk.queries), size)
    ]


@EVERY_ARITHMETIC
@pytest.mark.parametrize(
    ("head_dim", "group", "kv_heads"), [(64, 3, 3), (16, 1, 2), (128, 8, 1), (80, 13, 1), (32, 48, 1)]
)
def test_chunk_sizes_change_no_byte(head_dim: int, group: int, kv_heads: int, instruction_set: str) -> None:
    """A prompt at once, in chunks of any size, or token by token, each chunk a call of its own."""
    random = np.random.default_rng(head_dim)
    kv = random_kv(random, 600, kv_heads, head_dim)
    whole = random_chunk(random, kv, group, 0, 600)
    expected = attend([whole], instruction_set=instruction_set)[0]
    pool = ThreadPool(2)
    for size in (512, 256, 255, 100, 64, 48, 17, 16, 13, 8, 5, 4, 3, 2, 1):
        pieces = in_pieces(whole, size)
        # Together in one call: a call for each would only lay out arenas. Some are asked alone below.
        outs = attend(pieces, pool=pool, instruction_set=instruction_set)
        assert same_bytes(np.concatenate(outs), expected), size
    for position in (0, 1, 15, 16, 254, 255, 256, 257, 511, 512, 599):
        alone = Chunk(kv, position, whole.queries[position : position + 1])
        out = attend([alone], threads=2, instruction_set=instruction_set)[0][0]
        assert same_bytes(out, expected[position]), position


def test_positions_written_later_change_no_byte() -> None:
    """A chunk of a prompt is stored whole before any of its rows attends; so are the chunks of an adopter."""
    random = np.random.default_rng(3)
    kv = random_kv(random, 600, 2, 64)
    whole = random_chunk(random, kv, 3, 0, 600)
    for end in (1, 17, 256, 300, 599):
        short = KV(kv.keys[:end], kv.values[:end])
        for size in (end, 16, 1):
            expected = np.concatenate(attend(in_pieces(Chunk(short, 0, whole.queries[:end]), size)))
            again = np.concatenate(attend(in_pieces(Chunk(kv, 0, whole.queries[:end]), size)))
            assert same_bytes(expected, again)


def test_sequences_that_share_blocks_read_the_same_bytes() -> None:
    random = np.random.default_rng(4)
    prefix = random_kv(random, 320, 2, 64)
    own = [random_kv(random, tail, 2, 64) for tail in (1, 30, 200)]
    queries = [random_chunk(random, tail, 3, 0, len(tail)).queries for tail in own]
    apart = [
        Chunk(
            KV(np.concatenate([prefix.keys, tail.keys]), np.concatenate([prefix.values, tail.values])),
            320,
            query,
        )
        for tail, query in zip(own, queries, strict=True)
    ]
    expected = [attend([chunk])[0] for chunk in apart]

    arena = Arena((2, 64), 16, NAN)
    tables = arena.lay_out([prefix, *own], order=5)
    shared = [np.concatenate([tables[0], table]) for table in tables[1:]]
    outs = arena.attend(apart, shared, ThreadPool(2), "")

    for out, alone in zip(outs, expected, strict=True):
        assert same_bytes(out, alone)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_more_long_contexts_than_there_is_room_for_run_states_change_no_byte(threads: int) -> None:
    """Single rows are cut into runs while their states fit; the rest are not, and must not show it."""
    random = np.random.default_rng(6)
    kv = random_kv(random, 1400, 8, 256)
    chunks = [random_chunk(random, kv, 16, start, 1) for start in range(1290, 1400, 11)]
    for chunk, out in zip(chunks, attend(chunks, threads=threads), strict=True):
        assert same_bytes(out, attend([chunk])[0])


# --- Memory that is not a sequence's own


@EVERY_ARITHMETIC
@given(shape=shapes(6_000_000), block_size=st.sampled_from(BLOCK_SIZES))
@settings(max_examples=25)
def test_what_nobody_wrote_is_never_read(instruction_set: str, shape: Shape, block_size: int) -> None:
    """The tails of last blocks, free blocks, other layers, padding: 0 x NaN would be NaN."""
    chunks = shape.chunks()
    asked: dict[str, Any] = {"block_size": block_size, "threads": 2, "instruction_set": instruction_set}
    clean = attend(chunks, poison=ZERO, **asked)
    for poison in (NAN, INFINITY, LARGEST, INFINITY | 0x8000):
        outs = attend(chunks, poison=poison, **asked)
        for out, expected in zip(outs, clean, strict=True):
            assert np.isfinite(out).all()
            assert same_bytes(out, expected), hex(poison)


@EVERY_PATH
@pytest.mark.parametrize("group", [1, 3, 13])
@pytest.mark.parametrize("what", ["keys", "values"])
def test_a_position_that_is_not_a_number_spoils_only_the_rows_that_see_it(
    what: str, group: int, instruction_set: str
) -> None:
    """Rows before it keep their bytes, rows from it on fail: a bad score must not just count as far away."""
    random = np.random.default_rng(group)
    kv = random_kv(random, 270, 1, 16)
    whole = random_chunk(random, kv, group, 0, 270)
    expected = attend([whole], instruction_set=instruction_set)[0]
    for position in (0, 100, 255, 256):
        spoiled = KV(kv.keys.copy(), kv.values.copy())
        getattr(spoiled, what)[position] = np.nan
        for pieces in ([whole], in_pieces(whole, 60)):
            chunks = [Chunk(spoiled, piece.start, piece.queries) for piece in pieces]
            out = np.concatenate(attend(chunks, instruction_set=instruction_set))
            assert same_bytes(out[:position], expected[:position])
            assert np.isnan(out[position:]).all()


def test_a_key_that_overflowed_fails_its_row() -> None:
    """Keys beyond f16 are stored as infinity. Their softmax has no answer, and none may be made up."""
    random = np.random.default_rng(8)
    kv = random_kv(random, 400, 1, 16)
    kv.keys[100, 0, 3] = np.inf
    queries = np.abs(random_chunk(random, kv, 2, 0, 400).queries)
    out = np.concatenate(attend(in_pieces(Chunk(kv, 0, queries), 50)))
    assert np.isfinite(out[:100]).all()
    assert np.isnan(out[100:]).all()


def test_a_query_that_is_not_a_number_spoils_only_its_row() -> None:
    random = np.random.default_rng(9)
    kv = random_kv(random, 300, 2, 32)
    chunk = random_chunk(random, kv, 3, 280, 20)
    expected = attend([chunk])[0]
    chunk.queries[7, 4, 5] = np.nan
    out = attend([chunk])[0]
    assert np.isnan(out[7, 4]).all()
    out[7, 4] = expected[7, 4]
    assert same_bytes(out, expected)


# --- Refused


def ask(**changes: Any) -> Floats:
    """One decode over one block of 16 with two heads of 16, with these changes."""

    def ints(values: list[int]) -> npt.NDArray[np.int32]:
        return np.array(values, dtype=np.int32)

    given_: dict[str, Any] = {
        "heads": 2, "head_dim": 16, "rows": 1, "kv_heads": 1, "block_size": 16, "extent": 4096, "layer": 0,
        "starts": [0], "lens": [1], "offsets": [0, 1], "table": [0], **changes,
    }  # fmt: skip
    return paged_attention(
        ThreadPool(1),
        np.zeros(2 * given_["extent"], dtype=np.uint8),
        given_["extent"],
        given_["layer"],
        given_["block_size"],
        given_["kv_heads"],
        np.ones((given_["rows"], given_["heads"], given_["head_dim"]), dtype=np.float32),
        ints(given_["starts"]),
        ints(given_["lens"]),
        ints(given_["offsets"]),
        ints(given_["table"]),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 8}, "head size 8 "),
        ({"head_dim": 24}, "head size 24 "),
        ({"head_dim": 272}, "head size 272 "),
        ({"kv_heads": 0}, "2 query heads do not divide among 0"),
        ({"kv_heads": 3}, "2 query heads do not divide among 3"),
        ({"heads": 49}, "49 query heads share a KV head; at most 48"),
        ({"block_size": 0}, "block size 0 "),
        ({"block_size": 12}, "block size 12 "),
        ({"block_size": 512}, "block size 512 "),
        ({"extent": 1000}, "1024 bytes at 0 .* 1000"),
        ({"layer": 3100}, "1024 bytes at 3100 .* 4096"),
        ({"layer": -2}, "1024 bytes at -2 "),
        ({"starts": [16]}, "1 tokens from 16 .* 0 to 1"),
        ({"starts": [-1]}, "1 tokens from -1 "),
        ({"starts": [2**31 - 1]}, "1 tokens from 2147483647 "),
        ({"lens": [0], "rows": 0}, "0 tokens from 0 "),
        ({"lens": [2]}, "2 tokens, the queries 1"),
        ({"lens": [1, 1]}, "1 starts .* 2 lengths"),
        ({"offsets": [0]}, "1 starts .* 1 table offsets"),
        ({"offsets": [0, 2]}, "entries 0 to 2"),
        ({"offsets": [-1, 1]}, "entries -1 to 1"),
        ({"table": [2]}, "block 2 "),
        ({"table": [-1]}, "block -1 "),
        ({"table": [2**31 - 1]}, "block 2147483647 "),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(**changes)
