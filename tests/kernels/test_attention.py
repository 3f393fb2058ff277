"""Attention over blocks: as right as float32 can be, and the same bytes however it is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention_batches import (
    BORDERS,
    EVERY_KIND,
    EVERY_KV_DTYPE,
    HEAD_SIZES,
    KINDS,
    Shape,
    all_close,
    all_same_bytes,
    close,
    in_pieces,
    kinds,
    shapes,
    variants,
)
from kernels.paged_kv import (
    BLOCK_SIZES,
    EPSILON,
    INFINITY,
    KV,
    LARGEST,
    MINUS_INFINITY,
    NAN,
    PLAIN,
    Q8,
    RUN,
    ZERO,
    Chunk,
    Floats,
    Kind,
    Poison,
    attend,
    q8_codes,
    random_chunk,
    random_kv,
    same_bytes,
)
from kernels.paths import EVERY_ARITHMETIC, EVERY_PATH
from octavo.kernels import ThreadPool
from octavo.kernels._native import paged_attention

# --- Right


@EVERY_ARITHMETIC
@EVERY_KIND
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_every_head_size_is_close_to_float64(head_dim: int, kind: Kind, instruction_set: str) -> None:
    chunks = Shape(head_dim, 3, 2, ((299, 1), (0, 20), (250, 12)), seed=head_dim).chunks()
    assert all_close(chunks, kind, attend(chunks, kind, instruction_set=instruction_set))


@EVERY_ARITHMETIC
@EVERY_KV_DTYPE
@pytest.mark.parametrize("group", [*range(1, 17), 48])
@pytest.mark.parametrize("kv_heads", [1, 2, 5, 8])
def test_every_grouping_of_heads_is_close_to_float64(
    group: int, kv_heads: int, kind: Kind, instruction_set: str
) -> None:
    chunks = Shape(32, group, kv_heads, ((260, 1), (60, 7)), seed=group).chunks()
    assert all_close(chunks, kind, attend(chunks, kind, instruction_set=instruction_set))


@EVERY_ARITHMETIC
@EVERY_KIND
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_length_is_close_to_float64(block_size: int, kind: Kind, instruction_set: str) -> None:
    for length in BORDERS:
        chunks = Shape(48, 2, 2, ((length - 1, 1),), seed=length).chunks()
        out = attend(chunks, kind, block_size=block_size, instruction_set=instruction_set)[0]
        assert close(chunks[0], kind, out), length


@EVERY_ARITHMETIC
@given(
    shape=shapes(4_000_000), kind=kinds(), block_size=st.sampled_from(BLOCK_SIZES), order=st.integers(0, 99)
)
@settings(max_examples=100)
def test_any_batch_is_close_to_float64(
    instruction_set: str, shape: Shape, kind: Kind, block_size: int, order: int
) -> None:
    chunks = shape.chunks()
    outs = attend(chunks, kind, block_size=block_size, order=order, instruction_set=instruction_set)
    assert all_close(chunks, kind, outs)


def test_scores_far_apart_choose_one_value() -> None:
    """A score 90 or more below the largest weighs less than float32 can add to it."""
    random = np.random.default_rng(0)
    kv = random_kv(random, 700, 1, 32)
    kv.keys[:, 0, 0] = -100.0
    kv.keys[300, 0, 0] = 100.0
    query = np.zeros((1, 4, 32), dtype=np.float32)
    query[..., 0] = 1.0
    chunk = Chunk(kv, 699, query)

    assert same_bytes(attend([chunk])[0][0, 0], kv.values[300, 0].astype(np.float32))
    codes, step = q8_codes(kv.values[300, 0].astype(np.float32))
    assert np.allclose(attend([chunk], Q8)[0][0, 0], codes * np.float64(step), rtol=4.0 * EPSILON, atol=0.0)


@EVERY_KV_DTYPE
def test_equal_scores_average_the_values(kind: Kind) -> None:
    kv = random_kv(np.random.default_rng(1), 1000, 1, 16)
    kv.values[:, 0, 5] = 8.0  # beyond all others: one scale for all codes, and for all weights
    values = kv.values.astype(np.float64)
    if kind.kv_dtype == "q8":
        codes, steps = q8_codes(kv.values.astype(np.float32))
        values = codes * steps.astype(np.float64)[..., None]
    out = attend([Chunk(kv, 999, np.zeros((1, 1, 16), dtype=np.float32))], kind)[0]
    assert np.allclose(out[0, 0], values.mean(axis=(0, 1)), rtol=4e-7, atol=1e-6)


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


@EVERY_KV_DTYPE
def test_a_distance_beyond_float32_weighs_nothing(kind: Kind) -> None:
    kv = KV(np.zeros((2, 1, 16), dtype=np.float16), np.zeros((2, 1, 16), dtype=np.float16))
    kv.keys[1, 0, 0] = kv.values[1] = 1.0
    queries = np.zeros((1, 4, 16), dtype=np.float32)
    queries[0, :, 0] = [-87.5, -200.0, -1e30, -3e38]
    assert (attend([Chunk(kv, 1, queries)], kind)[0] == 0.0).all()


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


@EVERY_PATH
@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 600, 1500])
def test_weights_of_codes_are_codes_with_one_scale_a_run(length: int, instruction_set: str) -> None:
    """The rule of q8. Zero queries weigh every value 1, so that a weight is the scale of its value."""
    kv = random_kv(np.random.default_rng(length), length, 1, 32)
    kv.values[:, 0] *= np.random.default_rng(0).uniform(0.01, 3.0, (length, 1)).astype(np.float16)
    codes, scales = q8_codes(kv.values[:, 0].astype(np.float32))
    total = np.zeros(32, dtype=np.float32)
    for start in range(0, length, RUN):
        weights = scales[start : start + RUN]
        step = weights.max() / np.float32(32767.0)
        weight_codes = np.rint(weights * (np.float32(1.0) / step)).astype(np.int64)
        total += (weight_codes @ codes[start : start + RUN].astype(np.int64)).astype(np.float32) * step
    zeros = np.zeros((1, 2, 32), dtype=np.float32)
    for window in (0, length):
        kind = Kind("q8", window)
        out = attend([Chunk(kv, length - 1, zeros)], kind, threads=2, instruction_set=instruction_set)[0]
        assert same_bytes(out[0, 0], total / np.float32(length))
        assert same_bytes(out[0, 1], out[0, 0])


@EVERY_PATH
@pytest.mark.parametrize("head_dim", [16, 256])
def test_sums_of_the_largest_codes_are_exact(head_dim: int, instruction_set: str) -> None:
    """256 products of 127 and 32,767 stay below 2^31, over dimensions and over the positions of a run."""
    # One dimension, rotated, is equal ones: each of their codes is the largest.
    keys = np.zeros((300, 2, head_dim), dtype=np.float16)
    keys[:RUN, :, 0] = 1.0
    keys[RUN:, :, 0] = -1.0
    values = np.full((300, 2, head_dim), -2.0, dtype=np.float16)
    values[RUN:] = 1.0
    values[:, 1] *= -1.0
    queries = np.zeros((1, 4, head_dim), dtype=np.float32)
    queries[..., 0] = [1.0, -1.0, 1.0, -1.0]
    out = attend([Chunk(KV(keys, values), 299, queries)], Q8, instruction_set=instruction_set)[0][0]
    # Scores are 1 in the first run and -1 in the second, or the other way round.
    for head, distance in enumerate((-2.0, 2.0, -2.0, 2.0)):
        second = (300 - RUN) * np.exp(distance)
        expected = (-2.0 * RUN + second) / (RUN + second) * (-1.0 if head >= 2 else 1.0)
        assert np.allclose(out[head], expected, rtol=64.0 * EPSILON)


# --- The same bytes


@EVERY_ARITHMETIC
@given(shape=shapes(6_000_000), kind=kinds())
@settings(max_examples=60)
def test_blocks_order_threads_and_instructions_change_no_byte(
    instruction_set: str, shape: Shape, kind: Kind
) -> None:
    chunks = shape.chunks()
    expected = attend(chunks, kind, instruction_set=instruction_set)
    for name, outs in variants(chunks, kind, instruction_set).items():
        assert all_same_bytes(outs, expected), name


@pytest.mark.slow
@EVERY_ARITHMETIC
@given(
    shape=shapes(60_000_000),
    kind=kinds(),
    block_size=st.sampled_from(BLOCK_SIZES),
    poison=st.sampled_from([NAN, INFINITY]),
)
@settings(max_examples=400)
def test_larger_batches_are_right_and_the_same_everywhere(
    instruction_set: str, shape: Shape, kind: Kind, block_size: int, poison: Poison
) -> None:
    chunks = shape.chunks()
    asked: dict[str, Any] = {"block_size": block_size, "poison": poison, "threads": 2}
    expected = attend(chunks, kind, instruction_set=instruction_set, **asked)
    assert all_close(chunks, kind, expected)
    for name, outs in variants(chunks, kind, instruction_set).items():
        assert all_same_bytes(outs, expected), name


@EVERY_ARITHMETIC
@given(shape=shapes(20_000_000), kind=kinds(), threads=st.integers(1, 3))
@settings(max_examples=60)
def test_neighbours_change_no_byte(instruction_set: str, shape: Shape, kind: Kind, threads: int) -> None:
    chunks = shape.chunks()
    outs = attend(chunks, kind, threads=threads, instruction_set=instruction_set)
    for chunk, out in zip(chunks, outs, strict=True):
        assert same_bytes(out, attend([chunk], kind, instruction_set=instruction_set)[0])


HEADS = [(64, 3, 3), (16, 1, 2), (128, 8, 1), (80, 13, 1), (32, 48, 1)]
"""head_dim, group, kv_heads."""


@EVERY_ARITHMETIC
@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        pytest.param(
            kind,
            heads,
            id=f"{name}-{heads}",
            marks=[] if kind in (PLAIN, Q8) or heads[:2] in ((16, 1), (80, 13)) else [pytest.mark.slow],
        )
        for name, kind in KINDS.items()
        for heads in HEADS
    ],
)
def test_chunk_sizes_change_no_byte(kind: Kind, heads: tuple[int, int, int], instruction_set: str) -> None:
    """A prompt at once, in chunks of any size, or token by token, each chunk a call of its own."""
    head_dim, group, kv_heads = heads
    random = np.random.default_rng(head_dim)
    kv = random_kv(random, 600, kv_heads, head_dim)
    whole = random_chunk(random, kv, group, 0, 600)
    expected = attend([whole], kind, instruction_set=instruction_set)[0]
    pool = ThreadPool(2)
    for size in (512, 256, 255, 100, 64, 48, 17, 16, 13, 8, 5, 4, 3, 2, 1):
        pieces = in_pieces(whole, size)
        # Together in one call: a call for each would only lay out arenas. Some are asked alone below.
        outs = attend(pieces, kind, pool=pool, instruction_set=instruction_set)
        assert same_bytes(np.concatenate(outs), expected), size
    for position in (0, 1, 15, 16, 99, 100, 254, 255, 256, 257, 511, 512, 599):
        alone = Chunk(kv, position, whole.queries[position : position + 1])
        out = attend([alone], kind, threads=2, instruction_set=instruction_set)[0][0]
        assert same_bytes(out, expected[position]), position


@EVERY_KIND
def test_positions_written_later_change_no_byte(kind: Kind) -> None:
    """A chunk of a prompt is stored whole before any of its rows attends; so are the chunks of an adopter."""
    random = np.random.default_rng(3)
    kv = random_kv(random, 600, 2, 64)
    whole = random_chunk(random, kv, 3, 0, 600)
    for end in (1, 17, 256, 300, 599):
        short = KV(kv.keys[:end], kv.values[:end])
        for size in (end, 16, 1):
            expected = np.concatenate(attend(in_pieces(Chunk(short, 0, whole.queries[:end]), size), kind))
            again = np.concatenate(attend(in_pieces(Chunk(kv, 0, whole.queries[:end]), size), kind))
            assert same_bytes(expected, again)


@EVERY_KV_DTYPE
@pytest.mark.parametrize("threads", [1, 3])
def test_more_long_contexts_than_there_is_room_for_run_states_change_no_byte(
    kind: Kind, threads: int
) -> None:
    """Single rows are cut into runs while their states fit; the rest are not, and must not show it."""
    random = np.random.default_rng(6)
    kv = random_kv(random, 1400, 8, 256)
    chunks = [random_chunk(random, kv, 16, start, 1) for start in range(1290, 1400, 11)]
    for chunk, out in zip(chunks, attend(chunks, kind, threads=threads), strict=True):
        assert same_bytes(out, attend([chunk], kind)[0])


# --- Memory that is not a sequence's own


@EVERY_ARITHMETIC
@given(shape=shapes(6_000_000), kind=kinds(), block_size=st.sampled_from(BLOCK_SIZES))
@settings(max_examples=40)
def test_what_nobody_wrote_is_never_read(
    instruction_set: str, shape: Shape, kind: Kind, block_size: int
) -> None:
    """Tails of last blocks, free blocks, other layers, padding, before windows: 0 x NaN would be NaN."""
    chunks = shape.chunks()
    asked: dict[str, Any] = {"block_size": block_size, "threads": 2, "instruction_set": instruction_set}
    clean = attend(chunks, kind, poison=ZERO, **asked)
    for poison in (NAN, INFINITY, LARGEST, MINUS_INFINITY):
        outs = attend(chunks, kind, poison=poison, **asked)
        assert all(np.isfinite(out).all() for out in outs)
        assert all_same_bytes(outs, clean), poison


@EVERY_PATH
@EVERY_KIND
@pytest.mark.parametrize("group", [3, 13])
@pytest.mark.parametrize("what", ["keys", "values"])
def test_a_position_that_is_not_a_number_spoils_only_the_rows_that_see_it(
    what: str, group: int, kind: Kind, instruction_set: str
) -> None:
    """Other rows keep their bytes, those that see it fail: a bad score must not just count as far away."""
    random = np.random.default_rng(group)
    kv = random_kv(random, 270, 1, 16)
    whole = random_chunk(random, kv, group, 0, 270)
    expected = attend([whole], kind, instruction_set=instruction_set)[0]
    for position in (0, 100, 255, 256):
        spoiled = KV(kv.keys.copy(), kv.values.copy())
        getattr(spoiled, what)[position, 0, 9] = np.nan
        sees = np.array([kind.first_seen(row) <= position <= row for row in range(270)])
        for pieces in ([whole], in_pieces(whole, 60)):
            chunks = [Chunk(spoiled, piece.start, piece.queries) for piece in pieces]
            out = np.concatenate(attend(chunks, kind, instruction_set=instruction_set))
            assert same_bytes(out[~sees], expected[~sees])
            spoilt = out[sees] if what == "keys" or kind.kv_dtype == "q8" else out[sees][..., 9]
            assert np.isnan(spoilt).all()


@EVERY_PATH
@EVERY_KV_DTYPE
def test_a_value_that_is_not_a_number_spoils_its_row_however_little_it_weighs(
    kind: Kind, instruction_set: str
) -> None:
    """0 x NaN is NaN: a score 200 below the others does not make the value one."""
    kv = random_kv(np.random.default_rng(0), 20, 1, 16)
    kv.keys[:] = 0.0
    kv.keys[5, 0, 0] = -200.0
    kv.values[5] = np.nan
    query = np.zeros((1, 2, 16), dtype=np.float32)
    query[..., 0] = 1.0
    assert np.isnan(attend([Chunk(kv, 19, query)], kind, instruction_set=instruction_set)[0]).all()


@EVERY_KV_DTYPE
def test_a_key_that_overflowed_fails_its_row(kind: Kind) -> None:
    """Keys beyond what is stored are infinite. Their softmax has no answer, and none may be made up."""
    random = np.random.default_rng(8)
    kv = random_kv(random, 400, 1, 16)
    kv.keys[100, 0, 3] = np.inf
    queries = np.abs(random_chunk(random, kv, 2, 0, 400).queries)
    out = np.concatenate(attend(in_pieces(Chunk(kv, 0, queries), 50), kind))
    assert np.isfinite(out[:100]).all()
    assert np.isnan(out[100:]).all()


@EVERY_PATH
@EVERY_KIND
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_query_that_is_not_a_number_spoils_only_its_row(
    kind: Kind, value: float, instruction_set: str
) -> None:
    """An infinite one is a number to a soft cap, if its keys are floats."""
    random = np.random.default_rng(9)
    kv = random_kv(random, 300, 2, 32)
    chunk = random_chunk(random, kv, 3, 280, 20)
    expected = attend([chunk], kind, instruction_set=instruction_set)[0]
    chunk.queries[7, 4, 5] = value
    out = attend([chunk], kind, instruction_set=instruction_set)[0]
    if np.isnan(value) or kind.kv_dtype == "q8" or not kind.soft_cap:
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
        "starts": [0], "lens": [1], "offsets": [0, 1], "table": [0],
        "kv_dtype": "f16", "window": 0, "soft_cap": 0.0, **changes,
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
        kv_dtype=given_["kv_dtype"],
        window=given_["window"],
        soft_cap=given_["soft_cap"],
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
        ({"kv_dtype": "q4"}, "f16 or q8, not as 'q4'"),
        ({"kv_dtype": ""}, "f16 or q8, not as ''"),
        ({"kv_dtype": "q8", "extent": 600}, "640 bytes at 0 .* 600"),
        ({"kv_dtype": "q8", "layer": 3460}, "640 bytes at 3460 .* 4096"),
        ({"window": -1}, "window of -1 "),
        ({"soft_cap": -1.0}, "capped at -1"),
        ({"soft_cap": np.nan}, "capped at nan"),
        ({"soft_cap": np.inf}, "capped at inf"),
        ({"soft_cap": 1001.0}, "capped at 1001; 0 leaves them as they are, else 0.001 to 1000"),
        ({"soft_cap": 1e-39}, "capped at 1e-39"),
        ({"layer": 2**63 - 1}, "1024 bytes at 9223372036854775807 "),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(**changes)
