"""Who comes before whom: virtual token counters between users, a rank that never changes within each.

    flow (account, user)  counter   its sequences by rank, a quantum apart
    anna                      512   a1 at 512   a2 at 768   a3 at 1024
    ben, weight 2             600   b1 at 600   b2 at 728                 -> order: a1 b1 b2 a2 a3

What is computed for a flow moves its counter, so whoever has had less comes first, and no user's tenth
request is before another's first. Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024),
algorithm 2: counters, their weights, and the lift of those who ask for more than they get only now. Unlike
there, what is computed while nobody else of the class goes short is charged to nobody: an idle machine owes
nothing, and whoever uses it most by night is not last in the morning.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush, heapreplace

from octavo.scheduler.flow import QUANTUM, Account, Flow
from octavo.scheduler.limits import SchedulingPolicy
from octavo.scheduler.sequence import Sequence

STARVED_AFTER = 30.0
"""Seconds without any service after which the first of a background flow is visited before everybody else."""

MAX_ABSENT = 1024
"""Accounts with nothing open whose counter is remembered."""


class FairQueue:
    """All open sequences of a scheduler, those that wait and those that run, in one order.

    With the policies `fcfs` and `priority` a class is one flow, and its order the rank alone.

    The cost of adding, removing and charging grows with the logarithm of the number of flows and sequences
    (and the shifting of a list's pointers); reading the order costs what is read of it.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._accounts: dict[tuple[bool, str], Account] = {}
        self._flows: list[tuple[tuple[bool, float, int], Flow]] = []  # open ones by place
        self._lacking: set[Flow] = set()  # whose sequences got less of the last step than they could use
        # By class: flows with sequences that wait; the highest counter there was; whether all are not equal.
        self._num_waiting_flows = {False: 0, True: 0}
        self._top = {False: 0.0, True: 0.0}
        self._uneven = {False: False, True: False}
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
        if not self._is_backlogged(flow):
            self._move(flow, max(flow.counter, self._virtual_time(flow.background)))
        flow.num_waiting += 1
        self._num_waiting_flows[flow.background] += flow.num_waiting == 1

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; idempotent."""
        flow = sequence.flow
        if flow is None:
            return
        sequence.flow = None
        if not sequence.has_begun:
            self._waits_no_longer(flow)
        del flow.ranked[bisect_left(flow.ranked, (sequence.rank,))]
        if not flow.ranked:
            self._close(flow)

    def settle(self, served: Mapping[Flow | None, int], lacking: set[Flow], now: float) -> None:
        """Count what a step has computed.

        Args:
            served: tokens by flow; None: of sequences that have left.
            lacking: flows of sequences that got less than they could use.
        """
        self._lacking = lacking
        contended = {background: self._num_backlogged(background) > 1 for background in (False, True)}
        for flow, num_tokens in served.items():
            if flow is None:
                continue
            flow.clock += num_tokens
            flow.served_at = now
            if flow.background:
                self._background[flow] = self._background.pop(flow)
            if contended[flow.background]:
                self._move(flow, flow.counter + num_tokens / flow.weight)
                self._top[flow.background] = max(self._top[flow.background], flow.counter)
                self._uneven[flow.background] = True
        for background in (False, True):
            if self._uneven[background] and not contended[background]:
                self._even_out(background)

    def _is_backlogged(self, flow: Flow) -> bool:
        return flow.num_waiting > 0 or flow in self._lacking

    def _num_backlogged(self, background: bool) -> int:
        """Flows of a class that ask for more than they get."""
        num_lacking = sum(one.background is background and not one.num_waiting for one in self._lacking)
        return self._num_waiting_flows[background] + num_lacking

    def _virtual_time(self, background: bool) -> float:
        """Where those stand who only now ask for more than they get: with the least of the others."""
        if self._num_backlogged(background):
            for (of_class, counter, _), flow in self._flows:
                if of_class is background and self._is_backlogged(flow):
                    return counter
        return self._top[background]

    def _even_out(self, background: bool) -> None:
        """Nobody goes short but one at most: nobody owes anything."""
        top = self._top[background]
        for _, flow in self._flows:
            if flow.background is background:
                flow.counter = top
        self._flows = sorted((flow.place, flow) for _, flow in self._flows)
        self._uneven[background] = False

    def _move(self, flow: Flow, counter: float) -> None:
        if counter != flow.counter:
            del self._flows[self._index(flow)]
            flow.counter = counter
            insort(self._flows, (flow.place, flow))

    def _waits_no_longer(self, flow: Flow) -> None:
        flow.num_waiting -= 1
        self._num_waiting_flows[flow.background] -= flow.num_waiting == 0

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
    def quantum_of(sequence: Sequence) -> float:
        """A quantum of its service, in virtual tokens."""
        flow = sequence.flow
        assert flow is not None, f"{sequence} is not in the queue"
        return flow.gap

    @staticmethod
    def outranks(sequence: Sequence, other: Sequence) -> bool:
        """Whether a sequence comes first by its class or priority, whatever was computed for whom."""
        if sequence.flow is other.flow:
            return sequence.rank[0] < other.rank[0]
        return other.background and not sequence.background

    def due_victims(self, sequence: Sequence, others: list[Sequence]) -> list[Sequence]:
        """Of others that have begun, whose blocks one that has not may take to begin: those that it outranks,
        and those that began a quantum of service ahead of where it stands now."""
        ahead = self.place(sequence)[1] + self.quantum_of(sequence)
        return [
            one
            for one in others
            if (
                one.seniority[1] >= ahead
                if one.flow is not sequence.flow and one.background is sequence.background
                else self.outranks(sequence, one)
            )
        ]

    def begin(self, sequence: Sequence) -> None:
        """Fix the seniority of one that begins: where it stands now. It never changes, so that two who want
        the same blocks never take them from each other in turn. Within a flow it goes by rank."""
        flow = sequence.flow
        assert flow is not None, f"{sequence} is not in the queue"
        tag = self.place(sequence)[1]
        self._waits_no_longer(flow)
        begun = [one for _, one in flow.ranked if one.has_begun]
        tag = max([tag, *(one.seniority[1] for one in begun if one.rank < sequence.rank)])
        tag = min([tag, *(one.seniority[1] for one in begun if self.outranks(sequence, one))])
        sequence.seniority = (sequence.background, tag, sequence.rank[0], sequence.arrival)

    def _starved(self, now: float) -> Sequence | None:
        """The first of the background flow that has been without service for longest, if that is too long."""
        for flow in self._background:
            if now - flow.served_at < STARVED_AFTER:
                return None
            for _, sequence in flow.ranked:
                if not sequence.held:
                    return sequence
        return None

    # --- flows ------------------------------------------------------------------------------------

    def _index(self, flow: Flow) -> int:
        return bisect_left(self._flows, (flow.place,))

    def _flow_of(self, sequence: Sequence, now: float) -> Flow:
        share = sequence.share
        together = self._policy is not SchedulingPolicy.FAIR
        name, user = ("", "") if together else (share.account, share.user)
        account = self._accounts.get((share.background, name))
        if account is None:
            account = self._accounts[share.background, name] = Account(name, share.background, share.weight)
            self._num_absent += 1
        if not together:
            account.weight = share.weight
        return account.flows.get(user) or self._open(account, user, now)

    def _open(self, account: Account, user: str, now: float) -> Flow:
        """A flow begins where its account stands or has stood: another user's name pays nothing off."""
        flows = account.flows
        counter = min((flow.counter for flow in flows.values()), default=account.level)
        self._num_absent -= not flows
        self._num_opened += 1
        flow = flows[user] = Flow(account, user, self._num_opened, counter, now)
        insort(self._flows, (flow.place, flow))
        if account.background:
            self._background[flow] = None
        return flow

    def _close(self, flow: Flow) -> None:
        account = flow.account
        del self._flows[self._index(flow)]
        self._background.pop(flow, None)
        self._lacking.discard(flow)
        del account.flows[flow.user]
        account.level = max(account.level, flow.counter)
        self._num_absent += not account.flows
        if self._num_absent > MAX_ABSENT:
            self._forget_absent()

    def _forget_absent(self) -> None:
        """Drop the half of the absent accounts that stand lowest: the lift leaves them least to lose."""
        absent = sorted((account.level, key) for key, account in self._accounts.items() if not account.flows)
        for _, key in absent[: len(absent) // 2]:
            del self._accounts[key]
        self._num_absent -= len(absent) // 2
