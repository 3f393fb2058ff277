"""Paged attention against the machine's limits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.bench.limits import Limits
from octavo.bench.recorded import Ints, RecordedProgram, chunks_without_kv, spread_of_one
from octavo.kernels import Program, ThreadPool
from octavo.kv.arena import Arena
from octavo.kv.layout import KVLayout

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
STREAMS = (1, 2, 4, 8, 16)
PROMPTS = (512, 3000)

_OPERATIONS_A_STEP = 8e9


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one layer, and how many layers lie in a block between its first and its last byte."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """One layer: the new tokens' keys and values stored, then attended.

    kind: "decode" (a token for each of `streams` sequences of `context` tokens, it included) or "prefill"
    (all `context` tokens of one prompt). seconds: median, with the fastest and slowest repeat. kv_from:
    "memory" for decode, which finds KV that the caches cannot hold any more, "cache" for prefill, which has
    just stored it.
    gflops: 4 x heads x head_dim for each pair of a token and one it sees. kv_gbs: KV bytes that must be read
    once, 10^9 a second.
    """

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kind: str
    context: int
    streams: int
    kv_from: str
    layers: int
    seconds: float
    seconds_low: float
    seconds_high: float
    gflops: float
    kv_gbs: float
    percent_of_peak: float
    percent_of_read: float


def measure_attention(
    pool: ThreadPool,
    instruction_set: str,
    limits: Limits,
    *,
    shapes: Sequence[AttentionShape],
    contexts: Sequence[int],
    streams: Sequence[int],
    prompts: Sequence[int],
    cold_bytes: int,
    most_bytes: int,
    repeats: int,
    say: Callable[[str], None],
) -> Iterator[AttentionResult]:
    """cold_bytes: KV that, read in turn, pushes itself out of every cache. most_bytes: KV of one case, unless
    a single layer is more."""
    for shape in shapes:
        cases = [_Case("decode", context, count) for count in streams for context in contexts]
        cases += [_Case("prefill", prompt, 1) for prompt in prompts]
        layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim)
        empty = RecordedProgram(pool, instruction_set, _qkv_width(shape))
        empty.bind_nothing()
        for case in cases:
            say(f"{shape.model} {case.kind}, {case.streams} x {case.context} tokens")
            yield _measure(
                pool, instruction_set, limits, shape, layout, case, empty, cold_bytes, most_bytes, repeats
            )


@dataclass(frozen=True, slots=True)
class _Case:
    kind: str
    context: int
    streams: int

    @property
    def num_tokens(self) -> int:
        """Computed in a step."""
        return self.streams if self.kind == "decode" else self.context

    @property
    def pairs(self) -> int:
        """Of a query token and a token it sees."""
        if self.kind == "decode":
            return self.streams * self.context
        return self.context * (self.context + 1) // 2


def _measure(
    pool: ThreadPool,
    instruction_set: str,
    limits: Limits,
    shape: AttentionShape,
    layout: KVLayout,
    case: _Case,
    empty: RecordedProgram,
    cold_bytes: int,
    most_bytes: int,
    repeats: int,
) -> AttentionResult:
    operations = 4 * shape.num_heads * shape.head_dim * case.pairs
    token_bytes = layout.layer_bytes // layout.block_size
    layer_bytes = case.streams * case.context * token_bytes
    affordable = min(most_bytes // layer_bytes, int(_OPERATIONS_A_STEP / operations))
    layers = max(1, min(shape.num_layers, affordable))
    # Short contexts fit a cache even over all layers: every step takes another set of sequences.
    sets = max(1, -(-cold_bytes // (layers * layer_bytes))) if case.kind == "decode" else 1
    blocks_each = -(-case.context // layout.block_size)
    num_blocks = sets * case.streams * blocks_each

    def record(program: Program, qkv: int) -> None:
        out = program.buffer(shape.num_heads * shape.head_dim)
        for _ in range(layers):
            program.attention(qkv, out, shape.num_heads, shape.num_kv_heads, shape.head_dim)

    with Arena(layout.extent_bytes, num_blocks) as arena:
        _fill(arena, layout, layers)
        full = RecordedProgram(pool, instruction_set, _qkv_width(shape), record)
        full.bind(arena.address, arena.extent_bytes, num_blocks, layout.block_size)
        order = np.random.default_rng(num_blocks).permutation(num_blocks).astype(np.int32)
        tables = order.reshape(sets, case.streams * blocks_each)
        chunk = _chunk(case, blocks_each)
        without = chunks_without_kv(case.num_tokens)
        turn = iter(range(repeats + 1))
        taken = spread_of_one(
            lambda: full.seconds(*chunk, tables[next(turn) % sets]),
            lambda: empty.seconds(*without),
            layers,
            repeats,
        )
    gflops = operations / taken.median / 1e9
    gbs = layer_bytes / taken.median / 1e9
    return AttentionResult(
        model=shape.model,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kind=case.kind,
        context=case.context,
        streams=case.streams,
        kv_from="memory" if case.kind == "decode" else "cache",
        layers=layers,
        seconds=taken.median,
        seconds_low=taken.low,
        seconds_high=taken.high,
        gflops=gflops,
        kv_gbs=gbs,
        percent_of_peak=100 * gflops / limits.fp32_gflops,
        percent_of_read=100 * gbs / limits.read_gbs,
    )


def _chunk(case: _Case, blocks_each: int) -> tuple[Ints, Ints, Ints]:
    """chunk_starts, chunk_lens and block_table_offsets of a step."""
    decode = case.kind == "decode"
    return (
        np.full(case.streams, case.context - 1 if decode else 0, dtype=np.int32),
        np.full(case.streams, 1 if decode else case.context, dtype=np.int32),
        np.arange(case.streams + 1, dtype=np.int32) * np.int32(blocks_each),
    )


def _fill(arena: Arena, layout: KVLayout, layers: int) -> None:
    """Random keys and values into the first `layers` of every block; the others' pages stay untouched."""
    memory = (ctypes.c_uint8 * arena.nbytes).from_address(arena.address)
    blocks = np.ctypeslib.as_array(memory).reshape(arena.num_blocks, arena.extent_bytes)
    random = np.random.default_rng(layers)
    layer: npt.NDArray[np.uint8] = random.uniform(-1, 1, layout.layer_bytes // 2).astype("<f2").view(np.uint8)
    for index in range(layers):
        blocks[:, index * layout.layer_bytes : (index + 1) * layout.layer_bytes] = layer


def _qkv_width(shape: AttentionShape) -> int:
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
