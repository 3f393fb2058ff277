"""What a scheduler may do in a step, and the longest request it takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of a step and of a request.

    Args:
        max_num_seqs: sequences that are computed together.
        max_num_batched_tokens: tokens of a step. At least `max_num_seqs`: everyone who generates gets one.
        max_model_len: tokens of a request, prompt and generated ones.
    Raises: ValueError, if one is not positive or a step has no room for one token of everyone.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs, "
                f"{self.max_num_seqs}: a step must have room for one token of each sequence"
            )


class RequestTooLong(Exception):
    """A prompt that leaves no room for a single generated token, however long it would wait."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"{num_tokens} tokens needed (prompt and at least one more), the limit is {limit}")
        self.num_tokens = num_tokens
        self.limit = limit
