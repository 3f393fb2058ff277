"""Attention as a program's operation: what layers store, layers of several kinds, and what a step reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention_batches import EVERY_KIND, EVERY_KV_DTYPE, all_same_bytes
from kernels.paged_kv import (
    BLOCK_SIZES,
    KV,
    NAN,
    PLAIN,
    Q8,
    RUN,
    Arena,
    Chunk,
    Floats,
    Kind,
    attend,
    same_bytes,
)
from kernels.paths import EVERY_PATH
from kernels.recorded import Attending, normed

BLOCK = 16
HEADS = (6, 2, 32)  # query heads, KV heads, head size


class Tokens:
    """Random queries, and halves as keys and values, of `count` tokens: token i is what position i holds."""

    def __init__(self, count: int, heads: tuple[int, int, int] = HEADS, seed: int = 0) -> None:
        num_heads, num_kv_heads, head_dim = heads
        random = np.random.default_rng(seed)
        self.queries = 2.0 * random.standard_normal((count, num_heads, head_dim)).astype(np.float32)
        shape = (count, num_kv_heads, head_dim)
        self.kv = KV(
            random.standard_normal(shape).astype(np.float16), random.standard_normal(shape).astype(np.float16)
        )

    def rows(self) -> Floats:
        """What the tokens embed to: float32[count, width]."""
        parts = (self.queries, self.kv.keys.astype(np.float32), self.kv.values.astype(np.float32))
        return np.concatenate([part.reshape(len(self.kv), -1) for part in parts], axis=1)

    def chunk(self, tokens: Sequence[int], rows: int) -> Chunk:
        """The last `rows` positions of a sequence of these tokens, as attention gets them."""
        ids = np.array(tokens)
        start = len(ids) - rows
        scale = np.float32(1.0) / np.sqrt(np.float32(self.queries.shape[2]))
        return Chunk(KV(self.kv.keys[ids], self.kv.values[ids]), start, self.queries[ids[start:]] * scale)


def expected_of(chunk: Chunk, kind: Kind) -> Floats:
    """Attention of a call of its own, normed as a program's logits are: float32[rows, width]."""
    out = attend([chunk], kind)[0].reshape(len(chunk.queries), -1)
    return normed(out, np.ones(out.shape[1], dtype=np.float32), 1e-5)


