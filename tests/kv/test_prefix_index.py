from __future__ import annotations

import pytest

from octavo.kv.block import Block
from octavo.kv.prefix_index import COMMON, Namespace, PrefixIndex


def held(block_id: int) -> Block:
    block = Block(block_id)
    block.ref_count = 1
    return block


class Collides(int):
    """A token whose hash is that of every other one."""

    def __hash__(self) -> int:
        return 1


def test_a_block_is_found_after_its_parent_and_nowhere_else() -> None:
    index = PrefixIndex()
    first = index.insert(None, (1, 2), COMMON, Block(0))
    second = index.insert(first, (3, 4), COMMON, Block(1))
    root = index.root(COMMON)
    assert root is not None
    assert root.child((1, 2)) is first
    assert first.child((3, 4)) is second
    assert root.child((3, 4)) is None
    assert first.child((3, 5)) is None


def test_the_same_tokens_under_another_salt_are_another_tree() -> None:
    index = PrefixIndex()
    index.insert(None, (1, 2), Namespace(salt="mine"), Block(0))
    assert index.root(Namespace(salt="yours")) is None
    yours = index.insert(None, (1, 2), Namespace(salt="yours"), Block(1))
    mine = index.root(Namespace(salt="mine"))
    assert mine is not None
    assert mine.child((1, 2)) is not yours


def test_equal_hashes_of_unequal_tokens_do_not_meet() -> None:
    index = PrefixIndex()
    mine = (Collides(1), Collides(2))
    yours = (Collides(1), Collides(3))
    assert hash(mine) == hash(yours)
    node = index.insert(None, mine, COMMON, Block(0))
    root = index.root(COMMON)
    assert root is not None
    assert root.child(yours) is None
    assert root.child(mine) is node


def test_a_block_is_pending_until_the_step_commits() -> None:
    index = PrefixIndex()
    node = index.insert(None, (1, 2), COMMON, Block(0))
    assert node.pending
    assert index.pending == (node,)
    index.commit()
    assert not node.pending
    assert index.pending == ()


def test_rollback_forgets_what_the_step_registered_and_nothing_older() -> None:
    index = PrefixIndex()
    blocks = [held(number) for number in range(4)]
    old = index.insert(None, (1, 2), COMMON, blocks[0])
    index.commit()
    young = index.insert(old, (3, 4), COMMON, blocks[1])
    index.insert(young, (5, 6), COMMON, blocks[2])
    index.insert(None, (7, 8), Namespace(salt="other"), blocks[3])
    index.rollback()
    assert [block.node for block in blocks] == [old, None, None, None]
    assert old.child((3, 4)) is None
    assert index.root(Namespace(salt="other")) is None
    assert index.root(COMMON) is not None
    assert index.pending == ()


def test_a_block_of_a_running_step_is_not_forgotten() -> None:
    index = PrefixIndex()
    node = index.insert(None, (1, 2), COMMON, held(0))
    with pytest.raises(AssertionError, match="before its step has ended"):
        index.forget(node)
    returned = Block(1)
    index.insert(None, (3, 4), COMMON, returned)
    with pytest.raises(AssertionError, match="before its step had ended"):
        index.rollback()


def test_a_root_that_was_looked_up_too_early_is_not_written_to() -> None:
    index = PrefixIndex()
    only = index.insert(None, (1, 2), COMMON, Block(0))
    index.commit()
    stale = index.root(COMMON)
    index.forget(only)
    node = index.insert(stale, (3, 4), COMMON, Block(1))
    root = index.root(COMMON)
    assert root is not None
    assert root.child((3, 4)) is node


def test_a_salt_leaves_nothing_behind_when_its_last_block_is_forgotten() -> None:
    index = PrefixIndex()
    for number in range(100):
        node = index.insert(None, (1, number), Namespace(salt=f"{number}"), Block(number))
        index.commit()
        index.forget(node)
    assert list(index.roots()) == []


def test_a_block_that_others_continue_is_never_forgotten_first() -> None:
    index = PrefixIndex()
    parent = index.insert(None, (1, 2), COMMON, Block(0))
    index.insert(parent, (3, 4), COMMON, Block(1))
    index.commit()
    with pytest.raises(AssertionError, match="before the blocks that continue it"):
        index.forget(parent)
