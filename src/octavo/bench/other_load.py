"""How much of the machine went to processes that are not being measured."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


class OtherLoad:
    """Processor time used by everybody but this process and those of `pids`, from now on.

    What the hypervisor gave to other machines (steal) counts as theirs.
    """

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._pids = [os.getpid(), *pids]
        self._begin = time.perf_counter()
        self._others_before = self._others()

    def processors(self) -> float:
        """Processors' worth on average since the beginning; 0 on a machine that is ours alone."""
        seconds = time.perf_counter() - self._begin
        return max(0.0, (self._others() - self._others_before) / seconds) if seconds > 0 else 0.0

    def _others(self) -> float:
        return _all_seconds() - sum(process_seconds(pid) for pid in self._pids)


def process_seconds(pid: int) -> float:
    """Processor time of a process so far, user and system, its threads included.

    Raises: OSError if there is no such process.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def wait_for_quiet(seconds: float, *, most_processors: float = 0.1, window: float = 5.0) -> float:
    """Wait until others have used less than `most_processors` for `window` seconds, for at most `seconds`.

    Returns: processors' worth that others used in the last window.
    """
    deadline = time.monotonic() + seconds
    while True:
        load = OtherLoad()
        time.sleep(window)
        used = load.processors()
        if used < most_processors or time.monotonic() + window > deadline:
            return used


def _all_seconds() -> float:
    """Busy processor time of the whole machine since it started, steal included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS
