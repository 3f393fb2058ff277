"""The small operations of a step: what is stored, rotation, norm and gate, each on every path."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_kv import BLOCK_SIZES, SMALLEST_NORMAL, q8_codes, same_bytes, turned
from kernels.paths import EVERY_ARITHMETIC, EVERY_PATH, paths_like
from kernels.recorded import StoredKV, gated_and_normed, normed
from kernels.weights import Floats

# --- Storing keys and values as f16


def around_every_half() -> Floats:
    """All finite halves, what lies exactly between two of them, its neighbours, and anything at all."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    between = (halves[:-1] + halves[1:]) / 2.0
    ties = np.append(between, 65520.0).astype(np.float32)  # 65,520 lies between 65,504 and what is infinite
    anything = np.random.default_rng(0).integers(0, 2**32, 50_000, dtype=np.uint64).astype(np.uint32)
    positive = np.concatenate(
        [
            halves.astype(np.float32),
            ties,
            np.nextafter(ties, np.float32(0.0)),
            np.nextafter(ties, np.float32(np.inf)),
            np.array([np.inf, 3.4e38, 1e-45, 1.1e-38, 1.2e-38], dtype=np.float32),
            anything.view(np.float32),
        ]
    )
    both = np.concatenate([positive, -positive])
    return np.resize(both, (-(-both.size // 256), 256))


@EVERY_PATH
def test_keys_and_values_are_stored_as_the_nearest_half(instruction_set: str) -> None:
    """Ties to even, halves below the normal ones kept, infinity from 65,520 on, numbers never made up."""
    wanted = around_every_half()
    num_blocks = -(-len(wanted) // 16)
    stored = StoredKV(wanted, wanted[::-1], instruction_set=instruction_set, threads=2, num_blocks=num_blocks)
    stored.run(range(len(wanted)), 0, range(num_blocks))
    for found, floats in ((stored.keys(), wanted), (stored.values(), wanted[::-1])):
        bits = found.reshape(-1, 256)[: len(floats)]
        with np.errstate(over="ignore"):
            expected = floats.astype(np.float16)
        numbers = ~np.isnan(expected)
        assert np.array_equal(bits[numbers], expected.view(np.uint16)[numbers])
        assert (np.isnan(bits.view(np.float16)) == ~numbers).all()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_token_is_stored_to_its_own_slot_only(block_size: int) -> None:
    tokens = 3 * block_size
    random = np.random.default_rng(1)
    keys, values = random.standard_normal((2, tokens, 32)).astype(np.float32)
    stored = StoredKV(keys, values, block_size=block_size, num_blocks=5)
    stored.arena[:] = 0x34
    first, last = block_size - 3, 2 * block_size + 1

    stored.run(range(first, last), first, [4, 0, 2])

    written = {(table, slot) for table in (4, 0, 2) for slot in range(block_size)}
    expected = {
        ([4, 0, 2][position // block_size], position % block_size): position
        for position in range(first, last)
    }
    assert set(expected) < written
    for block in range(5):
        for slot in range(block_size):
            position = expected.get((block, slot))
            if position is None:
                assert (stored.keys()[block, slot] == 0x3434).all()
                assert (stored.values()[block, slot] == 0x3434).all()
            else:
                assert np.array_equal(
                    stored.keys()[block, slot].view(np.float16), keys[position].astype(np.float16)
                )
                assert np.array_equal(
                    stored.values()[block, slot].view(np.float16), values[position].astype(np.float16)
                )


# --- Storing keys and values as codes of 8 bits


def vectors_for_codes(head_dim: int) -> Floats:
    """What networks have, what lies at the borders of scales and codes, and what nobody wants."""
    random = np.random.default_rng(head_dim)
    usual = random.standard_normal((300, head_dim)) * 10.0 ** random.integers(-46, 38, (300, 1))
    outliers = random.standard_normal((50, head_dim))
    outliers[:, random.integers(0, head_dim, 50)] *= 1e4
    # Between two codes of a scale that is a power of two: to the even one, on both sides of 0.
    ties = np.resize(np.arange(-127.0, 127.5, 0.5), (-(-509 // (head_dim - 2)), head_dim))
    ties[:, 0], ties[:, -1] = 127.0, -127.0
    near = np.nextafter(ties.astype(np.float32), np.float32(np.inf))
    near[:, 0], near[:, -1] = 127.0, -126.5
    smallest = np.float64(SMALLEST_NORMAL)
    # Scales that are just normal, and just not; elements that are not, on a scale that is.
    borders = np.zeros((6, head_dim))
    borders[0, 3] = -127.0 * smallest
    borders[1, 3] = np.nextafter(np.float32(127.0 * smallest), np.float32(0.0))
    borders[2] = random.uniform(-0.99, 0.99, head_dim) * smallest
    borders[2, 5] = 127.0 * smallest
    borders[3] = random.uniform(-0.99, 0.99, head_dim) * smallest
    borders[4] = smallest
    borders[5, -1] = 2.0**-149
    limits = np.zeros((5, head_dim))
    limits[0], limits[1, 7] = np.finfo(np.float32).max, -np.finfo(np.float32).max
    limits[2], limits[3], limits[4] = -0.0, 1.0, -1.0
    limits[0, ::3] *= -1.0
    with np.errstate(over="ignore"):
        plain = np.concatenate([usual, outliers, ties, near, borders, limits]).astype(np.float32)
    # One that is not finite, at any place.
    spoiled = np.resize(plain, (3 * head_dim, head_dim))
    spoiled[np.arange(3 * head_dim), np.resize(np.arange(head_dim), 3 * head_dim)] = np.repeat(
        np.array([np.nan, np.inf, -np.inf], dtype=np.float32), head_dim
    )
    both = np.full((1, head_dim), np.inf, dtype=np.float32)
    both[0, ::2] = -np.inf
    bits = random.integers(0, 2**32, (200, head_dim), dtype=np.uint64).astype(np.uint32).view(np.float32)
    # Any bits, but numbers: of 256 one is not a number, most often.
    numbers = np.where(np.isfinite(bits), bits, np.float32(0.0))
    return np.concatenate([plain, spoiled, both, bits, numbers])


@EVERY_PATH
@pytest.mark.parametrize("head_dim", [16, 48, 64, 256])
def test_codes_and_scales_are_those_of_the_specification(head_dim: int, instruction_set: str) -> None:
    """Byte for byte: zeros, subnormals, ties, the largest; NaN and infinity spoil their vector alone."""
    wanted = vectors_for_codes(head_dim)
    num_blocks = -(-len(wanted) // 16)
    stored = StoredKV(
        wanted,
        wanted[::-1],
        instruction_set=instruction_set,
        threads=2,
        num_blocks=num_blocks,
        kv_dtype="q8",
    )
    stored.run(range(len(wanted)), 0, range(num_blocks))
    for (codes, scales), vectors in (
        (stored.key_codes(), turned(wanted)),
        (stored.value_codes(), wanted[::-1]),
    ):
        expected_codes, expected_scales = q8_codes(vectors)
        found = codes.reshape(-1, head_dim)[: len(vectors)]
        assert np.flatnonzero((found != expected_codes).any(axis=1)).tolist() == []
        steps = scales.reshape(-1)[: len(vectors)]
        assert (np.isnan(steps) == np.isnan(expected_scales)).all()
        numbers = ~np.isnan(steps)
        assert same_bytes(steps[numbers], expected_scales[numbers])
    assert 3 * head_dim < np.isnan(expected_scales).sum() < len(wanted) - 300
    assert (expected_scales == 0.0).sum() > 10


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_codes_of_a_token_are_stored_to_its_own_slot_only(block_size: int) -> None:
    """Neighbours in a pair are other positions' codes."""
    random = np.random.default_rng(1)
    tokens = 3 * block_size
    keys, values = random.standard_normal((2, tokens, 32)).astype(np.float32)
    for first, last in ((block_size - 3, 2 * block_size + 1), (0, 1), (1, 2), (block_size, 2 * block_size)):
        stored = StoredKV(keys, values, block_size=block_size, num_blocks=5, kv_dtype="q8")
        stored.arena[:] = 0x34
        stored.run(range(first, last), first, [4, 0, 2])
        for (codes, scales), vectors in ((stored.key_codes(), turned(keys)), (stored.value_codes(), values)):
            expected = np.full((5 * block_size, 32), 0x34, dtype=np.int8)
            expected_scales = np.full(5 * block_size, 0x34343434, dtype=np.uint32).view(np.float32)
            for position in range(first, last):
                slot = [4, 0, 2][position // block_size] * block_size + position % block_size
                expected[slot], expected_scales[slot] = q8_codes(vectors[position])
            assert np.array_equal(codes.reshape(-1, 32), expected)
            assert same_bytes(scales.reshape(-1), expected_scales)


# --- Rotation


def rotated(x: Floats, position: int, frequencies: npt.NDArray[np.float64], magnitude: float) -> Floats:
    """Su et al. 2021 on adjacent pairs, in float64, and then f16 as the arena holds it."""
    turned = x.astype(np.float64)
    width = 2 * len(frequencies)
    angles = position * frequencies
    # A complex number for each pair.
    pairs = turned[..., 0:width:2] + 1j * turned[..., 1:width:2]
    pairs = pairs * np.exp(1j * angles) * magnitude
    turned[..., 0:width:2], turned[..., 1:width:2] = pairs.real, pairs.imag
    return turned.astype(np.float32)


@EVERY_PATH
@pytest.mark.parametrize("position", [0, 1, 255, 256, 4_095, 65_535, 131_071, 1_000_003])
@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 32), (64, 16), (16, 1), (256, 128), (32, 0)])
def test_keys_are_rotated_by_their_position(
    instruction_set: str, position: int, head_dim: int, pairs: int
) -> None:
    """Angles of far positions need float64: in float32 those of the fastest pair are off by 0.06 at 1e6."""
    frequencies = 10_000.0 ** (-np.arange(pairs) / max(pairs, 1))
    keys = np.random.default_rng(position).standard_normal((1, head_dim)).astype(np.float32)
    stored = StoredKV(
        keys,
        keys,
        instruction_set=instruction_set,
        block_size=64,
        num_blocks=2,
        inverse_frequencies=frequencies,
        magnitude=1.25,
    )

    # All earlier positions share block 0.
    stored.run([0], position, [0] * (position // 64) + [1])

    found = stored.keys()[1, position % 64].view(np.float16).astype(np.float64)
    expected = rotated(keys[0], position, frequencies, 1.25).astype(np.float64)
    assert np.allclose(found, expected, rtol=2.0**-11 + 1e-5, atol=1e-6)
    unturned = stored.values()[1, position % 64].view(np.float16)
    assert np.array_equal(unturned, keys[0].astype(np.float16))


# --- Norm and gate


@EVERY_ARITHMETIC
@given(
    width=st.integers(1, 70),
    rows=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-12, 12),
)
@settings(max_examples=60)
def test_the_norm_is_close_to_float64_and_the_same_on_every_path(
    instruction_set: str, width: int, rows: int, seed: int, exponent: int
) -> None:
    """Also for widths that do not fill vectors of eight (Zhang and Sennrich 2019)."""
    random = np.random.default_rng(seed)
    x = (random.standard_normal((rows, width)) * 10.0**exponent).astype(np.float32)
    weight = random.uniform(-2.0, 2.0, width).astype(np.float32)
    exact = x.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + np.float32(1e-5)) * weight

    out = normed(x, weight, 1e-5, instruction_set=instruction_set)

    assert np.allclose(out, expected, rtol=2e-6, atol=1e-30)
    for name in paths_like(instruction_set):
        assert same_bytes(normed(x, weight, 1e-5, instruction_set=name, threads=2), out), name


def test_a_row_of_zeros_is_normed_to_zeros() -> None:
    assert (normed(np.zeros((3, 24), dtype=np.float32), np.ones(24, dtype=np.float32), 1e-6) == 0.0).all()


@EVERY_ARITHMETIC
@given(width=st.integers(1, 70), rows=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_the_gate_is_close_to_float64_and_the_same_on_every_path(
    instruction_set: str, width: int, rows: int, seed: int
) -> None:
    """Gates from -100, whose exponential float32 does not hold, to 100 (Shazeer 2020)."""
    random = np.random.default_rng(seed)
    gate = random.uniform(-100.0, 100.0, (rows, width)).astype(np.float32)
    gate[random.random((rows, width)) < 0.5] *= np.float32(0.05)
    up = random.standard_normal((rows, width)).astype(np.float32)
    exact = gate.astype(np.float64)
    gated = exact / (1.0 + np.exp(-exact)) * up
    expected = gated / np.sqrt((gated**2).mean(axis=1, keepdims=True) + np.float32(1e-5))

    out = gated_and_normed(gate, up, 1e-5, instruction_set=instruction_set)

    assert np.allclose(out, expected, rtol=3e-6, atol=1e-7)
    for name in paths_like(instruction_set):
        assert same_bytes(gated_and_normed(gate, up, 1e-5, instruction_set=name, threads=2), out), name


@EVERY_PATH
@pytest.mark.parametrize("width", [9, 15, 23])
def test_the_end_of_a_row_gets_the_bytes_of_its_beginning(width: int, instruction_set: str) -> None:
    """What does not fill a vector of eight is computed by the same polynomial."""
    random = np.random.default_rng(width)
    gate, up = random.standard_normal((2, 5, width)).astype(np.float32) * 4.0
    tail = width % 8
    gate[:, -tail:], up[:, -tail:] = gate[:, :tail], up[:, :tail]
    out = gated_and_normed(gate, up, 1e-5, instruction_set=instruction_set)
    assert same_bytes(out[:, -tail:].copy(), out[:, :tail].copy())


@EVERY_PATH
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_stays_so_alone(instruction_set: str, value: float) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((4, 40)).astype(np.float32)
    clean = gated_and_normed(x, x, 1e-5, instruction_set=instruction_set)
    spoiled = x.copy()
    spoiled[2, 37] = value
    out = gated_and_normed(spoiled, x, 1e-5, instruction_set=instruction_set)
    assert np.isnan(out[2]).any()
    assert same_bytes(out[[0, 1, 3]], clean[[0, 1, 3]])