@EVERY_PATH
@EVERY_KV_DTYPE
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_layer_and_head_is_stored_where_the_layout_says(
    block_size: int, kind: Kind, instruction_set: str
) -> None:
    """The bytes of the arena, those of neighbours' slots too, which stay what they were."""
    heads = (3, 3, 48)
    tokens = Tokens(300, heads)
    lengths = (300, 40, 1)
    layout = Arena(heads[1:], block_size, NAN, kind.kv_dtype)
    tables = layout.lay_out([KV(tokens.kv.keys[:n], tokens.kv.values[:n]) for n in lengths], order=1)
    program = Attending(
        tokens.rows(),
        heads,
        [kind] * 3,
        threads=2,
        instruction_set=instruction_set,
        block_size=block_size,
        num_blocks=len(layout.bytes),
    )
    for pieces in ((0, 7, 40, 300), (0, 1, 40), (0, 1)):
        for start, end in pairwise(pieces):
            table = tables[lengths.index(pieces[-1])][: -(-end // block_size)]
            program.run((range(start, end), start, table.tolist()))
    stored = layout.bytes[:, layout.layer_bytes : 2 * layout.layer_bytes]
    assert program.layer_bytes == layout.layer_bytes
    for layer in range(3):
        at = slice(layer * program.layer_bytes, (layer + 1) * program.layer_bytes)
        assert np.array_equal(program.arena[:, at], stored), layer
    assert (program.arena[:, 3 * program.layer_bytes :] == 0xFF).all()


LAYERS = [(0, 0.0), (100, 0.0), (0, 20.0), (100, 30.0), (257, 0.0), (1, 0.0), (2**31 - 1, 50.0)]
"""window, soft cap."""


@EVERY_KV_DTYPE
@pytest.mark.parametrize("shown", range(len(LAYERS)))
def test_each_layer_has_a_window_and_a_cap_of_its_own(shown: int, kind: Kind) -> None:
    kinds = [replace(kind, window=window, soft_cap=cap) for window, cap in LAYERS]
    tokens = Tokens(620)
    table = np.random.default_rng(0).permutation(39).tolist()
    for row_tile, threads in ((256, 2), (64, 1)):
        program = Attending(
            tokens.rows(), HEADS, kinds, shown=shown, threads=threads, num_blocks=39, row_tile=row_tile
        )
        found = [
            program.run((range(start, end), start, table))[0] for start, end in pairwise((0, 500, 619, 620))
        ]
        expected = expected_of(tokens.chunk(range(620), 620), kinds[shown])
        assert same_bytes(np.concatenate(found), expected)


# --- What a step reads


class Users:
    """Sequences that begin with the same tokens, in the same blocks, and go on by themselves.

    Their positions before the last are computed; the next step computes that one of each.
    """

    def __init__(
        self,
        own: Sequence[int],
        shared: int,
        kinds: Sequence[Kind] = (PLAIN,),
        *,
        threads: int = 1,
        heads: tuple[int, int, int] = HEADS,
        share: bool = True,
        shown: int = 0,
    ) -> None:
        self.tokens = Tokens(shared + sum(own), heads)
        ends = [shared, *(shared + np.cumsum(own)).tolist()]
        self.texts = [[*range(shared), *range(start, end)] for start, end in pairwise(ends)]
        common, blocks = shared // BLOCK, shared // BLOCK
        self.tables = []
        for text in self.texts:
            count = -(-len(text) // BLOCK) - common
            self.tables.append([*range(common), *range(blocks, blocks + count)])
            blocks += count
        self.attending = Attending(
            self.tokens.rows(), heads, kinds, shown=shown, threads=threads, num_blocks=blocks
        )
        assert self.attending.program.shared_prefix_attention
        self.attending.program.shared_prefix_attention = share
        if shared:
            self.attending.run((range(shared), 0, self.tables[0]))
        for text, table in zip(self.texts, self.tables, strict=True):
            if len(text) - shared > 1:
                self.attending.run((text[shared:-1], shared, table))

    def step(self) -> tuple[list[Floats], int, int]:
        """One token each. Returns: what it gave, positions read in this step, and attended to."""
        before = self.attending.counted()
        outs = self.attending.run(
            *((text[-1:], len(text) - 1, table) for text, table in zip(self.texts, self.tables, strict=True))
        )
        read, attended = np.subtract(self.attending.counted(), before).tolist()
        return outs, read, attended

    def expected(self, kind: Kind) -> list[Floats]:
        return [expected_of(self.tokens.chunk(text, 1), kind) for text in self.texts]


@EVERY_KIND
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_eight_users_read_four_common_runs_once(threads: int, kind: Kind) -> None:
    """What is common is read once, of runs that a window cuts by each row."""
    own = [1, 2, 17, 40, 63, 99, 128, 250]
    heads = (9, 3, 32)  # enough for the tasks of three threads
    users = Users(own, 4 * RUN, [kind], threads=threads, heads=heads)
    outs, read, attended = users.step()
    assert all_same_bytes(outs, users.expected(kind))
    lengths = [4 * RUN + n for n in own]
    firsts = [max(0, length - (kind.window or length)) for length in lengths]
    assert attended == 3 * sum(np.subtract(lengths, firsts))
    expected = sum(length - max(4 * RUN, first) for length, first in zip(lengths, firsts, strict=True))
    for end in range(RUN, 5 * RUN, RUN):
        seen = [min(RUN, max(0, end - first)) for first in firsts]
        expected += RUN * (RUN in seen) + sum(n for n in seen if n < RUN)
    assert read == 3 * expected
    if not kind.window:
        assert (read, attended) == (3 * (4 * RUN + 600), 3 * (8 * 4 * RUN + 600))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_sharing_leaves_every_thread_its_tasks(threads: int) -> None:
    """Few tasks over one KV head: then a run may be read more than once, and never as often as without."""
    users = Users([9] * 8, 4 * RUN, heads=(1, 1, 32), threads=threads)
    outs, read, attended = users.step()
    assert all_same_bytes(outs, users.expected(PLAIN))
    assert attended == 8 * (4 * RUN + 9)
    assert 4 * RUN + 8 * 9 <= read <= (attended if threads == 8 else attended / 2)


def test_counts_are_of_all_layers_and_steps() -> None:
    """Layers without a window and with one of 300, in f16 and in q8, step after step."""
    own = [5, 9, 30, 44, 60, 200]
    lengths = [2 * RUN + n for n in own]
    for dtype in (PLAIN, Q8):
        kinds = [dtype, replace(dtype, window=300), replace(dtype, soft_cap=30.0), replace(dtype, window=300)]
        users = Users(own, 2 * RUN, kinds)
        for _ in range(2):
            _, read, attended = users.step()
            windowed = 6 * 300
            # 300 positions end in the second common run, all of which only those of at most 44 tokens see.
            read_windowed = windowed - 3 * RUN
            assert attended == HEADS[1] * 2 * (sum(lengths) + windowed)
            assert read == HEADS[1] * 2 * (2 * RUN + sum(own) + read_windowed)


@EVERY_KV_DTYPE
def test_without_sharing_what_is_read_is_what_is_attended_to(kind: Kind) -> None:
    users = Users([3, 50, 99], 3 * RUN, [kind], share=False)
    plain, read, attended = users.step()
    assert read == attended == HEADS[1] * (9 * RUN + 152)
    users.attending.program.shared_prefix_attention = True
    assert users.attending.program.shared_prefix_attention
    shared, read, attended = users.step()
    assert attended == HEADS[1] * (9 * RUN + 152)
    assert read == HEADS[1] * (3 * RUN + 152)
    users.attending.program.shared_prefix_attention = False
    again, read, attended = users.step()
    assert read == attended
    assert all_same_bytes(plain, shared)
    assert all_same_bytes(plain, again)


def test_strangers_share_nothing() -> None:
    """The same tokens in other blocks are not the same blocks."""
    users = Users([700, 700, 300], 0)
    _, read, attended = users.step()
    assert read == attended == HEADS[1] * 1700


@EVERY_KV_DTYPE
@pytest.mark.parametrize("common", [BLOCK, 7 * BLOCK, RUN - BLOCK, RUN + 5 * BLOCK])
def test_the_common_part_of_a_run_is_read_once(common: int, kind: Kind) -> None:
    users = Users([300, 400, 500], common, [kind])
    outs, read, attended = users.step()
    assert attended == HEADS[1] * (1200 + 3 * common)
    assert read == HEADS[1] * (1200 + common)
    assert all_same_bytes(outs, users.expected(kind))


def test_a_group_larger_than_a_task_is_read_once_for_each_task() -> None:
    """16 query heads a KV head: three rows are 48 vectors, so seven rows are three tasks, and one KV head."""
    own = [1, 2, 3, 4, 5, 6, 7]
    users = Users(own, 4 * RUN, heads=(16, 1, 16))
    outs, read, attended = users.step()
    assert all_same_bytes(outs, users.expected(PLAIN))
    assert attended == 7 * 4 * RUN + sum(own)
    assert read == 3 * 4 * RUN + sum(own)


@EVERY_KIND
def test_decodes_beside_a_prompt_of_several_row_tiles_get_their_bytes(kind: Kind) -> None:
    """The prompt adopts the common blocks as well; a decode may fall into any row tile."""
    users = Users([1, 40, 700, 90, 30], 2 * RUN, [kind], threads=2)
    prompt, table = users.texts[2], users.tables[2]
    chunks = [(text[-1:], len(text) - 1, own) for text, own in zip(users.texts, users.tables, strict=True)]
    chunks[2] = (prompt[2 * RUN :], 2 * RUN, table)
    kept = users.attending.arena.copy()
    for share in (True, False):
        users.attending.arena[:] = kept
        users.attending.program.shared_prefix_attention = share
        outs = users.attending.run(*chunks)
        for i, (text, out) in enumerate(zip(users.texts, outs, strict=True)):
            rows = len(text) - 2 * RUN if i == 2 else 1
            assert same_bytes(out, expected_of(users.tokens.chunk(text, rows), kind)), (share, i)


@given(
    own=st.lists(st.one_of(st.integers(1, 40), st.integers(1, 500)), min_size=1, max_size=12),
    shared=st.integers(0, 70),
    windows=st.lists(st.one_of(st.just(0), st.integers(1, 900)), min_size=1, max_size=3),
    kv_dtype=st.sampled_from(["f16", "q8"]),
    threads=st.integers(1, 3),
)
@settings(max_examples=40)
def test_sharing_only_lessens_what_is_read(
    own: list[int], shared: int, windows: list[int], kv_dtype: str, threads: int
) -> None:
    kinds = [Kind(kv_dtype, window) for window in windows]
    plain, common = (
        Users(own, shared * BLOCK, kinds, threads=threads, share=share).step() for share in (False, True)
    )
    assert all_same_bytes(plain[0], common[0])
    lengths = [shared * BLOCK + n for n in own]
    attended = HEADS[1] * sum(min(window or length, length) for window in windows for length in lengths)
    assert plain[1:] == (attended, attended)
    assert common[2] == attended
    # No common run less than once, and what is not common by each.
    seen_once = HEADS[1] * sum(max(min(window or length, length) for length in lengths) for window in windows)
    assert seen_once <= common[1] <= attended


def test_rows_of_one_step_may_be_attended_to_by_others_of_it() -> None:
    """A user adopts blocks that another user's chunk writes in the same step, beside decodes that share."""
    tokens = Tokens(1400)
    first, second = [*range(1100)], [*range(1024), *range(1200, 1260)]
    third = [*range(1024), *range(1300, 1330)]
    tables = [[*range(69)], [*range(64), *range(69, 73)], [*range(64), *range(73, 75)]]
    for threads in (1, 2):
        program = Attending(
            tokens.rows(), HEADS, [Q8, replace(Q8, window=300)], threads=threads, num_blocks=75
        )
        outs = program.run(
            (first, 0, tables[0]), (second[1024:], 1024, tables[1]), (third[1024:], 1024, tables[2])
        )
        for text, out in zip((first, second, third), outs, strict=True):
            assert same_bytes(out, expected_of(tokens.chunk(text, len(out)), Q8))
