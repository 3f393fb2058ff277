"""What a scheduler may do in a step, and the longest request it takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SchedulingPolicy(StrEnum):
    """Who comes before whom. In all of them background work comes last.

    FAIR: users in turn, by what has been computed for each; of one user's the short ones first.
    FCFS: who came first. PRIORITY: the lower priority, then who came first.
    """

    FAIR = "fair"
    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of a step and of a request, and the order.

    Args:
        max_num_seqs: sequences that are computed together.
        max_num_batched_tokens: tokens of a step. At least `max_num_seqs`: everyone who generates gets one.
        max_model_len: tokens of a request, prompt and generated ones.
        policy: who comes before whom.
        target_itl: seconds that a step may take while somebody streams (`StepBudget`); None: learned.
    Raises: ValueError, if one is not positive or a step has no room for one token of everyone.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: SchedulingPolicy = SchedulingPolicy.FAIR
    target_itl: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs, "
                f"{self.max_num_seqs}: a step must have room for one token of each sequence"
            )
        if self.target_itl is not None and not self.target_itl > 0:
            raise ValueError(f"target_itl is {self.target_itl} seconds, it must be more than 0")


class RequestTooLong(Exception):
    """A prompt that leaves no room for a single generated token, however long it would wait."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"{num_tokens} tokens needed (prompt and at least one more), the limit is {limit}")
        self.num_tokens = num_tokens
        self.limit = limit
