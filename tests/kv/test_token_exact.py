"""Hits are exact to the token: the start of a block that others have is copied, or written on."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kv.block import Block
from octavo.kv.kv_cache import BlockCopy, KVCache
from octavo.kv.prefix_index import COMMON, Namespace, PrefixIndex, common_start
from octavo.scheduler.sequence import Sequence
from paged_model import PagedServer, solo

SIZE = 4


class Steps:
    """A cache whose sequences compute all they know in one step each."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.cache = KVCache(num_blocks, SIZE)
        self.here: list[Sequence] = []

    def plan(self, tokens: Seq[int], salt: str = "") -> Sequence:
        sequence = Sequence(str(len(self.here)), list(tokens), namespace=Namespace(salt=salt))
        self.here.append(sequence)
        self.cache.adopt(sequence)
        self.cache.allocate(sequence, sequence.num_tokens)
        self.cache.register(sequence, sequence.num_tokens)
        self.cache.audit(self.here)
        return sequence

    def commit(self) -> None:
        self.cache.commit()
        for sequence in self.here:
            sequence.num_computed_tokens = sequence.num_tokens
        self.cache.audit(self.here)

    def compute(self, tokens: Seq[int], salt: str = "") -> Sequence:
        sequence = self.plan(tokens, salt)
        self.commit()
        return sequence

    def leave(self, sequence: Sequence) -> None:
        self.cache.free(sequence)
        self.here.remove(sequence)
        self.cache.audit(self.here)


def ids(sequence: Sequence) -> list[int]:
    return list(sequence.block_table.block_ids)


def test_what_a_running_sequence_has_of_a_block_is_copied() -> None:
    steps = Steps()
    first = steps.compute([1, 2, 3, 4, 5, 6])
    second = steps.plan([1, 2, 3, 4, 5, 9])
    assert second.num_cached_tokens == 5
    assert ids(second)[0] == ids(first)[0]
    assert steps.cache.copies == (BlockCopy(ids(first)[1], ids(second)[1]),)
    steps.commit()
    assert not steps.cache.copies
    # Each goes on in its own.
    assert first.block_table.blocks[1].ref_count == second.block_table.blocks[1].ref_count == 1


def test_the_start_of_a_full_block_is_copied_and_the_block_stays_as_it_is() -> None:
    steps = Steps()
    first = steps.compute([1, 2, 3, 4, 5, 6, 7, 8])
    second = steps.compute([1, 2, 3, 4, 5, 6, 9])
    assert second.num_cached_tokens == 6
    assert ids(second)[1] != ids(first)[1]
    third = steps.compute([1, 2, 3, 4, 5, 6, 7, 8, 1])
    assert third.num_cached_tokens == 8
    assert ids(third)[:2] == ids(first)


def test_of_several_starts_the_longest_is_taken() -> None:
    steps = Steps()
    for tokens in ([1, 2, 0, 0], [1, 2, 3, 0], [1, 0, 0, 0], [1, 2, 4, 0]):
        steps.leave(steps.compute(tokens))
    steps.compute([1, 2, 3, 4])
    assert steps.here[-1].num_cached_tokens == 3
    steps.compute([1, 9])
    assert steps.here[-1].num_cached_tokens == 1
    steps.compute([2, 9])
    assert steps.here[-1].num_cached_tokens == 0


def test_a_half_block_that_was_left_is_written_on_without_a_copy() -> None:
    steps = Steps()
    first = steps.compute([1, 2, 3, 4, 5, 6])
    left = ids(first)
    steps.leave(first)
    assert (steps.cache.num_cached, steps.cache.num_used) == (2, 0)
    second = steps.plan([1, 2, 3, 4, 5, 6, 7])
    assert second.num_cached_tokens == 6
    assert ids(second) == left
    assert not steps.cache.copies
    # Its content is nobody's to find any more, until somebody has gone on.
    third = steps.plan([1, 2, 3, 4, 5, 6, 8])
    assert third.num_cached_tokens == 4
    steps.commit()
    steps.compute([1, 2, 3, 4, 5, 6, 7, 9])
    assert steps.here[-1].num_cached_tokens == 7


