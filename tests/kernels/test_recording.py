"""Programs are checked when they are recorded: what would read or write past a buffer is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kernels.paged_kv import same_bytes
from kernels.recorded import ints, matrix_of
from kernels.weights import GROUP, Floats, random_matrix
from octavo.kernels import Matrix, Program, ThreadPool

ONES = np.ones(16, dtype=np.float32)
SQUARE = matrix_of(np.eye(16, dtype=np.float32))
NARROW = matrix_of(np.eye(8, dtype=np.float32))


def to_eight(columns: int) -> Matrix:
    return matrix_of(np.zeros((8, columns), dtype=np.float32))


def program_with_buffers() -> Program:
    """Buffers 0 of 16, 1 of 48 and 2 of 16."""
    program = Program(ThreadPool(1), "", 4)
    assert [program.buffer(width) for width in (16, 48, 16)] == [0, 1, 2]
    return program


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda p: p.embed(NARROW, 0), "embeddings of 8 do not fit a buffer of 16"),
        (lambda p: p.rms_norm(0, ONES[:8], 1e-5, 2), "norm of 8 does not fit buffers of 16 and 16"),
        (lambda p: p.rms_norm(0, ONES, 1e-5, 1), "norm of 16 does not fit buffers of 16 and 48"),
        (lambda p: p.linear(0, [NARROW], 2, False), "matrix over 8 does not fit a buffer of 16"),
        (lambda p: p.linear(0, [SQUARE, SQUARE], 2, False), "matrices of 32 columns .* buffer of 16"),
        (lambda p: p.linear(0, [], 2, False), "matrices of 0 columns .* buffer of 16"),
        (lambda p: p.linear(0, [SQUARE], 0, False), "cannot replace the rows it reads"),
        (lambda p: p.linear(0, [SQUARE], 0, True), "cannot replace the rows it reads"),
        (lambda p: p.attention(1, 2, 1, 0, 16), "1 query heads do not divide among 0 KV heads"),
        (lambda p: p.attention(1, 2, 3, 2, 16), "3 query heads do not divide among 2 KV heads"),
        (lambda p: p.attention(1, 2, 1, 1, 8), "head size 8 "),
        (lambda p: p.attention(1, 2, 2, 1, 16), "buffers of 48 and 16 do not fit 2 "),
        (lambda p: p.attention(1, 2, 1, 1, 16, -1), "window of -1 positions"),
        (lambda p: p.attention(1, 2, 1, 1, 16, 0, -1.0), "capped at -1"),
        (lambda p: p.attention(1, 2, 1, 1, 16, 0, np.nan), "capped at nan"),
        (lambda p: p.attention(1, 2, 1, 1, 16, 0, np.inf), "capped at inf"),
        (lambda p: p.gated_linear(0, SQUARE, NARROW, 2), "matrix of 8 over 8 .* buffers of 16 and 16"),
        (lambda p: p.gated_linear(0, SQUARE, SQUARE, 1), "matrix of 16 over 16 .* buffers of 16 and 48"),
        (lambda p: p.gated_linear(0, SQUARE, SQUARE, 0), "cannot replace the rows it reads"),
        (lambda p: p.logits(0, ONES[:8], 1e-5, SQUARE), "norm of 8 .* buffer of 16"),
        (lambda p: p.logits(0, ONES, 1e-5, NARROW), "head over 8 .* buffer of 16"),
        (lambda p: p.rope(np.zeros(9), 1.0), "rope over 18 dimensions"),
    ],
)
def test_what_does_not_fit_a_buffer_is_refused_with_its_numbers(
    record: Callable[[Program], None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        record(program_with_buffers())


@pytest.mark.parametrize("buffer", [3, -1])
def test_a_buffer_that_is_not_there_is_refused(buffer: int) -> None:
    with pytest.raises(IndexError):
        program_with_buffers().embed(SQUARE, buffer)


def test_layers_of_unequal_heads_are_refused() -> None:
    program = program_with_buffers()
    program.attention(1, 2, 1, 1, 16)
    wide, out = program.buffer(96), program.buffer(32)
    with pytest.raises(ValueError, match="equal heads"):
        program.attention(wide, out, 1, 1, 32)


@pytest.mark.parametrize(
    ("extent", "block_size", "kv_dtype", "message"),
    [
        (4096, 0, "f16", "block size 0 "),
        (4096, 12, "f16", "block size 12 "),
        (65_536, 512, "f16", "block size 512 "),
        (1023, 16, "f16", "extents of 1023 bytes do not hold blocks of 1024"),
        (639, 16, "q8", "extents of 639 bytes do not hold blocks of 640"),
        (4096, 16, "q4", "f16 or q8, not as 'q4'"),
    ],
)
def test_blocks_that_the_kernels_do_not_have_are_refused(
    extent: int, block_size: int, kv_dtype: str, message: str
) -> None:
    program = program_with_buffers()
    program.attention(1, 2, 1, 1, 16)
    with pytest.raises(ValueError, match=message):
        program.bind(4096, extent, 1, block_size, kv_dtype)


@pytest.mark.parametrize("row_tile", [0, -1, 257])
def test_a_row_tile_has_1_to_256_tokens(row_tile: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 256 tokens, not {row_tile}"):
        Program(ThreadPool(1), "", row_tile)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 32), (3, 3, 48), (4, 1, 80), (2, 2, 80)]
)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_fused_operations_give_the_bytes_of_separate_ones(
    num_heads: int, num_kv_heads: int, head_dim: int, tokens: int
) -> None:
    """Rotation and storing follow their product head by head, codes follow attention: or each comes alone."""
    width, kv_width, block = num_heads * head_dim, num_kv_heads * head_dim, 16
    random = np.random.default_rng(tokens)
    # Rows of quantised weights are whole groups of 32.
    columns = -(-width // GROUP) * GROUP
    x = random.standard_normal((tokens, columns)).astype(np.float32)
    sizes = [width, kv_width, kv_width]
    qkv = [random_matrix("Q4_1", size, columns, seed=i) for i, size in enumerate(sizes)]
    output = random_matrix("Q4_1" if width % GROUP == 0 else "F32", 64, width)
    nothing = matrix_of(np.zeros((sum(sizes), columns), dtype=np.float32))

    def logits(fused: bool, threads: int) -> Floats:
        program = Program(ThreadPool(threads), "", 32)
        rows, made, attended, out = (program.buffer(n) for n in (columns, sum(sizes), width, 64))
        program.embed(matrix_of(x), rows)
        program.linear(rows, qkv, made, False)
        if not fused:
            program.linear(rows, [nothing], made, True)
        program.attention(made, attended, num_heads, num_kv_heads, head_dim)
        if not fused:
            program.gated_linear(rows, to_eight(columns), to_eight(columns), program.buffer(8))
        program.linear(attended, [output], out, False)
        program.logits(out, np.ones(64, dtype=np.float32), 1e-5, matrix_of(np.eye(64, dtype=np.float32)))
        program.rope(np.array([0.3, 0.01]), 1.0)
        blocks = -(-tokens // block)
        arena = np.zeros((blocks, 4 * kv_width * block), dtype=np.uint8)
        program.bind(arena.ctypes.data, arena.strides[0], blocks, block)
        table = ints(range(blocks))
        return program.logits_of_all_rows(
            ints(range(tokens)), ints([0]), ints([tokens]), ints([0, blocks]), table
        )

    separate = logits(fused=False, threads=1)
    for threads in (1, 2, 3):
        assert same_bytes(logits(fused=True, threads=threads), separate)


GATED = [("Q4_1", "Q4_1", "Q8_0"), ("Q5_0", "Q5_0", "Q4_0"), ("Q8_0", "Q4_0", "F16"), ("F32", "F32", "Q4_1")]


@pytest.mark.parametrize(("gate", "up", "down"), GATED)
@pytest.mark.parametrize("tokens", [1, 70, 130])
def test_a_gate_by_pieces_gives_the_bytes_of_one_by_rows(gate: str, up: str, down: str, tokens: int) -> None:
    """Pieces of several panels and a shorter last one, blocks of 64 rows, codes without rows between."""
    width, hidden = 96, 43 * GROUP
    random = np.random.default_rng(tokens)
    x = random.standard_normal((tokens, width)).astype(np.float32)
    gates, ups = random_matrix(gate, hidden, width, seed=1), random_matrix(up, hidden, width, seed=2)
    downs = random_matrix(down, width, hidden, seed=3)

    def logits(separate: bool, threads: int) -> Floats:
        program = Program(ThreadPool(threads), "", 256)
        rows, out, gated, other = (program.buffer(n) for n in (width, width, hidden, 8))
        program.embed(matrix_of(x), rows)
        program.gated_linear(rows, gates, ups, gated)
        if separate:  # the rows are then written, and quantised by an operation of their own
            program.linear(rows, [to_eight(width)], other, False)
        program.linear(gated, [downs], out, False)
        identity = matrix_of(np.eye(width, dtype=np.float32))
        program.logits(out, np.ones(width, dtype=np.float32), 1e-5, identity)
        arena = np.zeros(64, dtype=np.uint8)
        program.bind(arena.ctypes.data, 64, 1, 8)
        one = ints([1] * tokens)
        return program.logits_of_all_rows(
            ints(range(tokens)), one - 1, one, ints(range(tokens + 1)), ints([0] * tokens)
        )

    expected = logits(separate=True, threads=1)
    for threads in (1, 2, 3):
        assert same_bytes(logits(separate=False, threads=threads), expected), threads


def test_a_product_may_be_added_to_gated_rows() -> None:
    """They are then written, though their next reader takes codes."""
    width = GROUP
    x = np.random.default_rng(0).standard_normal((5, width)).astype(np.float32)
    square = random_matrix("Q4_1", width, width, seed=1)

    def logits(rows_first: bool) -> Floats:
        program = Program(ThreadPool(2), "", 256)
        rows, gated, out, norm = (program.buffer(width) for _ in range(4))
        program.embed(matrix_of(x), rows)
        program.gated_linear(rows, square, square, gated)
        if rows_first:
            program.rms_norm(gated, np.ones(width, dtype=np.float32), 1e-5, norm)
        program.linear(rows, [square], gated, True)
        program.linear(gated, [square], out, False)
        identity = matrix_of(np.eye(width, dtype=np.float32))
        program.logits(out, np.ones(width, dtype=np.float32), 1e-5, identity)
        arena = np.zeros(64, dtype=np.uint8)
        program.bind(arena.ctypes.data, 64, 1, 8)
        one = ints([1] * 5)
        return program.logits_of_all_rows(ints(range(5)), one - 1, one, ints(range(6)), ints([0] * 5))

    assert same_bytes(logits(rows_first=False), logits(rows_first=True))
