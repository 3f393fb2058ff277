"""Which blocks are in use, which are cached, which are free, and the order in which content is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from octavo.kv.block import Block
from octavo.kv.prefix_index import PrefixNode


class PoolExhausted(Exception):
    """More blocks were asked for than are free or cached. Nothing was taken."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {available} available")
        self.needed = needed
        self.available = available


class BlockPool:
    """Every block of one layer group: who refers to it, and in which order free ones are forgotten.

        |<------------------------------ num_blocks ------------------------------>|
        | in use (ref_count > 0) | cached (ref_count 0, content known) | free       |

    The last two are one doubly linked list, between two sentinels that spare every operation its branches:

        front -> free ... free -> cached, coldest ... cached, warmest -> back
                 ^ `take` begins here                                   ^ `release` puts known content here

    Free blocks are last in, first out, so that pages already touched are used again before new ones.
    No block is set aside as "null".

    Args:
        num_blocks: size of the pool.
        forget: called with the node of a cached block that is about to be written; must clear `block.node`.
        block_order: the ids 0 to num_blocks - 1 in the order in which untouched blocks are handed out.

    Source: Kwon et al. 2023, section 4.3; a free list with lazy eviction as in vLLM V1.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        forget: Callable[[PrefixNode], None],
        block_order: Sequence[int] | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, it must be at least 1")
        order = range(num_blocks) if block_order is None else block_order
        if sorted(order) != list(range(num_blocks)):
            raise ValueError(f"block_order must hold every id from 0 to {num_blocks - 1} once")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_cached = 0
        self.num_shared = 0
        self._forget = forget
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._front = Block(-1)
        self._back = Block(-1)
        self._front.newer, self._back.older = self._back, self._front
        for block_id in order:
            self._insert_before(self._back, self._blocks[block_id])

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free ones and cached ones."""
        return self.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        """Blocks that something refers to."""
        return self.num_blocks - self.num_free - self.num_cached

    def take(self, count: int) -> list[Block]:
        """Hand out `count` blocks to be written, forgetting the coldest content first.

        Returns: blocks with ref_count 1 and no content, in the order taken.
        Raises: PoolExhausted(needed, available) and takes nothing, if fewer than `count` are free or cached.
        Cost: O(count).
        """
        if count > self.num_available:
            raise PoolExhausted(count, self.num_available)
        taken = []
        for _ in range(count):
            block = self._front.newer
            self._unlink(block)
            if block.node is not None:
                self.num_cached -= 1
                self._forget(block.node)
            else:
                self.num_free -= 1
            block.ref_count = 1
            taken.append(block)
        return taken

    def take_over(self, block: Block) -> None:
        """Hand out a certain cached block to be written on behind its content, which is forgotten as such.

        Cost: O(1).
        """
        assert block.ref_count == 0, f"{block} is in use"
        assert block.node is not None, f"{block} holds nothing"
        self._unlink(block)
        self.num_cached -= 1
        self._forget(block.node)
        block.ref_count = 1

    def share(self, block: Block) -> None:
        """Add a reference to a block of known content; a cached one leaves the free list. Cost: O(1)."""
        if block.ref_count == 0:
            assert block.node is not None, f"{block} has no content to share"
            self._unlink(block)
            self.num_cached -= 1
        elif block.ref_count == 1:
            self.num_shared += 1
        block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop one reference to each block, in the given order: a sequence returns its last block first.

        Leaves are then colder than their roots, so a prefix is always forgotten from its end.
        Cost: O(1) a block.
        """
        for block in blocks:
            assert block.ref_count > 0, f"{block} is released once too often"
            block.ref_count -= 1
            if block.ref_count == 1:
                self.num_shared -= 1
            elif block.ref_count == 0:
                if block.node is not None:
                    self._insert_before(self._back, block)
                    self.num_cached += 1
                else:
                    self._insert_before(self._front.newer, block)
                    self.num_free += 1

    def blocks(self) -> Sequence[Block]:
        """Every block, by id. For the audit."""
        return self._blocks

    def free_list(self) -> Iterator[Block]:
        """The free list from its front; at most num_blocks + 1 steps, if it is broken. For the audit."""
        block = self._front.newer
        for _ in range(self.num_blocks + 1):
            if block is self._back:
                return
            yield block
            block = block.newer

    def _insert_before(self, place: Block, block: Block) -> None:
        block.older, block.newer = place.older, place
        place.older.newer = block
        place.older = block

    def _unlink(self, block: Block) -> None:
        block.older.newer = block.newer
        block.newer.older = block.older
        block.older = block.newer = block
