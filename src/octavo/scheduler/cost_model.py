"""How long a step takes, learned from the steps before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, isfinite, log, sqrt

UNBOUNDED_TOKENS = 1 << 30
"""What `CostModel.tokens_within` answers at most."""

_FIRST_PROPORTIONS = (2.3e-3, 0.48e-3, 0.92e-6, 0.38e-6)
_MAX_INNOVATION = 0.3  # of the prediction: a stall of ten times the usual counts as a step of 1.3 times
_NOISE = 0.15**2  # variance of one step's relative error
_SPEED_DRIFT = 0.02**2  # of the logarithm of all coefficients together, a step
_COEFFICIENT_DRIFT = 0.01**2  # of one coefficient alone, a step of nothing else
_FIRST_SPEED = 1.0**2  # the first step may have been a stall
_FIRST_COEFFICIENT = 0.7**2  # other machines and models have other proportions
_MAX_VARIANCE = 1.5**2


@dataclass(frozen=True, slots=True)
class StepWork:
    """What decides how long a step takes.

    num_tokens: rows, of all chunks. num_attended: keys that chunks of one token attend to, the sum of their
    context lengths with the token itself; they are read once each and time goes to reading. num_pairs: of a
    query and a key in longer chunks, n * start + n * (n + 1) / 2 for the tokens `start` to `start + n`; keys
    are read once for many queries and time goes to arithmetic.
    """

    num_tokens: int = 0
    num_attended: int = 0
    num_pairs: int = 0

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]]) -> StepWork:
        """The work of chunks, each (position of its first token, number of its tokens)."""
        tokens = attended = pairs = 0
        for start, num_tokens in chunks:
            tokens += num_tokens
            if num_tokens == 1:
                attended += start + 1
            else:
                pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return cls(tokens, attended, pairs)

    def added(self, start: int, num_tokens: int) -> StepWork:
        """This work and that of one more chunk, `num_tokens` from position `start`."""
        if num_tokens == 1:
            return StepWork(self.num_tokens + 1, self.num_attended + start + 1, self.num_pairs)
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return StepWork(self.num_tokens + num_tokens, self.num_attended, self.num_pairs + pairs)


NOTHING = StepWork()
"""The work of a step without chunks."""


class CostModel:
    """Seconds of a step, learned while steps are computed.

        seconds = c0 + c1 * num_tokens + c2 * num_attended + c3 * num_pairs

    An extended Kalman filter over the logarithms of the four coefficients. So they are positive, whatever is
    observed, and an error counts by its proportion: a step of 100 ms weighs as much as one of 5 ms. How much
    of a prediction a coefficient makes up is how much an error tells about it; one that makes up nothing
    stays where it is. The noise that keeps the filter awake has two parts. One moves all four together: a
    machine that slows down (heat, somebody else's work) slows down in everything, so a thousand steps
    without a prompt also say how long a prompt takes. The other moves each in proportion to its part in the
    step, so nothing becomes uncertain by not being seen, and no variance passes a bound.

    An error beyond `_MAX_INNOVATION` counts only up to it, and makes only as much certain as it counts: were
    it all, a first step that stalled would leave the filter sure of ten times the truth, and another speed
    would be followed the slower the further it is off.

    The first step sets all four, in the proportions that a fit to 1,037 steps of SmolLM2-135M on two threads
    gave: 2.3 ms, 0.48 ms a token, 0.92 microseconds a key, 0.38 a pair. Off by a factor of up to three each,
    with 20 % of noise, predictions are within 5 % (median) after 20 steps. Of real steps of mixed load
    (`benchmarks/step_times.py`, 400 to 560 a run): within 2.3 % (median) and 11 % (95 of 100) with nothing
    else at work, 4.1 to 5.6 % and 18 to 19 % beside somebody who took a core now and then, where the best
    constants for the same steps were off by 15 to 22 % (median).

    Source: Kalman 1960; clipped innovations as in Huber's M-estimators (Masreliez and Martin 1977).
    """

    __slots__ = ("_coefficients", "_covariance", "_logs")

    def __init__(self) -> None:
        self._logs: list[float] | None = None
        self._coefficients = (0.0, 0.0, 0.0, 0.0)
        self._covariance: list[list[float]] = []

    @property
    def coefficients(self) -> tuple[float, float, float, float] | None:
        """Seconds: of any step, a token, an attended key, a pair. None before the first observation."""
        return None if self._logs is None else self._coefficients

    def predict(self, work: StepWork) -> float | None:
        """Seconds that a step of this work takes; None before the first observation."""
        return None if self._logs is None else self._seconds(work)

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step of this work took `seconds`. What no step can have taken (nothing, less than nothing, no
        number) and a step without tokens say nothing.

        Cost: 5 microseconds.
        """
        if not (isfinite(seconds) and seconds > 0.0 and work.num_tokens > 0):
            return
        logs = self._logs
        if logs is None:
            self._begin(work, seconds)
            return
        predicted = self._seconds(work)
        error = seconds / predicted - 1.0
        # How much of it counts. What does not count leaves as much uncertain as it was.
        counted = _MAX_INNOVATION / max(abs(error), _MAX_INNOVATION)
        c0, c1, c2, c3 = self._coefficients
        # The part of each in the prediction: the derivative of its logarithm. They sum to one.
        h0 = c0 / predicted
        h1 = c1 * work.num_tokens / predicted
        h2 = c2 * work.num_attended / predicted
        h3 = c3 * work.num_pairs / predicted
        parts = (h0, h1, h2, h3)
        covariance = self._covariance
        towards = [row[0] * h0 + row[1] * h1 + row[2] * h2 + row[3] * h3 for row in covariance]
        t0, t1, t2, t3 = towards
        variance = _NOISE + h0 * t0 + h1 * t1 + h2 * t2 + h3 * t3
        step = counted * error / variance
        self._logs = logs = [
            logs[0] + t0 * step,
            logs[1] + t1 * step,
            logs[2] + t2 * step,
            logs[3] + t3 * step,
        ]
        self._coefficients = (exp(logs[0]), exp(logs[1]), exp(logs[2]), exp(logs[3]))
        drift = _SPEED_DRIFT
        for index, row in enumerate(covariance):
            gain = counted * towards[index] / variance
            row[0] += drift - gain * t0
            row[1] += drift - gain * t1
            row[2] += drift - gain * t2
            row[3] += drift - gain * t3
            row[index] += _COEFFICIENT_DRIFT * parts[index]
            if row[index] > _MAX_VARIANCE:
                self._bound(index)

    def tokens_within(self, seconds: float, work: StepWork, start: int) -> int:
        """The most tokens of one more chunk, from position `start`, with which a step of `work` is predicted
        to take at most `seconds`; 0 where none fits, `UNBOUNDED_TOKENS` at most.

        Raises: ValueError, if nothing was observed yet.
        """
        if self._logs is None:
            raise ValueError("no step was observed yet: nothing is known of how long one takes")
        left = seconds - self._seconds(work)
        if not left > 0.0:
            return 0
        # c3 / 2 n^2 + (c1 + c3 (start + 1/2)) n = left, in the form that loses no digits where c3 is small.
        _, per_token, _, per_pair = self._coefficients
        linear = per_token + per_pair * (start + 0.5)
        root = 2.0 * left / (linear + sqrt(linear * linear + 2.0 * per_pair * left))
        if not root < UNBOUNDED_TOKENS:  # neither where both are infinite
            return UNBOUNDED_TOKENS
        num_tokens = int(root)
        if num_tokens >= 1 and self._seconds(work.added(start, num_tokens + 1)) <= seconds:
            num_tokens += 1  # rounding
        # A single token reads its keys instead of multiplying them: another price.
        while num_tokens > 0 and self._seconds(work.added(start, num_tokens)) > seconds:
            num_tokens -= 1
        return num_tokens

    def _seconds(self, work: StepWork) -> float:
        c0, c1, c2, c3 = self._coefficients
        return c0 + c1 * work.num_tokens + c2 * work.num_attended + c3 * work.num_pairs

    def _begin(self, work: StepWork, seconds: float) -> None:
        c0, c1, c2, c3 = self._coefficients = _FIRST_PROPORTIONS
        scale = seconds / self._seconds(work)
        self._coefficients = (c0 * scale, c1 * scale, c2 * scale, c3 * scale)
        self._logs = [log(coefficient) for coefficient in self._coefficients]
        self._covariance = [
            [_FIRST_SPEED + _FIRST_COEFFICIENT * (row == column) for column in range(4)] for row in range(4)
        ]

    def _bound(self, index: int) -> None:
        """Shrink a variance to its bound, and what it shares with others alike: no correlation changes."""
        shrink = sqrt(_MAX_VARIANCE / self._covariance[index][index])
        for other, row in enumerate(self._covariance):
            row[index] *= shrink
            if other == index:
                self._covariance[index] = [value * shrink for value in row]
