"""One rule: each step moves what is computed of every sequence toward what is known of it."""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile

from octavo.kv.kv_cache import KVCache
from octavo.scheduler.limits import RequestTooLong, SchedulerConfig
from octavo.scheduler.plan import Preemption, PreemptionReason, ScheduledChunk, StepPlan
from octavo.scheduler.preemption import take_tails, victims_in_order
from octavo.scheduler.sequence import Sequence, SequenceStatus

_WATERMARK_DIVISOR = 100


def _entitlement(sequence: Sequence) -> tuple[bool, int, int]:
    return sequence.entitlement


def _filed(group: dict[Sequence, None], sequence: Sequence) -> dict[Sequence, None]:
    """The group with one more, in order of entitlement: at its end, but for priorities."""
    if group and next(reversed(group)).entitlement > sequence.entitlement:
        return dict.fromkeys(sorted([*group, sequence], key=_entitlement))
    group[sequence] = None
    return group


class _Draft:
    """A plan in the making."""

    __slots__ = (
        "blocked",
        "chunks",
        "has_prompt",
        "missing_blocks",
        "preemptions",
        "set_aside",
        "tokens_left",
    )

    def __init__(self, tokens_left: int, set_aside: set[Sequence]) -> None:
        self.chunks: list[ScheduledChunk] = []
        self.preemptions: list[Preemption] = []
        self.tokens_left = tokens_left
        self.set_aside = set_aside  # generating and yet to be visited: one of `tokens_left` for each
        self.missing_blocks = 0  # blocks that visited sequences still need for tokens they know
        self.has_prompt = False
        self.blocked = False  # a paused sequence does not fit: nobody behind it may begin


