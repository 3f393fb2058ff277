"""How far answers grow, learned from those that have ended."""

from __future__ import annotations

LEAST_DIVISOR = 100
"""At least this part of the pool stays free when somebody is let in, as long as nothing is known."""

MOST_DIVISOR = 8
"""At most this part: more would keep people out for growth that may never come."""

MEAN_OVER = 32
"""Answers; the mean of more than these leans on the latest."""


class Growth:
    """The mean length of answers, and the room that an admission leaves for those who are here."""

    def __init__(self) -> None:
        self._num_ended = 0
        self._mean = 0.0

    def ended(self, num_output_tokens: int) -> None:
        """An answer has ended, for whatever reason."""
        self._num_ended = min(self._num_ended + 1, MEAN_OVER)
        self._mean += (num_output_tokens - self._mean) / self._num_ended

    def watermark(self, num_blocks: int, num_running: int, block_size: int) -> int:
        """Blocks of a pool of `num_blocks`. Somebody met at any time of an answer has half of it to come."""
        expected = num_running * self._mean / 2 / block_size
        return max(1, num_blocks // LEAST_DIVISOR, min(int(expected), num_blocks // MOST_DIVISOR))
