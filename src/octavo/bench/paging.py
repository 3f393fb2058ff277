"""What paging costs: the same kernel over blocks of a pool and over a contiguous buffer for each layer.

Two contiguous layouts are measured, because the kernel reads a block as it lies: blocks as large as the paged
ones, one behind the other ("blocks"), and blocks of 256 tokens ("runs"). Of the latter the kernel attends one
at a time, so the keys (and the values) of a head that it needs are one piece, and nothing is looked up
between its first and its last position. Paging is held against the faster of the two. All lie in the same
memory, in pages of 4 KiB (`layers_in_turn`).

A buffer that nobody has to give back block by block may have huge pages; a pool refuses them, because one
touched block must not make 2 MiB resident. So whole runs are measured once more in huge pages, where the
system gives them: what paging and its pages cost together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from octavo.bench.attention_steps import AttentionShape, NewTokens, Room, fill, scattered
from octavo.bench.huge_pages import HugePages
from octavo.bench.layers_in_turn import LayersInTurn, Places, pool_layers
from octavo.bench.recorded import Ints, compared, ratios
from octavo.bench.spread import Spread
from octavo.kernels import ThreadPool
from octavo.kv.arena import Arena
from octavo.kv.layout import BLOCK_SIZES, PAGE_BYTES

STREAMS = (1, 8)
CONTEXTS = (1024, 4096)

RUN_TOKENS = 256

_BUFFERS = 2
"""One for all sides, and one in huge pages."""


@dataclass(frozen=True, slots=True)
class PagingResult:
    """Decode of `streams` sequences of `context` tokens: one layer, from blocks and from contiguous buffers.

    layers: of the model, as many as an extent of the pool holds here. order: of the blocks in memory, "in
    order" or "scattered" (drawn at random from all). seconds: median, as are those of the contiguous buffers:
    blocks_seconds of blocks as large, runs_seconds of whole runs, huge_seconds of whole runs in pages of 2
    MiB (null where the system gives none).
    ratio: of seconds and those of the faster of the two in pages of 4 KiB, named by `contiguous` ("blocks" or
    "runs"); the median over rounds of the ratio of a round, with the quartiles. huge_ratio: the same of
    seconds and huge_seconds.
    """

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    streams: int
    context: int
    layers: int
    block_size: int
    order: str
    seconds: float
    blocks_seconds: float
    runs_seconds: float
    huge_seconds: float | None
    contiguous: str
    ratio: float
    ratio_low: float
    ratio_high: float
    huge_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagingCases:
    block_sizes: Sequence[int] = BLOCK_SIZES
    streams: Sequence[int] = STREAMS
    contexts: Sequence[int] = CONTEXTS

    def decodes(self) -> list[NewTokens]:
        return [NewTokens(count, context) for count in self.streams for context in self.contexts]


def measure_paging(
    pool: ThreadPool,
    instruction_set: str,
    *,
    shapes: Sequence[AttentionShape],
    kv_dtypes: Sequence[str],
    cases: PagingCases,
    room: Room,
    repeats: int,
    say: Callable[[str], None],
) -> Iterator[PagingResult]:
    """Cases that `left_out` names are not measured."""
    room = room.shared_by(_BUFFERS)
    for shape in shapes:
        for kv_dtype in kv_dtypes:
            for new in cases.decodes():
                say(_name(shape, kv_dtype, new))
                if layers := pool_layers(shape, kv_dtype, new, room):
                    sets = room.sets(layers * new.layer_bytes(shape, kv_dtype))
                    steps = LayersInTurn(pool, instruction_set, shape, new, layers, sets)
                    yield from _measure(steps, kv_dtype, cases.block_sizes, repeats)


def left_out(
    shapes: Sequence[AttentionShape], kv_dtypes: Sequence[str], cases: PagingCases, room: Room
) -> list[str]:
    """A sentence for each case of which there is no room for one layer."""
    room = room.shared_by(_BUFFERS)
    return [
        room.refusal(_name(shape, kv_dtype, new), new.layer_bytes(shape, kv_dtype))
        for shape in shapes
        for kv_dtype in kv_dtypes
        for new in cases.decodes()
        if not pool_layers(shape, kv_dtype, new, room)
    ]


def _name(shape: AttentionShape, kv_dtype: str, new: NewTokens) -> str:
    return f"paging of {shape.model} {kv_dtype}, {new}"


def _measure(
    steps: LayersInTurn, kv_dtype: str, block_sizes: Sequence[int], repeats: int
) -> Iterator[PagingResult]:
    runs = steps.contiguous(kv_dtype, RUN_TOKENS)
    paged = [steps.paged(kv_dtype, size) for size in block_sizes]
    beside = [steps.contiguous(kv_dtype, size) for size in block_sizes]
    nbytes = max(places.nbytes for places in (runs, *paged, *beside))
    with (
        closing(Arena(-(-nbytes // PAGE_BYTES) * PAGE_BYTES, 1)) as memory,
        closing(HugePages(runs.nbytes)) as huge,
    ):
        fill(memory.address, nbytes)
        fill(huge.address, runs.nbytes)
        arms = {"runs": steps.arm(memory.address, runs, _in_order(runs))}
        if huge.are_huge:
            arms["huge"] = steps.arm(huge.address, runs, _in_order(runs))
        for pool, buffer in zip(paged, beside, strict=True):
            size = pool.block_size
            arms[f"blocks {size}"] = steps.arm(memory.address, buffer, _in_order(buffer))
            arms[f"in order {size}"] = steps.arm(memory.address, pool, _in_order(pool))
            arms[f"scattered {size}"] = steps.arm(memory.address, pool, scattered(pool.num_blocks))
        rounds = compared(list(arms.values()), steps.seconds_without, steps.operations, repeats)
        taken = dict(zip(arms, rounds, strict=True))
    for size in block_sizes:
        for order in ("in order", "scattered"):
            yield _result(
                steps,
                kv_dtype,
                size,
                order,
                taken[f"{order} {size}"],
                {"blocks": taken[f"blocks {size}"], "runs": taken["runs"]},
                taken.get("huge"),
            )


def _result(
    steps: LayersInTurn,
    kv_dtype: str,
    block_size: int,
    order: str,
    seconds: Sequence[float],
    contiguous: dict[str, list[float]],
    huge: Sequence[float] | None,
) -> PagingResult:
    shape, new = steps.shape, steps.new
    medians = {name: Spread.of(taken).median for name, taken in contiguous.items()}
    faster = min(medians, key=lambda name: medians[name])
    ratio = ratios(seconds, contiguous[faster])
    return PagingResult(
        model=shape.model,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kv_dtype=kv_dtype,
        streams=new.streams,
        context=new.context,
        layers=steps.layers,
        block_size=block_size,
        order=order,
        seconds=Spread.of(seconds).median,
        blocks_seconds=medians["blocks"],
        runs_seconds=medians["runs"],
        huge_seconds=None if huge is None else Spread.of(huge).median,
        contiguous=faster,
        ratio=ratio.median,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        huge_ratio=None if huge is None else ratios(seconds, huge).median,
    )


def _in_order(places: Places) -> Ints:
    return np.arange(places.num_blocks, dtype=np.int32)
