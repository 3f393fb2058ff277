"""Who comes before whom: virtual token counters between users, a rank that never changes within each.

    flow (account, user)  counter   its sequences by rank, a quantum apart
    anna                      512   a1 at 512   a2 at 768   a3 at 1024
    ben, weight 2             600   b1 at 600   b2 at 728                 -> order: a1 b1 b2 a2 a3

What is computed for a flow moves its counter, so whoever has had less comes first, and no user's tenth
request is before another's first. Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024),
algorithm 2: counters, their weights, and the lift on return from idling.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush, heapreplace

from octavo.scheduler.limits import SchedulingPolicy
from octavo.scheduler.sequence import Rank, Sequence

QUANTUM = 256.0
"""Tokens of service between two sequences of a flow: a step's prompt. And what a user must be behind another
before a newcomer of the one takes blocks of the other, since taking them costs computing them again."""

STARVED_AFTER = 30.0
"""Seconds without any service after which the first of a background flow is visited before everybody else."""

MAX_ABSENT = 1024
"""Accounts with nothing open whose counter is remembered."""


class Flow:
    """The open sequences of one user of an account, in one class.

    counter: virtual tokens, computed ones over the flow's weight. clock: computed tokens.
    opened: the number of its opening, which settles ties. served_at: seconds on the scheduler's clock.
    """

    __slots__ = ("account", "background", "clock", "counter", "opened", "ranked", "served_at", "user")

    def __init__(self, account: _Account, user: str, opened: int, counter: float, now: float) -> None:
        self.account = account
        self.background = account.background
        self.user = user
        self.opened = opened
        self.counter = counter
        self.clock = 0
        self.served_at = now
        self.ranked: list[tuple[Rank, Sequence]] = []

    @property
    def place(self) -> tuple[bool, float, int]:
        return self.background, self.counter, self.opened

    @property
    def gap(self) -> float:
        """Between two of its sequences, in virtual tokens."""
        return QUANTUM / self.weight

    @property
    def weight(self) -> float:
        """Users of an account who are here divide its weight."""
        return self.account.weight / max(1, len(self.account.flows))


class _Account:
    """level: the counter that its last flow to close has left."""

    __slots__ = ("background", "flows", "level", "name", "weight")

    def __init__(self, name: str, background: bool, weight: float) -> None:
        self.name = name
        self.background = background
        self.weight = weight
        self.level = 0.0
        self.flows: dict[str, Flow] = {}


class FairQueue:
    """All open sequences of a scheduler, those that wait and those that run, in one order.

    With the policies `fcfs` and `priority` a class is one flow, and its order the rank alone.

    The cost of adding, removing and charging grows with the logarithm of the number of flows and sequences
    (and the shifting of a list's pointers); reading the order costs what is read of it.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._accounts: dict[tuple[bool, str], _Account] = {}
        self._flows: list[tuple[tuple[bool, float, int], Flow]] = []  # open ones by place
        self._floor = {False: 0.0, True: 0.0}  # by class: what the last to leave had
        self._num_opened = 0
        self._num_absent = 0
        self._background: dict[Flow, None] = {}  # open ones, the longest without service first

    # --- coming and going -------------------------------------------------------------------------

    def add(self, sequence: Sequence, num_uncomputed: int, now: float) -> None:
        """Give a sequence its rank, which it keeps: `arrival` must be set.

        Within a user it is the clock of what was computed for that user, plus what is to compute, in whole
        quanta: short ones first, about equal ones as they came, and nobody is overtaken for longer than
        computing its own prompt takes.
        """
        flow = self._flow_of(sequence, now)
        fair = self._policy is SchedulingPolicy.FAIR
        age = int((flow.clock + num_uncomputed) // QUANTUM) if fair else 0
        priority = 0 if self._policy is SchedulingPolicy.FCFS else sequence.priority
        sequence.rank = (priority, age, sequence.arrival)
        sequence.flow = flow
        insort(flow.ranked, (sequence.rank, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; idempotent."""
        flow = sequence.flow
        if flow is None:
            return
        sequence.flow = None
        del flow.ranked[bisect_left(flow.ranked, (sequence.rank,))]
        if not flow.ranked:
            self._close(flow)

    def charge(self, served: Mapping[Flow | None, int], now: float) -> None:
        """Count what was computed. served: tokens by flow; None: of sequences that have left."""
        for flow, num_tokens in served.items():
            if flow is None:
                continue
            del self._flows[self._index(flow)]
            flow.counter += num_tokens / flow.weight
            flow.clock += num_tokens
            flow.served_at = now
            insort(self._flows, (flow.place, flow))
            if flow.background:
                self._background[flow] = self._background.pop(flow)

    # --- the order --------------------------------------------------------------------------------

    def in_order(self, now: float) -> Iterator[Sequence]:
        """Everybody, the most entitled first. Lazy: nothing may change while it is read."""
        starved = self._starved(now)
        if starved is not None:
            yield starved
        heap: list[tuple[tuple[bool, float, int], int, Flow]] = []
        num_fed = 0
        while True:
            while num_fed < len(self._flows) and (not heap or self._flows[num_fed][0] < heap[0][0]):
                place, flow = self._flows[num_fed]
                heappush(heap, (place, 0, flow))
                num_fed += 1
            if not heap:
                return
            _, index, flow = heap[0]
            sequence = flow.ranked[index][1]
            if index + 1 < len(flow.ranked):
                place = flow.background, flow.counter + (index + 1) * flow.gap, flow.opened
                heapreplace(heap, (place, index + 1, flow))
            else:
                heappop(heap)
            if sequence is not starved:
                yield sequence

    def copied(self) -> list[Sequence]:
        """Everybody in order, for threads that may not keep the scheduler's from changing it meanwhile."""
        placed = [
            ((flow.background, flow.counter + index * flow.gap, flow.opened), index, sequence)
            for _, flow in list(self._flows)
            for index, (_, sequence) in enumerate(list(flow.ranked))
        ]
        placed.sort(key=lambda one: one[:2])
        return [sequence for _, _, sequence in placed]

    @staticmethod
    def place(sequence: Sequence) -> tuple[bool, float, int]:
        """Class, virtual tokens, flow: the less, the more entitled; equal within a flow only."""
        flow = sequence.flow
        assert flow is not None, f"{sequence} is not in the queue"
        index = bisect_left(flow.ranked, (sequence.rank,))
        return flow.background, flow.counter + index * flow.gap, flow.opened

    @staticmethod
    def outranks(sequence: Sequence, other: Sequence) -> bool:
        """Whether a sequence comes first by its class or priority, whatever was computed for whom."""
        if sequence.flow is other.flow:
            return sequence.rank[0] < other.rank[0]
        return other.background and not sequence.background

    def is_due(self, sequence: Sequence, victim: Sequence) -> bool:
        """Whether one that has not begun may take blocks of one that has: because it outranks it, or because
        the other began a quantum of service ahead of where it stands now."""
        if sequence.flow is victim.flow or sequence.background is not victim.background:
            return self.outranks(sequence, victim)
        flow = sequence.flow
        assert flow is not None, f"{sequence} is not in the queue"
        return self.place(sequence)[1] + flow.gap <= victim.seniority[1]

    def begin(self, sequence: Sequence) -> None:
        """Fix the seniority of one that begins: where it stands now. It never changes, so that two who want
        the same blocks never take them from each other in turn. Within a flow it goes by rank."""
        flow = sequence.flow
        assert flow is not None, f"{sequence} is not in the queue"
        tag = self.place(sequence)[1]
        begun = [one for _, one in flow.ranked if one.has_begun]
        tag = max([tag, *(one.seniority[1] for one in begun if one.rank < sequence.rank)])
        tag = min([tag, *(one.seniority[1] for one in begun if self.outranks(sequence, one))])
        sequence.seniority = (sequence.background, tag, sequence.rank[0], sequence.arrival)

    def _starved(self, now: float) -> Sequence | None:
        """The first of the background flow that has been without service for longest, if that is too long."""
        flow = next(iter(self._background), None)
        if flow is None or now - flow.served_at < STARVED_AFTER:
            return None
        return next((sequence for _, sequence in flow.ranked if not sequence.held), None)

    # --- flows ------------------------------------------------------------------------------------

    def _index(self, flow: Flow) -> int:
        return bisect_left(self._flows, (flow.place,))

    def _flow_of(self, sequence: Sequence, now: float) -> Flow:
        share = sequence.share
        together = self._policy is not SchedulingPolicy.FAIR
        name, user = ("", "") if together else (share.account, share.user)
        account = self._accounts.get((share.background, name))
        if account is None:
            account = self._accounts[share.background, name] = _Account(name, share.background, share.weight)
            self._num_absent += 1
        if not together:
            account.weight = share.weight
        return account.flows.get(user) or self._open(account, user, now)

    def _open(self, account: _Account, user: str, now: float) -> Flow:
        """A flow begins where the least of those who are here stand, or where its account stands if that is
        more: idling earns nothing, and another user's name pays nothing off."""
        background = account.background
        first = bisect_left(self._flows, ((background,),))
        here = first < len(self._flows) and self._flows[first][1].background is background
        lift = self._flows[first][1].counter if here else self._floor[background]
        own = min((flow.counter for flow in account.flows.values()), default=account.level)
        if not account.flows:
            self._num_absent -= 1
        self._num_opened += 1
        flow = account.flows[user] = Flow(account, user, self._num_opened, max(lift, own), now)
        insort(self._flows, (flow.place, flow))
        if background:
            self._background[flow] = None
        return flow

    def _close(self, flow: Flow) -> None:
        account = flow.account
        del self._flows[self._index(flow)]
        self._background.pop(flow, None)
        del account.flows[flow.user]
        account.level = max(account.level, flow.counter)
        self._floor[flow.background] = flow.counter
        self._num_absent += not account.flows
        if self._num_absent > MAX_ABSENT:
            self._forget_absent()

    def _forget_absent(self) -> None:
        """Drop the half of the absent accounts that stand lowest: the lift leaves them least to lose."""
        absent = sorted((account.level, key) for key, account in self._accounts.items() if not account.flows)
        for _, key in absent[: len(absent) // 2]:
            del self._accounts[key]
        self._num_absent -= len(absent) // 2