class Scheduler:
    """Decides who computes how many tokens in the next step, and holds the blocks for them.

        waiting --- admission ---> running, in order of entitlement: class, priority, arrival
                                   | visited, planned | being visited | not yet visited |
                                     never a victim     takes blocks    gives blocks, from its end

    Sequences are visited once a step, the most entitled first. A generating one takes one token, which was
    set aside for it; a prompt takes what is left. Nothing is reserved for tokens that are not known yet: when
    the pool is full, the tails of those not yet visited pay, so the first always runs and somebody always
    finishes. One that waits and precedes some of those who run (background work comes last, then lower
    priorities) is visited in its place among them, and may take their blocks to begin.

    Deterministic; no clock, no tensors, no model. `step`, then `commit` or `rollback`, then the next `step`;
    `add` at any time, `finish` between steps.
    """

    def __init__(self, cache: KVCache, config: SchedulerConfig) -> None:
        self.config = config
        self.num_preemptions = 0  # how often anybody was paused
        self.num_lost_tokens = 0  # computed tokens that preemptions took, of everybody
        self._cache = cache
        self._waiting: dict[Sequence, None] = {}
        self._running: dict[Sequence, None] = {}
        self._num_arrived = 0
        self._open_plan: StepPlan | None = None

    # Who is here.

    @property
    def watermark(self) -> int:
        """Blocks that an admission leaves to those who are here."""
        return max(1, self._cache.target_blocks // _WATERMARK_DIVISOR)

    @property
    def limit(self) -> int:
        """Tokens of the longest request: the model's context, or the whole pool if that is less."""
        return min(self.config.max_model_len, self._cache.capacity_tokens)

    @property
    def waiting(self) -> Collection[Sequence]:
        """Sequences that were never admitted, in order of entitlement."""
        return self._waiting.keys()

    @property
    def running(self) -> Collection[Sequence]:
        """Admitted sequences in order of entitlement, paused and held ones included."""
        return self._running.keys()

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

    # Coming and going.

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for admission.

        Raises: RequestTooLong(needed, limit), if it cannot generate one token even alone.
        """
        assert sequence.status is SequenceStatus.WAITING, f"{sequence} was here before"
        if sequence.num_tokens + 1 > self.limit:
            raise RequestTooLong(sequence.num_tokens + 1, self.limit)
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        self._waiting = _filed(self._waiting, sequence)

    def finish(self, sequence: Sequence) -> None:
        """Let a sequence go, whatever state it is in: its references return, last block first. Idempotent."""
        assert self._open_plan is None, "a sequence may not go while a step is running"
        self._waiting.pop(sequence, None)
        self._running.pop(sequence, None)
        self._cache.free(sequence)
        sequence.status = SequenceStatus.FINISHED

    # A step.

    def step(self) -> StepPlan:
        """Plan a step and hold its blocks. A plan without chunks is over at once: it takes no commit."""
        assert self._open_plan is None, "the step before has neither been committed nor rolled back"
        active = [sequence for sequence in self._running if not sequence.held]
        order = self._in_order(active)[: self.config.max_num_seqs]
        draft = _Draft(
            tokens_left=self.config.max_num_batched_tokens,
            set_aside={seq for seq in order if len(seq.token_ids) - seq.num_computed_tokens == 1},
        )
        admitted: list[Sequence] = []
        for sequence in order:
            waits = sequence.status is SequenceStatus.WAITING
            if not self._visit(sequence, draft):
                draft.blocked |= waits or sequence.status is SequenceStatus.PAUSED
            elif waits:
                admitted.append(sequence)
        if not draft.blocked:
            self._admit(draft, admitted, room=self.config.max_num_seqs - len(active))
        for sequence in admitted:
            del self._waiting[sequence]
            self._running = _filed(self._running, sequence)

        num_tokens = self.config.max_num_batched_tokens - draft.tokens_left
        plan = StepPlan(tuple(draft.chunks), num_tokens, tuple(draft.preemptions), self._cache.copies)
        self._open_plan = plan if plan.chunks else None
        return plan

    def commit(self, plan: StepPlan) -> None:
        """The step was computed: its blocks are content, its tokens are done."""
        self._close(plan)
        self._cache.commit()
        for chunk in plan.chunks:
            chunk.sequence.num_computed_tokens = chunk.start + chunk.num_tokens

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

    def _in_order(self, active: list[Sequence]) -> list[Sequence]:
        """Those who run, and among them those who wait and are more entitled than the last of them."""
        if not active:
            return active
        last = active[-1].entitlement
        urgent = list(takewhile(lambda sequence: sequence.entitlement < last, self._waiting))
        if not urgent:
            return active
        readers = [sequence for sequence in urgent if not sequence.held]
        return sorted([*active, *readers], key=_entitlement)

    def _visit(self, sequence: Sequence, draft: _Draft) -> bool:
        """Give a sequence its part of the step. Returns whether it got one."""
        uncomputed = len(sequence.token_ids) - sequence.num_computed_tokens
        draft.set_aside.discard(sequence)
        if sequence.status is not SequenceStatus.RUNNING:
            # A victim of this step cannot begin again in it: a robbery leaves no block available.
            return not draft.blocked and self._begin(sequence, draft, watermark=0)
        if uncomputed > 1:
            # Somebody may have computed ahead of it, in an earlier step or in this one.
            self._cache.adopt(sequence)
        return self._plan_chunk(sequence, draft)

    def _admit(self, draft: _Draft, admitted: list[Sequence], room: int) -> None:
        """Let waiting sequences in, in order, until one does not fit beside those who are here."""
        for sequence in self._waiting:
            if len(admitted) >= room or not draft.tokens_left:
                break
            if sequence.held or sequence in admitted:
                continue
            if not self._begin(sequence, draft, self.watermark):
                break
            admitted.append(sequence)

    def _begin(self, sequence: Sequence, draft: _Draft, watermark: int) -> bool:
        """Start a waiting sequence, or a paused one again, if all it knows fits now. Returns whether it did.

        The first in a step need not fit: it may take the blocks of everybody else. The others may take those
        of those it precedes, if that is enough.
        """
        cache = self._cache
        lower = self._preceded_by(sequence)
        room = cache.num_available - draft.missing_blocks - watermark
        if draft.chunks and room < 1 and not lower:
            return False
        found = cache.find(sequence)
        if self._chunk_end(sequence, found.end, draft) == found.end:
            return False
        missing = cache.blocks_missing(sequence, found)
        if draft.chunks and missing > room:
            theirs = sum(block.ref_count == 1 for victim in lower for block in victim.block_table.blocks)
            if missing > room + theirs:
                return False
            self._take_from(lower, draft.missing_blocks + watermark + missing, draft)
        cache.adopt(sequence, found)
        return self._plan_chunk(sequence, draft)

    def _preceded_by(self, taker: Sequence) -> list[Sequence]:
        """Who may lose blocks so that `taker` can begin."""
        if not self._running or next(reversed(self._running)).precedence <= taker.precedence:
            return []
        victims = victims_in_order(reversed(self._running), taker)
        return [victim for victim in victims if victim.precedence > taker.precedence]

    def _take_from(self, victims: list[Sequence], num_blocks: int, draft: _Draft) -> None:
        for victim, num_lost in take_tails(self._cache, victims, num_blocks).items():
            # It has more than one token to compute now, and not in this step.
            draft.set_aside.discard(victim)
            self._preempt(victim, PreemptionReason.KV, num_lost, draft)

    def _chunk_end(self, sequence: Sequence, start: int, draft: _Draft) -> int:
        """Where a chunk that begins at `start` ends, as far as tokens go; `start` itself if there is none.

        A chunk that does not reach the last known token ends on a block border, so that what it leaves can
        be shared. One that is too short for that must not get stuck; but only the first prompt of a step may
        stop inside a block, or two that share a document would compute the same tokens side by side.
        """
        size = self._cache.block_size
        allowed = draft.tokens_left - len(draft.set_aside)
        end = min(len(sequence.token_ids), start + allowed)
        if end < len(sequence.token_ids):
            if allowed >= size:
                end -= end % size
            elif draft.has_prompt and end % size:
                end = start
        return end

    def _plan_chunk(self, sequence: Sequence, draft: _Draft) -> bool:
        """Plan the next tokens of a sequence, taking blocks from those behind it if need be."""
        cache = self._cache
        start, num_known = sequence.num_computed_tokens, len(sequence.token_ids)
        end = self._chunk_end(sequence, start, draft)
        if end <= start:
            draft.missing_blocks += cache.blocks_missing(sequence)
            return False
        num_held = len(sequence.block_table)
        needed = cache.blocks_for(end) - num_held
        if needed > cache.num_available:
            self._take_from(victims_in_order(reversed(self._running), sequence), needed, draft)
            end = min(end, (num_held + cache.num_available) * cache.block_size)
            if end <= start:
                assert draft.chunks, f"{sequence} has outgrown the pool of {cache.num_blocks} blocks"
                self._preempt(sequence, PreemptionReason.KV_FULL, 0, draft)
                return False
        cache.allocate(sequence, end)
        cache.register(sequence, end)
        draft.chunks.append(ScheduledChunk(sequence, start, end - start, end == num_known))
        draft.tokens_left -= end - start
        draft.has_prompt |= num_known - start > 1
        if end < num_known:
            draft.missing_blocks += cache.blocks_missing(sequence)
        sequence.status = SequenceStatus.RUNNING
        return True

    def _preempt(self, sequence: Sequence, reason: PreemptionReason, num_lost: int, draft: _Draft) -> None:
        """Let a sequence stand still for lack of blocks. Who stands still already is not paused again."""
        pauses = sequence.status is not SequenceStatus.PAUSED
        draft.preemptions.append(Preemption(sequence, reason, num_lost, pauses))
        self.num_lost_tokens += num_lost
        if pauses:
            sequence.status = SequenceStatus.PAUSED
            sequence.num_preemptions += 1
            self.num_preemptions += 1
