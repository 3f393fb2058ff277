"""What this machine can do at most, measured in the same run as what is held against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.kernels import ThreadPool
from octavo.kernels._native import peak_fma, peak_int8, peak_int8_summed, time_read

_FIRST_ITERATIONS = 100_000
_LOOP_SECONDS = 0.03
"""Long beside the start of the threads, short beside the patience of the reader."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The best of several repeats, all threads together: a limit is what can be reached, not what is usual.

    fp32_gflops: independent multiply-adds in registers, 2 operations each, 10^9 a second.
    int8_gops: the same for products of two 8-bit numbers, each widened at once.
    int8_summed_gops: for 4-bit codes times 8-bit numbers, eight products added in 16 bits before they are
    widened; with VNNI, which widens as it adds, and on the portable path, which computes in 32 bits, this is
    the loop of int8_gops.
    read_gbs: 10^9 bytes a second over `read_bytes` of memory.
    """

    fp32_gflops: float
    int8_gops: float
    int8_summed_gops: float
    read_gbs: float
    read_bytes: int

    def gops_of(self, peak: str) -> float:
        """The limit of arithmetic named "fp32", "int8" or "int8_summed"."""
        return {
            "fp32": self.fp32_gflops,
            "int8": self.int8_gops,
            "int8_summed": self.int8_summed_gops,
        }[peak]


def measure_limits(pool: ThreadPool, instruction_set: str, *, read_bytes: int, repeats: int) -> Limits:
    """read_bytes: of the array that is read; far more than the last-level cache."""
    data = np.ones(read_bytes, dtype=np.uint8)
    seconds = time_read(pool, data, repeats + 1, instruction_set)[1:]
    return Limits(
        fp32_gflops=_peak(lambda n: peak_fma(pool, n, instruction_set), repeats) / 1e9,
        int8_gops=_peak(lambda n: peak_int8(pool, n, instruction_set), repeats) / 1e9,
        int8_summed_gops=_peak(lambda n: peak_int8_summed(pool, n, instruction_set), repeats) / 1e9,
        read_gbs=read_bytes / min(seconds) / 1e9,
        read_bytes=read_bytes,
    )


def _peak(rate_of: Callable[[int], float], repeats: int) -> float:
    """Operations a second, over loops long enough that the start of the threads does not count."""
    begin = time.perf_counter()
    rate_of(_FIRST_ITERATIONS)
    seconds = time.perf_counter() - begin
    iterations = int(_FIRST_ITERATIONS * max(1.0, _LOOP_SECONDS / seconds))
    return max(rate_of(iterations) for _ in range(repeats))
