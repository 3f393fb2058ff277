"""Paged attention against the machine's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.bench.attention_steps import AttentionShape, AttentionSteps, NewTokens, Room, StoredKV
from octavo.bench.limits import Limits
from octavo.bench.recorded import spread_of_one
from octavo.kernels import ThreadPool

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
STREAMS = (1, 2, 4, 8, 16)
PROMPTS = (512, 3000)
CHUNKS = (8192, 32768)
CHUNK_TOKENS = 256

_OPERATIONS_A_STEP = 8e9


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """One layer: the new tokens' keys and values stored, then attended.

    kind: "decode" (a token for each of `streams` sequences of `context` tokens, it included), "prefill" (all
    `context` tokens of one prompt) or "chunk" (the last 256 of one). kv_dtype: "f16", or "q8" for int8 codes
    with a float scale for each token and head. kv_from: "memory" for decode and chunks, which find KV that
    the caches cannot hold any more, "cache" for prefill, which has just stored it. layers: attended in a
    step, one after another. seconds: median, with the fastest and slowest repeat.
    gflops: 4 x heads x head_dim for each pair of a token and one it sees. kv_gbs: bytes of keys and values
    as they are stored, scales included, that must be read once, 10^9 a second.
    percent_of_peak: gflops of fp32 multiply-adds. percent_of_read: kv_gbs of the read limit.
    """

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kind: str
    context: int
    streams: int
    kv_dtype: str
    kv_from: str
    layers: int
    seconds: float
    seconds_low: float
    seconds_high: float
    gflops: float
    kv_gbs: float
    percent_of_peak: float
    percent_of_read: float


@dataclass(frozen=True, slots=True)
class _Case:
    shape: AttentionShape
    kv_dtype: str
    kind: str
    new: NewTokens

    @property
    def name(self) -> str:
        return f"{self.shape.model} {self.kind} over {self.kv_dtype}, {self.new}"

    @property
    def layer_bytes(self) -> int:
        return self.new.layer_bytes(self.shape, self.kv_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCases:
    """contexts: of decode, each with each of `streams`. prompts: tokens of a prefill. chunks: tokens of a
    prompt whose last 256 are computed."""

    contexts: Sequence[int] = CONTEXTS
    streams: Sequence[int] = STREAMS
    prompts: Sequence[int] = PROMPTS
    chunks: Sequence[int] = CHUNKS

    def of(self, shape: AttentionShape, kv_dtype: str) -> list[_Case]:
        decode = [NewTokens(count, context) for count in self.streams for context in self.contexts]
        prefill = [NewTokens(1, prompt, prompt) for prompt in self.prompts]
        chunks = [NewTokens(1, context, min(CHUNK_TOKENS, context)) for context in self.chunks]
        kinds = (("decode", decode), ("prefill", prefill), ("chunk", chunks))
        return [_Case(shape, kv_dtype, kind, new) for kind, cases in kinds for new in cases]


def measure_attention(
    pool: ThreadPool,
    instruction_set: str,
    limits: Limits,
    *,
    shapes: Sequence[AttentionShape],
    kv_dtypes: Sequence[str],
    cases: AttentionCases,
    room: Room,
    repeats: int,
    say: Callable[[str], None],
) -> Iterator[AttentionResult]:
    """Cases that `left_out` names are not measured."""
    for shape in shapes:
        for kv_dtype in kv_dtypes:
            for case in cases.of(shape, kv_dtype):
                if room.layers(1, case.layer_bytes):
                    say(case.name)
                    yield _measure(pool, instruction_set, limits, case, room, repeats)


def left_out(
    shapes: Sequence[AttentionShape], kv_dtypes: Sequence[str], cases: AttentionCases, room: Room
) -> list[str]:
    """A sentence for each case of which one layer's keys and values are too many."""
    return [
        room.refusal(case.name, case.layer_bytes)
        for shape in shapes
        for kv_dtype in kv_dtypes
        for case in cases.of(shape, kv_dtype)
        if not room.layers(1, case.layer_bytes)
    ]


def _measure(
    pool: ThreadPool,
    instruction_set: str,
    limits: Limits,
    case: _Case,
    room: Room,
    repeats: int,
) -> AttentionResult:
    shape, new = case.shape, case.new
    operations = 4 * shape.num_heads * shape.head_dim * new.pairs
    layers = room.layers(shape.num_layers, case.layer_bytes)
    layers = max(1, min(layers, int(_OPERATIONS_A_STEP / operations)))
    from_memory = case.kind != "prefill"
    sets = room.sets(layers * case.layer_bytes) if from_memory else 1
    steps = AttentionSteps(pool, instruction_set, shape, layers)
    with StoredKV(shape, case.kv_dtype, layers, sets * new.num_blocks()) as kv:
        tables = kv.scattered().reshape(sets, -1)
        turns = iter(range(repeats + 1))
        taken = spread_of_one(
            lambda: steps.seconds(kv, new, tables[next(turns) % sets]),
            lambda: steps.seconds_without(new),
            layers,
            repeats,
        )
    gflops = operations / taken.median / 1e9
    gbs = case.layer_bytes / taken.median / 1e9
    return AttentionResult(
        model=shape.model,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kind=case.kind,
        context=new.context,
        streams=new.streams,
        kv_dtype=case.kv_dtype,
        kv_from="memory" if from_memory else "cache",
        layers=layers,
        seconds=taken.median,
        seconds_low=taken.low,
        seconds_high=taken.high,
        gflops=gflops,
        kv_gbs=gbs,
        percent_of_peak=100 * gflops / limits.fp32_gflops,
        percent_of_read=100 * gbs / limits.read_gbs,
    )
