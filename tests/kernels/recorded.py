"""Small programs recorded by hand, to look at one operation at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.paged_kv import Kind
from kernels.weights import Floats, packed
from octavo.kernels import Matrix, Program, ThreadPool

Bits16 = npt.NDArray[np.uint16]
Codes = npt.NDArray[np.int8]


def matrix_of(values: Floats) -> Matrix:
    """float32[out, in], unquantised."""
    return packed("F32", np.ascontiguousarray(values).view(np.uint8).reshape(-1), *values.shape)


def ints(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


class StoredKV:
    """A program that stores keys and values given as float32, and the arena that it stores them to.

    One layer, one KV head. Token `i` embeds to a query of zeros, keys[i] and values[i].
    """

    def __init__(
        self,
        keys: Floats,
        values: Floats,
        *,
        instruction_set: str = "",
        threads: int = 1,
        block_size: int = 16,
        num_blocks: int = 1,
        kv_dtype: str = "f16",
        inverse_frequencies: npt.NDArray[np.float64] | None = None,
        magnitude: float = 1.0,
    ) -> None:
        self.head_dim = keys.shape[1]
        self.block_size = block_size
        vector = self.head_dim + 4 if kv_dtype == "q8" else 2 * self.head_dim
        self.arena = np.zeros((num_blocks, 2 * block_size * vector), dtype=np.uint8)
        program = Program(ThreadPool(threads), instruction_set, 256)
        qkv, out = program.buffer(3 * self.head_dim), program.buffer(self.head_dim)
        program.embed(matrix_of(np.concatenate([np.zeros_like(keys), keys, values], axis=1)), qkv)
        program.attention(qkv, out, 1, 1, self.head_dim)
        head = matrix_of(np.eye(self.head_dim, dtype=np.float32))
        program.logits(out, np.ones(self.head_dim, dtype=np.float32), 1e-5, head)
        frequencies = np.zeros(0) if inverse_frequencies is None else inverse_frequencies
        program.rope(frequencies, magnitude)
        program.bind(self.arena.ctypes.data, self.arena.strides[0], num_blocks, block_size, kv_dtype)
        self._program = program

    def run(self, tokens: Sequence[int], start: int, table: Sequence[int]) -> None:
        """One chunk from position `start`."""
        self._program.logits_of_all_rows(
            ints(tokens), ints([start]), ints([len(tokens)]), ints([0, len(table)]), ints(table)
        )

    def _half(self, second: bool) -> npt.NDArray[np.uint8]:
        """Of every block what holds keys, or values."""
        half = self.arena.shape[1] // 2
        return np.ascontiguousarray(self.arena[:, half:] if second else self.arena[:, :half])

    def keys(self) -> Bits16:
        """f16: the arena's keys as bits, uint16[num_blocks, block_size, head_dim]."""
        keys = self._half(False).view(np.uint16).reshape(-1, self.head_dim, self.block_size)
        return keys.transpose(0, 2, 1)

    def values(self) -> Bits16:
        """f16: the arena's values as bits, uint16[num_blocks, block_size, head_dim]."""
        return self._half(True).view(np.uint16).reshape(-1, self.block_size, self.head_dim)

    def key_codes(self) -> tuple[Codes, Floats]:
        """q8: codes int8[num_blocks, block_size, head_dim] and scales float32[num_blocks, block_size]."""
        codes, scales = self._codes_and_scales(False)
        pairs = codes.reshape(-1, self.head_dim // 2, self.block_size, 2)
        return pairs.transpose(0, 2, 1, 3).reshape(-1, self.block_size, self.head_dim), scales

    def value_codes(self) -> tuple[Codes, Floats]:
        """q8: the same of the values."""
        codes, scales = self._codes_and_scales(True)
        pairs = codes.reshape(-1, self.block_size // 2, self.head_dim, 2)
        return pairs.transpose(0, 1, 3, 2).reshape(-1, self.block_size, self.head_dim), scales

    def _codes_and_scales(self, second: bool) -> tuple[Codes, Floats]:
        half, size = self._half(second), self.head_dim * self.block_size
        return half[:, :size].copy().view(np.int8), half[:, size:].copy().view(np.float32)


class Attending:
    """A program of nothing but attention layers, all over the same queries, keys and values.

    Token `i` embeds to rows[i]: float32[(num_heads + 2 * num_kv_heads) * head_dim], its queries not scaled
    yet. What the layer `shown` gives is normed, with weights of 1: the program's logits. The arena's bytes
    are 0xFF before they are written.
    """

    def __init__(
        self,
        rows: Floats,
        heads: tuple[int, int, int],
        kinds: Sequence[Kind],
        *,
        shown: int = 0,
        threads: int = 1,
        instruction_set: str = "",
        block_size: int = 16,
        num_blocks: int = 1,
        row_tile: int = 256,
    ) -> None:
        """heads: num_heads, num_kv_heads, head_dim. kinds: of the layers, which all store alike."""
        num_heads, num_kv_heads, head_dim = heads
        kv_dtype = kinds[0].kv_dtype
        vector = head_dim + 4 if kv_dtype == "q8" else 2 * head_dim
        self.layer_bytes = 2 * num_kv_heads * block_size * vector
        self.arena = np.full((num_blocks, len(kinds) * self.layer_bytes + 64), 0xFF, dtype=np.uint8)
        width = num_heads * head_dim
        self.program = Program(ThreadPool(threads), instruction_set, row_tile)
        qkv, outs = self.program.buffer(rows.shape[1]), [self.program.buffer(width) for _ in kinds]
        for kind, out in zip(kinds, outs, strict=True):
            self.program.embed(matrix_of(rows), qkv)  # again: attention scales the queries in place
            self.program.attention(qkv, out, num_heads, num_kv_heads, head_dim, kind.window, kind.soft_cap)
        identity = matrix_of(np.eye(width, dtype=np.float32))
        self.program.logits(outs[shown], np.ones(width, dtype=np.float32), 1e-5, identity)
        self.program.bind(self.arena.ctypes.data, self.arena.strides[0], num_blocks, block_size, kv_dtype)

    def run(self, *chunks: tuple[Sequence[int], int, Sequence[int]]) -> list[Floats]:
        """One step of chunks (tokens, start, table). Returns: for each float32[tokens, width]."""
        lens = [len(tokens) for tokens, _, _ in chunks]
        out = self.program.logits_of_all_rows(
            ints([token for tokens, _, _ in chunks for token in tokens]),
            ints([start for _, start, _ in chunks]),
            ints(lens),
            ints(np.cumsum([0, *(len(table) for _, _, table in chunks)]).tolist()),
            ints([block for _, _, table in chunks for block in table]),
        )
        return np.split(out, np.cumsum(lens)[:-1])

    def counted(self) -> tuple[int, int]:
        """Positions of KV heads read, and attended to, up to now."""
        return self.program.kv_rows_read, self.program.kv_rows_attended


def normed(x: Floats, weight: Floats, eps: float, *, instruction_set: str = "", threads: int = 1) -> Floats:
    """The final norm of rows x: float32[rows, width], through a head that is the identity."""
    program = Program(ThreadPool(threads), instruction_set, 256)
    buffer = program.buffer(x.shape[1])
    program.embed(matrix_of(x), buffer)
    program.logits(buffer, weight, eps, matrix_of(np.eye(x.shape[1], dtype=np.float32)))
    return _run_all(program, len(x))


def gated_and_normed(
    gate: Floats, up: Floats, eps: float, *, instruction_set: str = "", threads: int = 1
) -> Floats:
    """The gated activation of rows float32[rows, width], then the final norm with weights of 1."""
    width = gate.shape[1]
    program = Program(ThreadPool(threads), instruction_set, 256)
    both, out = program.buffer(2 * width), program.buffer(width)
    program.embed(matrix_of(np.concatenate([gate, up], axis=1)), both)
    first, second = np.hsplit(np.eye(2 * width, dtype=np.float32), 2)
    program.gated_linear(both, matrix_of(first.T), matrix_of(second.T), out)
    ones = np.ones(width, dtype=np.float32)
    program.logits(out, ones, eps, matrix_of(np.eye(width, dtype=np.float32)))
    return _run_all(program, len(gate))


def _run_all(program: Program, tokens: int) -> Floats:
    """Every token once, as a sequence of its own; there are no layers, so one block is enough for all."""
    arena = np.zeros(64, dtype=np.uint8)
    program.bind(arena.ctypes.data, 64, 1, 8)
    return program.logits_of_all_rows(
        ints(range(tokens)),
        ints([0] * tokens),
        ints([1] * tokens),
        ints(range(tokens + 1)),
        ints([0] * tokens),
    )
