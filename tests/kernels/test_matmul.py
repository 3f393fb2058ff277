"""Packed weights times rows of activations: within bounds of float64, and bytes that never change."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_kv import EPSILON, same_bytes
from kernels.paths import EVERY_ARITHMETIC, EVERY_PATH, FUSED, WITHOUT_FMA, paths_like
from kernels.weights import FLOAT_TYPES, GROUP, QUANTIZED_TYPES, TYPES, Floats, random_matrix, whole_blocks
from octavo.kernels import Matrix, ThreadPool
from octavo.kernels._native import matmul

Doubles = npt.NDArray[np.float64]

SMALLEST_NORMAL = 2.0**-126


def activations(rows: int, columns: int, seed: int = 0) -> Floats:
    """Rows as networks have them: some outliers, some much smaller rows."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, columns)) * np.exp(random.normal(0.0, 2.0, (rows, 1)))
    return (x * np.where(random.random((rows, columns)) < 0.01, 30.0, 1.0)).astype(np.float32)


def product(x: Floats, matrix: Matrix, *, threads: int = 1, instruction_set: str = "") -> Floats:
    return matmul(ThreadPool(threads), matrix, x, instruction_set)


def activation_steps(x: Floats, coding: str) -> Floats:
    """What a code of 1 is worth in each group of 32: float32[rows, groups, 1].

    Q8_0 meets 16-bit codes. All other weights meet 8-bit codes of all but the first largest value
    of a group, which has a 16-bit code.
    """
    sizes = np.sort(np.abs(x.reshape(len(x), -1, GROUP)), axis=2)
    steps = sizes[..., -1:] / np.float32(32767.0)
    if coding != "Q8_0":
        steps = np.maximum(steps, sizes[..., -2:-1] / np.float32(127.0))
    return steps.astype(np.float32)


def quantized_activations(x: Floats, coding: str) -> Doubles:
    """What the specification makes of rows: codes round to nearest even."""
    groups, steps = x.reshape(len(x), -1, GROUP), activation_steps(x, coding)
    usable = steps >= np.float32(SMALLEST_NORMAL)
    codes = np.rint(groups * (np.float32(1.0) / np.where(usable, steps, np.float32(1.0))))
    coded: Doubles = np.where(usable, codes.astype(np.float64) * steps, 0.0).reshape(x.shape)
    return coded


def error_bound(x: Doubles, weights: Floats, operations: int) -> Doubles:
    """Of a sum of products in float32 (Higham 2002, section 3.1); subnormal products count as zero."""
    size = np.abs(x) @ np.abs(weights.astype(np.float64)).T
    bound: Doubles = operations * EPSILON * size + x.shape[1] * SMALLEST_NORMAL
    return bound


SHAPES = [(8, 32), (1, 64), (9, 96), (63, 576), (200, 1536)]


@EVERY_ARITHMETIC
@pytest.mark.parametrize("coding", QUANTIZED_TYPES)
@pytest.mark.parametrize(("out", "columns"), SHAPES)
def test_quantised_weights_differ_from_float64_by_accumulation_only(
    coding: str, out: int, columns: int, instruction_set: str
) -> None:
    """The reference takes the dequantised weights and the activations as the specification codes them."""
    columns = whole_blocks(coding, columns)
    matrix = random_matrix(coding, out, columns, seed=out)
    x = activations(37, columns)
    coded, weights = quantized_activations(x, coding), matrix.dequantize()

    out_rows = product(x, matrix, instruction_set=instruction_set)
    error = np.abs(out_rows - coded @ weights.astype(np.float64).T)

    # Integer sums are exact. A group costs two roundings of its scales and one or two of its sum; a product
    # is rounded once more where it is not fused. Q4_1's products of scale and minimum may cancel, so they are
    # bounded apart.
    groups = columns // GROUP
    parts = np.abs(weights.astype(np.float64)) + (2.0 * np.abs(weights).max() if coding != "Q8_0" else 0.0)
    bound = (2 * groups + 6) * EPSILON * (np.abs(coded) @ parts.T) + columns * SMALLEST_NORMAL
    assert (error <= bound).all()


