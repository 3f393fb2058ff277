"""How many threads a step should use on this machine, container or not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def default_num_threads() -> int:
    """min(processors this process may use, cgroup quota rounded down, physical cores), at least 1.

    A second thread on one core only adds barriers to wait for, and a quota that is overrun freezes every
    thread for the rest of the period.
    """
    allowed = os.sched_getaffinity(0)
    limits = [len(allowed), _physical_cores(allowed)]
    quota = cgroup_quota()
    if quota is not None:
        limits.append(int(quota))
    return max(1, min(limits))


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


def _physical_cores(allowed: set[int]) -> int:
    cores = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            siblings = (topology / "thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return len(cores)
