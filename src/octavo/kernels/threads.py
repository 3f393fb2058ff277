"""How many threads a step should use on this machine, container or not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_DEVICES = Path("/sys/devices")

_LITTLE = 0.5
"""Of the largest core's capacity: below it are the little cores of Arm's designs (0.25 to 0.45); the middle
ones of three sizes (0.7 to 0.9) are above."""


def default_num_threads(devices: Path = _DEVICES) -> int:
    """min(physical performance cores this process may use, cgroup quota rounded down), at least 1.

    A second thread on one core only adds barriers to wait for, and a quota that is overrun freezes every
    thread for the rest of the period.
    """
    limits = [_physical_cores(performance_processors(os.sched_getaffinity(0), devices), devices)]
    quota = cgroup_quota()
    if quota is not None:
        limits.append(int(quota))
    return max(1, min(limits))


def performance_processors(allowed: set[int], devices: Path = _DEVICES) -> set[int]:
    """Those of `allowed` that are not on small cores: all of them where cores are equal or all are small.

    A step of a small model waits about 150 times for its slowest chunk, and reading weights for a few rows
    is limited by memory, of which the large cores alone take all: small ones are left to everything else.
    Hybrid processors of Intel list their kinds of cores, Arm's have a capacity for each. Dense cores of AMD
    differ in their clock alone, and count as large.
    """
    large = allowed & _listed(devices / "cpu_core" / "cpus")
    if large:
        return large
    capacities = {cpu: _capacity(devices, cpu) for cpu in allowed}
    enough = _LITTLE * max(capacities.values(), default=0)
    return {cpu for cpu, capacity in capacities.items() if capacity >= enough}


def _listed(file: Path) -> set[int]:
    """Processors of a list such as `0-11,16`; none where there is no list."""
    processors: set[int] = set()
    try:
        for part in file.read_text().strip().split(","):
            first, dash, last = part.partition("-")
            processors.update(range(int(first), int(last if dash else first) + 1))
    except (OSError, ValueError):
        return set()
    return processors


def _capacity(devices: Path, cpu: int) -> int:
    """1,024 is the largest core at its highest clock; 0 where the system does not tell, as for equal ones."""
    try:
        return int((devices / f"system/cpu/cpu{cpu}/cpu_capacity").read_text())
    except (OSError, ValueError):
        return 0


def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Processors' worth of time that the control group and its ancestors allow; None without a limit."""
    quotas: list[float] = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            for group in _with_ancestors(root, path):
                quotas += _quota_v2(group)
        elif "cpu" in controllers.split(","):  # version 1
            for group in _with_ancestors(root / "cpu", path):
                quotas += _quota_v1(group)
    return min(quotas, default=None)


def _with_ancestors(root: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it up to the root, which in a container may be all there is."""
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        yield group
        if group == root:
            return


def _quota_v2(folder: Path) -> list[float]:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return [] if quota == "max" else [int(quota) / int(period)]
    except (OSError, ValueError, ZeroDivisionError):
        return []


def _quota_v1(folder: Path) -> list[float]:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return []
    return [quota / period] if quota > 0 and period > 0 else []


def _physical_cores(processors: set[int], devices: Path) -> int:
    cores = set()
    for cpu in processors:
        topology = devices / f"system/cpu/cpu{cpu}/topology"
        try:
            siblings = (topology / "thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return len(cores)
