"""Which blocks are in use, which are cached, which are free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from octavo.kv.block import Block
from octavo.kv.eviction import EvictionOrder
from octavo.kv.prefix_index import PrefixNode


class PoolExhausted(Exception):
    """More blocks were asked for than are free or cached. Nothing was taken."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {available} available")
        self.needed = needed
        self.available = available


class BlockPool:
    """Every block of one layer group: who refers to it, and what is free.

        |<------------------------------ num_blocks ------------------------------>|
        | in use (ref_count > 0) | cached (ref_count 0, content known) | free       |
                                   `EvictionOrder` says whose turn it is

    Free blocks are a doubly linked list between two sentinels that spare every operation its branches. The
    last returned is the first taken, and those whose pages went back to the system (`put_back`) are last of
    all, so that pages already touched are used again before new ones. Content is forgotten when a block is
    needed, and no sooner. No block is set aside as "null".

    Args:
        num_blocks: size of the pool.
        forget: called with the node of a cached block that is about to be written; must clear `block.node`.
        block_order: the ids 0 to num_blocks - 1 in the order in which untouched blocks are handed out.
        quotas: cached blocks of those owners whose share is not an equal part (`EvictionOrder`).

    Source: Kwon et al. 2023, section 4.3; lazy eviction as in vLLM V1.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        forget: Callable[[PrefixNode], None],
        block_order: Sequence[int] | None = None,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, it must be at least 1")
        order = range(num_blocks) if block_order is None else block_order
        if sorted(order) != list(range(num_blocks)):
            raise ValueError(f"block_order must hold every id from 0 to {num_blocks - 1} once")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_shared = 0
        self.eviction = EvictionOrder(num_blocks, quotas)
        self.num_touched = 0
        self._forget = forget
        self._retired: list[Block] = []
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._front = Block(-1)
        self._back = Block(-1)
        self._front.newer, self._back.older = self._back, self._front
        for block_id in order:
            self._insert_before(self._back, self._blocks[block_id])

    @property
    def num_cached(self) -> int:
        """Blocks that nobody refers to and whose content is known."""
        return len(self.eviction)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free ones and cached ones."""
        return self.num_free + len(self.eviction)

    @property
    def num_used(self) -> int:
        """Blocks that something refers to."""
        return self.num_blocks - self.num_free - len(self.eviction)

    def take(self, count: int) -> list[Block]:
        """Hand out `count` blocks to be written; content is forgotten where free ones do not suffice.

        Returns: blocks with ref_count 1 and no content, in the order taken.
        Raises: PoolExhausted(needed, available) and takes nothing, if fewer than `count` are free or cached.
        Cost: O(1) for a free block, as `EvictionOrder` for a cached one.
        """
        if count > self.num_available:
            raise PoolExhausted(count, self.num_available)
        self.eviction.clock += count
        taken = []
        for _ in range(count):
            block = self._first_free() if self.num_free else self._forget_coldest()
            block.ref_count = 1
            taken.append(block)
        return taken

    def _first_free(self) -> Block:
        block = self._front.newer
        self._unlink(block)
        self.num_free -= 1
        self.num_touched += not block.touched
        block.touched = True
        return block

    def _forget_coldest(self) -> Block:
        node = self.eviction.coldest()
        block, parent = node.block, node.parent
        assert block is not None, "a node without a block is cached"
        self.eviction.remove(node)
        self._forget(node)
        self.eviction.uncover(parent)
        return block

    def take_over(self, block: Block) -> None:
        """Hand out a certain cached leaf to be written on behind its content, which is forgotten as such.

        Cost: as `take`.
        """
        node = block.node
        assert block.ref_count == 0, f"{block} is in use"
        assert node is not None, f"{block} holds nothing"
        parent = node.parent
        self.eviction.remove(node)
        self._forget(node)
        self.eviction.uncover(parent)
        block.ref_count = 1

    def share(self, block: Block) -> None:
        """Add a reference to a block of known content; a cached one is used again. Cost: O(1) amortised."""
        if block.ref_count == 0:
            assert block.node is not None, f"{block} has no content to share"
            self.eviction.remove(block.node)
        elif block.ref_count == 1:
            self.num_shared += 1
        block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop one reference to each block. Cost: O(1) a block, O(log n) for a leaf of known content."""
        for block in blocks:
            assert block.ref_count > 0, f"{block} is released once too often"
            block.ref_count -= 1
            if block.ref_count == 1:
                self.num_shared -= 1
            elif block.ref_count == 0:
                if block.node is not None:
                    self.eviction.add(block.node)
                else:
                    self._insert_before(self._front.newer, block)
                    self.num_free += 1

    # Pages go back, and the pool grows and shrinks: see `PoolPages`.

    @property
    def num_free_touched(self) -> int:
        """Free blocks whose pages may take memory; `take` hands them out before other free ones."""
        return self.num_touched - self.num_used - self.num_cached

    def withdraw(self, num_free: int, num_cached: int) -> list[Block]:
        """Hand out so many free blocks and then so many cached ones, as `take` would choose them, but not to
        be written: that is no use of the pool, by which the age of content is counted.

        Returns: blocks with ref_count 1 and no content, for `put_back` or `retire`.
        """
        taken = [self._first_free() for _ in range(num_free)]
        taken += [self._forget_coldest() for _ in range(num_cached)]
        for block in taken:
            block.ref_count = 1
        return taken

    def put_back(self, blocks: Iterable[Block]) -> None:
        """Return withdrawn blocks, whose pages go back to the system, behind all that are free."""
        for block in blocks:
            self._give_up_pages(block)
            self._insert_before(self._back, block)
            self.num_free += 1

    def retire(self, blocks: Iterable[Block]) -> None:
        """As `put_back`, but these leave the pool, which is smaller from now on."""
        for block in blocks:
            self._give_up_pages(block)
            self._retired.append(block)
            self.num_blocks -= 1
        self.eviction.num_blocks = self.num_blocks

    def grow(self, count: int) -> None:
        """Add free blocks without pages: retired ones, then such with ids that are new."""
        for _ in range(count):
            if self._retired:
                block = self._retired.pop()
            else:
                block = Block(len(self._blocks))
                self._blocks.append(block)
            self._insert_before(self._back, block)
        self.num_free += count
        self.num_blocks += count
        self.eviction.num_blocks = self.num_blocks

    def _give_up_pages(self, block: Block) -> None:
        assert block.ref_count == 1, f"{block} is not in one hand"
        assert block.node is None, f"{block} has content to lose"
        block.ref_count = 0
        self.num_touched -= block.touched
        block.touched = False

    def blocks(self) -> Sequence[Block]:
        """Every block there ever was, by id, retired ones too. For the audit."""
        return self._blocks

    def retired(self) -> Sequence[Block]:
        """Blocks that the pool was shrunk by and has not grown by again. For the audit."""
        return self._retired

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