def test_a_half_block_of_which_only_a_part_fits_is_copied() -> None:
    steps = Steps()
    first = steps.compute([1, 2, 3])
    left = ids(first)
    steps.leave(first)
    second = steps.plan([1, 2, 9])
    assert second.num_cached_tokens == 2
    assert steps.cache.copies == (BlockCopy(left[0], ids(second)[0]),)


def test_what_is_known_longer_already_is_not_kept_twice() -> None:
    steps = Steps()
    long, short = steps.compute([1, 2, 3]), steps.compute([1, 2])
    steps.leave(long)
    steps.leave(short)
    assert (steps.cache.num_cached, steps.cache.num_free) == (1, 99)


def test_what_this_step_computes_is_not_copied_before_it_is_there() -> None:
    steps = Steps()
    first = steps.plan([1, 2, 3, 4, 5, 6])
    second = steps.plan([1, 2, 3, 4, 5, 9])
    assert second.num_cached_tokens == 4
    assert not steps.cache.copies
    assert ids(first)[1] != ids(second)[1]


def test_another_salt_copies_nothing() -> None:
    steps = Steps()
    steps.compute([1, 2, 3], salt="mine")
    steps.leave(steps.compute([1, 2, 3, 4, 5], salt="mine"))
    assert steps.compute([1, 2, 3, 9], salt="yours").num_cached_tokens == 0
    assert steps.compute([1, 2, 3, 9], salt="mine").num_cached_tokens == 3


def test_what_is_copied_from_is_not_forgotten_before_the_step_ends() -> None:
    """Three blocks: one to copy from, which is the coldest, one for the copy, and one more."""
    steps = Steps(3)
    steps.leave(steps.compute([1, 2, 3, 4]))
    second = steps.plan([1, 2, 9])
    assert second.num_cached_tokens == 2
    assert steps.cache.num_available == 1
    steps.plan([7, 7, 7])
    assert steps.cache.num_available == 0
    steps.commit()
    assert steps.cache.num_available == 1


def test_without_a_block_for_the_copy_the_tokens_are_computed() -> None:
    steps = Steps(1)
    steps.leave(steps.compute([1, 2, 3, 4]))
    second = steps.plan([1, 2, 9])
    assert second.num_cached_tokens == 0
    steps.commit()
    assert steps.cache.num_cached == 0


@pytest.mark.parametrize("gone", [False, True])
def test_a_failed_step_leaves_no_copy_and_counts_none(gone: bool) -> None:
    steps = Steps()
    first = steps.compute([1, 2, 3, 4, 5, 6, 7])
    if gone:
        steps.leave(first)
    second = steps.plan([1, 2, 3, 4, 5, 9])
    assert second.num_computed_tokens == second.num_cached_tokens == 5
    steps.cache.rollback()
    steps.cache.audit(steps.here)
    assert second.num_computed_tokens == second.num_cached_tokens == steps.cache.prefix_hits == 4
    assert not steps.cache.copies


def test_a_failed_step_keeps_what_was_there_before_it() -> None:
    """A half block that was taken over holds committed tokens, whatever becomes of the step."""
    steps = Steps()
    steps.leave(steps.compute([1, 2, 3, 4, 5, 6, 7]))
    second = steps.plan([1, 2, 3, 4, 5, 6, 7, 9, 9])
    steps.cache.rollback()
    steps.cache.audit(steps.here)
    assert second.num_computed_tokens == second.num_cached_tokens == steps.cache.prefix_hits == 7


