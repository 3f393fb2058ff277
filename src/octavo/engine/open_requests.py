"""Who is open: how many of them wait, whether one more may, where each stands and for how long.

| begun: seat and blocks | can begin now | waits ........ at most `bound` |   in order of submission
                         ^ seats and pool suffice for it and all before it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.engine.estimates import Estimates
from octavo.engine.request import Request, RequestRefused
from octavo.engine.standing import Standing
from octavo.scheduler.plan import WaitReason
from octavo.scheduler.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.kv.kv_cache import KVCache
    from octavo.scheduler.scheduler import Scheduler


class OpenRequests:
    """Requests from their submission to their end, of one engine.

    `check` and `add` are called under the engine's lock, so that of requests which arrive together each sees
    those before it. `computed` and `ended` are the engine thread's. The others are for any thread: they read
    what the engine thread writes, which is as it was at some moment during the call.
    """

    def __init__(self, bound: int, scheduler: Scheduler, cache: KVCache) -> None:
        """bound: requests that may wait."""
        self.bound = bound
        self._scheduler = scheduler
        self._cache = cache
        self._estimates = Estimates()
        self._open: dict[Request, None] = {}

    # --- coming and going -------------------------------------------------------------------------

    def check(self, num_tokens: int) -> None:
        """Whether a request with a prompt of `num_tokens` may come.

        A request *waits* where the seats (`max_num_seqs`) or the pool cannot take it now beside those who
        have begun and those who came before it; who can be taken begins with one of the next steps and does
        not count, and where nobody has begun the first can always be taken. Once one has to wait, all who
        come later do. Blocks that a prompt will find in the cache count as needed: what it finds is only
        known when it begins.

        Raises: RequestRefused "queue_full", if it would have to wait and `bound` or more do.
        """
        if len(self._open) < self.bound:
            return  # so many would not even wait if all of them did
        num_waiting, waits = self._queue(num_tokens)
        if not waits or num_waiting < self.bound:
            return
        seconds = self.estimated_wait()
        raise RequestRefused(
            f"the queue is full: {num_waiting:,} requests wait and at most {self.bound:,} may "
            "(max_num_queued_reqs); nothing of this one was computed",
            code="queue_full",
            retry_after=max(1.0, seconds if seconds is not None else 1.0),
        )

    def add(self, request: Request) -> None:
        """It has been submitted."""
        self._open[request] = None

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step has been computed, in `seconds` since the one before it or since it could begin."""
        self._estimates.step(num_tokens, seconds)

    def ended(self, request: Request) -> None:
        """It has its outcome."""
        self._open.pop(request, None)
        if request.outcome in ("stop", "length"):
            self._estimates.answered(request.stats.num_output_tokens)

    # --- what is asked ----------------------------------------------------------------------------

    def estimated_wait(self) -> float | None:
        """Seconds until all that is ahead of a request that comes now is computed: known tokens, and as many
        more as answers have had. None where nothing has been computed yet.
        """
        ahead = [request for request in self._now() if request.sequence.status is not SequenceStatus.FINISHED]
        return self._estimates.seconds_for(self._tokens_of(ahead))

    def standing(self, request: Request) -> Standing | None:
        """Where it stands; None while it generates, and after its end. Cost: O(open requests)."""
        sequence = request.sequence
        status = sequence.status
        if request.outcome is not None or request.cancelled is not None or status is SequenceStatus.FINISHED:
            return None
        lacks = self._scheduler.lacks(sequence)
        uncomputed = _uncomputed(sequence)
        is_computed = status is SequenceStatus.RUNNING and lacks is None
        if is_computed and request.first_token_at is not None and uncomputed <= 1:
            return None
        requests = {other.sequence: other for other in self._now()}
        begun = [other for one, other in requests.items() if one.status is SequenceStatus.RUNNING]
        position, ahead = 0, [other for other in begun if other is not request]
        if self._stands(sequence):
            line = self._scheduler.in_order
            before = line[: line.index(sequence)] if sequence in line else line
            standing = [requests[one] for one in before if one in requests and self._stands(one)]
            position = len(standing) + 1
            ahead += [other for other in standing if other.sequence.status is not SequenceStatus.RUNNING]
        if lacks is None and status is SequenceStatus.PAUSED:
            lacks = WaitReason.KV
        num_tokens = float(uncomputed + sum(_uncomputed(other.sequence) for other in ahead))
        if lacks is WaitReason.KV or lacks is WaitReason.SEATS:
            num_tokens = uncomputed + self._tokens_of(ahead)  # somebody has to end first
        return Standing(
            position,
            lacks,
            min(sequence.num_computed_tokens, sequence.num_tokens),
            sequence.num_tokens,
            self._estimates.seconds_for(num_tokens),
        )

    def _stands(self, sequence: Sequence) -> bool:
        """Whether it waits, is paused, or has to leave its seat to others."""
        if sequence.status is SequenceStatus.RUNNING:
            return self._scheduler.lacks(sequence) is WaitReason.SEATS
        return sequence.status is not SequenceStatus.FINISHED

    # --- how it is counted ------------------------------------------------------------------------

    def _now(self) -> list[Request]:
        """All of this moment: copied in one go, the engine thread takes away those that end."""
        return [request for request in list(self._open) if request.cancelled is None]

    def _queue(self, num_tokens: int) -> tuple[int, bool]:
        """How many wait, and whether one more with a prompt of `num_tokens` would."""
        seats, blocks = self._scheduler.config.max_num_seqs, self._cache.num_available
        needs: list[int] = []  # blocks, of those nothing was computed for
        nobody_begun = True
        for request in list(self._open):
            sequence = request.sequence
            status = sequence.status
            if request.cancelled is not None or status is SequenceStatus.FINISHED:
                # It goes before the next step, and what only it refers to with it.
                blocks += sum(block.ref_count == 1 for block in sequence.block_table.blocks)
            elif status is SequenceStatus.WAITING:
                needs.append(self._blocks_missing(sequence))
            else:
                nobody_begun = False
                seats -= not sequence.held  # the seat of one that nobody reads is lent to others
                blocks -= self._blocks_missing(sequence)
        for index, num_blocks in enumerate((*needs, self._cache.blocks_for(num_tokens))):
            fits = num_blocks <= blocks or (nobody_begun and index == 0)
            if seats < 1 or not fits:
                return len(needs) - index, True
            seats -= 1
            blocks -= num_blocks
        return 0, False

    def _blocks_missing(self, sequence: Sequence) -> int:
        """Blocks that it lacks for the tokens it knows."""
        return max(0, self._cache.blocks_for(sequence.num_tokens) - len(sequence.block_table))

    def _tokens_of(self, requests: Iterable[Request]) -> float:
        """Tokens still to be computed of all of them: known ones, and expected ones."""
        expected = self._estimates.output_tokens
        total = 0.0
        for request in requests:
            sequence = request.sequence
            num_output = sequence.num_tokens - sequence.num_prompt_tokens
            to_come = max(1.0, min(request.max_output_tokens, expected) - num_output)
            total += _uncomputed(sequence) + to_come
        return total


def _uncomputed(sequence: Sequence) -> int:
    return max(0, sequence.num_tokens - sequence.num_computed_tokens)
