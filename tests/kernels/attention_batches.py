"""Batches to ask attention for: every shape of heads, ragged chunks, kinds of layers, and how else to ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from kernels.paged_kv import (
    BLOCK_SIZES,
    PLAIN,
    Q8,
    Chunk,
    Floats,
    Kind,
    attend,
    float64_attention,
    random_chunk,
    random_kv,
    same_bytes,
)
from kernels.paths import paths_like

HEAD_SIZES = range(16, 257, 16)
# Runs end at multiples of 256, blocks at multiples of 8 to 256, vectors at multiples of 8 or 16.
BORDERS = [1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 256, 257, 258, 511, 512, 513, 769, 1500]

KINDS = {
    "f16": PLAIN,
    "q8": Q8,
    "f16-window-100": Kind("f16", window=100),
    "f16-cap-20": Kind("f16", soft_cap=20.0),
    "q8-window-257-cap-50": Kind("q8", window=257, soft_cap=50.0),
}
"""One of each kernel that there is: two ways to store, each with a cap and without, windows inside a run and
across."""

EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
EVERY_KV_DTYPE = pytest.mark.parametrize("kind", [PLAIN, Q8], ids=["f16", "q8"])


def close(chunk: Chunk, kind: Kind, out: Floats) -> bool:
    expected, bound = float64_attention(chunk, kind)
    return bool((np.abs(out - expected) <= bound).all())


def all_close(chunks: Sequence[Chunk], kind: Kind, outs: Sequence[Floats]) -> bool:
    return all(close(chunk, kind, out) for chunk, out in zip(chunks, outs, strict=True))


def all_same_bytes(outs: Sequence[Floats], others: Sequence[Floats]) -> bool:
    return all(same_bytes(out, other) for out, other in zip(outs, others, strict=True))


@dataclass(frozen=True)
class Shape:
    head_dim: int
    group: int
    kv_heads: int
    spans: tuple[tuple[int, int], ...]
    """(tokens before, rows) of each chunk, each of a sequence of its own."""
    seed: int

    def chunks(self) -> list[Chunk]:
        random = np.random.default_rng(self.seed)
        return [
            random_chunk(
                random,
                random_kv(random, start + rows, self.kv_heads, self.head_dim),
                self.group,
                start,
                rows,
            )
            for start, rows in self.spans
        ]


def shapes(largest_work: int) -> st.SearchStrategy[Shape]:
    """Ragged batches of decodes and prefill chunks; at most `largest_work` multiply-adds, more or less."""
    starts = st.one_of(st.sampled_from([0, *BORDERS]), st.integers(0, 600))
    spans = st.tuples(starts, st.one_of(st.just(1), st.sampled_from([2, 5, 8, 13, 40]), st.integers(1, 300)))

    def fits(shape: Shape) -> bool:
        seen = sum(rows * (start + rows) for start, rows in shape.spans)
        return 2 * seen * shape.group * shape.kv_heads * shape.head_dim <= largest_work

    return st.builds(
        Shape,
        head_dim=st.sampled_from(HEAD_SIZES),
        group=st.one_of(st.integers(1, 16), st.sampled_from([24, 48])),
        kv_heads=st.integers(1, 8),
        spans=st.lists(spans, min_size=1, max_size=5).map(tuple),
        seed=st.integers(0, 2**32 - 1),
    ).filter(fits)


def kinds() -> st.SearchStrategy[Kind]:
    """Windows from the row's own position alone to all that there is."""
    windows = st.one_of(st.just(0), st.sampled_from([*BORDERS, 2**31 - 1]), st.integers(1, 700))
    return st.builds(
        Kind,
        kv_dtype=st.sampled_from(["f16", "q8"]),
        window=windows,
        soft_cap=st.sampled_from([0.0, 0.0, 0.5, 30.0, 50.0]),
    )


def in_pieces(chunk: Chunk, size: int) -> list[Chunk]:
    return [
        Chunk(chunk.kv, chunk.start + at, chunk.queries[at : at + size])
        for at in range(0, len(chunk.queries), size)
    ]


def variants(chunks: list[Chunk], kind: Kind, instruction_set: str) -> dict[str, list[Floats]]:
    """The same batch asked in other ways, none of which may change a byte."""
    asked: dict[str, dict[str, Any]] = {
        **{f"blocks of {size}": {"block_size": size} for size in BLOCK_SIZES},
        **{f"order {order}": {"order": order} for order in (1, 2)},
        **{f"{threads} threads": {"threads": threads} for threads in (2, 3)},
        **{name: {"instruction_set": name} for name in paths_like(instruction_set)},
    }
    if kind.window:
        asked["what lies before the windows written"] = {"forget": False}
        longest = max(chunk.end for chunk in chunks)
        if kind.window >= longest:
            asked["no window"] = {"kind": replace(kind, window=0)}
    return {
        name: attend(chunks, **{"kind": kind, "instruction_set": instruction_set, **changes})
        for name, changes in asked.items()
    }
