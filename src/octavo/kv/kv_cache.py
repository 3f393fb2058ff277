"""The cache as the scheduler sees it: sequences hold blocks, find known ones, and give them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from octavo.kv.audit import audit
from octavo.kv.block import Block
from octavo.kv.block_table import BlockTable
from octavo.kv.pool import BlockPool
from octavo.kv.prefix_index import PrefixIndex, PrefixNode


class TokenSequence(Protocol):
    """What the cache reads and writes of a sequence; `scheduler.Sequence` is one.

        |<------------------------ len(token_ids) ------------------------>|
        |<----- num_computed_tokens ----->|<-- this step -->|              |
        |<------------ block_table: whole blocks ------------->|

    `num_seen_tokens` is the furthest that `num_computed_tokens` has been before a preemption.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_seen_tokens: int
    salt: str
    block_table: BlockTable


class Adoption(NamedTuple):
    """A sequence refers to blocks that another one computes in this very step."""

    sequence: TokenSequence
    keep_blocks: int  # what it held, or adopted, of committed content
    num_counted: int  # prompt tokens counted as cached for the pending part


class Merge(NamedTuple):
    """A sequence computes a block whose content is known already. The known one holds a reference for it."""

    sequence: TokenSequence
    position: int  # in its block table
    known: Block


