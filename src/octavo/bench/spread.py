"""A quantity measured several times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median


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
