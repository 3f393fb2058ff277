"""The cache as the scheduler sees it: sequences hold blocks, find known ones, and give them back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from octavo.kv.audit import AuditError, audit
from octavo.kv.block import Block
from octavo.kv.block_table import BlockTable
from octavo.kv.pool import BlockPool
from octavo.kv.pool_pages import PoolPages
from octavo.kv.prefix_index import COMMON, Namespace, PrefixIndex, PrefixNode, common_start


class TokenSequence(Protocol):
    """What the cache reads and writes of a sequence; `scheduler.Sequence` is one.

        |<------------------------ len(token_ids) ------------------------>|
        |<----- num_computed_tokens ----->|<-- this step -->|              |
        |<------------ block_table: whole blocks ------------->|

    `num_seen_tokens` is the furthest that `num_computed_tokens` has been before a preemption. Equal
    `namespace` shares content; `owner` and `background` say only whose content is forgotten first.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_seen_tokens: int
    namespace: Namespace
    owner: str
    background: bool
    block_table: BlockTable


class Adoption(NamedTuple):
    """A sequence refers to blocks that another one computes in this very step."""

    sequence: TokenSequence
    keep_blocks: int  # what it held, or adopted, of committed content
    num_counted: int  # prompt tokens counted as cached for the pending part


def _claim(node: PrefixNode, sequence: TokenSequence) -> None:
    """A sequence uses what is known: it is its owner's now, and interactive if one of both is."""
    node.owner = sequence.owner
    node.background = node.background and sequence.background


class BlockCopy(NamedTuple):
    """The whole of one block to another, before the step computes anything. Ids."""

    source: int
    destination: int