class KVCache:
    """One pool of blocks and the index of what is in them.

    Life of a block of a sequence, in one step (`adopt` and `allocate`, `register`, then `commit`):

        adopt                     allocate                register              commit
        known blocks are          free or coldest         full ones become      pending ones are content;
        shared, not computed      cached ones are taken   findable, pending     a twin gives way to the first

    Between `register` and `commit` later sequences may adopt what is pending: they come later in the plan,
    and the native step stores keys and values before it attends. `rollback` instead of `commit` undoes the
    pending blocks and shortens every sequence that adopted one. `free_tail` and `free` of a sequence that is
    part of the running step wait until it has ended.

    Invariant between steps, with prefix caching: every full computed block of every sequence is the block of
    its index node. So a sequence holds its whole chain, and continuing it needs no search from the root.

    Args:
        num_blocks, block_size: the pool; `block_size` in tokens.
        enable_prefix_caching: off, nothing is ever registered or found.
        block_order: the order in which untouched blocks are handed out.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        enable_prefix_caching: bool = True,
        block_order: Sequence[int] | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, it must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        # Prompt tokens ever looked for, once a sequence, and those of them that it did not compute itself.
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._index = PrefixIndex()
        self._pool = BlockPool(num_blocks, forget=self._index.forget, block_order=block_order)
        self._adoptions: list[Adoption] = []
        self._merges: list[Merge] = []

    # How much there is.

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def num_used(self) -> int:
        """Blocks that a sequence refers to."""
        return self._pool.num_used

    @property
    def num_cached(self) -> int:
        """Blocks that nobody refers to and whose content is known."""
        return self._pool.num_cached

    @property
    def num_free(self) -> int:
        """Blocks that nobody refers to and that hold nothing of use."""
        return self._pool.num_free

    @property
    def num_shared(self) -> int:
        """Blocks with more than one reference."""
        return self._pool.num_shared

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and cached."""
        return self._pool.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_missing(self, sequence: TokenSequence, found: Iterable[PrefixNode] = ()) -> int:
        """Blocks that must still leave the free list until all known tokens of a sequence are computed.

        Args:
            found: what `find` returned for it. Those of them that are in use cost nothing.
        """
        in_use = sum(node.block is not None and node.block.ref_count > 0 for node in found)
        return self.blocks_for(len(sequence.token_ids)) - len(sequence.block_table) - in_use

    # A sequence grows.

    def find(self, sequence: TokenSequence) -> list[PrefixNode]:
        """The known blocks that continue what a sequence has computed, pending ones too. Changes nothing.

        At least one token is left to compute: its logits are what the next token is sampled from.
        Cost: O(tokens found), from where the sequence stands.
        """
        if not self.enable_prefix_caching:
            return []
        size, token_ids = self.block_size, sequence.token_ids
        first = sequence.num_computed_tokens // size
        found: list[PrefixNode] = []
        node = self._tip(sequence, first)
        for index in range(first, (len(token_ids) - 1) // size):
            node = node and node.child(tuple(token_ids[index * size : (index + 1) * size]))
            if node is None:
                break
            found.append(node)
        return found

    def adopt(self, sequence: TokenSequence, found: Sequence[PrefixNode] | None = None) -> int:
        """Let a sequence refer to the known blocks that continue it, instead of computing them.

        A block that it had begun itself gives way to the known one.

        Args:
            found: what `find` has just returned for this sequence, to spare a second search.
        Returns: tokens by which `num_computed_tokens` has grown.
        """
        table, size = sequence.block_table, self.block_size
        start = sequence.num_computed_tokens
        if self.enable_prefix_caching and not table.blocks and not sequence.num_seen_tokens:
            self.prefix_queries += sequence.num_prompt_tokens
        if found is None:
            found = self.find(sequence)
        if not found:
            return 0
        first = start // size
        blocks = []
        num_committed = 0
        for node in found:
            assert node.block is not None
            self._pool.share(node.block)
            blocks.append(node.block)
            num_committed += not node.pending
        self._pool.release(table.cut(first))
        table.extend(blocks)
        sequence.num_computed_tokens = end = len(table) * size

        keep = first + num_committed
        known = self._first_seen(sequence, start, keep * size)
        pending = self._first_seen(sequence, max(start, keep * size), end)
        sequence.num_cached_tokens += known + pending
        self.prefix_hits += known
        if num_committed < len(found):
            self._adoptions.append(Adoption(sequence, keep, pending))
        return end - start

    def allocate(self, sequence: TokenSequence, num_tokens_total: int) -> None:
        """Give a sequence the blocks it lacks for its first `num_tokens_total` tokens.

        Raises: PoolExhausted(needed, available), and takes nothing.
        """
        table = sequence.block_table
        lacking = self.blocks_for(num_tokens_total) - len(table)
        if lacking > 0:
            table.extend(self._pool.take(lacking))

    def register(self, sequence: TokenSequence, num_tokens_after_step: int) -> None:
        """Make the blocks that this step fills findable by their content, pending until `commit`.

        A block whose content is known already stays the sequence's own until `commit`: this step writes it,
        and a shared block is never written.
        Cost: O(block_size) for each block that becomes full.
        """
        if not self.enable_prefix_caching:
            return
        size, blocks = self.block_size, sequence.block_table.blocks
        first, end = sequence.num_computed_tokens // size, num_tokens_after_step // size
        if first == end:
            return
        parent = self._tip(sequence, first)
        for index in range(first, end):
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            twin = parent and parent.child(tokens)
            if twin is None:
                parent = self._index.insert(parent, tokens, sequence.salt, blocks[index])
            else:
                assert twin.block is not None
                # The reference keeps the twin from being forgotten before the step ends.
                self._pool.share(twin.block)
                self._merges.append(Merge(sequence, index, twin.block))
                parent = twin

    # A step ends.

    def commit(self) -> None:
        """The step has computed what it planned: pending blocks are content, twins become one block."""
        self._index.commit()
        for adoption in self._adoptions:
            self.prefix_hits += adoption.num_counted
        for merge in self._merges:
            own = merge.sequence.block_table.replace(merge.position, merge.known)
            self._pool.release((own,))
        self._adoptions.clear()
        self._merges.clear()

    def rollback(self) -> None:
        """The step failed: pending blocks are forgotten, and whoever adopted one is where it was before."""
        self._index.rollback()
        self._pool.release(merge.known for merge in reversed(self._merges))
        for adoption in reversed(self._adoptions):
            adoption.sequence.num_cached_tokens -= adoption.num_counted
            self._shorten(adoption.sequence, adoption.keep_blocks)
        self._adoptions.clear()
        self._merges.clear()

    # A sequence shrinks.

    def free_tail(self, sequence: TokenSequence, keep_blocks: int) -> None:
        """Take all but the first `keep_blocks` blocks from a sequence; what was known stays findable."""
        sequence.num_seen_tokens = max(sequence.num_seen_tokens, sequence.num_computed_tokens)
        self._shorten(sequence, keep_blocks)

    def free(self, sequence: TokenSequence) -> None:
        """Take every block from a sequence. Idempotent."""
        self.free_tail(sequence, 0)

    def audit(self, sequences: Iterable[TokenSequence]) -> None:
        """Prove the books; `sequences` are all that hold blocks. Raises AuditError, naming what is wrong."""
        audit(
            pool=self._pool,
            index=self._index,
            block_size=self.block_size,
            chained=self.enable_prefix_caching,
            sequences=list(sequences),
            pinned=[merge.known for merge in self._merges],
        )

    def _tip(self, sequence: TokenSequence, num_full: int) -> PrefixNode | None:
        """The node of a sequence's last full computed block; its salt's root, if there is no such block."""
        if num_full == 0:
            return self._index.root(sequence.salt)
        return sequence.block_table.blocks[num_full - 1].node

    def _shorten(self, sequence: TokenSequence, keep_blocks: int) -> None:
        self._pool.release(sequence.block_table.cut(keep_blocks))
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, keep_blocks * self.block_size)

    @staticmethod
    def _first_seen(sequence: TokenSequence, start: int, end: int) -> int:
        """How many prompt tokens from `start` to `end` the sequence has now for the first time."""
        return max(0, min(end, sequence.num_prompt_tokens) - max(start, sequence.num_seen_tokens))