@EVERY_ARITHMETIC
@pytest.mark.parametrize("coding", QUANTIZED_TYPES)
@pytest.mark.parametrize(("out", "columns"), SHAPES)
def test_quantised_weights_differ_from_unrounded_activations_by_half_a_code(
    coding: str, out: int, columns: int, instruction_set: str
) -> None:
    """1 / 254 of a group's second largest value, with Q8_0 1 / 65,534 of the largest."""
    columns = whole_blocks(coding, columns)
    matrix = random_matrix(coding, out, columns, seed=out)
    x, weights = activations(37, columns), matrix.dequantize().astype(np.float64)

    error = np.abs(product(x, matrix, instruction_set=instruction_set) - x.astype(np.float64) @ weights.T)

    half_code = activation_steps(x, coding)[..., 0] / 2.0 * (1.0 + 1e-4)
    sums = np.abs(weights).reshape(out, -1, GROUP).sum(axis=2)
    rounding = error_bound(x.astype(np.float64), matrix.dequantize(), 2 * columns // GROUP + 6)
    assert (error <= half_code @ sums.T + 4.0 * rounding).all()


@EVERY_ARITHMETIC
@pytest.mark.parametrize("coding", QUANTIZED_TYPES)
def test_one_outlier_costs_its_neighbours_nothing(coding: str, instruction_set: str) -> None:
    """Networks have such values; with one scale for 32 they would take most of the others' precision."""
    columns = whole_blocks(coding, 64)
    matrix = random_matrix(coding, 24, columns)
    weights = matrix.dequantize().astype(np.float64)
    x = np.random.default_rng(0).standard_normal((16, columns)).astype(np.float32)
    half_codes = np.abs(x.reshape(16, -1, GROUP)).max(axis=2) / 254.0
    x[:, 5] = 100.0
    error = np.abs(product(x, matrix, instruction_set=instruction_set) - x.astype(np.float64) @ weights.T)
    sums = np.abs(weights).reshape(24, -1, GROUP).sum(axis=2)
    rounding = error_bound(x.astype(np.float64), matrix.dequantize(), 2 * columns // GROUP + 6)
    assert (error <= half_codes @ sums.T + 4.0 * rounding).all()


@EVERY_ARITHMETIC
@pytest.mark.parametrize("coding", FLOAT_TYPES)
@pytest.mark.parametrize(("out", "columns"), [*SHAPES, (1, 1), (7, 3), (20, 37), (17, 101)])
def test_float_weights_are_close_to_float64(
    coding: str, out: int, columns: int, instruction_set: str
) -> None:
    matrix = random_matrix(coding, out, columns, seed=out)
    x, weights = activations(37, columns), matrix.dequantize()
    out_rows = product(x, matrix, instruction_set=instruction_set)
    error = np.abs(out_rows - x.astype(np.float64) @ weights.astype(np.float64).T)
    assert (error <= error_bound(x.astype(np.float64), weights, columns + 1)).all()


@pytest.mark.parametrize("coding", FLOAT_TYPES)
@pytest.mark.parametrize("instruction_set", FUSED)
def test_float_weights_are_one_chain_of_fused_multiply_adds(coding: str, instruction_set: str) -> None:
    """Two products whose rounded sum is nothing, but whose exact difference is not."""
    matrix = random_matrix(coding, 9, 2, seed=3)
    w = matrix.dequantize().astype(np.float64)
    x = np.array([[1.0 + 2.0**-20, 1.0 - 2.0**-19]], dtype=np.float32)
    first = (x[0, 0] * w[:, 0]).astype(np.float32)
    expected = (first.astype(np.float64) + x[0, 1].astype(np.float64) * w[:, 1]).astype(np.float32)
    assert same_bytes(product(x, matrix, instruction_set=instruction_set)[0], expected)


@pytest.mark.parametrize("coding", FLOAT_TYPES)
@pytest.mark.parametrize("instruction_set", WITHOUT_FMA)
def test_float_weights_are_one_chain_of_rounded_products(coding: str, instruction_set: str) -> None:
    """The same where there is no fused multiply-add."""
    matrix = random_matrix(coding, 9, 2, seed=3)
    w = matrix.dequantize()
    x = np.array([[1.0 + 2.0**-20, 1.0 - 2.0**-19]], dtype=np.float32)
    expected = x[0, 0] * w[:, 0] + x[0, 1] * w[:, 1]
    assert same_bytes(product(x, matrix, instruction_set=instruction_set)[0], expected)


@pytest.mark.parametrize("coding", QUANTIZED_TYPES)
@EVERY_PATH
@pytest.mark.parametrize("at", range(GROUP))
def test_an_outlier_may_stand_anywhere_in_its_group(coding: str, instruction_set: str, at: int) -> None:
    columns = whole_blocks(coding, 2 * GROUP)
    matrix = random_matrix(coding, 21, columns)
    weights = matrix.dequantize().astype(np.float64)
    x = np.random.default_rng(at).uniform(-1.0, 1.0, (6, columns)).astype(np.float32)
    x[:, at] = [200.0, -200.0, 1.0001, 250.0, -1.5, 30.0]
    error = np.abs(product(x, matrix, instruction_set=instruction_set) - x.astype(np.float64) @ weights.T)
    assert (error <= 0.51 / 127.0 * np.abs(weights).sum(axis=1)).all()


@pytest.mark.parametrize("coding", QUANTIZED_TYPES)
@EVERY_PATH
def test_one_value_among_zeros_is_exact_to_15_bits(coding: str, instruction_set: str) -> None:
    columns = whole_blocks(coding, 2 * GROUP)
    matrix = random_matrix(coding, 21, columns)
    weights = matrix.dequantize().astype(np.float64)
    x = np.diag(np.random.default_rng(1).standard_normal(columns)).astype(np.float32)
    error = np.abs(product(x, matrix, instruction_set=instruction_set) - x.astype(np.float64) @ weights.T)
    assert (error <= np.abs(x).max(axis=1, keepdims=True) * np.abs(weights).max() * 2.0**-15).all()


@pytest.mark.parametrize("coding", QUANTIZED_TYPES)
@EVERY_PATH
def test_values_that_share_the_largest_magnitude_are_each_counted_once(
    coding: str, instruction_set: str
) -> None:
    columns = whole_blocks(coding, 2 * GROUP)
    matrix = random_matrix(coding, 21, columns)
    weights = matrix.dequantize().astype(np.float64)
    x = np.where(np.random.default_rng(2).random((50, columns)) < 0.5, -3.0, 3.0).astype(np.float32)
    error = np.abs(product(x, matrix, instruction_set=instruction_set) - x.astype(np.float64) @ weights.T)
    assert (error <= 3.0 * 1e-5 * np.abs(weights).sum(axis=1)).all()


# --- The same bytes


@EVERY_ARITHMETIC
@pytest.mark.parametrize("coding", TYPES)
def test_any_number_of_rows_gives_the_same_bytes(coding: str, instruction_set: str) -> None:
    columns = whole_blocks(coding, 96)
    matrix = random_matrix(coding, 43, columns)
    x = activations(300, columns)
    whole = product(x, matrix, threads=2, instruction_set=instruction_set)
    pool = ThreadPool(1)
    for rows in range(1, 301):
        assert same_bytes(matmul(pool, matrix, x[:rows], instruction_set), whole[:rows]), rows
    for row in range(300):
        assert same_bytes(matmul(pool, matrix, x[row : row + 1], instruction_set)[0], whole[row]), row


@EVERY_ARITHMETIC
@given(
    coding=st.sampled_from(TYPES),
    rows=st.integers(1, 40),
    out=st.integers(1, 150),
    groups=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-38, 30),
)
@settings(max_examples=80)
def test_threads_and_instructions_change_no_byte(
    instruction_set: str, coding: str, rows: int, out: int, groups: int, seed: int, exponent: int
) -> None:
    """Down to where products are flushed to zero and up to where sums are infinite."""
    columns = whole_blocks(coding, groups * GROUP)
    matrix = random_matrix(coding, out, columns, seed=seed)
    with np.errstate(over="ignore", under="ignore"):
        x = (activations(rows, columns, seed) * 10.0**exponent).astype(np.float32)
    expected = product(x, matrix, instruction_set=instruction_set)
    for threads in (2, 3):
        assert same_bytes(product(x, matrix, threads=threads, instruction_set=instruction_set), expected)
    for name in paths_like(instruction_set):
        assert same_bytes(product(x, matrix, instruction_set=name), expected), name


@pytest.mark.parametrize("coding", TYPES)
@pytest.mark.parametrize("columns", [576, 1536])
def test_sizes_of_a_real_layer_are_the_same_on_every_path(coding: str, columns: int) -> None:
    """Whether few rows read packed codes, or many rows have them unpacked, stretch by stretch."""
    columns = whole_blocks(coding, columns)
    matrix = random_matrix(coding, 101, columns, seed=columns)
    x = activations(21, columns)
    expected = product(x, matrix, instruction_set="portable")
    for name in FUSED:
        for rows in (1, 3, 4, 7, 8, 15, 16, 21):
            found = product(x[:rows], matrix, instruction_set=name)
            assert same_bytes(found, expected[:rows]), (name, rows)


@EVERY_PATH
@pytest.mark.parametrize("coding", QUANTIZED_TYPES)
@pytest.mark.parametrize("group", [0, 1])
def test_integer_sums_are_the_same_on_every_path(coding: str, instruction_set: str, group: int) -> None:
    """One group that is not zero leaves one product, which every path rounds once.

    The row's codes add up to nothing in either half of the group, so that minima have no second one.
    """
    columns = whole_blocks(coding, 2 * GROUP)
    matrix = random_matrix(coding, 75, columns)
    x = np.zeros((9, columns), dtype=np.float32)
    quarter = activations(9, GROUP // 4)
    x[:, group * GROUP : (group + 1) * GROUP] = np.concatenate([quarter, -quarter, -quarter, quarter], axis=1)
    expected = product(x, matrix, instruction_set="portable")
    assert np.count_nonzero(expected) > expected.size / 2
    assert same_bytes(product(x, matrix, instruction_set=instruction_set), expected)


@pytest.mark.parametrize("coding", TYPES)
@pytest.mark.parametrize("columns", [32, 576, 1536])
@pytest.mark.parametrize("instruction_set", WITHOUT_FMA)
def test_a_path_without_fma_differs_by_its_own_roundings(
    coding: str, columns: int, instruction_set: str
) -> None:
    """Both paths add the same n products in the same order.

    Fused, the sum is off by at most n u of what was added in magnitude, and one u more where products are
    rounded first (Higham 2002, section 3.1; u = 2^-24): together (2n + 1) u.
    """
    columns = whole_blocks(coding, columns)
    matrix = random_matrix(coding, 192, columns, seed=columns)
    x, weights = activations(9, columns), np.abs(matrix.dequantize()).astype(np.float64)
    if coding in FLOAT_TYPES:
        products, size = columns, np.abs(x.astype(np.float64)) @ weights.T
    else:
        # A group is one product, and one of its minimum, which may have the other sign.
        products = 2 * columns // GROUP
        parts = weights + (2.0 * weights.max() if coding != "Q8_0" else 0.0)
        size = np.abs(quantized_activations(x, coding)) @ parts.T

    ours, fused = (product(x, matrix, instruction_set=name) for name in (instruction_set, FUSED[-1]))

    difference = np.abs(ours.astype(np.float64) - fused)
    assert (difference <= (2 * products + 1) * EPSILON * size + columns * SMALLEST_NORMAL).all()


# --- Rows that are not ordinary


@pytest.mark.parametrize("coding", TYPES)
@EVERY_PATH
def test_rows_of_zeros_give_zeros(coding: str, instruction_set: str) -> None:
    columns = whole_blocks(coding, 64)
    matrix = random_matrix(coding, 21, columns)
    x = np.zeros((5, columns), dtype=np.float32)
    x[3] = -0.0
    assert (product(x, matrix, instruction_set=instruction_set) == 0.0).all()


@pytest.mark.parametrize("coding", QUANTIZED_TYPES)
@EVERY_PATH
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1.1e-38, 1.4e-36])
def test_rows_too_small_for_a_scale_give_zeros(coding: str, instruction_set: str, size: float) -> None:
    """The largest value subnormal, or so small that the step of a code would be."""
    columns = whole_blocks(coding, 64)
    matrix = random_matrix(coding, 21, columns)
    x = np.full((5, columns), size, dtype=np.float32)
    assert (product(x, matrix, instruction_set=instruction_set) == 0.0).all()


