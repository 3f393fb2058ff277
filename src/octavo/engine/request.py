"""What a request is made of on its way through the engine, and how it can end.

A `Request` is one choice: its `Sequence` belongs to the engine thread, its `tokens` and `logprobs` queues are
written by the engine thread and read by the consumer's, its `stats` are written by the engine thread.

    engine thread --append--> | tokens, logprobs |  --popleft--> consumer (event loop or thread)
    engine thread --set once--> outcome             --read-----> consumer, after which nothing is appended
    consumer      --set once--> cancelled           --read-----> engine thread, between two steps
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo.engine.standing import Standing as Standing
from octavo.scheduler.plan import PreemptionReason
from octavo.scheduler.share import Share as Share

if TYPE_CHECKING:
    from octavo.kernels import Sampler
    from octavo.scheduler.plan import Preemption
    from octavo.scheduler.sequence import Sequence

MAX_PAUSES_KEPT = 64
"""A request that is paused more often keeps the latest of its pauses; all of them are counted."""


class RequestRefused(Exception):
    """The engine will not take this request; nothing was computed.

    code: "context_length_exceeded" (both numbers are in the message), "empty_prompt", "invalid_token",
    "queue_full", "shutting_down" or "engine_failed". param: the field at fault as the engine knows it, or
    None. retry_after: seconds after which asking again may help, where the engine can tell.
    """

    def __init__(
        self, message: str, *, code: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after


class RequestFailed(Exception):
    """The engine took this request and could not finish it.

    code: "step_failed" (the native call or the code around it raised), "non_finite_logits", "shutting_down"
    or "engine_failed" (the block accounting is broken and the engine has stopped).
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities at one output position, of the raw logits.

    top: (token id, logprob), most likely first, as many as `SamplingParams.logprobs` asked for.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Delta:
    """What one generation produced since its consumer last looked: one token or more, or its end.

    token_ids: every new token, the one that ended the stream included (so they add up to `usage`).
    logprobs: as long as token_ids when log-probabilities were asked for, else empty.
    finish_reason: "stop" or "length" on the last delta, None before.
    stop_token_id: the last of token_ids when that token ended the stream (an end-of-sequence token or one of
        `stop_token_ids`); its text is not part of the answer.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None

    @property
    def text_token_ids(self) -> list[int]:
        """The tokens whose text belongs to the answer: token_ids without the token that ended the stream."""
        return self.token_ids if self.stop_token_id is None else self.token_ids[:-1]


class Pause(NamedTuple):
    """One time that a request stood still for lack of blocks.

    at: seconds since it was submitted. reason: KV once blocks were taken from it, also while it stood still
    already. tokens_lost: computed tokens that went with them.
    """

    at: float
    reason: PreemptionReason
    tokens_lost: int


@dataclass(slots=True)
class RequestStats:
    """One request in numbers; times in seconds since it was submitted. Complete when the stream has ended.

    num_cached_tokens: prompt tokens this request did not compute itself, whenever they were adopted.
    num_computed_tokens: tokens whose KV it computed itself; what a pause took and it computed again counts
    again.
    queue_time: until the first step that computed anything for it. first_token_time, total_time: until then.
    num_preemptions, num_lost_tokens: pauses, and tokens whose KV was taken because of them.
    pauses: the last MAX_PAUSES_KEPT of them, oldest first.
    finish_reason: "stop", "length", "abort" (the client went away) or "error"; None while it lives.
    """

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    queue_time: float | None = None
    first_token_time: float | None = None
    total_time: float | None = None
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    pauses: deque[Pause] = field(default_factory=lambda: deque(maxlen=MAX_PAUSES_KEPT))
    finish_reason: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second after the first one; 0.0 where fewer than two came."""
        if self.first_token_time is None or self.total_time is None or self.num_output_tokens < 2:
            return 0.0
        seconds = self.total_time - self.first_token_time
        return (self.num_output_tokens - 1) / seconds if seconds > 0 else 0.0


class Mailbox(Protocol):
    """Where the engine thread announces, once a step, which requests have news for one consumer."""

    def post(self, requests: list[Request]) -> None:
        """Called by the engine thread. Raises if nobody will ever read it (RuntimeError: a closed loop)."""


