"""Which blocks lose their pages, in which order, and a pool that grows and shrinks."""

from __future__ import annotations

import pytest

from octavo.kv.block import Block
from octavo.kv.kv_cache import KVCache
from octavo.scheduler.sequence import Sequence

SIZE = 2


class Home:
    """A cache whose requests compute their prompt of so many blocks and hold it until they leave."""

    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        self.cache = KVCache(num_blocks, SIZE, enable_prefix_caching=caching)
        self.here: list[Sequence] = []
        self._next = 0

    def come(self, num_blocks: int) -> Sequence:
        prompt = list(range(self._next, self._next + num_blocks * SIZE))
        self._next += len(prompt)
        sequence = Sequence("", prompt)
        self.cache.allocate(sequence, len(prompt))
        self.cache.register(sequence, len(prompt))
        self.cache.commit()
        sequence.num_computed_tokens = len(prompt)
        self.here.append(sequence)
        return sequence

    def leave(self, sequence: Sequence) -> list[int]:
        """Returns: the ids of its blocks, in order."""
        ids = list(sequence.block_table.block_ids)
        self.cache.free(sequence)
        self.here.remove(sequence)
        return ids

    def counts(self) -> tuple[int, int, int]:
        self.cache.audit(self.here)
        return self.cache.num_used, self.cache.num_cached, self.cache.num_free


def test_a_fresh_pool_has_nothing_to_give_back() -> None:
    home = Home(8)
    pages = home.cache.pages
    assert (pages.num_unused, pages.num_cold) == (0, 0)
    assert pages.give_back_unused(8) == pages.give_back_cached(8) == []
    assert home.counts() == (0, 0, 8)


def test_free_blocks_give_their_pages_back_once() -> None:
    home = Home(8, caching=False)
    ids = home.leave(home.come(3))
    pages = home.cache.pages
    assert (pages.num_unused, pages.num_cold) == (3, 3)
    assert len(pages.give_back_unused(2)) == 2
    assert pages.num_unused == 1
    assert set(pages.give_back_unused(8)) < set(ids)
    assert pages.give_back_unused(8) == []
    assert home.counts() == (0, 0, 8)


def test_blocks_with_pages_are_handed_out_before_those_whose_pages_were_given_back() -> None:
    home = Home(6, caching=False)
    gone = set(home.leave(home.come(2)))
    assert set(home.cache.pages.give_back_unused(2)) == gone
    kept = home.leave(home.come(4))
    assert not gone & set(kept), "never touched ones are no worse than these, and come first"
    first = home.come(4)
    assert set(first.block_table.block_ids) == set(kept)
    assert set(home.come(2).block_table.block_ids) == gone


def test_cached_blocks_are_given_back_from_the_end_of_the_coldest_conversation() -> None:
    home = Home(10)
    cold, warm, used = home.come(3), home.come(3), home.come(2)
    cold_ids, warm_ids = home.leave(cold), home.leave(warm)
    pages = home.cache.pages
    assert pages.num_cold == 6
    assert pages.give_back_cached(2) == [cold_ids[2], cold_ids[1]]
    assert home.counts() == (2, 4, 4)
    assert pages.give_back_cached(100) == [cold_ids[0], *reversed(warm_ids)]
    assert home.counts() == (2, 0, 8)
    assert used.num_computed_tokens == 2 * SIZE


def test_what_was_forgotten_is_what_the_pool_would_have_forgotten() -> None:
    given, taken = Home(9), Home(9)
    for home in (given, taken):
        for length in (2, 3, 1, 2):
            home.leave(home.come(length))
    wanted: list[int] = []
    while taken.cache.num_cached:
        before = {block for block in taken.cache._pool.blocks() if block.node is not None}
        taken.cache._pool.take(taken.cache.num_free + 1)
        wanted += [block.block_id for block in before if block.node is None]
    assert given.cache.pages.give_back_cached(8) == wanted


def test_giving_back_does_not_make_content_older() -> None:
    home = Home(8)
    home.leave(home.come(4))
    clock = home.cache._pool.eviction.clock
    home.cache.pages.give_back_cached(2)
    home.cache.pages.give_back_unused(2)
    home.cache.pages.resize(3)
    home.cache.pages.retire(5)
    assert home.cache._pool.eviction.clock == clock


def test_a_pool_shrinks_by_what_is_free_then_by_what_is_cold() -> None:
    home = Home(10)
    ids = home.leave(home.come(4))
    home.come(2)
    pages = home.cache.pages
    pages.resize(4)
    assert (home.cache.num_blocks, home.cache.target_blocks, pages.num_to_retire) == (10, 4, 6)
    assert pages.retire(4) == [], "free blocks that were never touched have no pages to release"
    assert home.counts() == (2, 4, 0)
    assert pages.retire(100) == [ids[3], ids[2]]
    assert (home.counts(), home.cache.num_blocks, pages.num_to_retire) == ((2, 2, 0), 4, 0)
    assert home.cache.capacity_tokens == 4 * SIZE


def test_blocks_in_use_leave_when_they_are_returned() -> None:
    home = Home(6, caching=False)
    long, short = home.come(4), home.come(2)
    pages = home.cache.pages
    pages.resize(2)
    assert pages.retire(10) == []
    assert (home.counts(), home.cache.num_blocks) == ((6, 0, 0), 6)
    home.leave(short)
    assert len(pages.retire(10)) == 2
    assert (home.counts(), home.cache.num_blocks) == ((4, 0, 0), 4)
    home.leave(long)
    assert len(pages.retire(10)) == 2
    assert (home.counts(), home.cache.num_blocks) == ((0, 0, 2), 2)


def test_a_pool_grows_by_its_retired_blocks_and_then_by_new_ones() -> None:
    home = Home(4)
    pages = home.cache.pages
    pages.resize(1)
    pages.retire(10)
    retired = {block.block_id for block in home.cache._pool.retired()}
    assert len(retired) == 3
    pages.resize(6)
    assert (home.counts(), home.cache.num_blocks, pages.num_extents) == ((0, 0, 6), 6, 6)
    assert set(home.come(6).block_table.block_ids) == set(range(6))
    assert pages.num_to_retire == 0


def test_growing_while_blocks_are_still_to_leave_keeps_them() -> None:
    home = Home(6)
    home.come(6)
    pages = home.cache.pages
    pages.resize(2)
    pages.resize(5)
    home.leave(home.here[0])
    pages.retire(10)
    assert (home.counts(), home.cache.num_blocks) == ((0, 5, 0), 5)
    pages.resize(7)
    assert (home.counts(), home.cache.num_blocks, pages.num_extents) == ((0, 5, 2), 7, 7)


def test_the_shares_of_owners_follow_the_size_of_the_pool() -> None:
    home = Home(10)
    home.cache.pages.resize(4)
    home.cache.pages.retire(10)
    assert home.cache._pool.eviction.num_blocks == 4
    home.cache.pages.resize(30)
    assert home.cache._pool.eviction.num_blocks == 30


def test_a_block_that_is_shared_or_holds_content_is_never_put_back() -> None:
    home = Home(4)
    sequence = home.come(2)
    block: Block = sequence.block_table.blocks[0]
    with pytest.raises(AssertionError, match="content to lose"):
        home.cache._pool.put_back([block])
    home.cache._pool.share(block)
    with pytest.raises(AssertionError, match="not in one hand"):
        home.cache._pool.retire([block])
