"""On what a measurement was made: the facts without which its numbers mean nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

ASSUMED_CACHE_BYTES = 32 << 20
"""Where the system does not tell its last-level cache: more than most home processors have."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Processor, threads and moment of a measurement.

    last_level_cache_bytes: of one cache, as the system tells it. load_average: of the last minute, when the
    measurement began; a busy machine shows here. date: ISO 8601, UTC.
    """

    cpu_model: str
    processors: int
    threads: int
    instruction_set: str
    last_level_cache_bytes: int
    memory_bytes: int
    system: str
    python: str
    octavo: str
    date: str
    load_average: float

    @classmethod
    def now(cls, threads: int, instruction_set: str) -> Machine:
        from importlib.metadata import version

        return cls(
            cpu_model=cpu_model(),
            processors=len(os.sched_getaffinity(0)),
            threads=threads,
            instruction_set=instruction_set,
            last_level_cache_bytes=last_level_cache_bytes(),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            octavo=version("octavo"),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            load_average=round(os.getloadavg()[0], 2),
        )

    def describe(self) -> str:
        """One line for people."""
        return (
            f"{self.cpu_model}, {self.processors} processors, {self.threads} threads, "
            f"{self.instruction_set}, {self.date}, load {self.load_average:.2f} at the start"
        )


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()


def last_level_cache_bytes() -> int:
    """The largest cache of the first processor, or `ASSUMED_CACHE_BYTES`."""
    sizes = [0]
    for index in _CACHES.glob("index*"):
        try:
            text = (index / "size").read_text().strip()
        except OSError:
            continue
        sizes.append(int(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text))
    return max(sizes) or ASSUMED_CACHE_BYTES
