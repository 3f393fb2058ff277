"""The KV cache's memory while the server runs: cold blocks go back to the system, the pool grows and shrinks.

caller (admin, pressure)               | engine thread, between two steps
release, resize ------- command ------>|  an order is queued, or the target is set
                                       |  tend: one portion of what is to go, before each step
<------ status, when all that can ------|
        go at once has gone
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.model.available_memory import MIB, available_memory, format_bytes

if TYPE_CHECKING:
    from octavo.kv.arena import Arena
    from octavo.kv.kv_cache import KVCache

PORTION_BYTES = 32 * MIB
"""Given back before one step at most: 3 ms, which a stream does not notice."""

RELEASE_REASONS = ("idle", "pressure", "admin", "resize")


class KVCacheRefused(Exception):
    """The pool cannot have the size that was asked for: nothing has changed, the message has both numbers.

    code: "kv_cache_too_small", "kv_cache_too_large" or "kv_cache_in_use" (an open request needs more: ask
    again when it has ended).
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


@dataclass(frozen=True, slots=True)
class KVCacheStatus:
    """The pool at one moment between two steps; used + cached + free = total.

    budget_bytes: what the owner allowed. target_blocks: blocks the pool is to have; num_blocks is more while
    blocks that are to leave are in use. extent_bytes: what a block is charged, block_bytes without its
    padding. resident_bytes: physical memory that the blocks take, as the system sees it a moment later.
    """

    budget_bytes: int
    target_blocks: int
    num_blocks: int
    num_used: int
    num_cached: int
    num_free: int
    block_bytes: int
    extent_bytes: int
    resident_bytes: int


@dataclass(slots=True)
class _Release:
    """Blocks that are still to be given back, and who waits for it."""

    reason: str
    num_unused: int
    num_cached: int
    done: Future[KVCacheStatus] | None


