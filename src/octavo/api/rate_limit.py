"""Tokens a minute: a bucket that fills continuously, and what open requests have taken out of it."""

from __future__ import annotations

import time
from collections.abc import Callable

MINUTE = 60.0

_ROUNDING = 1e-6
"""Tokens. Whoever has waited the seconds that it was told must not be told 0.0 more."""


class TokenBucket:
    """At most `limit` tokens, refilled by `limit` a minute.

        |<------------------- limit ------------------->|
        | debt | 0 ....... level ........|    to refill |

    A request takes its prompt's tokens out, if they are there, and settles what it really computed when it
    ends. That may be more than was left: the level goes below 0 and the next request waits longer. So in any
    time t a key computes at most limit + limit * t / minute, and what its open requests compute beyond their
    prompts.

    clock: seconds that only grow.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        if limit < 1:
            raise ValueError(f"a limit of tokens a minute must be at least 1, not {limit}")
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._filled_at = clock()

    @property
    def remaining(self) -> int:
        """Whole tokens that are there now; 0 in debt."""
        return max(0, int(self._refilled()))

    @property
    def seconds_to_full(self) -> float:
        """Until `limit` tokens are there, if nothing is taken."""
        return self.seconds_until(self.limit)

    def seconds_until(self, tokens: int) -> float:
        """Until so many are there (at most `limit` ever are), if nothing is taken; 0.0 if they are."""
        lacking = min(tokens, self.limit) - self._refilled()
        return max(0.0, lacking * MINUTE / self.limit)

    def reserve(self, tokens: int) -> Reservation | None:
        """Take a request's tokens, at most `limit` of them; None, and nothing is taken, if they are not
        there."""
        needed = min(tokens, self.limit)
        if needed > self._refilled() + _ROUNDING:
            return None
        self._level -= needed
        return Reservation(self, needed)

    def limit_to(self, limit: int) -> None:
        """Another limit from now on; a debt stays, and more than the limit is not kept."""
        self._refilled()
        self.limit = limit
        self._level = min(self._level, float(limit))

    def charge(self, tokens: int) -> None:
        """Take tokens that were computed, there or not; give back where it is less than 0."""
        self._level = min(self._refilled() - tokens, float(self.limit))

    def _refilled(self) -> float:
        now = self._clock()
        gained = (now - self._filled_at) * self.limit / MINUTE
        self._level = min(self._level + gained, float(self.limit))
        self._filled_at = now
        return self._level


class Reservation:
    """What one request has taken before anybody knows what it computes."""

    def __init__(self, bucket: TokenBucket, tokens: int) -> None:
        self.tokens = tokens
        self._bucket = bucket
        self._settled = False

    def settle(self, computed: int) -> None:
        """The request has ended and computed so many tokens. The first time counts."""
        if not self._settled:
            self._settled = True
            self._bucket.charge(computed - self.tokens)
