"""One rule: each step moves what is computed of every sequence toward what is known of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import attrgetter

from octavo.kv.kv_cache import Found, KVCache
from octavo.scheduler.budget import StepBudget
from octavo.scheduler.cost_model import CostModel, StepWork
from octavo.scheduler.fair_queue import FairQueue
from octavo.scheduler.flow import Flow
from octavo.scheduler.growth import Growth
from octavo.scheduler.limits import RequestTooLong, SchedulerConfig
from octavo.scheduler.plan import Preemption, PreemptionReason, ScheduledChunk, StepPlan, WaitReason
from octavo.scheduler.preemption import exclusive_blocks, still_ones_first, take_tails
from octavo.scheduler.sequence import Sequence, SequenceStatus

LOOK_AHEAD = 4
"""Waiting ones that are compared by what is known of them, each at the price of a search."""

MOST_IN_VAIN = 16
"""Who may begin behind as many tokens as a step has: they get some of it only where they share a prompt."""

_RUNNING = SequenceStatus.RUNNING
_seniority = attrgetter("seniority")


class _Draft:
    """A plan in the making."""

    __slots__ = (
        "beginners",
        "budget",
        "chunks",
        "eldest",
        "has_prompt",
        "holders",
        "needed",
        "planned",
        "preemptions",
        "robbed",
    )

    def __init__(self, budget: StepBudget) -> None:
        self.budget = budget
        self.eldest: Sequence | None = None  # the most senior: nobody keeps blocks from it
        self.beginners: set[Sequence] = set()  # may begin in this step
        self.chunks: list[ScheduledChunk] = []
        self.planned: set[Sequence] = set()
        self.robbed: set[Sequence] = set()
        self.preemptions: list[Preemption] = []
        self.has_prompt = False
        self.needed: int | None = None  # `_needed_blocks`, once somebody has asked
        self.holders: list[Sequence] | None = None  # who holds blocks, the least senior first


class Scheduler:
    """Decides who computes how many tokens in the next step, and holds the blocks for them.

        everybody (`FairQueue`): who runs, who is paused, who waits, the most entitled first
        | in a seat: visited in this step                 | beyond the seats: not visited |
          1. who waits or is paused begins, if all it knows fits
          2. who generates takes one token, set aside for it, the most senior first
          3. prompts take what is left of the step's time and tokens, the most entitled first

    Nothing is reserved for tokens that are not known yet. When the pool is full, the least senior of those
    who have no part in the step yet pay with their tails. The order of entitlement moves with what is
    computed; seniority is fixed when a sequence begins, so two who want the same blocks never take them from
    each other in turn, the most senior always runs, and somebody always finishes.

    Deterministic; no clock, no tensors, no model. `step`, then `commit` or `rollback`, then the next `step`;
    `add` at any time, `finish` between steps. Times are seconds on the caller's clock, never less than
    before.
    """

    def __init__(self, cache: KVCache, config: SchedulerConfig, cost_model: CostModel | None = None) -> None:
        self.config = config
        self.cost_model = cost_model or CostModel()
        self.num_preemptions = 0  # how often anybody was paused
        self.num_lost_tokens = 0  # computed tokens that preemptions took, of everybody
        self.num_steps_over_target = 0  # in which those who generate take more than the target alone
        self._cache = cache
        self._queue = FairQueue(config.policy)
        self._growth = Growth()
        self._waiting: dict[Sequence, None] = {}
        self._running: dict[Sequence, None] = {}
        self._seated: dict[Sequence, WaitReason | None] = {}  # who was visited, and what it lacked
        self._turned_away: WaitReason | None = None  # why the first could not begin that could not
        self._last_planned = 0  # the last arrival before the last step
        self._num_arrived = 0
        self._now = 0.0
        self._open_plan: StepPlan | None = None

    # Who is here.

    @property
    def watermark(self) -> int:
        """Blocks that an admission leaves to those who are here, for what they are expected to grow by."""
        return self._growth.watermark(self._cache.target_blocks, len(self._running), self._cache.block_size)

    @property
    def limit(self) -> int:
        """Tokens of the longest request: the model's context, or the whole pool if that is less."""
        return min(self.config.max_model_len, self._cache.capacity_tokens)

    @property
    def waiting(self) -> Collection[Sequence]:
        """Sequences that were never admitted, in the order of their arrival."""
        return self._waiting.keys()

    @property
    def running(self) -> Collection[Sequence]:
        """Admitted sequences in the order of admission, paused and held ones included."""
        return self._running.keys()

    @property
    def in_order(self) -> list[Sequence]:
        """Everybody, the most entitled first, as of some moment during the call: any thread may ask."""
        return self._queue.copied()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Admitted sequences that are not paused."""
        return len(self._running) - self.num_paused

    @property
    def num_paused(self) -> int:
        """Admitted sequences that wait for blocks."""
        # Copied in one go: metrics are read in another thread than the one that admits and finishes.
        return sum(sequence.status is SequenceStatus.PAUSED for sequence in list(self._running))

    def lacks(self, sequence: Sequence) -> WaitReason | None:
        """Why the last step computed nothing of a sequence; None if it did, or the sequence came after it."""
        seated = self._seated
        if sequence in seated:
            return seated[sequence]
        if len(seated) >= self.config.max_num_seqs:
            return WaitReason.SEATS
        return self._turned_away if sequence.arrival <= self._last_planned else None

    # Coming and going.

    def add(self, sequence: Sequence, now: float) -> None:
        """Let a sequence wait for admission.

        Raises: RequestTooLong(needed, limit), if it cannot generate one token even alone.
        """
        assert sequence.status is SequenceStatus.WAITING, f"{sequence} was here before"
        if sequence.num_tokens + 1 > self.limit:
            raise RequestTooLong(sequence.num_tokens + 1, self.limit)
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        self._queue.add(sequence, sequence.num_tokens - self._cache.find(sequence).end, now)
        self._waiting[sequence] = None

    def finish(self, sequence: Sequence) -> None:
        """Let a sequence go, whatever state it is in: its references return, last block first. Idempotent."""
        assert self._open_plan is None, "a sequence may not go while a step is running"
        if sequence.flow is not None and sequence.num_tokens > sequence.num_prompt_tokens:
            self._growth.ended(sequence.num_tokens - sequence.num_prompt_tokens)
        self._queue.remove(sequence)
        self._waiting.pop(sequence, None)
        self._running.pop(sequence, None)
        self._seated.pop(sequence, None)
        self._cache.free(sequence)
        sequence.status = SequenceStatus.FINISHED

    # A step.

    def step(self, now: float) -> StepPlan:
        """Plan a step and hold its blocks. A plan without chunks is over at once: it takes no commit."""
        assert self._open_plan is None, "the step before has neither been committed nor rolled back"
        self._now = now
        max_tokens = self.config.max_num_batched_tokens
        budget = StepBudget(max_tokens, self.cost_model, self.config.target_itl)
        draft = _Draft(budget)
        seated: dict[Sequence, WaitReason | None] = dict.fromkeys(self._take_seats(draft))
        order = [one for one in seated if one.status is _RUNNING or one in draft.beginners]
        generating = [one for one in order if len(one.token_ids) - one.num_computed_tokens == 1]
        budget.set_aside(generating, interactive=not all(one.background for one in order))
        for sequence in sorted(generating, key=_seniority):
            budget.visit(sequence)
            if sequence not in draft.robbed:
                seated[sequence] = self._plan_chunk(sequence, draft)
        if len(generating) < len(order):
            for sequence in order:
                if sequence in draft.planned or sequence in draft.robbed:
                    continue
                if budget.unassigned < 1:
                    seated[sequence] = WaitReason.FAIR_SHARE
                else:
                    # Somebody may have computed ahead of it, in an earlier step or in this one.
                    seated[sequence] = self._plan_chunk(sequence, draft, self._cache.find(sequence))
        for sequence in draft.robbed:
            seated[sequence] = WaitReason.KV
        self._seated = seated
        self._last_planned = self._num_arrived
        self.num_steps_over_target += budget.over_target
        work = budget.set_aside_work
        if len(draft.chunks) != len(generating) or draft.has_prompt:
            work = StepWork.of([(start, num_tokens) for _, start, num_tokens, _ in draft.chunks])
        plan = StepPlan(
            tuple(draft.chunks),
            max_tokens - budget.tokens_left,
            tuple(draft.preemptions),
            self._cache.copies,
            work,
            self.cost_model.predict(work),
        )
        self._open_plan = plan if plan.chunks else None
        return plan

    def commit(self, plan: StepPlan, seconds: float | None = None) -> None:
        """The step was computed, in `seconds` if somebody has measured it: its blocks are content."""
        self._close(plan)
        self._cache.commit()
        served: dict[Flow | None, int] = {}
        for sequence, start, num_tokens, _ in plan.chunks:
            sequence.num_computed_tokens = start + num_tokens
            flow = sequence.flow
            served[flow] = served.get(flow, 0) + num_tokens
        self._queue.settle(served, self._lacking_flows(plan), self._now)
        if seconds is not None:
            self.cost_model.observe(plan.work, seconds)

    def _lacking_flows(self, plan: StepPlan) -> set[Flow]:
        """Of those who could have used more of a step than they got."""
        lacking = {one.flow for one, lacks in self._seated.items() if lacks is not None}
        lacking |= {chunk.sequence.flow for chunk in plan.chunks if not chunk.samples}
        if len(self._running) > len(self._seated):
            unseated = (one for one in self._running if one not in self._seated)
            lacking |= {one.flow for one in unseated if not one.held}
        return {flow for flow in lacking if flow is not None}

    def rollback(self, plan: StepPlan) -> None:
        """The step failed: everyone is as far as before it. What was taken from others stays taken."""
        self._close(plan)
        self._cache.rollback()
        for chunk in reversed(plan.chunks):
            sequence = chunk.sequence
            self._cache.free_tail(sequence, self._cache.blocks_for(sequence.num_computed_tokens))

    def _close(self, plan: StepPlan) -> None:
        assert plan is self._open_plan or not plan.chunks, "this plan is not the one that is running"
        self._open_plan = None

    def _take_seats(self, draft: _Draft) -> list[Sequence]:
        """Who is visited in this step, in order: those who run, those who wait or are paused and can begin.

        When one cannot, because what it knows does not fit, nobody behind it begins, but for the eldest,
        which begins with whatever fits. Nor do more than a few whom the tokens of the step cannot reach,
        unless they share what others compute in it. Who runs keeps its seat before those who cannot begin.
        """
        running = [one for one in self._running if not one.held]
        draft.eldest = eldest = min(running, key=_seniority, default=None)
        seats = self.config.max_num_seqs
        visited: list[Sequence] = []
        self._turned_away = None
        tokens_ahead = num_in_vain = 0
        order = self._queue.in_order(self._now)
        for one in self._nearest_to_cache(order) if len(self._waiting) > 1 else order:
            if len(visited) >= seats:
                break
            if one.held:
                continue
            if eldest is None:
                draft.eldest = eldest = one
            if one.status is _RUNNING:
                visited.append(one)
            elif num_in_vain >= MOST_IN_VAIN and one is not eldest:
                self._turned_away = WaitReason.FAIR_SHARE
                break
            elif one is eldest or (one not in draft.robbed and self._makes_room(one, visited, draft)):
                draft.beginners.add(one)
                draft.needed = self._needed_blocks(draft) + self._cache.blocks_missing(one)
                visited.append(one)
                num_in_vain += tokens_ahead >= self.config.max_num_batched_tokens
            else:
                self._turned_away = WaitReason.KV
                break
            tokens_ahead += len(one.token_ids) - one.num_computed_tokens
        if self._turned_away is not None:
            here = set(visited)
            others = [one for one in running if one.status is _RUNNING and one not in here]
            generating = [one for one in others if len(one.token_ids) - one.num_computed_tokens == 1]
            prompts = sorted(set(others).difference(generating), key=self._queue.place)
            visited += (sorted(generating, key=_seniority) + prompts)[: seats - len(visited)]
        if eldest is not None and eldest not in visited and self._is_owed_a_seat(eldest, visited, draft):
            del visited[seats - 1 :]
            visited.append(eldest)
            if eldest.status is not _RUNNING:
                draft.beginners.add(eldest)
        return visited

    def _nearest_to_cache(self, order: Iterator[Sequence]) -> Iterator[Sequence]:
        """The same order, but of a few who wait within a quantum of each other, the first ones of their
        users, the one first of which most is known. So requests with a common prefix stay together while it
        is cached, and nobody is passed by more than a quantum of service."""
        held_back: list[Sequence] = []
        for one in order:
            if one.status is SequenceStatus.WAITING and not one.held:
                background, place, _ = self._queue.place(one)
                if not held_back:
                    reach = background, place + self._queue.quantum_of(one)
                if len(held_back) < LOOK_AHEAD and (background, place) < reach:
                    held_back.append(one)
                    continue
            if held_back:
                yield from self._by_known_tokens(held_back)
                held_back = []
            yield one
        yield from self._by_known_tokens(held_back)

    def _by_known_tokens(self, waiting: list[Sequence]) -> list[Sequence]:
        if len(waiting) < 2:
            return waiting
        return sorted(waiting, key=lambda one: -self._cache.find(one).end)

    def _is_owed_a_seat(self, eldest: Sequence, visited: list[Sequence], draft: _Draft) -> bool:
        """Or those visited might all be unable to go on, for want of blocks that it holds."""
        return eldest not in draft.robbed and not any(self._queue.outranks(one, eldest) for one in visited)

    def _makes_room(self, sequence: Sequence, visited: list[Sequence], draft: _Draft) -> bool:
        """Whether all that one knows fits beside what those who run and those who begin before it need: into
        what is available, or else with blocks of those it may rob, if those are enough and the tokens of the
        step are not those of others before it."""
        cache = self._cache
        waits = sequence.status is SequenceStatus.WAITING
        room = cache.num_available - self._needed_blocks(draft) - (self.watermark if waits else 0)
        room -= self._others_cache() if sequence.background else 0
        if cache.blocks_missing(sequence) > room:
            ahead = sum(len(one.token_ids) - one.num_computed_tokens for one in visited)
            victims = self._victims(sequence, draft) if ahead < draft.budget.tokens_left else []
            # Nor does it stand behind what they have yet to get.
            room += sum(cache.blocks_missing(one) for one in victims if one.status is _RUNNING)
            if room < 1 and not victims:
                return False
            found = cache.find(sequence)
            known = {node.block for node in found.nodes if node.block is not None}
            lacking = cache.blocks_missing(sequence, found) - room
            if exclusive_blocks(victims, lacking, known) < lacking:
                return False
            for _ in range(2):  # what was found may have been the victims' alone, and is no longer in use
                if lacking > 0:
                    before = cache.num_available
                    self._take_from(victims, before + lacking, draft)
                    room += cache.num_available - before
                    lacking = cache.blocks_missing(sequence, found) - room
        return True

    def _needed_blocks(self, draft: _Draft) -> int:
        """Blocks for what those know who run, and those who begin in this step."""
        if draft.needed is None:
            running = (one for one in self._running if one.status is _RUNNING and not one.held)
            draft.needed = sum(self._cache.blocks_missing(one) for one in running)
        return draft.needed

    def _victims(self, taker: Sequence, draft: _Draft) -> list[Sequence]:
        """Who may lose blocks to `taker`, first to be robbed first: nobody who has a part in this step. One
        that runs takes from those who are less senior, and from held ones, since nobody visits them; one that
        begins only from those it is to be preferred to; the eldest from everybody."""
        if draft.holders is None:
            holders = (one for one in self._running if one.block_table.blocks)
            draft.holders = sorted(holders, key=_seniority, reverse=True)
        others = [
            one
            for one in draft.holders
            if one.block_table.blocks and one is not taker and one not in draft.planned
        ]
        if taker is not draft.eldest:
            if taker.status is _RUNNING:
                others = [one for one in others if one.held or one.seniority > taker.seniority]
            elif taker.status is SequenceStatus.PAUSED:
                others = [one for one in others if self._queue.outranks(taker, one)]
            else:
                others = self._queue.due_victims(taker, others)
        return still_ones_first(others)

    def _take_from(self, victims: list[Sequence], num_blocks: int, draft: _Draft) -> None:
        for victim, num_lost in take_tails(self._cache, victims, num_blocks).items():
            # It has more than one token to compute now, and not in this step.
            draft.budget.visit(victim)
            draft.robbed.add(victim)
            self._preempt(victim, PreemptionReason.KV, num_lost, draft)

    def _chunk_end(self, sequence: Sequence, start: int, draft: _Draft) -> int:
        """Where a chunk that begins at `start` ends, as far as the budget goes; `start` if there is none.

        A chunk that does not reach the last known token ends on a block border, so that what it leaves can
        be shared. One that is too short for that must not get stuck; but only the first prompt of a step may
        stop inside a block, or two that share a document would compute the same tokens side by side.
        """
        size, num_known = self._cache.block_size, len(sequence.token_ids)
        allowed = draft.budget.tokens_for(sequence, start, first_prompt=not draft.has_prompt)
        end = start + allowed
        if end < num_known:
            if end - end % size > start:
                end -= end % size
            elif draft.has_prompt and end % size:
                end = start
        return end

    def _plan_chunk(self, sequence: Sequence, draft: _Draft, found: Found | None = None) -> WaitReason | None:
        """Plan the next tokens of one, behind what was found of it, taking blocks from others if need be.

        Returns what it lacks for that; None if it was planned: only then it has adopted what was found.
        """
        cache = self._cache
        start = sequence.num_computed_tokens if found is None else found.end
        num_known = len(sequence.token_ids)
        # One token was set aside for whoever generates: it need not be asked for.
        next_only = num_known - start == 1 and draft.budget.unassigned > 0
        end = num_known if next_only else self._chunk_end(sequence, start, draft)
        if end <= start:
            return WaitReason.FAIR_SHARE
        left_alone = self._others_cache() if sequence.background else 0
        if self._blocks_until(end, sequence, found) + left_alone > cache.num_available:
            victims = self._victims(sequence, draft)
            self._take_from(victims, self._blocks_until(end, sequence, found) + left_alone, draft)
            left_alone = 0 if sequence is draft.eldest else left_alone and self._others_cache()
            # Some of what was found may have been the victims' alone.
            lacking = self._blocks_until(end, sequence, found) + left_alone - cache.num_available
            if lacking > 0 and found is not None and found.source is not None:
                found = found.without_copy(sequence.num_computed_tokens)
                start = found.end
                end = max(start, self._chunk_end(sequence, start, draft))
                lacking = self._blocks_until(end, sequence, found) + left_alone - cache.num_available
            if lacking > 0:
                end = min(end, (cache.blocks_for(end) - lacking) * cache.block_size)
            if end <= start:
                assert draft.chunks or sequence is not draft.eldest, (
                    f"{sequence} has outgrown the pool of {cache.num_blocks} blocks"
                )
                if sequence not in draft.beginners:
                    self._preempt(sequence, PreemptionReason.KV_FULL, 0, draft)
                return WaitReason.KV
        if sequence.status is not _RUNNING:
            self._begin(sequence)
        if found is not None:
            cache.adopt(sequence, found)
            start = sequence.num_computed_tokens
        cache.allocate(sequence, end)
        cache.register(sequence, end)
        draft.chunks.append(ScheduledChunk(sequence, start, end - start, end == num_known))
        draft.planned.add(sequence)
        draft.budget.spend(start, end - start)
        draft.has_prompt |= not next_only
        return None

    def _begin(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.WAITING:
            self._queue.begin(sequence)
            del self._waiting[sequence]
            self._running[sequence] = None
        sequence.status = _RUNNING

    def _blocks_until(self, end: int, sequence: Sequence, found: Found | None) -> int:
        """Blocks that must leave the free list until the tokens before `end` are computed."""
        cache = self._cache
        if found is None:
            return cache.blocks_for(end) - len(sequence.block_table)
        beyond = cache.blocks_for(len(sequence.token_ids)) - cache.blocks_for(end)
        return cache.blocks_missing(sequence, found) - beyond

    def _others_cache(self) -> int:
        """Cached blocks that are not for background work to have forgotten: what others have used, up to half
        of the pool. The eldest may, once there is nothing else to take."""
        return min(self._cache.num_cached_of_interactive, self._cache.target_blocks // 2)

    def _preempt(self, sequence: Sequence, reason: PreemptionReason, num_lost: int, draft: _Draft) -> None:
        """Let a sequence stand still for lack of blocks. Who stands still already is not paused again."""
        pauses = sequence.status is not SequenceStatus.PAUSED
        draft.preemptions.append(Preemption(sequence, reason, num_lost, pauses))
        self.num_lost_tokens += num_lost
        if pauses:
            sequence.status = SequenceStatus.PAUSED
            sequence.num_preemptions += 1
            self.num_preemptions += 1