class KVMemory:
    """Gives pages back in portions. What changes anything runs on the engine thread, between steps.

    budget_bytes: of the pool, never less than its blocks' extents.
    """

    def __init__(self, cache: KVCache, arena: Arena, *, block_bytes: int, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        # Blocks whose pages were given back, by why.
        self.num_released = dict.fromkeys(RELEASE_REASONS, 0)
        self._cache = cache
        self._arena = arena
        self._block_bytes = block_bytes
        self._portion = max(1, PORTION_BYTES // arena.extent_bytes)
        self._orders: deque[_Release] = deque()
        self._resized: list[Future[KVCacheStatus]] = []

    @property
    def num_cold(self) -> int:
        """Blocks that could be given back; any thread may look."""
        return self._cache.pages.num_cold

    @property
    def has_unused(self) -> bool:
        """Whether free blocks have pages."""
        return self._cache.pages.num_unused > 0

    def resident_bytes(self) -> int:
        """Physical memory that blocks take now, bytes. Any thread may ask; 1 ms for each GiB."""
        return self._arena.resident_bytes(self._cache.pages.num_extents)

    def status(self) -> KVCacheStatus:
        """How things stand; resident_bytes is left 0, for whoever can wait for it."""
        cache = self._cache
        return KVCacheStatus(
            budget_bytes=self.budget_bytes,
            target_blocks=cache.target_blocks,
            num_blocks=cache.num_blocks,
            num_used=cache.num_used,
            num_cached=cache.num_cached,
            num_free=cache.num_free,
            block_bytes=self._block_bytes,
            extent_bytes=self._arena.extent_bytes,
            resident_bytes=0,
        )

    def release(
        self, reason: str, most: int | None = None, done: Future[KVCacheStatus] | None = None
    ) -> None:
        """Order that all free blocks lose their pages; and cached ones their content too, the coldest first,
        until `most` blocks have been given back in all (None: every block that nobody refers to)."""
        pages = self._cache.pages
        num_unused, num_cached = pages.num_unused, self._cache.num_cached
        if most is not None:
            num_cached = min(num_cached, max(0, most - num_unused))
        self._orders.append(_Release(reason, num_unused, num_cached, done))

    def check(self, budget_bytes: int) -> tuple[int, int]:
        """What can be said of a budget before anything is done for it; any thread may ask.

        Returns: the blocks that fit in it, and the tokens of the longest request that they hold.
        Raises: KVCacheRefused.
        """
        cache, arena = self._cache, self._arena
        num_blocks, extent = budget_bytes // arena.extent_bytes, arena.extent_bytes
        if num_blocks < 1:
            raise KVCacheRefused(
                f"a KV cache of {budget_bytes:,} bytes is smaller than one block of {extent:,}",
                code="kv_cache_too_small",
            )
        if num_blocks <= cache.num_pinned:
            raise KVCacheRefused(
                f"a KV cache of {budget_bytes:,} bytes has {num_blocks:,} blocks, and the prefixes of the "
                f"configuration hold {cache.num_pinned:,}",
                code="kv_cache_too_small",
            )
        if num_blocks > arena.num_blocks:
            raise KVCacheRefused(
                f"a KV cache of {format_bytes(budget_bytes)} has {num_blocks:,} blocks, and address space "
                f"for {arena.num_blocks:,} was reserved, {format_bytes(arena.nbytes)}",
                code="kv_cache_too_large",
            )
        resident = self.resident_bytes()
        more, available = num_blocks * extent - resident, available_memory()
        if num_blocks > cache.target_blocks and more > available:
            raise KVCacheRefused(
                f"a KV cache of {format_bytes(budget_bytes)} needs {format_bytes(more)} beside the "
                f"{format_bytes(resident)} it takes already, but {format_bytes(available)} are available",
                code="kv_cache_too_large",
            )
        return num_blocks, (num_blocks - cache.num_pinned) * cache.block_size

    def resize(self, budget_bytes: int, longest_open: int, done: Future[KVCacheStatus]) -> None:
        """Let the pool have as many blocks as fit in a budget that `check` has passed; what is in use beyond
        them leaves when it is returned.

        longest_open: tokens that the longest open request may come to have.
        Raises: KVCacheRefused, if a smaller pool could not hold it beside what is pinned.
        """
        num_blocks, num_pinned = budget_bytes // self._arena.extent_bytes, self._cache.num_pinned
        needed = max(1, self._cache.blocks_for(longest_open))
        if num_blocks < min(needed + num_pinned, self._cache.target_blocks):
            raise KVCacheRefused(
                f"a KV cache of {budget_bytes:,} bytes has {num_blocks:,} blocks, pinned prefixes hold "
                f"{num_pinned:,} of them, and an open request may need {needed:,} for its {longest_open:,} "
                "tokens, prompt and answer together",
                code="kv_cache_in_use",
            )
        self.budget_bytes = budget_bytes
        self._cache.pages.resize(num_blocks)
        self._resized.append(done)

    def tend(self) -> bool:
        """Give back one portion, if anything is to go. Returns whether more can go at once."""
        if not (self._orders or self._resized or self._cache.pages.num_to_retire):
            return False
        pages, portion = self._cache.pages, self._portion
        num_before = self._cache.num_blocks
        self._give("resize", pages.retire(portion))
        portion -= num_before - self._cache.num_blocks
        if not pages.num_to_retire:
            for done in self._resized:
                done.set_result(self.status())
            self._resized.clear()
        while self._orders and portion > 0:
            order = self._orders[0]
            # Of those counted when it was ordered some may be in use by now: then there is less to give back.
            count = min(portion, order.num_unused)
            given = self._give(order.reason, pages.give_back_unused(count))
            order.num_unused = order.num_unused - given if given == count else 0
            portion -= given
            count = min(portion, order.num_cached)
            given = self._give(order.reason, pages.give_back_cached(count))
            order.num_cached = order.num_cached - given if given == count else 0
            portion -= given
            if not order.num_unused and not order.num_cached:
                self._orders.popleft()
                if order.done is not None:
                    order.done.set_result(self.status())
        return bool(self._orders or pages.num_to_retire)

    def give_back_unused(self) -> None:
        """A portion of the pages of free blocks, for an engine that is idle."""
        self._give("idle", self._cache.pages.give_back_unused(self._portion))

    def abandon(self, refusal: Exception) -> None:
        """No step comes any more: tell whoever waits."""
        waiting = [*self._resized, *(order.done for order in self._orders if order.done is not None)]
        self._resized.clear()
        self._orders.clear()
        for one in waiting:
            one.set_exception(refusal)

    def _give(self, reason: str, block_ids: list[int]) -> int:
        if block_ids:
            self._arena.release(block_ids)
            self.num_released[reason] += len(block_ids)
        return len(block_ids)
