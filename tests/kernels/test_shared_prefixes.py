"""Sequences whose tables share the ids of whole runs: read once for all, a run gives each the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention_batches import EVERY_KIND, KINDS, all_close, all_same_bytes, kinds
from kernels.paged_kv import (
    BLOCK_SIZES,
    KV,
    NAN,
    Arena,
    Chunk,
    Floats,
    Kind,
    Table,
    attend,
    joined,
    random_chunk,
    random_kv,
    same_bytes,
)
from kernels.paths import EVERY_ARITHMETIC, paths_like
from octavo.kernels import ThreadPool

EVERY_NUMBER_OF_THREADS = pytest.mark.parametrize("threads", [1, 2, 3])


@dataclass(frozen=True)
class Branch:
    """A sequence that takes the first blocks of an earlier one and goes on by itself."""

    source: int  # an earlier branch, modulo their number
    shared: int  # tokens, cut to whole blocks that the source has
    own: int  # tokens; where nothing is shared at least one
    rows: int  # that are computed, the last ones; their keys may be shared blocks too
    held_back: int = 0  # tokens after these rows, written already


class SharedTables:
    """Branches laid out in one arena, and for each its tokens, its table and the chunk it computes."""

    def __init__(
        self,
        branches: Sequence[Branch],
        *,
        head_dim: int = 32,
        group: int = 3,
        kv_heads: int = 2,
        block_size: int = 16,
        kv_dtype: str = "f16",
        seed: int = 0,
        bad_key: tuple[int, int] | None = None,  # (branch, position of its own tokens) that is not a number
    ) -> None:
        random = np.random.default_rng(seed)
        self.arena = Arena((kv_heads, head_dim), block_size, NAN, kv_dtype)
        self.chunks: list[Chunk] = []
        self.tables: list[Table] = []
        whole: list[KV] = []
        takes: list[tuple[int, int]] = []
        owns: list[KV] = []
        for i, branch in enumerate(branches):
            source = branch.source % i if i else 0
            blocks = min(branch.shared, len(whole[source])) // block_size if i else 0
            own = random_kv(random, branch.own if blocks else max(1, branch.own), kv_heads, head_dim)
            if bad_key is not None and i == bad_key[0]:
                own.keys[bad_key[1]] = np.nan
            shared = blocks * block_size
            before = [KV(whole[source].keys[:shared], whole[source].values[:shared])] if blocks else []
            whole.append(joined(*before, own))
            owns.append(own)
            takes.append((source, blocks))
            end = max(1, len(whole[i]) - branch.held_back)
            rows = min(branch.rows, end)
            self.chunks.append(random_chunk(random, whole[i], group, end - rows, rows))
        for (source, blocks), table in zip(takes, self.arena.lay_out(owns, seed), strict=True):
            self.tables.append(np.concatenate([self.tables[source][:blocks], table]) if blocks else table)

    def attend(
        self, kind: Kind, *, threads: int = 1, instruction_set: str = "", share_prefixes: bool = True
    ) -> list[Floats]:
        return self.arena.attend(
            self.chunks,
            self.tables,
            ThreadPool(threads),
            kind,
            instruction_set,
            share_prefixes=share_prefixes,
        )

    def alone(self, kind: Kind, instruction_set: str = "") -> list[Floats]:
        """Each chunk in a call and blocks of its own."""
        return [attend([chunk], kind, instruction_set=instruction_set)[0] for chunk in self.chunks]


def decode(source: int, shared: int, own: int) -> Branch:
    return Branch(source, shared, own, rows=1)


FAMILIES = {
    "two-of-equal-length": [decode(0, 0, 600), decode(0, 512, 88)],
    "eight-over-four-runs": [decode(0, 0, 1040), *(decode(0, 1024, 3 + 5 * i) for i in range(7))],
    "twenty": [decode(0, 0, 530), *(decode(i, 512, 10 + i) for i in range(19))],
    "one-run-each-and-no-more": [decode(0, 0, 256), decode(0, 256, 1), decode(0, 256, 0), decode(0, 0, 256)],
    "they-leave-in-the-middle-of-a-run": [
        decode(0, 0, 1100),
        *(decode(0, shared, 400) for shared in (1024, 1008, 768, 640, 512, 400, 256, 240, 16)),
    ],
    "groups-within-groups": [
        decode(0, 0, 1300),
        decode(0, 512, 800),
        decode(1, 1024, 300),
        decode(1, 1024, 40),
        decode(0, 1024, 100),
        decode(4, 1040, 300),
        decode(0, 256, 600),
        decode(0, 0, 700),
    ],
    "two-families-and-strangers": [
        decode(0, 0, 800),
        decode(0, 0, 900),
        decode(0, 768, 20),
        decode(1, 768, 20),
        decode(0, 768, 300),
        decode(1, 512, 20),
        decode(0, 0, 300),
        decode(0, 0, 20),
    ],
    "equal-tables": [decode(0, 0, 768), *(decode(0, 768, 0) for _ in range(8))],
    "equal-tables-at-different-positions": [
        Branch(0, 0, 1100, 1), *(Branch(0, 1100, 0, 1, held_back=97 * i) for i in range(12))
    ],
    "decodes-beside-chunks": [
        Branch(0, 0, 1100, 20),
        decode(0, 1024, 40),
        Branch(0, 1024, 300, 290),
        decode(0, 1024, 60),
        Branch(0, 768, 300, 2),
        decode(4, 1024, 30),
        Branch(0, 1024, 50, 100),
        decode(0, 1024, 1),
    ],
}  # fmt: skip
EVERY_FAMILY = pytest.mark.parametrize("branches", FAMILIES.values(), ids=FAMILIES)


@EVERY_KIND
@EVERY_FAMILY
def test_sharing_changes_no_byte(branches: Sequence[Branch], kind: Kind) -> None:
    """With one thread or three, on every path: what each gets alone, within its bound of float64."""
    shared = SharedTables(branches, kv_dtype=kind.kv_dtype)
    expected = shared.alone(kind)
    assert all_close(shared.chunks, kind, expected)
    assert all_same_bytes(shared.attend(kind, share_prefixes=False), expected)
    for threads in (1, 2, 3):
        assert all_same_bytes(shared.attend(kind, threads=threads), expected), threads
    for name in paths_like(""):
        assert all_same_bytes(shared.attend(kind, threads=2, instruction_set=name), expected), name


@EVERY_ARITHMETIC
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 1), (2, 8), (5, 1), (16, 2), (17, 1), (48, 1)])
def test_sharing_changes_no_byte_of_any_grouping(group: int, kv_heads: int, instruction_set: str) -> None:
    """48 query vectors of a task are 48 rows of one head, or one row: groups are cut into equal parts."""
    branches = [decode(0, 0, 530), *(decode(0, 512, 1 + i) for i in range(59))]
    for name in ("f16", "q8", "q8-window-257-cap-50"):
        kind = KINDS[name]
        shared = SharedTables(branches, head_dim=16, group=group, kv_heads=kv_heads, kv_dtype=kind.kv_dtype)
        expected = shared.attend(kind, instruction_set=instruction_set, share_prefixes=False)
        for threads in (1, 3):
            outs = shared.attend(kind, threads=threads, instruction_set=instruction_set)
            assert all_same_bytes(outs, expected), (name, threads)


branchings = st.lists(
    st.builds(
        Branch,
        source=st.integers(0, 19),
        shared=st.one_of(st.sampled_from([0, 256, 512, 768, 1024]), st.integers(0, 1100)),
        own=st.one_of(st.integers(0, 40), st.integers(0, 600)),
        rows=st.sampled_from([1, 1, 1, 1, 1, 2, 30]),
        held_back=st.sampled_from([0, 0, 0, 1, 100]),
    ),
    min_size=2,
    max_size=20,
)


@EVERY_ARITHMETIC
@given(
    branches=branchings,
    kind=kinds(),
    head_dim=st.sampled_from([16, 48, 64]),
    group=st.sampled_from([1, 2, 3, 4, 9, 16]),
    kv_heads=st.integers(1, 3),
    block_size=st.sampled_from(BLOCK_SIZES),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_any_branching_changes_no_byte(
    instruction_set: str,
    branches: list[Branch],
    kind: Kind,
    head_dim: int,
    group: int,
    kv_heads: int,
    block_size: int,
    threads: int,
    seed: int,
) -> None:
    shared = SharedTables(
        branches,
        head_dim=head_dim,
        group=group,
        kv_heads=kv_heads,
        block_size=block_size,
        kv_dtype=kind.kv_dtype,
        seed=seed,
    )
    expected = shared.attend(kind, instruction_set=instruction_set, share_prefixes=False)
    assert all_same_bytes(shared.attend(kind, threads=threads, instruction_set=instruction_set), expected)
    for chunk, out in zip(shared.chunks, expected, strict=True):
        assert same_bytes(out, attend([chunk], kind, instruction_set=instruction_set)[0])


@pytest.mark.slow
@EVERY_ARITHMETIC
@given(branches=branchings, kind=kinds(), threads=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=400)
def test_more_branchings_change_no_byte(
    instruction_set: str, branches: list[Branch], kind: Kind, threads: int, seed: int
) -> None:
    shared = SharedTables(branches, kv_dtype=kind.kv_dtype, seed=seed)
    expected = shared.alone(kind, instruction_set)
    assert all_close(shared.chunks, kind, expected)
    assert all_same_bytes(shared.attend(kind, threads=threads, instruction_set=instruction_set), expected)


# --- Tables that are alike, and not equal


@EVERY_NUMBER_OF_THREADS
def test_equal_blocks_in_another_order_or_run_are_not_one_run(threads: int) -> None:
    """Runs are equal where the ids are, in order; where they stand in the sequence does not matter."""
    arena = Arena((2, 32), 16)
    random = np.random.default_rng(0)
    tokens = random_kv(random, 100 * 16, 2, 32)
    (ids,) = arena.lay_out([tokens])
    first, second, third = np.arange(16), np.arange(16, 32), np.arange(32, 48)
    swapped = first.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    last_differs = first.copy()
    last_differs[15] = 60
    first_differs = first.copy()
    first_differs[0] = 61
    tail = np.array([70])
    orders = [
        [first, second, third, tail],
        [swapped, second, third, tail],
        [second, first, third, tail],
        [third, second, first, tail],
        [last_differs, second, tail],
        [first_differs, second, third, tail],
        [first, first, first, tail],
        [first, second, tail],
        [tail, first, second, third],
        [first[::-1], second, tail],
    ]
    chunks, tables = [], []
    for order in orders:
        blocks = np.concatenate(order)
        at = (blocks[:, None] * 16 + np.arange(16)).reshape(-1)
        kv = KV(tokens.keys[at], tokens.values[at])
        chunks.append(random_chunk(random, kv, 3, len(kv) - 1, 1))
        tables.append(ids[blocks])
    outs = arena.attend(chunks, tables, ThreadPool(threads))
    assert all_same_bytes(outs, [attend([chunk])[0] for chunk in chunks])


@EVERY_NUMBER_OF_THREADS
@pytest.mark.parametrize("kv_dtype", ["f16", "q8"])
def test_a_common_run_that_a_window_cuts_is_read_as_each_row_sees_it(kv_dtype: str, threads: int) -> None:
    """Of rows over the same runs some see all of one, some its end, some nothing."""
    branches = [decode(0, 0, 1040), *(decode(0, 1024, 1 + 37 * i) for i in range(12))]
    shared = SharedTables(branches, kv_dtype=kv_dtype)
    for window in (1, 100, 255, 256, 257, 300, 512, 600, 1024, 1040, 1041, 1100, 2000):
        kind = Kind(kv_dtype, window)
        expected = shared.alone(kind)
        assert all_same_bytes(shared.attend(kind, threads=threads), expected), window


@EVERY_KIND
@pytest.mark.parametrize(
    ("what", "bad_key"), [("query", None), ("tail", (5, 22)), ("common", (0, 400)), ("first", (0, 0))]
)
def test_what_is_not_a_number_spoils_only_the_rows_that_see_it(
    what: str, bad_key: tuple[int, int] | None, kind: Kind
) -> None:
    """A query, the own tail of one, a position of a common run that some windows pass by."""
    kind = replace(kind, window=kind.window and 600)
    branches = [decode(0, 0, 1030), *(decode(0, 768, 20 + 100 * i) for i in range(8))]
    clean = SharedTables(branches, kv_dtype=kind.kv_dtype)
    spoiled = SharedTables(branches, kv_dtype=kind.kv_dtype, bad_key=bad_key)
    if bad_key is None:
        spoiled.chunks[3].queries[:, :, 7] = np.nan
    fails = [
        bool(np.isnan(chunk.queries).any())
        or bool(np.isnan(chunk.kv.keys[kind.first_seen(chunk.start) : chunk.end]).any())
        for chunk in spoiled.chunks
    ]
    assert sum(fails) == {"query": 1, "tail": 1, "common": 3 if kind.window else 9}.get(what, sum(fails))
    outs = spoiled.attend(kind, threads=2)
    for out, expected, bad in zip(outs, clean.alone(kind), fails, strict=True):
        assert np.isnan(out).all() if bad else same_bytes(out, expected)
