"""A quantity measured several times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, and how far apart the repeats were: a wide spread says that the machine was busy."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises ValueError where there is no value."""
        ordered = sorted(values)
        if not ordered:
            raise ValueError("nothing was measured")
        return cls(median(ordered), ordered[0], ordered[-1])

    @classmethod
    def middle_half_of(cls, values: Iterable[float]) -> Spread:
        """With the quartiles for low and high, for many values: one that a neighbour has spoilt says nothing.
        Raises ValueError where there are less than two."""
        ordered = list(values)
        if len(ordered) < 2:
            raise ValueError(f"{len(ordered)} values have no quartiles")
        low, middle, high = quantiles(ordered, n=4, method="inclusive")
        return cls(middle, low, high)
