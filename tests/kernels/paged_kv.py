"""Keys and values in blocks as the kernels read them, and attention over them in float64.

The layouts are the specification's (docs/kernels.md). In a layer of a block, for every KV head:

    f16   K f16 [head_dim][block_size], of all heads, then V f16 [block_size][head_dim]
    q8    K int8 [head_dim / 2][block_size][2] and float [block_size] scales, of all heads,
          then V int8 [block_size / 2][head_dim][2] and float [block_size] scales
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.kernels import ThreadPool
from octavo.kernels._native import paged_attention

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Doubles = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int8]
Table = npt.NDArray[np.int32]

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
RUN = 256  # positions whose state is computed from nothing (KERNELS: the determinism rule)
EPSILON = 2.0**-24  # half an ulp of float32: the relative error of one operation
SMALLEST_NORMAL = np.float32(2.0**-126)


def same_bytes(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Equal bit for bit: -0.0 is not 0.0 here."""
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


@dataclass(frozen=True)
class Poison:
    """What memory that nobody wrote may hold, as bits: of a half, of a code, of a scale of codes."""

    half: int
    code: int
    scale: int


NAN = Poison(0xFFFF, 0xFF, 0xFFFFFFFF)
INFINITY = Poison(0x7C00, 0x7F, 0x7F800000)
MINUS_INFINITY = Poison(0xFC00, 0x80, 0xFF800000)  # -128 is no code of a stored number
LARGEST = Poison(0x7BFF, 0x81, 0x7F7FFFFF)
ZERO = Poison(0x0000, 0x00, 0x00000000)


@dataclass(frozen=True)
class Kind:
    """What attention a layer has.

    kv_dtype: how keys and values are stored. window: positions a row sees, its own included; 0: all before
    it. soft_cap: scores become soft_cap * tanh(score / soft_cap); 0: they do not (Gemma 2, 2024).
    """

    kv_dtype: str = "f16"
    window: int = 0
    soft_cap: float = 0.0

    def first_seen(self, position: int) -> int:
        return max(0, position + 1 - self.window) if self.window else 0


PLAIN = Kind()
Q8 = Kind("q8")


@dataclass(frozen=True)
class KV:
    """What one sequence has written: float16[num_tokens, num_kv_heads, head_dim] each, stored so or as q8."""

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


def joined(*parts: KV) -> KV:
    """One sequence of these, one after another."""
    return KV(np.concatenate([part.keys for part in parts]), np.concatenate([part.values for part in parts]))


