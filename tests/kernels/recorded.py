"""Small programs recorded by hand, to look at one operation at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.weights import Floats, packed
from octavo.kernels import Matrix, Program, ThreadPool

Halves = npt.NDArray[np.uint16]


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
        inverse_frequencies: npt.NDArray[np.float64] | None = None,
        magnitude: float = 1.0,
    ) -> None:
        self.head_dim = keys.shape[1]
        self.block_size = block_size
        self.arena = np.zeros((num_blocks, 2 * self.head_dim * block_size), dtype=np.uint16)
        program = Program(ThreadPool(threads), instruction_set, 256)
        qkv, out = program.buffer(3 * self.head_dim), program.buffer(self.head_dim)
        program.embed(matrix_of(np.concatenate([np.zeros_like(keys), keys, values], axis=1)), qkv)
        program.attention(qkv, out, 1, 1, self.head_dim)
        head = matrix_of(np.eye(self.head_dim, dtype=np.float32))
        program.logits(out, np.ones(self.head_dim, dtype=np.float32), 1e-5, head)
        frequencies = np.zeros(0) if inverse_frequencies is None else inverse_frequencies
        program.rope(frequencies, magnitude)
        program.bind(self.arena.ctypes.data, self.arena.strides[0], num_blocks, block_size)
        self._program = program

    def run(self, tokens: Sequence[int], start: int, table: Sequence[int]) -> None:
        """One chunk from position `start`."""
        self._program.logits_of_all_rows(
            ints(tokens), ints([start]), ints([len(tokens)]), ints([0, len(table)]), ints(table)
        )

    def keys(self) -> Halves:
        """The arena's keys as bits: uint16[num_blocks, block_size, head_dim]."""
        half = self.head_dim * self.block_size
        return self.arena[:, :half].reshape(-1, self.head_dim, self.block_size).transpose(0, 2, 1)

    def values(self) -> Halves:
        """The arena's values as bits: uint16[num_blocks, block_size, head_dim]."""
        half = self.head_dim * self.block_size
        return self.arena[:, half:].reshape(-1, self.block_size, self.head_dim)


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
