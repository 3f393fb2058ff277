"""Rows that see a window of positions, and scores with a soft cap: what each means, at its borders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernels.attention_batches import EVERY_KV_DTYPE, Shape, all_same_bytes, close, in_pieces
from kernels.paged_kv import (
    BLOCK_SIZES,
    EPSILON,
    KV,
    RUN,
    Chunk,
    Floats,
    Kind,
    attend,
    random_chunk,
    random_kv,
    same_bytes,
)
from kernels.paths import EVERY_ARITHMETIC, EVERY_PATH

WINDOWS = [1, 2, 7, 8, 9, 15, 16, 17, 100, 255, 256, 257, 300, 511, 512, 513]

# --- Windows


@EVERY_PATH
@EVERY_KV_DTYPE
@pytest.mark.parametrize("window", [1, 2, 8, 100, 256, 257, 600])
def test_a_window_counts_the_own_position(window: int, kind: Kind, instruction_set: str) -> None:
    """Equal scores: the mean of the last `window` values and of nothing else, in decode and in a chunk."""
    tokens, rows = 600, 40
    kv = KV(np.zeros((tokens, 1, 16), dtype=np.float16), np.zeros((tokens, 1, 16), dtype=np.float16))
    kv.values[:, 0] = np.arange(tokens)[:, None] % 2**11  # halves, and as q8 a scale each
    whole = Chunk(kv, tokens - rows, np.zeros((rows, 2, 16), dtype=np.float32))
    asked = replace(kind, window=window)
    for size in (rows, 7, 1):
        out = np.concatenate(attend(in_pieces(whole, size), asked, instruction_set=instruction_set))
        for row in range(rows):
            own = tokens - rows + row
            # Beside roundings, half a step of weights, whose values are codes of 127.
            expected = np.arange(max(0, own + 1 - window), own + 1).mean()
            assert np.allclose(out[row], expected, rtol=2e-5 if kind.kv_dtype == "q8" else 1e-6)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@EVERY_KV_DTYPE
def test_every_window_at_every_border_of_its_blocks_and_runs(kind: Kind, block_size: int) -> None:
    """Decodes of rows whose window begins or ends where a block, a register of positions or a run does."""
    random = np.random.default_rng(0)
    kv = random_kv(random, 800, 1, 32)
    for window in WINDOWS:
        asked = replace(kind, window=window)
        for own in {*WINDOWS, window + RUN - 1, window + RUN, 799}:
            if own < len(kv):
                chunk = random_chunk(random, kv, 2, own, 1)
                out = attend([chunk], asked, block_size=block_size)[0]
                assert close(chunk, asked, out), (window, own)


@EVERY_ARITHMETIC
@EVERY_KV_DTYPE
@pytest.mark.parametrize("group", [2, 13])
def test_rows_of_a_chunk_see_the_windows_of_rows_alone(group: int, kind: Kind, instruction_set: str) -> None:
    random = np.random.default_rng(group)
    kv = random_kv(random, 640, 1, 32)
    whole = random_chunk(random, kv, group, 0, 640)
    for window in WINDOWS:
        asked = replace(kind, window=window)
        expected = attend([whole], asked, threads=2, instruction_set=instruction_set)[0]
        for own in (0, window - 1, window, RUN - 1, RUN, window + RUN - 1, window + RUN, 511, 512, 639):
            if own < 640:
                alone = Chunk(kv, own, whole.queries[own : own + 1])
                out = attend([alone], asked, instruction_set=instruction_set)[0][0]
                assert same_bytes(out, expected[own]), (window, own)


@EVERY_ARITHMETIC
@EVERY_KV_DTYPE
def test_a_window_as_long_as_the_context_is_none(kind: Kind, instruction_set: str) -> None:
    for start, rows in ((0, 1), (254, 1), (255, 1), (256, 1), (599, 1), (0, 70), (250, 30), (500, 100)):
        chunks = Shape(48, 3, 2, ((start, rows),), seed=start).chunks()
        expected = attend(chunks, kind, instruction_set=instruction_set)
        for window in (start + rows, start + rows + 1, 2 * (start + rows), 2**31 - 1):
            outs = attend(chunks, replace(kind, window=window), instruction_set=instruction_set)
            assert all_same_bytes(outs, expected), (start, rows, window)
        if start + rows > 1:
            outs = attend(chunks, replace(kind, window=start + rows - 1), instruction_set=instruction_set)
            assert not same_bytes(outs[0][-1], expected[0][-1])


@EVERY_PATH
@EVERY_KV_DTYPE
@pytest.mark.parametrize("block_size", [8, 16, 256])
def test_what_lies_before_the_windows_may_be_anybodys(
    block_size: int, kind: Kind, instruction_set: str
) -> None:
    """Blocks wholly before every window are another sequence's, whose keys and values are not numbers."""
    for window in (1, 8, 100, 300):
        asked = replace(kind, window=window)
        for start, rows in ((700, 1), (690, 20)):
            chunks = Shape(32, 3, 2, ((start, rows), (0, 30)), seed=window).chunks()
            both = [
                attend(chunks, asked, block_size=block_size, instruction_set=instruction_set, forget=forget)
                for forget in (False, True)
            ]
            assert all_same_bytes(*both), (window, start)
            assert all(np.isfinite(out).all() for out in both[1])


