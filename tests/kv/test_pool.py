from __future__ import annotations

import pytest

from octavo.kv.audit import audit
from octavo.kv.block import Block
from octavo.kv.pool import BlockPool, PoolExhausted
from octavo.kv.prefix_index import COMMON, PrefixIndex


class Books:
    """A pool with its index, audited against the blocks a test says it holds."""

    def __init__(self, num_blocks: int, block_order: list[int] | None = None) -> None:
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, forget=self.index.forget, block_order=block_order)

    def make_known(self, block: Block, first_token: int) -> None:
        self.index.insert(None, (first_token, 0), COMMON, block)
        self.index.commit()

    def check(self, *held: Block) -> None:
        audit(pool=self.pool, index=self.index, block_size=2, chained=True, sequences=[], pinned=held)


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_blocks_are_handed_out_in_the_order_that_was_asked_for() -> None:
    books = Books(5, block_order=[3, 1, 4, 0, 2])
    assert ids(books.pool.take(3)) == [3, 1, 4]
    assert ids(books.pool.take(2)) == [0, 2]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3]])
def test_an_order_that_is_not_a_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="from 0 to 2"):
        Books(3, block_order=order)


def test_asking_for_too_many_takes_nothing_and_says_both_numbers() -> None:
    books = Books(4)
    held = books.pool.take(3)
    with pytest.raises(PoolExhausted) as failure:
        books.pool.take(2)
    assert (failure.value.needed, failure.value.available) == (2, 1)
    assert books.pool.num_available == 1
    books.check(*held)


def test_a_block_without_content_is_used_again_before_untouched_ones() -> None:
    books = Books(4)
    block = books.pool.take(2)[1]
    books.pool.release([block])
    assert books.pool.take(1) == [block]


def test_known_content_outlives_its_last_reference_until_the_pool_needs_the_block() -> None:
    books = Books(2)
    one, other = books.pool.take(2)
    books.make_known(one, 1)
    books.pool.release([one])
    assert (books.pool.num_free, books.pool.num_cached, books.pool.num_used) == (0, 1, 1)
    assert one.node is not None

    assert books.pool.take(1) == [one]
    assert one.node is None
    assert books.index.root(COMMON) is None
    books.check(one, other)


def test_the_coldest_content_is_forgotten_first() -> None:
    books = Books(3)
    blocks = books.pool.take(3)
    for number, block in enumerate(blocks):
        books.make_known(block, number)
    books.pool.release([blocks[1], blocks[2], blocks[0]])
    # Using a block makes it warm again.
    books.pool.share(blocks[1])
    books.pool.release([blocks[1]])
    assert books.pool.take(3) == [blocks[2], blocks[0], blocks[1]]


def test_free_blocks_are_taken_before_any_content_is_forgotten() -> None:
    books = Books(4)
    known, unknown = books.pool.take(2)
    books.make_known(known, 1)
    books.pool.release([known, unknown])
    taken = books.pool.take(3)
    assert known not in taken
    books.check(*taken)


def test_a_shared_block_is_counted_once_and_stays_until_the_last_reference_goes() -> None:
    books = Books(2)
    (block,) = books.pool.take(1)
    books.make_known(block, 1)
    books.pool.share(block)
    books.pool.share(block)
    assert (books.pool.num_used, books.pool.num_shared) == (1, 1)
    books.check(block, block, block)
    books.pool.release([block, block])
    assert (books.pool.num_used, books.pool.num_shared) == (1, 0)
    books.check(block)


def test_releasing_once_too_often_is_a_broken_invariant() -> None:
    books = Books(2)
    (block,) = books.pool.take(1)
    books.pool.release([block])
    with pytest.raises(AssertionError, match="once too often"):
        books.pool.release([block])


def test_a_block_of_unknown_content_cannot_be_shared_from_the_free_list() -> None:
    books = Books(2)
    (block,) = books.pool.take(1)
    books.pool.release([block])
    with pytest.raises(AssertionError, match="no content"):
        books.pool.share(block)
