"""Which blocks have pages, how these go back to the system, and how the pool grows and shrinks."""

from __future__ import annotations

from octavo.kv.block import Block
from octavo.kv.pool import BlockPool


class PoolPages:
    """One pool's hold on the arena.

        |<------------------------ target ------------------------->|<- leave when returned ->|
        |<------------------------------ pool.num_blocks ------------------------------------>|  retired
        | in use           | cached            | free, touched | free, without pages          |  (no pages)
          never given back   the coldest first   first to go     nothing to give

    Every method that gives something back returns block ids: the pages of those extents hold nothing from now
    on, and the caller releases them (`Arena.release`) before the next step. Between steps only.

    `target`: blocks the pool is to have. It has more only while blocks beyond are in use: they leave when
    they are returned, by `retire`.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.target = pool.num_blocks

    @property
    def num_unused(self) -> int:
        """Free blocks with pages: nothing is lost when they are given back."""
        return self._pool.num_free_touched

    @property
    def num_cold(self) -> int:
        """Blocks that nobody refers to and that have pages, with content or without."""
        return self._pool.num_free_touched + self._pool.num_cached

    @property
    def num_extents(self) -> int:
        """Extents that were ever part of the pool: their ids are below this."""
        return len(self._pool.blocks())

    @property
    def num_to_retire(self) -> int:
        """Blocks that can leave a pool that is above its target now."""
        return min(self._pool.num_blocks - self.target, self._pool.num_available)

    def give_back_unused(self, most: int) -> list[int]:
        """Free blocks lose their pages. O(most)."""
        return self._put_back(self._pool.withdraw(min(most, self._pool.num_free_touched), 0))

    def give_back_cached(self, most: int) -> list[int]:
        """Cached blocks lose content and pages, in the order in which the pool would forget them."""
        return self._put_back(self._pool.withdraw(0, min(most, self._pool.num_cached)))

    def retire(self, most: int) -> list[int]:
        """Blocks leave the pool, if it is above its target: free ones, then cached ones, coldest first.

        Returns: the ids of those that had pages.
        """
        count = min(most, self.num_to_retire)
        num_free = min(count, self._pool.num_free)
        touched = min(num_free, self._pool.num_free_touched)
        leaving = self._pool.withdraw(num_free, count - num_free)
        self._pool.retire(leaving)
        return [block.block_id for block in leaving[:touched] + leaving[num_free:]]

    def resize(self, target: int) -> None:
        """Set the target. Free blocks are added at once where it is above what the pool has; `retire` does
        the other way."""
        assert target >= 1, f"a pool of {target} blocks"
        self.target = target
        if target > self._pool.num_blocks:
            self._pool.grow(target - self._pool.num_blocks)

    def _put_back(self, blocks: list[Block]) -> list[int]:
        self._pool.put_back(blocks)
        return [block.block_id for block in blocks]