def turned(vectors: Floats) -> Floats:
    """Keys float32[..., head_dim] as q8 stores them: blocks of n, the largest power of two that divides
    head_dim, times the Hadamard matrix of n rows (Sylvester 1867), in rounds of sums and differences at
    distances 1, 2, 4, ..., in float32 where denormals count as zero.
    """

    def normal(x: Floats) -> Floats:
        return np.where(np.abs(x) < SMALLEST_NORMAL, np.float32(0.0), x)

    x = normal(vectors)
    half = 1
    with np.errstate(over="ignore", invalid="ignore"):
        while half < hadamard_size(vectors.shape[-1]):
            pairs = x.reshape(*x.shape[:-1], vectors.shape[-1] // (2 * half), 2, half)
            low, high = pairs[..., 0, :], pairs[..., 1, :]
            x = normal(np.stack([low + high, low - high], axis=-2).reshape(x.shape))
            half *= 2
    return x


def hadamard_size(head_dim: int) -> int:
    """Rows of the matrix that keys are rotated with."""
    return head_dim & -head_dim


def hadamard(head_dim: int) -> Doubles:
    """float64[head_dim, head_dim], the matrix of `turned`: it is its own inverse, times its size."""
    n = hadamard_size(head_dim)
    bits = np.arange(n)
    signs = np.array([[(-1.0) ** bin(i & j).count("1") for j in bits] for i in bits])
    return np.kron(np.eye(head_dim // n), signs)


def q8_codes(vectors: Floats) -> tuple[Codes, Floats]:
    """Codes and scales of vectors float32[..., head_dim]: int8 of that shape, and float32[...].

    scale = max |x| / 127, code = the nearest integer, ties to even, of x * (1 / scale), all in float32 where
    denormals count as zero. A scale below the normal numbers is 0, that of a vector which is not finite is
    NaN, and both have codes of 0.
    """
    x = np.where(np.abs(vectors) < SMALLEST_NORMAL, np.float32(0.0), vectors)
    finite = np.asarray(np.isfinite(x).all(axis=-1))
    x = np.where(finite[..., None], x, np.float32(0.0))
    scales = np.abs(x).max(axis=-1) / np.float32(127.0)
    usable = scales >= SMALLEST_NORMAL
    inverse = np.float32(1.0) / np.where(usable, scales, np.float32(1.0))
    codes = np.rint(x * inverse[..., None]) * usable[..., None]
    scales = np.where(usable, scales, np.float32(0.0))
    return codes.astype(np.int8), np.where(finite, scales, np.float32(np.nan)).astype(np.float32)


def attend(
    chunks: Sequence[Chunk],
    kind: Kind = PLAIN,
    *,
    block_size: int = 16,
    order: int = 0,
    poison: Poison = NAN,
    threads: int = 1,
    instruction_set: str = "",
    pool: ThreadPool | None = None,
    forget: bool = True,
) -> list[Floats]:
    """The kernel's answer for each chunk, all in one call.

    Each sequence lies in blocks of its own, handed out in a random order (`order` is its seed) among blocks
    that nobody owns. Everything that no position has written is `poison`: the padding, the other layers, the
    tail of a last block, and the blocks of nobody. With `forget`, what lies before the windows of all chunks
    is nobody's too: whole blocks there are those of nobody, the rest of a block was never written.
    """
    arena = Arena(chunks[0].kv.keys.shape[1:], block_size, poison, kind.kv_dtype)
    # One sequence may have several chunks: they read the same blocks.
    sequences = {id(chunk.kv): chunk.kv for chunk in chunks}
    first_seen = {
        key: min(kind.first_seen(chunk.start) for chunk in chunks if id(chunk.kv) == key) if forget else 0
        for key in sequences
    }
    laid_out = arena.lay_out(list(sequences.values()), order, list(first_seen.values()))
    tables = dict(zip(sequences, laid_out, strict=True))
    return arena.attend(
        chunks,
        [tables[id(chunk.kv)] for chunk in chunks],
        pool or ThreadPool(threads),
        kind,
        instruction_set,
    )


class Arena:
    """Blocks of three layers of which the middle one is used, with padding at the end."""

    def __init__(
        self, heads: tuple[int, ...], block_size: int, poison: Poison = NAN, kv_dtype: str = "f16"
    ) -> None:
        self.kv_heads, self.head_dim = heads
        self.block_size = block_size
        self._poison = poison
        self._kv_dtype = kv_dtype
        vector = self.head_dim + 4 if kv_dtype == "q8" else 2 * self.head_dim
        self.layer_bytes = 2 * self.kv_heads * block_size * vector
        self._extent = 3 * self.layer_bytes + 64
        self.bytes = np.zeros((0, self._extent), dtype=np.uint8)

    def lay_out(
        self, sequences: Sequence[KV], order: int = 0, first_seen: Sequence[int] | None = None
    ) -> list[Table]:
        """Write the sequences to blocks in random order, each from its `first_seen` on.

        Returns: a block table for each. Entries of whole blocks before `first_seen` are blocks of nobody.
        """
        counts = [-(-len(kv) // self.block_size) for kv in sequences]
        num_blocks = sum(counts) + 3
        ids = np.random.default_rng(order).permutation(num_blocks).astype(np.int32)
        *tables, nobodys = np.split(ids, np.cumsum(counts))
        nothing = np.zeros((1, 1, self.kv_heads, self.head_dim), dtype=np.float16)
        unwritten = self._layers(KV(nothing[0], nothing[0]), 1, 1)[0]
        padding = np.full(64, self._poison.code, dtype=np.uint8)
        self.bytes = np.tile(np.concatenate([unwritten, unwritten, unwritten, padding]), (num_blocks, 1))
        for i, (kv, table) in enumerate(zip(sequences, tables, strict=True)):
            if not len(kv):
                continue
            first = first_seen[i] if first_seen is not None else 0
            self.bytes[table, self.layer_bytes : 2 * self.layer_bytes] = self._layers(kv, len(table), first)
            before = first // self.block_size
            table[:before] = np.resize(nobodys, before)
        return tables

    def attend(
        self,
        chunks: Sequence[Chunk],
        tables: Sequence[Table],
        pool: ThreadPool,
        kind: Kind = PLAIN,
        instruction_set: str = "",
        *,
        share_prefixes: bool = True,
    ) -> list[Floats]:
        lens = [len(chunk.queries) for chunk in chunks]
        out = paged_attention(
            pool,
            self.bytes.reshape(-1),
            self._extent,
            self.layer_bytes,  # past the first layer
            self.block_size,
            self.kv_heads,
            np.concatenate([chunk.queries for chunk in chunks]),
            np.array([chunk.start for chunk in chunks], dtype=np.int32),
            np.array(lens, dtype=np.int32),
            np.cumsum([0, *map(len, tables)]).astype(np.int32),
            np.concatenate(tables),
            instruction_set,
            kind.kv_dtype,
            kind.window,
            kind.soft_cap,
            share_prefixes,
        )
        return np.split(out, np.cumsum(lens)[:-1])

    def _layers(self, kv: KV, num_blocks: int, first: int) -> npt.NDArray[np.uint8]:
        """Positions from `first` on: uint8[num_blocks, layer_bytes]."""
        layers = self._q8_layers if self._kv_dtype == "q8" else self._f16_layers
        return layers(kv, num_blocks, first)

    def _f16_layers(self, kv: KV, num_blocks: int, first: int) -> npt.NDArray[np.uint8]:
        shape = (2, num_blocks * self.block_size, self.kv_heads, self.head_dim)
        padded = np.full(shape, self._poison.half, dtype=np.uint16)
        padded[0, first : len(kv)] = kv.keys[first:].view(np.uint16)
        padded[1, first : len(kv)] = kv.values[first:].view(np.uint16)
        blocks = padded.reshape(2, num_blocks, self.block_size, self.kv_heads, self.head_dim)
        keys = blocks[0].transpose(0, 2, 3, 1).reshape(num_blocks, -1)
        values = blocks[1].transpose(0, 2, 1, 3).reshape(num_blocks, -1)
        return np.ascontiguousarray(np.concatenate([keys, values], axis=1)).view(np.uint8)

    def _q8_layers(self, kv: KV, num_blocks: int, first: int) -> npt.NDArray[np.uint8]:
        parts = []
        for vectors, is_keys in ((kv.keys, True), (kv.values, False)):
            shape = (num_blocks * self.block_size, self.kv_heads, self.head_dim)
            codes = np.full(shape, self._poison.code, dtype=np.uint8)
            scales = np.full(shape[:2], self._poison.scale, dtype=np.uint32)
            as_floats = vectors[first:].astype(np.float32)
            written, steps = q8_codes(turned(as_floats) if is_keys else as_floats)
            codes[first : len(kv)] = written.view(np.uint8)
            scales[first : len(kv)] = steps.view(np.uint32)
            if is_keys:  # [block][slot][head][pair][2] -> [block][head][pair][slot][2]
                pairs = codes.reshape(num_blocks, self.block_size, self.kv_heads, -1, 2)
                pairs = pairs.transpose(0, 2, 3, 1, 4)
            else:  # [block][pair][2][head][dim] -> [block][head][pair][dim][2]
                pairs = codes.reshape(num_blocks, -1, 2, self.kv_heads, self.head_dim)
                pairs = pairs.transpose(0, 3, 1, 4, 2)
            by_head = np.ascontiguousarray(
                scales.reshape(num_blocks, self.block_size, self.kv_heads).transpose(0, 2, 1)
            )
            both = [pairs.reshape(num_blocks, self.kv_heads, -1), by_head.view(np.uint8)]
            parts.append(np.concatenate(both, axis=2).reshape(num_blocks, -1))
        return np.concatenate(parts, axis=1)


@dataclass(frozen=True)
class _Stored:
    """Keys, or values, of one KV head as they were stored: numbers = codes * steps (f16: all in `codes`)."""

    codes: Doubles  # [tokens, head_dim]
    steps: Doubles  # [tokens]

    @property
    def numbers(self) -> Doubles:
        return self.codes * self.steps[:, None]


def _stored(vectors: Halves, kv_dtype: str) -> _Stored:  # values, which are not rotated
    if kv_dtype == "q8":
        codes, steps = q8_codes(vectors.astype(np.float32))
        return _Stored(codes.astype(np.float64), steps.astype(np.float64))
    return _Stored(vectors.astype(np.float64), np.ones(len(vectors)))


def float64_attention(chunk: Chunk, kind: Kind = PLAIN) -> tuple[Doubles, Doubles]:
    """Causal softmax attention over what is stored, and how far the kernels may be from it.

    The bound is a priori (Higham 2002, section 3.1), with e = 2^-24.

    - A score of head_dim float products is off by (head_dim + 1) e sum |q k|, fused or not.
    - q8: q becomes int16 codes on a step of max |q| / 32,767. A code is off by half a step and by the
      roundings of 1 / step and of the product, 3 e x 32,767 < 0.01 of a step. The sum of codes is exact; its
      conversion and two scales round once each. So a score is off by 0.51 step sum |k| + 4 e sum |q k|,
      where q and k are rotated. Rotating q in log2 n rounds of additions, each partial sum at most sum |q|,
      and dividing by n, puts log2 n e sum |q| / n more to each of its elements.
    - soft cap: tanh y = 1 - 2 / (1 + e^2y), off by 10 e in absolute terms: 2y is rounded twice, and
      x / (2 cosh^2 (x / 2)) < 0.45; the exp is off by two ulp, 4 e, of which at most half arrives; the sum,
      the quotient (at most 2) and the difference round once each; and so does the product with the cap.
    - A weight is off by twice its score's error beside its exp, a run's sum by one e a position, a fold by
      a few.
    - q8: a run's weights times their values' scales become int16 codes on a step of their largest / 32,767.
      Each is off by 0.51 step, so a dimension of the run's output by 0.51 step sum |code of v|. A step below
      the normal numbers gives zeros: 32,767 x 2^-126 sum |code of v| are lost at most.
    """
    rows, num_heads, head_dim = chunk.queries.shape
    kv_heads = chunk.kv.keys.shape[1]
    group = num_heads // kv_heads
    out, bound = np.empty(chunk.queries.shape), np.empty(chunk.queries.shape)
    positions = np.arange(chunk.end)
    own = np.repeat(np.arange(chunk.start, chunk.end), group)[:, None]
    seen = positions <= own
    if kind.window:
        seen &= positions > own - kind.window
    for kv_head in range(kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        q = chunk.queries[:, heads].astype(np.float64).reshape(rows * group, head_dim)
        keys = chunk.kv.keys[: chunk.end, kv_head].astype(np.float64)
        rotation_error = np.zeros((len(q), 1))
        if kind.kv_dtype == "q8":
            size = hadamard_size(head_dim)
            rotation_error = math.log2(size) * EPSILON * np.abs(q).sum(axis=1, keepdims=True) / size
            codes, steps = q8_codes(turned(chunk.kv.keys[: chunk.end, kv_head].astype(np.float32)))
            keys = codes.astype(np.float64) * steps[:, None].astype(np.float64)
            q = q @ hadamard(head_dim) / size
        values = _stored(chunk.kv.values[: chunk.end, kv_head], kind.kv_dtype)
        scores, magnitudes = q @ keys.T, np.abs(q) @ np.abs(keys).T
        if kind.kv_dtype == "q8":
            query_step = np.abs(q).max(axis=1, keepdims=True) / 32767.0
            score_error = (0.51 * query_step + rotation_error) * np.abs(keys).sum(axis=1)
            score_error += 4.0 * EPSILON * magnitudes
        else:
            score_error = (head_dim + 1) * EPSILON * magnitudes
        if kind.soft_cap:
            scores = kind.soft_cap * np.tanh(scores / kind.soft_cap)
            score_error = score_error + 10.0 * EPSILON * kind.soft_cap
        worst = np.where(seen, score_error, 0.0).max(axis=1, keepdims=True)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        runs = -(-chunk.end // RUN)
        relative = np.expm1(2.0 * worst) + (RUN + runs + 16) * EPSILON
        error = 2.0 * relative * (weights @ np.abs(values.numbers))
        if kind.kv_dtype == "q8":
            for start in range(0, chunk.end, RUN):
                run = slice(start, start + RUN)
                largest = (weights[:, run] * values.steps[run]).max(axis=1, keepdims=True)
                step = largest * (1.0 + 2.0 * relative) / 32767.0
                error += (0.51 * step + 2.0**-111) * (seen[:, run] @ np.abs(values.codes[run]))
        out[:, heads] = (weights @ values.numbers).reshape(rows, group, head_dim)
        bound[:, heads] = error.reshape(rows, group, head_dim)
    return out, bound