@EVERY_ARITHMETIC
@pytest.mark.parametrize("coding", QUANTIZED_TYPES)
@pytest.mark.parametrize("size", [1e-28, 1e-20, 1e20, 1e34])
def test_extreme_rows_stay_within_half_a_code(coding: str, size: float, instruction_set: str) -> None:
    columns = whole_blocks(coding, 64)
    matrix = random_matrix(coding, 21, columns, spread=0.01)
    x = np.random.default_rng(0).uniform(-size, size, (5, columns)).astype(np.float32)
    weights = matrix.dequantize().astype(np.float64)
    error = np.abs(product(x, matrix, instruction_set=instruction_set) - x.astype(np.float64) @ weights.T)
    assert (error <= size / 250.0 * np.abs(weights).sum(axis=1) + columns * SMALLEST_NORMAL).all()


@pytest.mark.parametrize("coding", TYPES)
@EVERY_PATH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [1, 4, 7, 9])
def test_a_row_that_is_not_finite_fails_alone(
    coding: str, instruction_set: str, value: float, rows: int
) -> None:
    columns = whole_blocks(coding, 64)
    matrix = random_matrix(coding, 21, columns)
    x = activations(rows, columns)
    clean = product(x, matrix, instruction_set=instruction_set)
    for bad in range(rows):
        spoiled = x.copy()
        spoiled[bad, 40] = value
        out = product(spoiled, matrix, instruction_set=instruction_set)
        # Float weights of zero times infinity aside, none of the row's outputs is a number.
        assert not np.isfinite(out[bad]).any()
        keep = np.arange(rows) != bad
        assert same_bytes(out[keep], clean[keep])


def test_rows_that_do_not_fit_are_refused_with_both_numbers() -> None:
    matrix = random_matrix("Q8_0", 8, 64)
    with pytest.raises(ValueError, match=r"rows of 32 .* over 64"):
        product(np.zeros((2, 32), dtype=np.float32), matrix)


def test_an_instruction_set_that_is_not_there_is_refused_with_those_that_are() -> None:
    matrix = random_matrix("Q8_0", 8, 64)
    with pytest.raises(ValueError, match=r"'avx1024' cannot run.*portable"):
        product(np.zeros((2, 64), dtype=np.float32), matrix, instruction_set="avx1024")


def test_no_rows_are_no_work() -> None:
    assert product(np.zeros((0, 64), dtype=np.float32), random_matrix("Q4_0", 8, 64)).shape == (0, 8)
