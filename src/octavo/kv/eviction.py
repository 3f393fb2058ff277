"""In which order content is forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, nlargest

from octavo.kv.prefix_index import PrefixNode

MAX_SHARES = 8
"""Owners without a quota among whom the pool is divided: a household, not everybody who ever came."""

MAX_OWNERS = 64
"""Owners that are told apart; whoever comes beyond them shares one account."""

_OTHERS = "\0others"
_STALE_ENTRIES = 64  # that a heap may hold beside twice its live ones


class _Account:
    """What one owner has cached, as interactive or as background content."""

    __slots__ = (
        "background",
        "heap",
        "last_used",
        "num_blocks",
        "num_leaves",
        "owner",
        "share",
        "takes_part",
    )

    def __init__(self, owner: str, *, background: bool) -> None:
        self.owner = owner
        self.background = background
        self.num_blocks = 0
        self.num_leaves = 0
        self.last_used = 0
        # Blocks it may hold before it is above its share, as `EvictionOrder` has dealt them out last; and
        # whether being used would leave them as they are: it is one of those who share, or never will be.
        self.share = 1
        self.takes_part = False
        # (worth, ticket, node); an entry is live while the node still has its ticket.
        self.heap: list[tuple[int, int, PrefixNode]] = []

    def coldest(self) -> tuple[int, int, PrefixNode] | None:
        """The live entry of least worth; stale ones before it are dropped."""
        heap = self.heap
        while heap:
            if heap[0][2].ticket == heap[0][1]:
                return heap[0]
            heappop(heap)
        return None


class EvictionOrder:
    """Cached blocks, and which of them is forgotten next.

    Leaves first: a block goes only when nothing that continues it is cached, so no prefix loses its
    beginning. Among leaves, in this order:

    1. what only background work has used;
    2. of owners who hold more than their share, the one that is furthest above it (so a scan of 100,000
       tokens flushes its own past, not a family's chats). A share is a quota, if the owner has one; what
       quotas leave is shared equally by the `MAX_SHARES` who came last, and those before them have none;
    3. the least recently useful: when a request last held it, by a clock that ticks with every block taken.
       The end of a turn, where the next one goes on, and a block after which ways have parted count as used
       one turnover of the pool later.

    A block belongs to who used it last. O(log n) each, and O(owners) to choose whose block goes, of which
    there are at most `MAX_OWNERS` and one for all others.

    Args:
        num_blocks: size of the pool.
        quotas: blocks of those owners whose share is not an equal part.
    """

    def __init__(self, num_blocks: int, quotas: Mapping[str, int] | None = None) -> None:
        self.num_blocks = num_blocks
        self.quotas = dict(quotas or {})
        self.clock = 0
        self.num_background = 0  # cached blocks that only background work has used
        self._accounts: dict[tuple[str, bool], _Account] = {}
        self._account_of: dict[PrefixNode, _Account] = {}
        self._num_tickets = 0
        # Of how many blocks and which quotas shares were dealt out; None once they are not what they were.
        self._dealt: tuple[int, dict[str, int]] | None = None

    def __len__(self) -> int:
        return len(self._account_of)

    def add(self, node: PrefixNode) -> None:
        """A block of known content has lost its last reference."""
        account = self._account(node.owner, background=node.background)
        self._account_of[node] = account
        account.num_blocks += 1
        self.num_background += account.background
        if not account.takes_part:
            self._dealt = None
        account.last_used = node.last_used = self.clock
        if not node.children:
            self._push(account, node)

    def uncover(self, node: PrefixNode | None) -> None:
        """The last that continued this one may just have been forgotten."""
        if node is not None and not node.children and not node.ticket:
            account = self._account_of.get(node)
            if account is not None:
                self._push(account, node)

    def remove(self, node: PrefixNode) -> None:
        """A cached block is referred to again, or has been chosen."""
        account = self._account_of.pop(node)
        account.num_blocks -= 1
        self.num_background -= account.background
        if node.ticket:
            node.ticket = 0
            account.num_leaves -= 1
            if len(account.heap) > 2 * account.num_leaves + _STALE_ENTRIES:
                account.heap = [entry for entry in account.heap if entry[2].ticket == entry[1]]
                heapify(account.heap)
        if not account.num_blocks:
            del self._accounts[account.owner, account.background]
            self._dealt = None

    def coldest(self) -> PrefixNode:
        """What is to be forgotten next; it stays until `remove`. Raises IndexError if nothing is cached."""
        if self._dealt is None or self._dealt[0] != self.num_blocks or self._dealt[1] is not self.quotas:
            self._deal_out_shares()
        background, others, over, excess_of_over = [], [], None, 1.0
        for account in self._accounts.values():
            if not account.num_leaves:
                continue
            if account.background:
                background.append(account)
                continue
            others.append(account)
            excess = account.num_blocks / account.share
            if excess > excess_of_over:
                over, excess_of_over = account, excess
        accounts = background or (others if over is None else [over])
        entries = [entry for account in accounts if (entry := account.coldest()) is not None]
        if not entries:
            raise IndexError("nothing is cached")
        return min(entries, key=lambda entry: entry[:2])[2]

    def leaves(self) -> Iterator[PrefixNode]:
        """What `coldest` chooses from. For the audit."""
        for account in self._accounts.values():
            yield from (entry[2] for entry in account.heap if entry[2].ticket == entry[1])

    def nodes(self) -> Iterator[PrefixNode]:
        """All that are cached. For the audit."""
        return iter(self._account_of)

    def _deal_out_shares(self) -> None:
        """Say what each interactive owner may hold. Only when it may have changed: who comes and goes, who is
        used and had no part, quotas, the pool. A block that is forgotten only asks who is furthest above."""
        interactive = [account for account in self._accounts.values() if not account.background]
        left = self.num_blocks - sum(self.quotas.get(account.owner, 0) for account in interactive)
        equal = [account for account in interactive if account.owner not in self.quotas]
        sharing = equal
        if len(equal) > MAX_SHARES:
            sharing = nlargest(MAX_SHARES, equal, key=lambda account: account.last_used)
        for account in interactive:
            account.share = max(self.quotas.get(account.owner, 0), 1)
            account.takes_part = account.owner in self.quotas
        for account in sharing:
            account.share = max(max(left, 0) // len(sharing), 1)
            account.takes_part = True
        self._dealt = (self.num_blocks, self.quotas)

    def _account(self, owner: str, *, background: bool) -> _Account:
        account = self._accounts.get((owner, background))
        if account is None:
            if len(self._accounts) >= MAX_OWNERS and owner not in self.quotas:
                owner = _OTHERS
                account = self._accounts.get((owner, background))
            if account is None:
                account = self._accounts[owner, background] = _Account(owner, background=background)
                account.takes_part = background
                self._dealt = None
        return account

    def _push(self, account: _Account, node: PrefixNode) -> None:
        self._num_tickets += 1
        node.ticket = self._num_tickets
        account.num_leaves += 1
        worth = node.last_used + self.num_blocks * (node.ends_turn or node.is_fork)
        heappush(account.heap, (worth, node.ticket, node))
