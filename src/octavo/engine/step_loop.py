"""The engine thread: one step after another while there is work, asleep without a tick when there is none.

    callers (event loops, threads)          | engine thread
    submit, cancel, resume --- commands --->|  between two steps: run the commands
                                            |  plan the step, build the batch
    <------- news, one post a mailbox ------|  hand over what the last step produced
                                            |  one native call, no interpreter lock
                                            |  commit, take the tokens, apply the stop rules

Scheduler, cache and open requests are touched by this thread only, so none of them needs a lock. The
hand-over waits for the moment before the native call: whoever it wakes then finds the interpreter free.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

import numpy as np

from octavo.engine.fault import ENGINE_STOPPED, STEP_FAILED, describe
from octavo.engine.generation import MAX_UNREAD_TOKENS, RESUME_UNREAD_TOKENS
from octavo.engine.kv_memory import KVMemory
from octavo.engine.metrics import EngineMetrics
from octavo.engine.open_requests import OpenRequests
from octavo.engine.request import Mailbox, Request, RequestFailed, RequestRefused, TokenLogprobs
from octavo.kv.kv_cache import KVCache
from octavo.model.batch import RaggedBatch
from octavo.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from octavo.kernels import Sampled, Sampler
    from octavo.scheduler.plan import StepPlan

logger = logging.getLogger("octavo.engine")

IDLE_AUDIT_AFTER = 1.0
"""Seconds of idleness before the block accounting is proven, so that no request ever waits for the proof."""

IDLE_RELEASE_AFTER = 4.0
"""Seconds more before the pages of free blocks go back to the system: a pause between two requests is
shorter."""


class BlocksLeaked(AssertionError):
    """Blocks were still in use when no request was left: an accounting bug, found at shutdown."""


class BatchStepper(Protocol):
    """What the loop asks of a model, once a step."""

    def step(self, batch: RaggedBatch) -> list[Sampled | None]: ...
    @property
    def attention_kv_bytes_read(self) -> int: ...
    @property
    def attention_kv_bytes_attended(self) -> int: ...


class StepLoop:
    """What the engine thread runs. Other threads only put into `commands` and read the numbers.

    commands: callables that run between two steps, in order.
    fault: why the loop has ended early, None while the block accounting can be trusted.
    last_progress: monotonic seconds of the last completed step, or of the end of the last rest.
    resting: asleep with nothing that could be computed.
    """

    def __init__(
        self,
        model: BatchStepper,
        scheduler: Scheduler,
        cache: KVCache,
        metrics: EngineMetrics,
        memory: KVMemory,
        open_requests: OpenRequests,
        *,
        copy_block: Callable[[int, int], None],
        audits_every_step: bool,
        log_content: bool,
    ) -> None:
        """copy_block(source, destination): copies the whole of one block to another."""
        self.commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.fault: BaseException | None = None
        self.last_progress = time.monotonic()
        self.resting = False
        self.num_finished = 0
        self._model = model
        self._scheduler = scheduler
        self._cache = cache
        self._metrics = metrics
        self._memory = memory
        self._open_requests = open_requests
        self._copy_block = copy_block
        self._audits_every_step = audits_every_step
        self._log_content = log_content
        self._requests: dict[str, Request] = {}
        self._news: defaultdict[Mailbox, list[Request]] = defaultdict(list)
        self._returned_at: float | None = None
        self._target_doubted = False
        self._closing_at: float | None = None

    # --- commands ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request with the scheduler."""
        self._requests[request.sequence.sequence_id] = request
        try:
            self._scheduler.add(request.sequence, time.monotonic())
        except Exception as error:
            self._log_fault(error, "scheduling a request")
            self._conclude(request, RequestFailed(STEP_FAILED, code="step_failed"))

    def cancel(self, request: Request) -> None:
        """Return what this request alone holds, whatever its state."""
        if request.outcome is None:
            self._finish(request, request.cancelled or "abort")

    def resume(self, request: Request) -> None:
        """Let a held sequence go on, if its reader has caught up."""
        if len(request.tokens) <= RESUME_UNREAD_TOKENS:
            request.sequence.held = False

    def close_at(self, deadline: float) -> None:
        """End once nothing is open, and at `deadline` (monotonic seconds) in any case."""
        self._closing_at = deadline

    @property
    def longest_open(self) -> int:
        """Tokens that the longest open request may come to have, prompt and answer; 0 without one."""
        return max(
            (
                request.sequence.num_prompt_tokens + request.max_output_tokens
                for request in self._requests.values()
            ),
            default=0,
        )

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Step until closed. Afterwards every request has an outcome, and `fault` says what went wrong, if
        it did: AuditError or BlocksLeaked, or the exception that left the accounting in doubt."""
        try:
            self._run_until_closed()
            self._end_all("the server is shutting down", code="shutting_down")
            self._cache.unpin_all()
            if self._cache.num_used:
                raise BlocksLeaked(f"{self._cache.num_used} blocks are in use and no request is left")
            self._audit()
            self._memory.abandon(RequestRefused("the server is shutting down", code="shutting_down"))
        except BaseException as error:
            logger.critical("the engine stops\n%s", describe(error, log_content=self._log_content))
            self.fault = error
            self.abandon_all()

    def _run_until_closed(self) -> None:
        has_work = True
        while True:
            if not has_work:
                self._sleep()
            while not self.commands.empty():
                self.commands.get_nowait()()
            if self._closing_at is not None and (not self._requests or time.monotonic() >= self._closing_at):
                return
            more_to_give = self._memory.tend()
            has_work = self._step() or more_to_give

    def _sleep(self) -> None:
        """Wait for a command; prove the accounting once, after a while without any."""
        self._hand_over()
        self._returned_at = None
        self.resting = all(request.sequence.held for request in self._requests.values())
        if not self.resting:
            logger.error("no step could be planned for %d requests", len(self._requests))
        command = self._next_command()
        if self.resting:
            self.last_progress = time.monotonic()
            self.resting = False
        if command is not None:
            command()

    def _next_command(self) -> Callable[[], None] | None:
        """The next command, or None when the time to close has come."""
        if self._closing_at is not None:
            with contextlib.suppress(Empty):
                return self.commands.get(timeout=max(self._closing_at - time.monotonic(), 0.0))
            return None
        with contextlib.suppress(Empty):
            return self.commands.get(timeout=IDLE_AUDIT_AFTER)
        self._audit()
        if self._memory.has_unused:
            with contextlib.suppress(Empty):
                return self.commands.get(timeout=IDLE_RELEASE_AFTER)
            while self._memory.has_unused and self.commands.empty():
                self._memory.give_back_unused()
        return self.commands.get()

    def _step(self) -> bool:
        """Plan and compute one step; False if there is nothing to compute."""
        try:
            plan = self._scheduler.step(time.monotonic())
        except Exception as error:
            self._fail_all(error)
            return False
        if plan.preemptions:
            self._note_preemptions(plan)
        if not plan.chunks:
            return bool(plan.preemptions)  # what was taken may be enough for the next one
        try:
            batch = self._build_batch(plan)
            self._hand_over()
            entered_at = time.monotonic()
            for copy in plan.copies:
                self._copy_block(copy.source, copy.destination)
            drawn = self._model.step(batch)
            returned_at = time.monotonic()
            if len(drawn) != len(plan.chunks):
                raise RuntimeError(f"the model answered {len(drawn)} of {len(plan.chunks)} sequences")
        except Exception as error:
            self._scheduler.rollback(plan)
            self._fail_step(plan, error)
            return True
        gap = entered_at - self._returned_at if self._returned_at is not None else None
        seconds = returned_at - entered_at + (gap or 0.0)
        self._scheduler.commit(plan, seconds)
        self._metrics.step(returned_at - entered_at, gap)
        if self._scheduler.num_steps_over_target and not self._target_doubted:
            self._target_doubted = True
            logger.warning(
                "those who stream now take longer than the %.0f ms of --target-itl-ms by themselves: prompts "
                "get a tenth of each step, and tokens come further apart",
                (self._scheduler.config.target_itl or 0.0) * 1000,
            )
        if plan.predicted is not None:
            self._metrics.prediction(plan.predicted, seconds)
        self._open_requests.computed(plan.num_tokens, seconds)
        self._metrics.attention_kv_bytes_read = self._model.attention_kv_bytes_read
        self._metrics.attention_kv_bytes_attended = self._model.attention_kv_bytes_attended
        self._returned_at = self.last_progress = returned_at
        try:
            self._take_tokens(plan, drawn, entered_at, returned_at)
        except Exception as error:
            self._fail_step(plan, error)
        if self._audits_every_step:
            self._audit()
        return True

    def _note_preemptions(self, plan: StepPlan) -> None:
        """What was taken stays taken, whatever becomes of the step."""
        now = time.monotonic()
        for preemption in plan.preemptions:
            self._requests[preemption.sequence.sequence_id].note_preemption(preemption, now)

    def _build_batch(self, plan: StepPlan) -> RaggedBatch:
        """The plan as arrays; a chunk that samples brings its request's sampler."""
        requests = self._requests
        token_ids: list[int] = []
        starts: list[int] = []
        lengths: list[int] = []
        offsets = [0]
        tables = []
        samplers: list[Sampler | None] = []
        num_entries = 0
        for chunk in plan.chunks:
            sequence, start, num_tokens = chunk.sequence, chunk.start, chunk.num_tokens
            if num_tokens == 1:
                token_ids.append(sequence.token_ids[start])
            else:
                token_ids += sequence.token_ids[start : start + num_tokens]
            starts.append(start)
            lengths.append(num_tokens)
            block_ids = sequence.block_table.block_ids
            num_entries += len(block_ids)
            offsets.append(num_entries)
            tables.append(block_ids)
            samplers.append(requests[sequence.sequence_id].sampler if chunk.samples else None)
        return RaggedBatch(
            token_ids=np.array(token_ids, dtype=np.int32),
            chunk_starts=np.array(starts, dtype=np.int32),
            chunk_lens=np.array(lengths, dtype=np.int32),
            block_table_offsets=np.array(offsets, dtype=np.int32),
            block_tables=np.frombuffer(b"".join(tables), dtype=np.int32),
            samplers=samplers,
        )

    def _take_tokens(
        self, plan: StepPlan, drawn: list[Sampled | None], entered_at: float, returned_at: float
    ) -> None:
        requests = self._requests
        for chunk, sampled in zip(plan.chunks, drawn, strict=True):
            request = requests[chunk.sequence.sequence_id]
            request.stats.num_computed_tokens += chunk.num_tokens
            if request.scheduled_at is None:
                request.scheduled_at = entered_at
                request.stats.queue_time = entered_at - request.arrived_at
                self._metrics.queue_time.observe(request.stats.queue_time)
            if sampled is not None:
                self._accept(request, sampled, returned_at)

    def _accept(self, request: Request, sampled: Sampled, now: float) -> None:
        """One token for one request, and the rules that may end it."""
        token_id = sampled.token_id
        if token_id < 0:
            # Its blocks stay findable: whoever computed them anew would get the same bytes.
            message = "the model's output is not finite for this request"
            self._finish(request, RequestFailed(message, code="non_finite_logits"))
            return
        sequence = request.sequence
        sequence.append(token_id)
        self._metrics.generation_tokens += 1
        if request.first_token_at is None:
            self._note_first_token(request, now)
        else:
            self._metrics.inter_token_latency.observe(now - request.last_token_at)
        request.last_token_at = now
        if request.wants_logprobs:  # before the token, so that no reader sees a token without
            request.logprobs.append(TokenLogprobs(token_id, sampled.logprob, sampled.top_logprobs))
        request.tokens.append(token_id)

        num_output = sequence.num_tokens - sequence.num_prompt_tokens
        if token_id in request.stop_token_ids and num_output >= request.min_tokens:
            request.stop_token_id = token_id
            self._finish(request, "stop")
        elif num_output >= request.max_output_tokens:
            self._finish(request, "length")
        else:
            if request.waiting:
                self._tell(request)
            if len(request.tokens) > MAX_UNREAD_TOKENS:
                sequence.held = True
                # Its reader may have emptied the queue just before, without seeing the flag; nobody else
                # would clear it then.
                self.resume(request)

    def _note_first_token(self, request: Request, now: float) -> None:
        request.first_token_at = now
        stats = request.stats
        stats.first_token_time = now - request.arrived_at
        stats.num_cached_tokens = request.sequence.num_cached_tokens
        self._metrics.prompt_tokens += stats.num_prompt_tokens
        self._metrics.time_to_first_token.observe(stats.first_token_time)

    # --- ends -------------------------------------------------------------------------------------

    def _finish(self, request: Request, outcome: str | RequestFailed) -> None:
        """End a request in any state: its blocks go back, its consumer learns why."""
        self._scheduler.finish(request.sequence)
        self._conclude(request, outcome)

    def _conclude(self, request: Request, outcome: str | RequestFailed) -> None:
        self._requests.pop(request.sequence.sequence_id, None)
        request.conclude(outcome, time.monotonic())
        self.num_finished += 1
        self._metrics.finish(request.stats)
        self._open_requests.ended(request)
        if request.waiting:
            self._tell(request)
        logger.info("%s", request)

    def _tell(self, request: Request) -> None:
        if request.mailbox is not None:
            request.waiting = False
            self._news[request.mailbox].append(request)

    def _hand_over(self) -> None:
        """One post a mailbox. Where that fails (a closed event loop), nobody reads: cancel its requests."""
        if not self._news:
            return
        news, self._news = self._news, defaultdict(list)
        for mailbox, requests in news.items():
            try:
                mailbox.post(requests)
            except Exception:
                for request in requests:
                    self.commands.put(partial(self.cancel, request))

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        """A step raised: fail exactly its requests, and go on if the blocks add up."""
        self._log_fault(error, f"a step of {len(plan.chunks)} requests")
        self._metrics.failed_steps += 1
        for chunk in plan.chunks:
            request = self._requests.get(chunk.sequence.sequence_id)
            if request is not None:
                self._finish(request, RequestFailed(STEP_FAILED, code="step_failed"))
        self._returned_at = None
        self.last_progress = time.monotonic()
        self._audit()

    def _fail_all(self, error: Exception) -> None:
        """Planning raised, so nobody knows whose step it was: fail every request."""
        self._log_fault(error, "planning a step")
        self._metrics.failed_steps += 1
        self._cache.rollback()
        self._end_all(STEP_FAILED, code="step_failed")
        self._audit()

    def _end_all(self, message: str, *, code: str) -> None:
        for request in list(self._requests.values()):
            self._finish(request, RequestFailed(message, code=code))
        self._hand_over()

    def abandon_all(self) -> None:
        """After a fault: tell every consumer, those still in the queue too, and touch no block any more."""
        while True:
            for request in list(self._requests.values()):
                self._conclude(request, RequestFailed(ENGINE_STOPPED, code="engine_failed"))
            try:
                command = self.commands.get_nowait()
            except Empty:
                break
            # Submissions, cancels and resumes; only a submission adds someone to tell. What changes the pool
            # looks at `fault` first.
            with contextlib.suppress(Exception):
                command()
        self._memory.abandon(RequestRefused(ENGINE_STOPPED, code="engine_failed"))
        self._hand_over()

    def _log_fault(self, error: Exception, what: str) -> None:
        logger.error("%s failed\n%s", what, describe(error, log_content=self._log_content))

    def _audit(self) -> None:
        """Prove the block accounting against the open requests. Raises AuditError, which ends the loop."""
        self._cache.audit([request.sequence for request in self._requests.values()])
