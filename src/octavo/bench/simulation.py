"""The scheduler and the cache as they are, on a machine that is only a clock."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from octavo.bench.arrivals import VOCAB_SIZE, Client, User
from octavo.bench.fairness import Service
from octavo.bench.step_costs import StepCosts
from octavo.kv.kv_cache import KVCache
from octavo.scheduler.limits import SchedulerConfig
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.share import Share


class NothingPlanned(AssertionError):
    """Somebody is there, nobody comes, and no step can be planned: nobody would ever be answered."""


@dataclass(slots=True)
class SimulatedRequest:
    """What became of one request. Moments in simulated seconds, None: it did not come to that.

    arrived_at: when it was sent, which may be during a step. scheduled_at: the beginning of the step that
    computed its first token. largest_gap: seconds between two of its tokens. num_computed_tokens: with those
    computed again after a preemption, of which num_lost_tokens had been taken.
    """

    user: User
    arrived_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    largest_gap: float = 0.0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_lost_tokens: int = 0


@dataclass(slots=True)
class _Open:
    """A request that is not answered yet, and whose it is."""

    request: SimulatedRequest
    client: Client
    number: int
    last_token_at: float = 0.0


@dataclass(slots=True)
class Occupancy:
    """What of the pool and of the seats was used, weighed by seconds of steps.

    pool: blocks that somebody refers to, of all. filled: slots of the blocks in use that hold a computed
    token. seats: requests that a step computes, of those it may.
    """

    seconds: float = 0.0
    pool: float = 0.0
    filled: float = 0.0
    seats: float = 0.0

    def note(self, seconds: float, pool: float, filled: float, seats: float) -> None:
        self.seconds += seconds
        self.pool += seconds * pool
        self.filled += seconds * filled
        self.seats += seconds * seats

    def mean(self, name: str) -> float:
        """The mean of one of them over all steps; 0 where there was none."""
        return float(getattr(self, name)) / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Outcome:
    """A simulation that has ended. now: simulated seconds. All but the wall times is decided by the seeds.

    step_seconds, step_errors: simulated, and by how much what `CostModel` had predicted was off, relative.
    planning_seconds: of Python, `step` and `commit` of one step. adding_seconds: of Python, one `add`.
    """

    requests: list[SimulatedRequest] = field(default_factory=list)
    services: dict[User, Service] = field(default_factory=dict)
    occupancy: Occupancy = field(default_factory=Occupancy)
    now: float = 0.0
    most_waiting: int = 0
    num_tokens: int = 0
    step_seconds: array[float] = field(default_factory=lambda: array("d"))
    step_errors: array[float] = field(default_factory=lambda: array("d"))
    planning_seconds: array[float] = field(default_factory=lambda: array("d"))
    adding_seconds: array[float] = field(default_factory=lambda: array("d"))
    wall_seconds: float = 0.0


class Simulation:
    """Clients, a scheduler, a cache and a clock.

        clients --- add --->  scheduler.step, commit  --- answers ---> clients
                              the clock goes on by what StepCosts says of the plan's work

    No model and no tensors: an answer's length is drawn when it is asked for, and its tokens are made up,
    different for each request. What arrives during a step is added after it, as the engine does. When there
    is nothing to compute, the clock jumps to the next arrival. Python's own time is measured and costs no
    simulated time.

    Args:
        until: simulated seconds after which nobody asks any more. drains: what is open then is answered;
            else it is cut off.
        audits: prove the books after every step.
    """

    def __init__(
        self,
        clients: Several[Client],
        cache: KVCache,
        config: SchedulerConfig,
        costs: StepCosts,
        *,
        until: float,
        drains: bool = True,
        seed: int = 0,
        audits: bool = False,
    ) -> None:
        self.scheduler = Scheduler(cache, config)
        self.outcome = Outcome()
        self._cache = cache
        self._costs = costs
        self._until = until
        self._drains = drains
        self._audits = audits
        self._rng = random.Random(f"{seed} the machine")
        self._open: dict[Sequence, _Open] = {}
        self._num_asked = 0
        # (moment, number, who asks): the number decides where moments are equal.
        self._arrivals: list[tuple[float, int, Client]] = []
        for client in clients:
            self.outcome.services[client.user] = Service(client.user.weight)
            for moment in client.pace.first(client.rng):
                if moment < until:
                    self._num_asked += 1
                    self._arrivals.append((moment, self._num_asked, client))
        heapify(self._arrivals)

    def run(self) -> Outcome:
        """Simulate to the end. Raises: NothingPlanned, and what the scheduler, cache and audit raise."""
        outcome = self.outcome
        begin = time.perf_counter()
        while True:
            self._let_in()
            if outcome.now >= self._until and not self._drains:
                break
            if self._open and self._step():
                continue
            if not self._arrivals:
                if self._open:
                    raise NothingPlanned(f"{len(self._open)} requests are open and no step can be planned")
                break
            outcome.now = self._arrivals[0][0]
        for sequence in list(self._open):
            self._leave(sequence)
        for service in outcome.services.values():
            service.end(outcome.now)
        outcome.wall_seconds = time.perf_counter() - begin
        return outcome

    def _let_in(self) -> None:
        outcome, arrivals = self.outcome, self._arrivals
        while arrivals and arrivals[0][0] <= outcome.now:
            moment, number, client = heappop(arrivals)
            ask = client.ask()
            request = SimulatedRequest(ask.user, moment, len(ask.prompt), ask.num_output)
            sequence = Sequence(f"{number}", ask.prompt, share=_share_of(ask.user))
            begin = time.perf_counter()
            self.scheduler.add(sequence, outcome.now)
            outcome.adding_seconds.append(time.perf_counter() - begin)
            outcome.requests.append(request)
            outcome.services[ask.user].wait(moment)
            self._open[sequence] = _Open(request, client, number)
            self._ask_again(client, moment, client.pace.after_asking(client.rng))
        outcome.most_waiting = max(outcome.most_waiting, self.scheduler.num_waiting)

    def _ask_again(self, client: Client, now: float, pause: float | None) -> None:
        if pause is not None and now + pause < self._until:
            self._num_asked += 1
            heappush(self._arrivals, (now + pause, self._num_asked, client))

    def _step(self) -> bool:
        """One step, and the time it takes; False if there is nothing to compute."""
        outcome = self.outcome
        begin = time.perf_counter()
        plan = self.scheduler.step(outcome.now)
        planning = time.perf_counter() - begin
        if not plan.chunks:
            return False
        seconds = self._costs.seconds(plan.work, self._rng)
        if plan.predicted is not None:
            outcome.step_errors.append(plan.predicted / seconds - 1.0)
        began_at = outcome.now
        outcome.now += seconds
        outcome.num_tokens += plan.num_tokens
        begin = time.perf_counter()
        self.scheduler.commit(plan, seconds)
        outcome.planning_seconds.append(planning + time.perf_counter() - begin)
        outcome.step_seconds.append(seconds)
        self._note_occupancy(plan, seconds)
        self._take_tokens(plan, began_at)
        if self._audits:
            self._cache.audit([*self.scheduler.running, *self.scheduler.waiting])
        return True

    def _note_occupancy(self, plan: StepPlan, seconds: float) -> None:
        size, used = self._cache.block_size, self._cache.num_used
        # Only the last block of a sequence has slots that are not filled, and it is nobody else's.
        empty = sum(
            len(sequence.block_table) * size - sequence.num_computed_tokens
            for sequence in self.scheduler.running
        )
        self.outcome.occupancy.note(
            seconds,
            used / self._cache.num_blocks,
            1.0 - empty / (used * size),
            len(plan.chunks) / self.scheduler.config.max_num_seqs,
        )

    def _take_tokens(self, plan: StepPlan, began_at: float) -> None:
        now, services = self.outcome.now, self.outcome.services
        for chunk in plan.chunks:
            sequence = chunk.sequence
            one = self._open[sequence]
            request = one.request
            request.num_computed_tokens += chunk.num_tokens
            service = services[request.user]
            service.serve(now, chunk.num_tokens)
            if request.scheduled_at is None:
                request.scheduled_at = began_at
                service.begin(max(began_at, request.arrived_at))
            if chunk.samples:
                self._accept(sequence, one, now)

    def _accept(self, sequence: Sequence, one: _Open, now: float) -> None:
        request = one.request
        if request.first_token_at is None:
            request.first_token_at = now
        else:
            request.largest_gap = max(request.largest_gap, now - one.last_token_at)
        one.last_token_at = now
        sequence.append((one.number * 7_919 + request.num_generated_tokens) % VOCAB_SIZE)
        request.num_generated_tokens += 1
        if request.num_generated_tokens == request.num_output_tokens:
            request.finished_at = now
            self._leave(sequence)
            one.client.answered(sequence.token_ids)
            self._ask_again(one.client, now, one.client.pace.after_answer(one.client.rng))

    def _leave(self, sequence: Sequence) -> None:
        request = self._open.pop(sequence).request
        request.num_cached_tokens = sequence.num_cached_tokens
        request.num_preemptions = sequence.num_preemptions
        request.num_lost_tokens = sequence.num_lost_tokens
        self.scheduler.finish(sequence)


def _share_of(user: User) -> Share:
    return Share(account=user.name, weight=user.weight, background=user.background)