# --- Soft caps


def two_positions(scores: Floats, kind: Kind, instruction_set: str) -> Floats:
    """e^s / (1 + e^s) for the capped scores float32[n]: each beside a score of 0, whose value is 0."""
    queries = np.zeros((-(-scores.size // 384), 384, 16), dtype=np.float32)
    queries.reshape(-1, 16)[: scores.size, 0] = scores
    kv = KV(np.zeros((2, 8, 16), dtype=np.float16), np.zeros((2, 8, 16), dtype=np.float16))
    kv.keys[1, :, 0] = kv.values[1] = 1.0
    outs = attend([Chunk(kv, 1, rows[None]) for rows in queries], kind, instruction_set=instruction_set)
    return np.stack(outs)[:, 0, :, 0].reshape(-1)[: scores.size]


@EVERY_PATH
@EVERY_KV_DTYPE
@pytest.mark.parametrize("cap", [0.5, 1.0, 20.0, 30.0, 50.0, 1000.0])
def test_a_score_is_capped_within_its_roundings(cap: float, kind: Kind, instruction_set: str) -> None:
    """cap * tanh(s / cap), within 10 x 2^-24 of the cap; a logistic function hands on a quarter of that."""
    sizes = np.geomspace(0.01, 200.0, 400).astype(np.float32)
    scores = np.concatenate([sizes, -sizes, [np.float32(0.0)]])
    found = two_positions(scores, replace(kind, soft_cap=cap), instruction_set).astype(np.float64)
    # As q8 the one dimension is rotated to equal ones: their codes are 32,767, and 127, on scales of 24 bits.
    capped = cap * np.tanh(scores.astype(np.float64) / cap)
    error = 10.0 * EPSILON * cap + 4.0 * EPSILON * np.abs(scores)
    exact = np.exp(np.minimum(capped, 0.0)) / (1.0 + np.exp(-np.abs(capped)))
    # Lost is an exponential below e^-87, or a weight that is too small for a scale of its code.
    lost = 127.0 * 2.0**-111 if kind.kv_dtype == "q8" else 2.0**-125
    bound = exact * (2.0 * np.expm1(error) + 16.0 * EPSILON) + lost
    assert scores[np.abs(found - exact) > bound].tolist() == []


@EVERY_PATH
@EVERY_KV_DTYPE
@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_huge_scores_are_the_cap(cap: float, kind: Kind, instruction_set: str) -> None:
    """Equal bytes from 50 caps on, also where the score itself is beyond float32."""
    scores = np.array([50.0 * cap, 1e4, 1e10, 1e30, 3e38], dtype=np.float32)
    for sign in (np.float32(1.0), np.float32(-1.0)):
        found = two_positions(sign * scores, replace(kind, soft_cap=cap), instruction_set)
        exact = 1.0 / (1.0 + np.exp(-float(sign) * cap))
        assert np.allclose(found, exact, rtol=32.0 * EPSILON * max(cap, 1.0))
        assert same_bytes(found, np.resize(found[:1], found.shape))

    # Sums that overflow on the way are still far away, not lost.
    kv = KV(np.zeros((2, 1, 16), dtype=np.float16), np.zeros((2, 1, 16), dtype=np.float16))
    kv.keys[1] = 60_000.0
    kv.values[1] = 1.0
    queries = np.full((1, 1, 16), 3e38, dtype=np.float32)
    out = attend([Chunk(kv, 1, queries)], replace(kind, soft_cap=cap), instruction_set=instruction_set)[0]
    assert np.allclose(out, 1.0 / (1.0 + np.exp(-cap)), rtol=32.0 * EPSILON * max(cap, 1.0))


@EVERY_PATH
@EVERY_KV_DTYPE
def test_a_cap_keeps_the_order_of_scores_and_their_signs(kind: Kind, instruction_set: str) -> None:
    """tanh never falls; where computed weights fall at all, it is by roundings."""
    scores = np.linspace(-120.0, 120.0, 2001).astype(np.float32)
    found = two_positions(scores, replace(kind, soft_cap=30.0), instruction_set).astype(np.float64)
    assert (np.diff(found) >= -64.0 * 30.0 * EPSILON * found[1:]).all()
    assert found[0] < 1e-12
    assert found[1000] == 0.5
    assert found[-1] > 1.0 - 1e-6


@EVERY_PATH
@EVERY_KV_DTYPE
def test_a_capped_score_that_is_not_a_number_stays_none(kind: Kind, instruction_set: str) -> None:
    scores = np.array([1.0, np.nan, -200.0], dtype=np.float32)
    found = two_positions(scores, replace(kind, soft_cap=30.0), instruction_set)
    assert np.isnan(found).tolist() == [False, True, False]


@EVERY_KV_DTYPE
def test_a_cap_far_beyond_all_scores_changes_little(kind: Kind) -> None:
    """Scores of a few units under a cap of 1,000: s - s^3 / 3e6, and roundings of the cap."""
    chunks = Shape(64, 3, 2, ((299, 1), (0, 40)), seed=0).chunks()
    plain, capped = attend(chunks, kind), attend(chunks, replace(kind, soft_cap=1000.0))
    for one, other in zip(plain, capped, strict=True):
        assert not same_bytes(one, other)
        assert np.allclose(one, other, rtol=0.0, atol=5e-3)
