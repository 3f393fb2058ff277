"""How evenly users were served.

Service is computed tokens, of prompts and answers alike, over the user's weight: what a virtual token counter
counts. Source: Sheng et al. 2024, "Fairness in Serving Large Language Models" (OSDI).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

MOST_COMPARED = 16
"""Users of whom each is compared with each: those who were backlogged longest."""


class Service:
    """What one user was given over time, and when some of what it asked for had not begun.

    times, totals: seconds, rising, and tokens / weight that were computed up to then. backlogs: the spans of
    time, in order, in which at least one request of the user waited for its first token to be computed.
    """

    __slots__ = ("_num_waiting", "_since", "backlogs", "times", "total", "totals", "weight")

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.times = array("d")
        self.totals = array("d")
        self.total = 0.0
        self.backlogs: list[tuple[float, float]] = []
        self._num_waiting = 0
        self._since = 0.0

    def serve(self, now: float, num_tokens: int) -> None:
        """A step that ended at `now` computed tokens of this user."""
        self.total += num_tokens / self.weight
        if self.times and self.times[-1] == now:
            self.totals[-1] = self.total
        else:
            self.times.append(now)
            self.totals.append(self.total)

    def wait(self, now: float) -> None:
        """One more request waits."""
        if not self._num_waiting:
            self._since = now
        self._num_waiting += 1

    def begin(self, now: float) -> None:
        """A request that waited does so no longer."""
        assert self._num_waiting, "nobody waits"
        self._num_waiting -= 1
        if not self._num_waiting and now > self._since:
            if self.backlogs and self.backlogs[-1][1] == self._since:
                self.backlogs[-1] = (self.backlogs[-1][0], now)
            else:
                self.backlogs.append((self._since, now))

    def end(self, now: float) -> None:
        """Nothing follows: what still waits has waited until `now`."""
        while self._num_waiting:
            self.begin(now)

    @property
    def backlogged_seconds(self) -> float:
        """How long some request waited."""
        return sum(end - begin for begin, end in self.backlogs)

    @property
    def served_while_backlogged(self) -> float:
        """Tokens / weight that were computed while some request waited."""
        return sum(self.upto(end) - self.upto(begin) for begin, end in self.backlogs)

    def upto(self, when: float) -> float:
        """Tokens / weight computed up to a moment, with what a step computed that ended then."""
        index = int(np.searchsorted(np.frombuffer(self.times), when, side="right")) if self.times else 0
        return self.totals[index - 1] if index else 0.0

    def at(
        self, times: np.ndarray[tuple[int], np.dtype[np.float64]]
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The same for many moments: float64[n] -> float64[n]."""
        if not self.times:
            return np.zeros(len(times))
        totals = np.concatenate(([0.0], np.frombuffer(self.totals)))
        return totals[np.searchsorted(np.frombuffer(self.times), times, side="right")]


class Difference(NamedTuple):
    """How much more one of two users was given than the other, tokens / weight, and in which span of time."""

    tokens: float
    begin: float
    end: float


NO_DIFFERENCE = Difference(0.0, 0.0, 0.0)


def common_spans(one: Service, other: Service) -> list[tuple[float, float]]:
    """Spans of time in which both were backlogged, in order."""
    spans, i, j = [], 0, 0
    while i < len(one.backlogs) and j < len(other.backlogs):
        (a, b), (c, d) = one.backlogs[i], other.backlogs[j]
        if max(a, c) < min(b, d):
            spans.append((max(a, c), min(b, d)))
        i, j = (i + 1, j) if b < d else (i, j + 1)
    return spans


def largest_difference(one: Service, other: Service) -> Difference:
    """The most by which two users' service differs over any span of time in which both were backlogged.

    Over a span it is the change of (service of one - service of other); over any span within a longer one,
    the difference between that curve's highest and its lowest point.
    """
    worst = NO_DIFFERENCE
    for begin, end in common_spans(one, other):
        moments = [np.array([begin])]
        for service in (one, other):
            times = np.frombuffer(service.times) if service.times else np.zeros(0)
            moments.append(
                times[np.searchsorted(times, begin, "right") : np.searchsorted(times, end, "right")]
            )
        times = np.unique(np.concatenate(moments))
        curve = one.at(times) - other.at(times)
        low, high = int(curve.argmin()), int(curve.argmax())
        if curve[high] - curve[low] > worst.tokens:
            first, last = sorted((low, high))
            worst = Difference(float(curve[high] - curve[low]), float(times[first]), float(times[last]))
    return worst


def largest_of_all(services: Iterable[Service]) -> Difference:
    """The largest difference of any two, of the `MOST_COMPARED` users who were backlogged longest."""
    longest = sorted((each for each in services if each.backlogs), key=lambda each: -each.backlogged_seconds)
    pairs = combinations(longest[:MOST_COMPARED], 2)
    return max((largest_difference(*pair) for pair in pairs), default=NO_DIFFERENCE)


def vtc_bound(longest_prompt: int, capacity_tokens: int, smallest_weight: float = 1.0) -> float:
    """What a scheduler with virtual token counters keeps `largest_difference` below, tokens / weight.

    2 max(w_p L_input, w_q M) with both prices 1: L_input the longest prompt, M the tokens that fit a running
    batch, here the whole pool. Source: Sheng et al. 2024, Theorem 4.8.
    """
    return 2.0 * max(longest_prompt, capacity_tokens) / smallest_weight


def jain_index(values: Sequence[float]) -> float:
    """1 where all are equal, 1 / n where one of n has everything; 1 where nobody has anything.

    Source: Jain, Chiu and Hawe 1984, "A Quantitative Measure of Fairness and Discrimination".
    """
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
