"""Keys and values in blocks as the kernels read them, and attention over them in float64.

The layout is the specification's: in a layer of a block, K is [num_kv_heads][head_dim][block_size] and V is
[num_kv_heads][block_size][head_dim], both f16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.kernels import ThreadPool
from octavo.kernels._native import paged_attention

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Doubles = npt.NDArray[np.float64]

NAN, INFINITY, LARGEST, ZERO = 0xFFFF, 0x7C00, 0x7BFF, 0x0000
"""What a byte that nobody wrote may hold, as halves."""

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
RUN = 256  # positions whose state is computed from nothing (KERNELS: the determinism rule)
EPSILON = 2.0**-24  # half an ulp of float32: the relative error of one operation


def same_bytes(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Equal bit for bit: -0.0 is not 0.0 here."""
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


@dataclass(frozen=True)
class KV:
    """What one sequence has written: float16[num_tokens, num_kv_heads, head_dim] each."""

    keys: Halves
    values: Halves

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Chunk:
    """Queries float32[num_rows, num_heads, head_dim] of consecutive positions of one sequence."""

    kv: KV
    start: int
    queries: Floats

    @property
    def end(self) -> int:
        return self.start + len(self.queries)


def random_kv(random: np.random.Generator, tokens: int, kv_heads: int, head_dim: int) -> KV:
    shape = (tokens, kv_heads, head_dim)
    return KV(
        random.standard_normal(shape).astype(np.float16), random.standard_normal(shape).astype(np.float16)
    )


def random_chunk(random: np.random.Generator, kv: KV, group: int, start: int, rows: int) -> Chunk:
    """Scaled queries, so that scores are spread by about 2."""
    _, kv_heads, head_dim = kv.keys.shape
    queries = random.standard_normal((rows, kv_heads * group, head_dim)) * (2.0 * head_dim**-0.5)
    return Chunk(kv, start, queries.astype(np.float32))


def attend(
    chunks: Sequence[Chunk],
    *,
    block_size: int = 16,
    order: int = 0,
    poison: int = NAN,
    threads: int = 1,
    instruction_set: str = "",
    pool: ThreadPool | None = None,
) -> list[Floats]:
    """The kernel's answer for each chunk, all in one call.

    Each sequence lies in blocks of its own, handed out in a random order (`order` is its seed) among blocks
    that nobody owns. Everything that no position has written is `poison`: the padding, the other layers, the
    tail of a last block, and the blocks of nobody.
    """
    arena = Arena(chunks[0].kv.keys.shape[1:], block_size, poison)
    # One sequence may have several chunks: they read the same blocks.
    sequences = list({id(chunk.kv): chunk.kv for chunk in chunks}.values())
    tables = dict(zip(map(id, sequences), arena.lay_out(sequences, order), strict=True))
    return arena.attend(
        chunks, [tables[id(chunk.kv)] for chunk in chunks], pool or ThreadPool(threads), instruction_set
    )


class Arena:
    """Blocks of three layers of which the middle one is used, with padding at the end."""

    def __init__(self, heads: tuple[int, ...], block_size: int, poison: int) -> None:
        self.kv_heads, self.head_dim = heads
        self.block_size = block_size
        self._poison = np.uint16(poison)
        self._head = self.kv_heads * self.head_dim * block_size  # halves of K, and of V, of a layer
        self._extent = 6 * self._head + 64
        self.halves = np.zeros((0, self._extent), dtype=np.uint16)

    def lay_out(self, sequences: Sequence[KV], order: int) -> list[npt.NDArray[np.int32]]:
        """Write the sequences to blocks in random order. Returns: a block table for each."""
        counts = [-(-len(kv) // self.block_size) for kv in sequences]
        num_blocks = sum(counts) + 3
        ids = np.random.default_rng(order).permutation(num_blocks).astype(np.int32)
        self.halves = np.full((num_blocks, self._extent), self._poison, dtype=np.uint16)
        tables = np.split(ids, np.cumsum(counts))[:-1]
        for kv, table in zip(sequences, tables, strict=True):
            self._write(kv, table)
        return tables

    def attend(
        self,
        chunks: Sequence[Chunk],
        tables: Sequence[npt.NDArray[np.int32]],
        pool: ThreadPool,
        instruction_set: str,
    ) -> list[Floats]:
        lens = [len(chunk.queries) for chunk in chunks]
        out = paged_attention(
            pool,
            self.halves.view(np.uint8).reshape(-1),
            2 * self._extent,
            2 * 2 * self._head,  # past the first layer
            self.block_size,
            self.kv_heads,
            np.concatenate([chunk.queries for chunk in chunks]),
            np.array([chunk.start for chunk in chunks], dtype=np.int32),
            np.array(lens, dtype=np.int32),
            np.cumsum([0, *map(len, tables)]).astype(np.int32),
            np.concatenate(tables),
            instruction_set,
        )
        return np.split(out, np.cumsum(lens)[:-1])

    def _write(self, kv: KV, table: npt.NDArray[np.int32]) -> None:
        padded = np.full(
            (2, len(table) * self.block_size, self.kv_heads, self.head_dim), self._poison, dtype=np.uint16
        )
        padded[0, : len(kv)] = kv.keys.view(np.uint16)
        padded[1, : len(kv)] = kv.values.view(np.uint16)
        blocks = padded.reshape(2, len(table), self.block_size, self.kv_heads, self.head_dim)
        keys = blocks[0].transpose(0, 2, 3, 1).reshape(len(table), -1)
        values = blocks[1].transpose(0, 2, 1, 3).reshape(len(table), -1)
        self.halves[table, 2 * self._head : 3 * self._head] = keys
        self.halves[table, 3 * self._head : 4 * self._head] = values


def float64_attention(chunk: Chunk) -> tuple[Doubles, Doubles]:
    """Causal softmax attention, and how far float32 may be from it.

    The bound is a priori (Higham 2002, section 3.1): a score of head_dim products is off by at most
    (head_dim + 1) * eps * sum |q k|, fused or not, a weight by twice that beside its exp, a run's sum by one
    eps a position.
    """
    keys, values = chunk.kv.keys.astype(np.float64), chunk.kv.values.astype(np.float64)
    rows, num_heads, head_dim = chunk.queries.shape
    group = num_heads // keys.shape[1]
    out, bound = np.empty(chunk.queries.shape), np.empty(chunk.queries.shape)
    for row in range(rows):
        seen = slice(0, chunk.start + row + 1)
        for head in range(num_heads):
            query = chunk.queries[row, head].astype(np.float64)
            k, v = keys[seen, head // group], values[seen, head // group]
            scores = k @ query
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[row, head] = weights @ v
            score_error = (head_dim + 1) * EPSILON * (np.abs(k) @ np.abs(query)).max()
            runs = -(-len(k) // RUN)
            relative = np.expm1(2.0 * score_error) + (RUN + runs + 16) * EPSILON
            bound[row, head] = 2.0 * relative * (weights @ np.abs(v))
    return out, bound
