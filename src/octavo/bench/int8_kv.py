"""What int8 keys and values save in attention: the same decode over f16 and over q8, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from octavo.bench.attention_steps import (
    BLOCK_SIZE,
    AttentionShape,
    NewTokens,
    Room,
    fill,
    scattered,
)
from octavo.bench.layers_in_turn import LayersInTurn, pool_layers
from octavo.bench.recorded import compared, ratios
from octavo.bench.spread import Spread
from octavo.kernels import ThreadPool
from octavo.kv.arena import Arena
from octavo.kv.layout import PAGE_BYTES

CASES = (NewTokens(1, 4096), NewTokens(8, 4096))


@dataclass(frozen=True, slots=True)
class Int8KVResult:
    """Decode of `streams` sequences of `context` tokens from scattered blocks of 16, seconds of one layer.

    layers: of the model, as many as an extent of the pool holds here. f16_seconds, q8_seconds: medians.
    ratio: the median over rounds of q8_seconds / f16_seconds of the same round, with the quartiles.
    bytes_ratio: of what they read.
    """

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    streams: int
    context: int
    layers: int
    f16_seconds: float
    q8_seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    bytes_ratio: float


def measure_int8_kv(
    pool: ThreadPool,
    instruction_set: str,
    *,
    shapes: Sequence[AttentionShape],
    cases: Sequence[NewTokens],
    room: Room,
    repeats: int,
    say: Callable[[str], None],
) -> Iterator[Int8KVResult]:
    """Cases that `left_out` names are not measured."""
    for shape in shapes:
        for new in cases:
            say(_name(shape, new))
            if layers := pool_layers(shape, "f16", new, room):
                sets = room.sets(layers * new.layer_bytes(shape, "q8"))
                yield _measure(LayersInTurn(pool, instruction_set, shape, new, layers, sets), repeats)


def left_out(shapes: Sequence[AttentionShape], cases: Sequence[NewTokens], room: Room) -> list[str]:
    """A sentence for each case of which there is no room for one layer."""
    return [
        room.refusal(_name(shape, new), new.layer_bytes(shape, "f16"))
        for shape in shapes
        for new in cases
        if not pool_layers(shape, "f16", new, room)
    ]


def _name(shape: AttentionShape, new: NewTokens) -> str:
    return f"int8 beside f16 of {shape.model}, {new}"


def _measure(steps: LayersInTurn, repeats: int) -> Int8KVResult:
    shape, new = steps.shape, steps.new
    both = [steps.paged(kv_dtype, BLOCK_SIZE) for kv_dtype in ("f16", "q8")]
    nbytes = max(places.nbytes for places in both)
    with closing(Arena(-(-nbytes // PAGE_BYTES) * PAGE_BYTES, 1)) as memory:
        fill(memory.address, nbytes)
        f16, q8 = compared(
            [steps.arm(memory.address, places, scattered(places.num_blocks)) for places in both],
            steps.seconds_without,
            steps.operations,
            repeats,
        )
    ratio = ratios(q8, f16)
    return Int8KVResult(
        model=shape.model,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        streams=new.streams,
        context=new.context,
        layers=steps.layers,
        f16_seconds=Spread.of(f16).median,
        q8_seconds=Spread.of(q8).median,
        ratio=ratio.median,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        bytes_ratio=shape.token_bytes("q8") / shape.token_bytes("f16"),
    )
