"""The proof that no block is lost, counted twice, or found under a wrong name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from octavo.kv.block import Block

if TYPE_CHECKING:
    from octavo.kv.kv_cache import TokenSequence
    from octavo.kv.pool import BlockPool
    from octavo.kv.prefix_index import PrefixIndex, PrefixNode


class AuditError(Exception):
    """The books of the cache do not add up; the message names the block or sequence and what is wrong."""


def audit(
    *,
    pool: BlockPool,
    index: PrefixIndex,
    block_size: int,
    chained: bool,
    sequences: list[TokenSequence],
    pinned: Iterable[Block],
) -> None:
    """Prove that free + used + cached == total, that references are right and nobody writes what another one
    holds, that index and chains agree, that what may be forgotten is what nobody refers to, from its leaves,
    and that pages are where the pool believes them.

    Args:
        chained: whether full computed blocks must be in the index.
        sequences: everyone who holds blocks.
        pinned: blocks with a reference that is in no table, once for each.
    Raises: AuditError at the first thing that is wrong.
    Cost: O(num_blocks + tokens of all sequences). For idle moments, and for each step under test.
    """
    _audit_free_list(pool)
    _audit_pages(pool)
    _audit_references(pool, sequences, pinned)
    held = {block for sequence in sequences for block in sequence.block_table.blocks}
    _audit_index(pool, index, block_size, held)
    _audit_cached(pool)
    if chained:
        for sequence in sequences:
            _audit_chain(sequence, index, block_size)


def _audit_free_list(pool: BlockPool) -> None:
    listed = list(pool.free_list())
    if len(set(listed)) < len(listed):
        raise AuditError("the free list runs in a circle or names a block twice")
    for older, newer in pairwise(listed):
        if newer.older is not older:
            raise AuditError(f"{newer} does not point back at {older}")
    free, retired = set(listed), set(pool.retired())
    for block in pool.blocks():
        if (block.ref_count == 0 and block.node is None and block not in retired) != (block in free):
            raise AuditError(f"{block} is {'on' if block in free else 'not on'} the free list")
    if pool.num_free != len(listed):
        raise AuditError(f"{pool.num_free} free blocks counted, {len(listed)} listed")


def _audit_cached(pool: BlockPool) -> None:
    """What may be forgotten is what nobody refers to, and of that the leaves can be chosen."""
    cached = {block.node for block in pool.blocks() if block.ref_count == 0 and block.node is not None}
    nodes = list(pool.eviction.nodes())
    if set(nodes) != cached:
        raise AuditError(f"{len(cached)} blocks are cached, {len(nodes)} are known to the order of eviction")
    leaves = list(pool.eviction.leaves())
    wanted = {node for node in nodes if not node.children}
    if set(leaves) != wanted or len(leaves) != len(wanted):
        raise AuditError(f"{len(wanted)} cached leaves, {len(leaves)} can be chosen to be forgotten")


def _audit_pages(pool: BlockPool) -> None:
    """What holds something has pages, what has left has none; free blocks without pages are taken last."""
    retired = pool.retired()
    if len(set(retired)) < len(retired):
        raise AuditError("a block has left the pool twice")
    for block in retired:
        if block.ref_count or block.node is not None or block.touched:
            raise AuditError(f"{block} has left the pool and still holds something")
    for block in pool.blocks():
        if not block.touched and (block.ref_count or block.node is not None):
            raise AuditError(f"{block} holds something, and its pages are said to be untouched")
    num_touched = sum(block.touched for block in pool.blocks())
    if pool.num_touched != num_touched:
        raise AuditError(f"{pool.num_touched} blocks with pages counted, there are {num_touched}")
    for block, following in pairwise(pool.free_list()):
        if following.touched and not block.touched:
            raise AuditError(f"{following} has pages and would be taken after {block}, which has none")


def _audit_references(pool: BlockPool, sequences: list[TokenSequence], pinned: Iterable[Block]) -> None:
    held: Counter[Block] = Counter()
    for sequence in sequences:
        table = sequence.block_table
        if [block.block_id for block in table.blocks] != list(table.block_ids):
            raise AuditError(f"{sequence}: block_ids {list(table.block_ids)} are not the ids of its blocks")
        if len(set(table.blocks)) < len(table):
            raise AuditError(f"{sequence} holds a block twice")
        held.update(table.blocks)
    for block, count in held.items():
        # Whoever has a block whose content nobody knows yet is writing it.
        if count > 1 and block.node is None:
            raise AuditError(f"{block} is written, and is in {count} block tables")
    references = held + Counter(pinned)
    blocks = pool.blocks()
    for block in blocks:
        if block.ref_count != references[block]:
            raise AuditError(f"{block} has {references[block]} references from sequences")
    num_used = sum(block.ref_count > 0 for block in blocks)
    num_here = len(blocks) - len(pool.retired())
    if not pool.num_free + pool.num_cached + num_used == num_here == pool.num_blocks:
        raise AuditError(
            f"{pool.num_free} free + {pool.num_cached} cached + {num_used} used blocks "
            f"are not {pool.num_blocks}, or these are not all but {len(pool.retired())} of {len(blocks)}"
        )
    num_shared = sum(block.ref_count > 1 for block in blocks)
    if pool.num_shared != num_shared:
        raise AuditError(f"{pool.num_shared} shared blocks counted, there are {num_shared}")


def _audit_index(pool: BlockPool, index: PrefixIndex, block_size: int, held: set[Block]) -> None:
    nodes: list[PrefixNode] = []
    for namespace, root in index.roots():
        if root.namespace != namespace or root.tokens or root.block is not None:
            raise AuditError(f"the root of {namespace} stands for something else")
        if not root.children:
            raise AuditError(f"the root of {namespace} was left with nothing under it")
        unvisited = [root]
        while unvisited:
            parent = unvisited.pop()
            for child in _audit_children(parent):
                _audit_order(parent, child)
                _audit_partial(child, block_size, held)
                nodes.append(child)
                unvisited.append(child)
    known = {block for block in pool.blocks() if block.node is not None}
    found = {node.block for node in nodes}
    if known != found or len(found) != len(nodes):
        raise AuditError(
            f"{len(known)} blocks of known content, {len(nodes)} nodes for {len(found)} blocks; "
            f"not found: {sorted(block.block_id for block in known - found)}"
        )
    if {node for node in nodes if node.pending} != set(index.pending):
        raise AuditError("the nodes marked pending are not those of this step")


def _audit_children(parent: PrefixNode) -> list[PrefixNode]:
    children = []
    for first, alike in parent.children.items():
        if not alike:
            raise AuditError(f"an empty bucket was left for blocks that begin with token {first}")
        if any(one.tokens >= other.tokens for one, other in pairwise(alike)):
            raise AuditError(f"blocks that begin with token {first} are not in order, or are there twice")
        for node in alike:
            if node.block is None or node.block.node is not node:
                raise AuditError(f"a node and its {node.block} do not point at each other")
            if first != node.tokens[0]:
                raise AuditError(f"{node.block} is filed under another first token than its own")
            if node.parent is not parent:
                raise AuditError(f"{node.block} names another parent than the one it is under")
            if node.namespace != parent.namespace:
                raise AuditError(f"{node.block} of {node.namespace} is found in {parent.namespace}")
            children.append(node)
    return children


def _audit_partial(node: PrefixNode, block_size: int, held: set[Block]) -> None:
    """Whoever writes on a block that is not full makes it unfindable first."""
    if len(node.tokens) == block_size:
        return
    if len(node.tokens) > block_size or node.pending or node.children:
        raise AuditError(
            f"{node.block} stands for {len(node.tokens)} tokens and is no leaf of committed ones"
        )
    if node.block in held:
        raise AuditError(f"{node.block} is found with {len(node.tokens)} tokens, and in a block table")


def _audit_order(parent: PrefixNode, child: PrefixNode) -> None:
    """A block may be relied on, and is referred to, only together with everything before it."""
    if parent.block is None or child.block is None:
        return
    if parent.pending and not child.pending:
        raise AuditError(f"{child.block} is committed before {parent.block}, which it continues")
    if parent.block.ref_count == 0 and child.block.ref_count > 0:
        raise AuditError(f"{child.block} is in use, and {parent.block}, which it continues, is not")


def _audit_chain(sequence: TokenSequence, index: PrefixIndex, block_size: int) -> None:
    table, computed = sequence.block_table, sequence.num_computed_tokens
    if not computed <= min(len(table) * block_size, len(sequence.token_ids)):
        raise AuditError(
            f"{sequence}: {computed} tokens computed, {len(sequence.token_ids)} known, "
            f"{len(table)} blocks held"
        )
    parent = index.root(sequence.namespace)
    for position in range(computed // block_size):
        node = table.blocks[position].node
        if node is None:
            raise AuditError(f"{sequence}: its full block {position} cannot be found by others")
        if node.tokens != tuple(sequence.token_ids[position * block_size : (position + 1) * block_size]):
            raise AuditError(f"{sequence}: its block {position} stands for other tokens")
        if node.parent is not parent:
            raise AuditError(f"{sequence}: its block {position} continues another chain")
        parent = node