class Request:
    """One choice between `Engine.submit` and its end. See the module's picture for who writes what."""

    __slots__ = (
        "arrived_at",
        "cancelled",
        "first_token_at",
        "last_token_at",
        "logprobs",
        "mailbox",
        "max_output_tokens",
        "min_tokens",
        "outcome",
        "request_id",
        "sampler",
        "scheduled_at",
        "sequence",
        "stats",
        "stop_token_id",
        "stop_token_ids",
        "tokens",
        "waiter",
        "waiting",
        "wants_logprobs",
    )

    def __init__(
        self,
        request_id: str,
        sequence: Sequence,
        sampler: Sampler,
        *,
        max_output_tokens: int,
        min_tokens: int,
        stop_token_ids: frozenset[int],
        wants_logprobs: bool,
        arrived_at: float,
    ) -> None:
        self.request_id = request_id
        self.sequence = sequence
        self.sampler: Sampler | None = sampler
        self.max_output_tokens = max_output_tokens
        self.min_tokens = min_tokens
        self.stop_token_ids = stop_token_ids
        self.wants_logprobs = wants_logprobs
        self.stats = RequestStats(num_prompt_tokens=sequence.num_prompt_tokens)

        self.arrived_at = arrived_at
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at = arrived_at

        self.tokens: deque[int] = deque()
        self.logprobs: deque[TokenLogprobs] = deque()
        self.outcome: str | RequestFailed | None = None
        self.stop_token_id: int | None = None
        self.cancelled: str | None = None

        self.mailbox: Mailbox | None = None
        self.waiting = False
        self.waiter: asyncio.Future[None] | None = None

    @property
    def has_news(self) -> bool:
        """Whether its consumer would find something: tokens, an outcome, or its own cancellation."""
        return bool(self.tokens) or self.outcome is not None or self.cancelled is not None

    @property
    def status(self) -> str:
        """ "waiting", "running", "paused" or "finished"."""
        status: str = self.sequence.status.value
        if self.outcome is not None:
            return "finished"
        # Between the return of its blocks and its outcome it still runs.
        return "running" if status == "finished" else status

    def progress(self, now: float) -> RequestStats:
        """Any thread: the numbers so far, `total_time` included; the final ones once it has ended."""
        stats, sequence = self.stats, self.sequence
        if self.outcome is not None:
            return stats
        return replace(
            stats,
            num_cached_tokens=sequence.num_cached_tokens,
            num_output_tokens=sequence.num_tokens - sequence.num_prompt_tokens,
            total_time=now - self.arrived_at,
            num_preemptions=sequence.num_preemptions,
            num_lost_tokens=sequence.num_lost_tokens,
            pauses=stats.pauses.copy(),  # the engine thread appends to its own
        )

    def note_preemption(self, preemption: Preemption, now: float) -> None:
        """Engine thread: a step has taken blocks from this request, or has none for it."""
        pauses = self.stats.pauses
        if preemption.pauses or not pauses:
            pauses.append(Pause(now - self.arrived_at, preemption.reason, preemption.num_lost_tokens))
        else:
            at, _, tokens_lost = pauses[-1]
            pauses[-1] = Pause(at, preemption.reason, tokens_lost + preemption.num_lost_tokens)

    def conclude(self, outcome: str | RequestFailed, now: float) -> None:
        """Engine thread: complete the numbers, let the sampler go, and only then show the outcome."""
        sequence, stats = self.sequence, self.stats
        stats.total_time = now - self.arrived_at
        stats.num_output_tokens = sequence.num_tokens - sequence.num_prompt_tokens
        stats.num_cached_tokens = sequence.num_cached_tokens
        stats.num_preemptions = sequence.num_preemptions
        stats.num_lost_tokens = sequence.num_lost_tokens
        stats.finish_reason = "error" if isinstance(outcome, RequestFailed) else outcome
        self.sampler = None
        self.outcome = outcome

    def __str__(self) -> str:
        """The one line a finished request leaves in the log: numbers, no content."""
        stats = self.stats
        return (
            f"request {self.request_id}: prompt {stats.num_prompt_tokens}, cached {stats.num_cached_tokens}, "
            f"output {stats.num_output_tokens}, queue {_seconds(stats.queue_time)}, "
            f"first token {_seconds(stats.first_token_time)}, {stats.tokens_per_second:.1f} tokens/s, "
            f"pauses {stats.num_preemptions}, {stats.finish_reason}"
        )


def _seconds(value: float | None) -> str:
    return f"{value:.3f} s" if value is not None else "never"
