"""Each way to break the books, and the audit that names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.kv.audit import AuditError
from octavo.kv.block import Block
from octavo.kv.kv_cache import KVCache
from octavo.kv.prefix_index import Namespace
from octavo.scheduler.sequence import Sequence


class Books:
    """Ten blocks of two tokens: three are held by one sequence, four are cached, of which one is half full,
    three are free."""

    def __init__(self) -> None:
        self.cache = KVCache(10, 2)
        self.gone = self._computed("gone", [10, 11, 12, 13, 14, 15])
        self.cached = list(self.gone.block_table.blocks)
        self.cache.free(self.gone)
        half = self._computed("half", [20])
        self.partial = half.block_table.blocks[0]
        self.cache.free(half)
        self.here = self._computed("here", [1, 2, 3, 4, 5])
        self.blocks = self.here.block_table.blocks
        self.cache.audit([self.here])

    def _computed(self, name: str, prompt: list[int]) -> Sequence:
        sequence = Sequence(name, prompt)
        self.cache.allocate(sequence, len(prompt))
        self.cache.register(sequence, len(prompt))
        self.cache.commit()
        sequence.num_computed_tokens = len(prompt)
        return sequence

    @property
    def front(self) -> Block:
        return next(self.cache._pool.free_list())


def lose_a_block(books: Books) -> None:
    block = books.front
    block.older.newer, block.newer.older = block.newer, block.older


def count_a_free_block_twice(books: Books) -> None:
    books.cache._pool.num_free += 1


def take_cached_for_free(books: Books) -> None:
    pool = books.cache._pool
    pool._insert_before(books.front, books.cached[2])
    pool.num_free += 1


def break_a_back_link(books: Books) -> None:
    books.front.newer.older = books.blocks[0]


def close_the_list_to_a_circle(books: Books) -> None:
    books.front.newer.newer = books.front


def forget_a_reference(books: Books) -> None:
    books.blocks[1].ref_count += 1


def free_a_block_that_is_held(books: Books) -> None:
    books.cache._pool.release([books.blocks[2]])


def miscount_shared(books: Books) -> None:
    books.cache._pool.num_shared = 1


def change_an_id(books: Books) -> None:
    books.here.block_table.block_ids[1] = 9


def hold_a_block_twice(books: Books) -> None:
    books.cache._pool.share(books.blocks[0])
    books.here.block_table.append(books.blocks[0])


def lose_a_cached_block(books: Books) -> None:
    node = books.cached[0].node
    assert node is not None
    books.cache._pool.eviction.remove(node)


def lose_a_leaf(books: Books) -> None:
    node = books.cached[2].node
    assert node is not None
    node.ticket = 0


def let_a_root_be_forgotten_before_its_leaf(books: Books) -> None:
    node = books.cached[0].node
    assert node is not None
    eviction = books.cache._pool.eviction
    eviction._push(eviction._account_of[node], node)


def let_a_root_go_before_its_leaf(books: Books) -> None:
    books.cache._pool.share(books.cached[2])
    books.here.block_table.append(books.cached[2])


def let_a_node_go_astray(books: Books) -> None:
    node = books.cached[2].node
    assert node is not None
    assert node.parent is not None
    node.parent.children.clear()


def leave_an_empty_bucket(books: Books) -> None:
    node = books.cached[2].node
    assert node is not None
    node.children[5] = []


def swap_two_blocks(books: Books) -> None:
    first, second = books.blocks[0].node, books.blocks[1].node
    assert first is not None
    assert second is not None
    first.block, second.block = second.block, first.block


def change_the_tokens_of_a_node(books: Books) -> None:
    node = books.cached[1].node
    assert node is not None
    node.tokens = (99, 13)


def change_the_salt_of_a_node(books: Books) -> None:
    node = books.cached[1].node
    assert node is not None
    node.namespace = Namespace(salt="yours")


def leave_a_node_pending(books: Books) -> None:
    node = books.blocks[1].node
    assert node is not None
    node.pending = True


def change_a_token_of_a_sequence(books: Books) -> None:
    books.here.token_ids[3] = 99


def change_the_order_of_a_sequence(books: Books) -> None:
    table = books.here.block_table
    table.replace(0, table.replace(1, table.blocks[0]))


def claim_more_than_is_held(books: Books) -> None:
    books.here.token_ids.extend([6, 7])
    books.here.num_computed_tokens = 7


def lose_the_name_of_a_full_block(books: Books) -> None:
    node = books.blocks[1].node
    assert node is not None
    books.cache._index.forget(node)


def write_on_a_partial_block(books: Books) -> None:
    node = books.partial.node
    assert node is not None
    books.cache._pool.share(books.partial)
    books.here.block_table.append(books.partial)


def let_a_partial_block_go_on(books: Books) -> None:
    node = books.partial.node
    assert node is not None
    node.tokens = (20, 21, 22)


def count_pages_twice(books: Books) -> None:
    books.cache._pool.num_touched += 1


def forget_that_a_block_was_touched(books: Books) -> None:
    books.blocks[0].touched = False
    books.cache._pool.num_touched -= 1


def put_pages_behind_none(books: Books) -> None:
    pool = books.cache._pool
    last = list(pool.free_list())[-1]
    last.touched = True
    pool.num_touched += 1


def retire_a_block_and_keep_it(books: Books) -> None:
    pool = books.cache._pool
    pool._retired.append(books.front)


def retire_a_block_twice(books: Books) -> None:
    pool = books.cache._pool
    books.cache.pages.resize(9)
    books.cache.pages.retire(1)
    pool._retired.append(pool._retired[0])


def retire_a_block_with_pages(books: Books) -> None:
    pool = books.cache._pool
    books.cache.pages.resize(9)
    books.cache.pages.retire(1)
    pool._retired[0].touched = True


def lose_a_block_that_left(books: Books) -> None:
    pool = books.cache._pool
    books.cache.pages.resize(9)
    books.cache.pages.retire(1)
    pool.num_blocks -= 1


def forget_who_writes(books: Books) -> None:
    books.cache._writes_after.clear()


def mistake_what_is_written_after(books: Books) -> None:
    books.here.token_ids.extend([6, 7])
    books.cache.allocate(books.here, 7)
    books.here.num_computed_tokens = 7


FAULTS: list[tuple[Callable[[Books], None], str]] = [
    (lose_a_block, "does not point back|not on the free list"),
    (count_a_free_block_twice, "4 free blocks counted, 3 listed"),
    (take_cached_for_free, "content known.* is on the free list"),
    (break_a_back_link, "does not point back"),
    (close_the_list_to_a_circle, "circle"),
    (forget_a_reference, "ref_count=2.* has 1 references from sequences"),
    (free_a_block_that_is_held, "ref_count=0.* has 1 references from sequences"),
    (miscount_shared, "1 shared blocks counted, there are 0"),
    (change_an_id, "are not the ids of its blocks"),
    (hold_a_block_twice, "holds a block twice"),
    (lose_a_cached_block, r"3 free \+ 3 cached \+ 3 used blocks are not 10"),
    (lose_a_leaf, "2 cached leaves, 1 can be chosen"),
    (let_a_root_be_forgotten_before_its_leaf, "2 cached leaves, 3 can be chosen"),
    (let_a_root_go_before_its_leaf, "is in use, and .* is not"),
    (let_a_node_go_astray, "not found"),
    (leave_an_empty_bucket, "empty bucket"),
    (swap_two_blocks, "do not point at each other"),
    (change_the_tokens_of_a_node, "filed under another first token"),
    (change_the_salt_of_a_node, "salt='yours'\\) is found in Namespace"),
    (leave_a_node_pending, "marked pending"),
    (change_a_token_of_a_sequence, "block 1 stands for other tokens"),
    (change_the_order_of_a_sequence, "block 0 stands for other tokens"),
    (claim_more_than_is_held, "7 tokens computed, 7 known, 3 blocks held"),
    (lose_the_name_of_a_full_block, "block 1 cannot be found by others"),
    (write_on_a_partial_block, "found with 1 tokens, and in a block table"),
    (let_a_partial_block_go_on, "stands for 3 tokens and is no leaf of committed ones"),
    (count_pages_twice, "8 blocks with pages counted, there are 7"),
    (forget_that_a_block_was_touched, "its pages are said to be untouched"),
    (put_pages_behind_none, "has pages and would be taken after"),
    (retire_a_block_and_keep_it, "is on the free list"),
    (retire_a_block_twice, "left the pool twice"),
    (retire_a_block_with_pages, "has left the pool and still holds something"),
    (lose_a_block_that_left, "used blocks are not 8, or these are not all but 1 of 10"),
    (forget_who_writes, "who writes after which block do not agree"),
    (mistake_what_is_written_after, "block 2 cannot be found|said to write after another block"),
]


@pytest.mark.parametrize(("fault", "named"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_audit_names_what_is_wrong(fault: Callable[[Books], None], named: str) -> None:
    books = Books()
    fault(books)
    with pytest.raises(AuditError, match=named):
        books.cache.audit([books.here])


def test_a_sequence_that_nobody_mentions_is_a_leak() -> None:
    books = Books()
    with pytest.raises(AuditError, match="has 0 references from sequences"):
        books.cache.audit([])


def test_a_block_that_two_are_writing_is_named() -> None:
    books = Books()
    other = Sequence("other", [1, 2, 3, 4, 9])
    for block in books.blocks:
        books.cache._pool.share(block)
        other.block_table.append(block)
    other.num_computed_tokens = 5
    with pytest.raises(AuditError, match="is written, and is in 2 block tables"):
        books.cache.audit([books.here, other])