def test_blocks_that_are_missing_count_the_one_that_is_copied_from() -> None:
    steps = Steps()
    steps.leave(steps.compute([1, 2, 3, 4, 5, 6, 7, 8]))
    new = Sequence("new", [1, 2, 3, 4, 5, 9])
    found = steps.cache.find(new)
    assert (len(found.nodes), found.num_more, found.end) == (1, 1, 5)
    # Two of its own leave the free list, and one stands still.
    assert steps.cache.blocks_missing(new, found) == 3
    before = steps.cache.num_available
    steps.cache.adopt(new, found)
    assert before - steps.cache.num_available == 3


class CountsComparisons(int):
    """A token that says how often it was compared with another."""

    count = 0

    def __eq__(self, other: object) -> bool:
        CountsComparisons.count += 1
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        CountsComparisons.count += 1
        return int(self) < int(other)

    __hash__ = int.__hash__


def test_a_thousand_siblings_are_not_scanned() -> None:
    index = PrefixIndex()
    for number in range(1000):
        index.insert(None, (1, number, 0, 0), COMMON, Block(number))
    index.commit()
    root = index.root(COMMON)
    assert root is not None
    CountsComparisons.count = 0
    wanted: Any = tuple(CountsComparisons(token) for token in (1, 500, 0, 7))
    assert root.longest_start(wanted).num_tokens == 3
    assert root.child(wanted) is None
    assert CountsComparisons.count < 200


words = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


@given(st.lists(words, max_size=30, unique=True), st.sets(st.integers(0, 29)), words)
def test_the_longest_start_is_the_longest(
    siblings: list[tuple[int, ...]], pending: set[int], wanted: tuple[int, ...]
) -> None:
    index = PrefixIndex()
    for number, tokens in enumerate(siblings):
        index.insert(None, tokens, COMMON, Block(number))
    index.commit()
    root = index.root(COMMON)
    for number, node in enumerate(
        [child for alike in root.children.values() for child in alike] if root else []
    ):
        node.pending = number in pending
    committed = [] if root is None else [
        child for alike in root.children.values() for child in alike if not child.pending
    ]  # fmt: skip
    start = root.longest_start(wanted) if root else None
    longest = max((common_start(node.tokens, wanted) for node in committed), default=0)
    if longest == 0:
        assert start is None or start == (None, 0)
    else:
        assert start is not None
        assert start.node in committed
        assert start.num_tokens == longest == common_start(start.node.tokens, wanted)


@pytest.mark.parametrize("changed", [0, 20, 100, 580, 598])
def test_t07_a_changing_line_costs_what_stands_behind_it(changed: int) -> None:
    """One token of 600 is another every time: what stands before it is found, exactly."""
    server = PagedServer(400, 16)
    for number in range(3):
        prompt = list(range(600))
        prompt[changed] = 1000 + number
        sequence = server.add(f"{number}", prompt, 4)
        server.run()
        assert sequence.num_cached_tokens == (changed if number else 0)
        assert sequence.token_ids == solo(prompt, 4)


def test_every_turn_of_a_chat_computes_only_its_new_text() -> None:
    server = PagedServer(200, 16)
    history = list(range(25))
    for turn in range(12):
        sequence = server.add(f"{turn}", history, 11)
        before = server.model.num_computed
        server.run()
        new = 25 if turn == 0 else 7 + 1  # the last token of an answer has not been computed
        assert server.model.num_computed - before == new + 10
        assert sequence.num_cached_tokens == len(history) - new
        history = [*sequence.token_ids, *range(1000 + 10 * turn, 1007 + 10 * turn)]
    assert server.model.num_copies == 0
    # One conversation, every token of it once.
    assert server.cache.num_cached == server.cache.blocks_for(len(history) - 8)


def test_the_half_block_that_a_pause_took_is_written_on() -> None:
    steps = Steps()
    sequence = steps.compute([1, 2, 3, 4, 5, 6, 7])
    held = ids(sequence)
    steps.cache.free_tail(sequence, 1)
    assert sequence.num_computed_tokens == 4
    sequence.append(8)
    assert steps.cache.adopt(sequence) == 3
    assert ids(sequence) == held
    assert not steps.cache.copies
    steps.cache.audit(steps.here)