class Found(NamedTuple):
    """What is known of what a sequence has not computed yet.

        | computed so far | nodes: whole blocks, to be shared | num_more tokens: the start of one more |
                                                              | block, to be copied or written on      |

    nodes: committed or pending. source: a block whose first `num_more` tokens are committed and continue the
    nodes, None where num_more is 0. end: `num_computed_tokens` after all of it is adopted.
    """

    nodes: list[PrefixNode]
    source: Block | None
    num_more: int
    end: int

    @property
    def ends_with_source(self) -> bool:
        """Whether `source` has these tokens and nothing else, and nobody refers to it: no need to copy."""
        source = self.source
        return (
            source is not None
            and source.ref_count == 0
            and source.node is not None
            and len(source.node.tokens) == self.num_more
        )

    def without_copy(self, num_computed_tokens: int) -> Found:
        """The whole blocks only, for a sequence that has computed so many tokens: copying takes a block more
        while it lasts."""
        return Found(self.nodes, None, 0, max(num_computed_tokens, self.end - self.num_more))


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
        shared, not computed;     cached ones are taken   findable, pending     a twin gives way to the first
        the start of one more
        is copied

    A shared block is never written: what a sequence shares is whole blocks, and of the block that it goes on
    in it has its own, with a copy of what others know of it (`copies`, to be made before the step computes).
    A block that was left half full and that nobody refers to is not copied but written on.

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
        quotas: cached blocks of those owners whose share is not an equal part of the pool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        enable_prefix_caching: bool = True,
        block_order: Sequence[int] | None = None,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, it must be at least 1")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        # Prompt tokens ever looked for, once a sequence, and those of them that it did not compute itself.
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._index = PrefixIndex()
        self._pool = BlockPool(num_blocks, forget=self._index.forget, block_order=block_order, quotas=quotas)
        self.pages = PoolPages(self._pool)
        self._adoptions: list[Adoption] = []
        self._merges: list[Merge] = []
        # Blocks whose start was copied for somebody to go on in.
        self.num_copied = 0
        self._copies: list[tuple[Block, Block]] = []
        # Who is writing a block that is not full, by what that block continues: an index node, or a
        # namespace for the first block. So others find what is computed of it.
        self._writers: dict[PrefixNode | Namespace, dict[TokenSequence, None]] = {}
        self._writes_after: dict[TokenSequence, PrefixNode | Namespace] = {}
        self._moved: dict[TokenSequence, int] = {}
        self._pinned: list[Block] = []

    # How much there is.

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool; more than `target_blocks` while blocks that are to leave it are in use."""
        return self._pool.num_blocks

    @property
    def target_blocks(self) -> int:
        """Blocks that the pool is to have."""
        return self.pages.target

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that the pool holds beside what is pinned, once it has shrunk to its
        target."""
        return (self.target_blocks - self.num_pinned) * self.block_size

    @property
    def num_used(self) -> int:
        """Blocks that a sequence refers to."""
        return self._pool.num_used

    @property
    def num_cached_of_interactive(self) -> int:
        """Of the cached blocks, those that not only background work has used."""
        return self._pool.num_cached - self._pool.eviction.num_background

    @property
    def num_cached(self) -> int:
        """Blocks that nobody refers to and whose content is known."""
        return self._pool.num_cached

    @property
    def num_pinned(self) -> int:
        """Blocks that `pin` holds."""
        return len(set(self._pinned))

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

    def blocks_missing(self, sequence: TokenSequence, found: Found | None = None) -> int:
        """Blocks that must still leave the free list until all known tokens of a sequence are computed.

        Args:
            found: what `find` returned for it. Blocks of it that are in use cost nothing; one that is copied
                from stays where it is for a step.
        """
        missing = self.blocks_for(len(sequence.token_ids)) - len(sequence.block_table)
        if found is None:
            return missing
        missing -= sum(node.block is not None and node.block.ref_count > 0 for node in found.nodes)
        source = found.source
        return missing + (source is not None and source.ref_count == 0 and not found.ends_with_source)

    @property
    def copies(self) -> tuple[BlockCopy, ...]:
        """What must be copied before the running step computes anything; in any order, once."""
        return tuple(BlockCopy(source.block_id, own.block_id) for source, own in self._copies)

    # A sequence grows.

    def find(self, sequence: TokenSequence) -> Found:
        """What is known of the tokens behind those that a sequence has computed. Changes nothing.

        Whole blocks, those too that are pending in this step; then the longest start of one more block that
        is committed: of a full one, of one that was left half full, or of one that another sequence is
        writing. At least one token is left to compute: its logits are what the next token is sampled from.
        Cost: O(tokens found) from where the sequence stands, times log siblings; and a comparison for each
        sequence that writes after the same block.
        """
        start, token_ids = sequence.num_computed_tokens, sequence.token_ids
        if not self.enable_prefix_caching or start >= len(token_ids) - 1:
            return Found([], None, 0, start)
        size = self.block_size
        first = start // size
        nodes: list[PrefixNode] = []
        node = self._tip(sequence, first)
        for index in range(first, (len(token_ids) - 1) // size):
            following = node and node.child(tuple(token_ids[index * size : (index + 1) * size]))
            if following is None:
                break
            nodes.append(node := following)
        whole = (first + len(nodes)) * size
        source, num_more = self._known_start(sequence, node, whole)
        if whole + num_more <= max(start, whole):
            return Found(nodes, None, 0, max(start, whole))
        return Found(nodes, source, num_more, whole + num_more)

    def _known_start(
        self, sequence: TokenSequence, node: PrefixNode | None, start: int
    ) -> tuple[Block | None, int]:
        """Of the tokens from `start`, a block border, up to the last but one: the block that has most of the
        first of them, after `node` (None: the first block in a namespace nobody has used)."""
        if node is not None and node.pending:
            return None, 0
        wanted = tuple(sequence.token_ids[start : min(start + self.block_size, len(sequence.token_ids) - 1)])
        source: Block | None = None
        num_more = 0
        if node is not None:
            known, num_more = node.longest_start(wanted)
            if known is not None:
                source = known.block
        key = sequence.namespace if node is None or node.parent is None else node
        for writer in self._writers.get(key, ()):
            if writer is not sequence:
                written = writer.token_ids[start : min(start + len(wanted), writer.num_computed_tokens)]
                count = common_start(tuple(written), wanted)
                if count > num_more:
                    source, num_more = writer.block_table.blocks[start // self.block_size], count
        return source, num_more

    def adopt(self, sequence: TokenSequence, found: Found | None = None) -> int:
        """Let a sequence refer to the known blocks that continue it, instead of computing them.

        It goes on in a copy of the start of one more, if there is a block for that. A block that it had begun
        itself gives way to the known one.

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
        if found.end <= start:
            return 0
        first = start // size
        blocks = []
        num_committed = 0
        for node in found.nodes:
            assert node.block is not None
            self._pool.share(node.block)
            _claim(node, sequence)
            blocks.append(node.block)
            num_committed += not node.pending
        begun, copied = self._go_on_in(found)
        if copied and found.source is not None and found.source.node is not None:
            _claim(found.source.node, sequence)
        if begun is None and not blocks:
            return 0
        self._stop_writing(sequence)
        self._pool.release(table.cut(first))
        table.extend(blocks)
        # Up to here it holds whatever becomes of this step.
        kept = (first + num_committed) * size
        end = len(table) * size
        if begun is not None:
            table.append(begun)
            end += found.num_more
            if not copied:
                kept = end
        sequence.num_computed_tokens = end

        known = self._first_seen(sequence, start, kept)
        unsure = self._first_seen(sequence, max(start, kept), end)
        sequence.num_cached_tokens += known + unsure
        self.prefix_hits += known
        if kept < end:
            self._adoptions.append(Adoption(sequence, kept // size, unsure))
        return end - start

    def _go_on_in(self, found: Found) -> tuple[Block | None, bool]:
        """A block that begins with the tokens of `found.source` and has one reference, and whether it is a
        copy, which the step is yet to make; None, if there is nothing to go on in or no block for it."""
        source = found.source
        if source is None:
            return None, False
        if found.ends_with_source:
            self._pool.take_over(source)
            return source, False
        # The reference keeps what is copied from being forgotten before the step ends.
        self._pool.share(source)
        if not self._pool.num_available:
            self._pool.release((source,))
            return None, False
        (own,) = self._pool.take(1)
        self._copies.append((source, own))
        return own, True

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
            if sequence not in self._writes_after:
                self._moved[sequence] = end
            return
        self._moved[sequence] = end
        parent = self._tip(sequence, first)
        for index in range(first, end):
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            twin = parent and parent.child(tokens)
            if twin is None:
                parent = self._index.insert(parent, tokens, sequence.namespace, blocks[index])
                parent.owner, parent.background = sequence.owner, sequence.background
            else:
                assert twin.block is not None
                # The reference keeps the twin from being forgotten before the step ends.
                self._pool.share(twin.block)
                self._merges.append(Merge(sequence, index, twin.block))
                parent = twin

    # A step ends.

    def commit(self) -> None:
        """The step has computed what it planned: pending blocks are content, twins become one block."""
        self._pool.release(source for source, _ in self._copies)
        self.num_copied += len(self._copies)
        self._copies.clear()
        self._index.commit()
        for adoption in self._adoptions:
            self.prefix_hits += adoption.num_counted
        for merge in self._merges:
            own = merge.sequence.block_table.replace(merge.position, merge.known)
            self._pool.release((own,))
        for sequence, num_full in self._moved.items():
            self._stop_writing(sequence)
            node = self._tip(sequence, num_full)
            key = sequence.namespace if node is None or node.parent is None else node
            self._writers.setdefault(key, {})[sequence] = None
            self._writes_after[sequence] = key
        self._adoptions.clear()
        self._merges.clear()
        self._moved.clear()

    def rollback(self) -> None:
        """The step failed: pending blocks are forgotten, whoever adopted one, or a copy, is where it was."""
        self._index.rollback()
        self._pool.release(merge.known for merge in reversed(self._merges))
        self._pool.release(source for source, _ in self._copies)
        self._copies.clear()
        self._moved.clear()
        for adoption in reversed(self._adoptions):
            adoption.sequence.num_cached_tokens -= adoption.num_counted
            self._shorten(adoption.sequence, adoption.keep_blocks)
        self._adoptions.clear()
        self._merges.clear()

    # A sequence shrinks.

    def free_tail(self, sequence: TokenSequence, keep_blocks: int) -> None:
        """Take all but the first `keep_blocks` blocks from a sequence.

        What was known stays findable, and what it has computed of a block that is not full becomes so.
        """
        sequence.num_seen_tokens = max(sequence.num_seen_tokens, sequence.num_computed_tokens)
        if self.enable_prefix_caching and keep_blocks < len(sequence.block_table):
            self._leave_partial(sequence, keep_blocks)
        self._shorten(sequence, keep_blocks)

    def _leave_partial(self, sequence: TokenSequence, keep_blocks: int) -> PrefixNode | None:
        """Returns: the node that what is left of the last block is found by from now on, if there is one."""
        start = sequence.num_computed_tokens // self.block_size * self.block_size
        tokens = tuple(sequence.token_ids[start : sequence.num_computed_tokens])
        position = start // self.block_size
        if not tokens or position < keep_blocks:
            return None
        block = sequence.block_table.blocks[position]
        assert block.ref_count == 1, f"{block} is not full, and {sequence} shares it"
        parent = self._tip(sequence, position)
        if parent is not None and parent.longest_start(tokens).num_tokens == len(tokens):
            return None
        node = self._index.insert_partial(parent, tokens, sequence.namespace, block)
        node.owner, node.background = sequence.owner, sequence.background
        return node

    def free(self, sequence: TokenSequence) -> None:
        """Take every block from a sequence that has ended: the next turn may go on here. Idempotent."""
        sequence.num_seen_tokens = max(sequence.num_seen_tokens, sequence.num_computed_tokens)
        if self.enable_prefix_caching and sequence.num_computed_tokens:
            node = self._leave_partial(sequence, 0)
            if node is None:
                node = self._tip(sequence, sequence.num_computed_tokens // self.block_size)
            if node is not None:
                node.ends_turn = not node.children
        self._shorten(sequence, 0)

    # What is given up late, and what never.

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Other blocks for owners whose share is not an equal part; what is cached stays until its turn."""
        self._pool.eviction.quotas = dict(quotas)

    def pin(self, token_ids: Sequence[int], namespace: Namespace = COMMON) -> int:
        """Hold the known whole blocks at the beginning of these tokens until `unpin_all`. Between steps.

        Returns: tokens that are held now; blocks that are not known are not computed here.
        """
        size, node = self.block_size, self._index.root(namespace)
        num_pinned = 0
        for start in range(0, len(token_ids) - size + 1, size):
            node = node and node.child(tuple(token_ids[start : start + size]))
            if node is None or node.block is None:
                break
            self._pool.share(node.block)
            self._pinned.append(node.block)
            num_pinned += size
        return num_pinned

    def unpin_all(self) -> None:
        """What was pinned is cached content like any other from now on."""
        self._pool.release(reversed(self._pinned))
        self._pinned.clear()

    def audit(self, sequences: Iterable[TokenSequence]) -> None:
        """Prove the books; `sequences` are all that hold blocks. Raises AuditError, naming what is wrong."""
        audit(
            pool=self._pool,
            index=self._index,
            block_size=self.block_size,
            chained=self.enable_prefix_caching,
            sequences=list(sequences),
            pinned=[
                *(merge.known for merge in self._merges),
                *(source for source, _ in self._copies),
                *self._pinned,
            ],
        )
        self._audit_writers()

    def _audit_writers(self) -> None:
        listed = [(key, sequence) for key, writers in self._writers.items() for sequence in writers]
        if {sequence: key for key, sequence in listed} != self._writes_after:
            raise AuditError("the lists of who writes after which block do not agree")
        for key, sequence in listed:
            node = self._tip(sequence, sequence.num_computed_tokens // self.block_size)
            if key != (sequence.namespace if node is None or node.parent is None else node):
                raise AuditError(f"{sequence} is said to write after another block than it does")

    def _tip(self, sequence: TokenSequence, num_full: int) -> PrefixNode | None:
        """The node of a sequence's last full computed block; its namespace's root where there is none."""
        if num_full == 0:
            return self._index.root(sequence.namespace)
        return sequence.block_table.blocks[num_full - 1].node

    def _stop_writing(self, sequence: TokenSequence) -> None:
        """Nobody finds what this sequence is writing any more, until a step has brought it further."""
        key = self._writes_after.pop(sequence, None)
        if key is not None:
            writers = self._writers[key]
            del writers[sequence]
            if not writers:
                del self._writers[key]

    def _shorten(self, sequence: TokenSequence, keep_blocks: int) -> None:
        if keep_blocks * self.block_size < sequence.num_computed_tokens:
            self._stop_writing(sequence)
        self._pool.release(sequence.block_table.cut(keep_blocks))
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, keep_blocks * self.block_size)

    @staticmethod
    def _first_seen(sequence: TokenSequence, start: int, end: int) -> int:
        """How many prompt tokens from `start` to `end` the sequence has now for the first time."""
        return max(0, min(end, sequence.num_prompt_tokens) - max(start, sequence.num_seen_tokens))
