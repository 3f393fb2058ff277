"""Weights come out of the packed tiles as the reference dequantiser reads them from the file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.weights import (
    FLOAT_TYPES,
    QUANTIZED_TYPES,
    TYPES,
    TYPES_WITH_QUANTISER,
    Bytes,
    dequantize,
    packed,
    quantize,
    whole_blocks,
)
from octavo.kernels import PACK_STRIP_BYTES, Matrix, ThreadPool, WeightStore
from quantized_blocks import BLOCKS

SUBNORMAL_HALVES = [0x0001, 0x8001, 0x0200, 0x03FF, 0x83FF]
EXTREME_HALVES = [0x0000, 0x8000, 0x0400, 0x7BFF, 0xFBFF, 0x3C00]
NOT_FINITE_HALVES = [0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF]


def random_bytes(coding: str, rows: int, columns: int, seed: int) -> Bytes:
    """Any codes at all, with any finite scales: what a file may hold, quantisers aside."""
    random = np.random.default_rng(seed)
    if coding in FLOAT_TYPES:
        halves = random.integers(0, 2**16, (rows, columns, 2 if coding == "F32" else 1), dtype=np.uint16)
        exponent = {"F32": 0x7F80, "F16": 0x7C00, "BF16": 0x7F80}[coding]
        # Little-endian: the exponent is in the last half of an element.
        halves[..., -1][halves[..., -1] & exponent == exponent] ^= 0x0400
        return halves.view(np.uint8).reshape(-1)
    block = BLOCKS[coding]
    blocks = random.integers(0, 256, (rows, columns // block.values, block.bytes), dtype=np.uint8)
    scales = random.integers(0, 2**16, (*blocks.shape[:2], len(block.halves)), dtype=np.uint16)
    scales[scales & 0x7C00 == 0x7C00] ^= 0x0400
    special = random.choice(SUBNORMAL_HALVES + EXTREME_HALVES, size=scales.shape)
    scales = np.where(random.random(scales.shape) < 0.3, special, scales).astype(np.uint16)
    for which, at in enumerate(block.halves):
        blocks[..., at : at + 2] = scales[..., which : which + 1].view(np.uint8)
    return blocks.reshape(-1)


def same_values(matrix: Matrix, data: Bytes) -> bool:
    expected = dequantize(matrix.type, data, matrix.out_features)
    return bool(np.array_equal(matrix.dequantize().view(np.uint32), expected.view(np.uint32)))


@given(
    coding=st.sampled_from(TYPES),
    rows=st.integers(1, 40),
    groups=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    threads=st.integers(1, 3),
)
@settings(max_examples=150)
def test_any_bytes_are_read_as_the_reference_reads_them(
    coding: str, rows: int, groups: int, seed: int, threads: int
) -> None:
    """Also where the output columns do not fill the last tile of eight."""
    columns = whole_blocks(coding, 1) * groups
    data = random_bytes(coding, rows, columns, seed)
    assert same_values(packed(coding, data, rows, columns, threads), data)


@pytest.mark.parametrize("coding", FLOAT_TYPES)
@pytest.mark.parametrize("columns", [1, 3, 8, 31, 33, 101])
def test_float_weights_need_no_groups(coding: str, columns: int) -> None:
    data = random_bytes(coding, 13, columns, seed=columns)
    assert same_values(packed(coding, data, 13, columns), data)


@pytest.mark.parametrize("coding", TYPES_WITH_QUANTISER)
@pytest.mark.parametrize("spread", [1e-7, 1e-4, 1.0, 3e3])
def test_quantised_weights_are_read_back(coding: str, spread: float) -> None:
    values = (np.random.default_rng(5).standard_normal((27, 96)) * spread).astype(np.float32)
    values[3] = 0.0
    data = quantize(values, coding)
    assert same_values(packed(coding, data, 27, 96), data)


def test_every_half_is_read_as_numpy_reads_it() -> None:
    """All 65,536 of them; of those that are not numbers only that they are not."""
    halves = np.arange(2**16, dtype=np.uint16)
    read = packed("F16", halves.view(np.uint8), 256, 256).dequantize().reshape(-1)
    expected = halves.view(np.float16).astype(np.float32)
    numbers = ~np.isnan(expected)
    assert np.array_equal(read[numbers].view(np.uint32), expected[numbers].view(np.uint32))
    assert np.isnan(read[~numbers]).all()


@pytest.mark.parametrize("coding", QUANTIZED_TYPES)
@pytest.mark.parametrize("half", NOT_FINITE_HALVES)
@pytest.mark.parametrize("row", [0, 7, 8, 20])
def test_a_scale_that_is_not_finite_is_refused_with_its_row(coding: str, half: int, row: int) -> None:
    columns = 2 * BLOCKS[coding].values
    data = random_bytes(coding, 21, columns, seed=half)
    for at in BLOCKS[coding].halves:
        spoiled = data.reshape(21, 2, -1).copy()
        spoiled[row, 1, at : at + 2] = np.array([half], dtype=np.uint16).view(np.uint8)
        with pytest.raises(ValueError, match=f"row {row} has a scale that is not finite"):
            packed(coding, spoiled.reshape(-1), 21, columns, threads=2)


@pytest.mark.parametrize("coding", TYPES)
@pytest.mark.parametrize("more", [-1, 1, 1000])
def test_data_of_another_size_is_refused_with_both_numbers(coding: str, more: int) -> None:
    columns = whole_blocks(coding, 64)
    data = random_bytes(coding, 10, columns, seed=0)
    wrong = np.resize(data, data.size + more)
    with pytest.raises(
        ValueError, match=f"{coding} matrix of 10 x {columns} takes {data.size} bytes, not {wrong.size}"
    ):
        packed(coding, wrong, 10, columns)


@pytest.mark.parametrize("coding", QUANTIZED_TYPES)
@pytest.mark.parametrize("columns", [1, 31, 33, 48])
def test_columns_that_are_not_whole_groups_are_refused(coding: str, columns: int) -> None:
    with pytest.raises(ValueError, match=f"2 x {columns} is not made of groups of {BLOCKS[coding].values}"):
        packed(coding, np.zeros(100, dtype=np.uint8), 2, columns)


@pytest.mark.parametrize(
    ("rows", "columns"), [(0, 32), (32, 0), (-1, 32), (2**62, 4), (2**40, 2**40), (4, 2**62)]
)
@pytest.mark.parametrize("coding", TYPES)
def test_impossible_sizes_are_refused_with_their_numbers(coding: str, rows: int, columns: int) -> None:
    """Products of such numbers wrap around to sizes that look right."""
    with pytest.raises(ValueError, match=f"{rows} x {columns}"):
        packed(coding, np.zeros(0, dtype=np.uint8), rows, columns)


@pytest.mark.parametrize("coding", ["IQ2_XXS", "TQ1_0", "f32", ""])
def test_an_unknown_type_is_refused_with_those_there_are(coding: str) -> None:
    with pytest.raises(ValueError, match=f"{coding} are not supported.*{', '.join(TYPES)}"):
        packed(coding, np.zeros(18, dtype=np.uint8), 1, 32)


@pytest.mark.parametrize("coding", TYPES)
def test_the_store_counts_what_its_matrices_take(coding: str) -> None:
    store, pool = WeightStore(), ThreadPool(1)
    columns = whole_blocks(coding, 64)
    data = random_bytes(coding, 20, columns, seed=1)
    first = Matrix(store, coding, data, 20, columns, pool)
    second = Matrix(store, coding, data, 20, columns, pool)
    # Panels of 32 columns: 20 rows take the room of 32. Starts are aligned to 64 bytes.
    whole = data.size * 32 // 20
    assert first.nbytes == (
        whole * BLOCKS[coding].packed // BLOCKS[coding].bytes if coding in BLOCKS else whole
    )
    assert 2 * first.nbytes <= store.used_bytes <= 2 * first.nbytes + 128
    assert same_values(second, data)


@pytest.mark.parametrize(("coding", "rows", "columns"), [("F16", 6000, 2000), ("Q4_K", 3, 256)])
def test_a_source_is_read_in_strips_and_each_is_told_once_in_order(
    coding: str, rows: int, columns: int
) -> None:
    data = random_bytes(coding, rows, columns, seed=4)
    read: list[tuple[int, int]] = []
    matrix = Matrix(
        WeightStore(), coding, data, rows, columns, ThreadPool(2), have_read=lambda *strip: read.append(strip)
    )
    ends = [end for _, end in read]
    assert [begin for begin, _ in read] == [0, *ends[:-1]]
    assert ends[-1] == data.size
    assert all(end - begin <= PACK_STRIP_BYTES for begin, end in read)
    assert len(read) == -(-data.size // PACK_STRIP_BYTES)
    assert same_values(matrix, data)


def test_a_panel_larger_than_a_strip_is_a_strip() -> None:
    columns = PACK_STRIP_BYTES // 64
    data = np.zeros(40 * columns * 4, dtype=np.uint8)
    read: list[tuple[int, int]] = []
    Matrix(WeightStore(), "F32", data, 40, columns, ThreadPool(1), have_read=lambda *s: read.append(s))
    assert read == [(0, 128 * columns), (128 * columns, 160 * columns)]


def test_what_a_listener_raises_is_raised_by_the_matrix() -> None:
    def refuse(begin: int, end: int) -> None:
        raise LookupError(f"{begin} to {end}")

    data = random_bytes("Q8_0", 8, 64, seed=2)
    with pytest.raises(LookupError, match=f"0 to {data.size}"):
        Matrix(WeightStore(), "Q8_0", data, 8, 64, ThreadPool(2), have_read=refuse)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_packing_is_shared_by_the_threads() -> None:
    """By processor time, which a busy machine does not stretch: a worker did a fifth at least."""
    data = random_bytes("Q4_K", 8192, 2048, seed=0)
    pool, shares = ThreadPool(2), []
    for _ in range(5):  # where the worker has no core, the caller does all: rightly so
        own, all_threads = time.thread_time(), time.process_time()
        Matrix(WeightStore(), "Q4_K", data, 8192, 2048, pool)
        own, all_threads = time.thread_time() - own, time.process_time() - all_threads
        shares.append(1 - own / all_threads)
    assert max(shares) > 0.2, shares


def test_a_store_that_knows_what_will_come_holds_it_in_one_piece() -> None:
    """Chunks of a fixed size leave a rest each, a huge page of which may be resident and not used."""
    data = random_bytes("F32", 32, 32 << 10, seed=3)  # 4 MiB
    store, pool = WeightStore(80 << 20), ThreadPool(1)
    mappings = _mappings()
    matrices = [Matrix(store, "F32", data, 32, 32 << 10, pool) for _ in range(20)]
    assert _mappings() <= mappings + 1
    assert store.used_bytes == 80 << 20
    assert all(same_values(matrix, data) for matrix in (matrices[0], matrices[-1]))


def _mappings() -> int:
    """Memory mappings of at least 16 MiB in this process."""
    count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(at, 16) for at in line.split()[0].split("-"))
        count += end - begin >= 16 << 20
    return count


def test_a_matrix_keeps_its_store() -> None:
    data = random_bytes("Q8_0", 8, 64, seed=2)
    matrix = packed("Q8_0", data, 8, 64)  # nobody else holds its store
    for seed in range(20):
        packed("Q8_0", random_bytes("Q8_0", 8, 64, seed=seed + 3), 8, 64)
    assert same_values(matrix, data)
