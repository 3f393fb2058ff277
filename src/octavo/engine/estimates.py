"""How fast the engine computes, and how long answers are: of the recent past, in two numbers."""

from __future__ import annotations

HALF_LIFE = 5.0
"""Seconds of computing after which a step counts half: long enough to hold a few chunks of a long prompt."""

OUTPUT_TOKENS = 128.0
"""What an answer is taken to have before any has ended."""

MEAN_OVER = 32
"""Answers; the mean of more than these leans on the latest."""


class Estimates:
    """Written by the engine thread, a few floats a step; read by any other."""

    def __init__(self) -> None:
        self._computed = (0.0, 0.0)  # decayed tokens and seconds; replaced together
        self._output_tokens = OUTPUT_TOKENS
        self._num_answers = 0

    def step(self, num_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens`, prompts' and answers', in `seconds`."""
        kept = 0.5 ** (seconds / HALF_LIFE)
        tokens, before = self._computed
        self._computed = (tokens * kept + num_tokens, before * kept + seconds)

    def answered(self, num_output_tokens: int) -> None:
        """An answer has come to its own end."""
        self._num_answers = min(self._num_answers + 1, MEAN_OVER)
        self._output_tokens += (num_output_tokens - self._output_tokens) / self._num_answers

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens computed a second; None before the first step."""
        tokens, seconds = self._computed
        return tokens / seconds if seconds > 0 else None

    @property
    def output_tokens(self) -> float:
        """Tokens of an answer."""
        return self._output_tokens

    def seconds_for(self, num_tokens: float) -> float | None:
        """How long computing so many tokens takes; None before the first step."""
        rate = self.tokens_per_second
        return num_tokens / rate if rate else None
