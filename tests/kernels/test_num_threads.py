"""How many threads a step takes by default: the least of what the machine and its control groups allow."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from octavo.kernels import threads
from octavo.kernels.threads import cgroup_quota, default_num_threads, performance_processors


def membership(folder: Path, *lines: str) -> Path:
    own = folder / "proc-self-cgroup"
    own.write_text("".join(line + "\n" for line in lines))
    return own


def v2(root: Path, group: str, quota: str) -> None:
    folder = root / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(quota + "\n")


def v1(root: Path, group: str, quota: int, period: int = 100_000) -> None:
    folder = root / "cpu" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


def test_a_quota_is_processors_worth_of_time(tmp_path: Path) -> None:
    v2(tmp_path, "house", "150000 100000")
    assert cgroup_quota(tmp_path, membership(tmp_path, "0::/house")) == 1.5


def test_an_unlimited_group_has_no_quota(tmp_path: Path) -> None:
    v2(tmp_path, "house", "max 100000")
    assert cgroup_quota(tmp_path, membership(tmp_path, "0::/house")) is None


@pytest.mark.parametrize(
    ("outer", "inner"), [("100000 100000", "300000 100000"), ("300000 100000", "50000 50000")]
)
def test_the_tightest_of_a_group_and_its_ancestors_counts(tmp_path: Path, outer: str, inner: str) -> None:
    v2(tmp_path, "house", outer)
    v2(tmp_path, "house/middle", "max 100000")
    v2(tmp_path, "house/middle/room", inner)
    assert cgroup_quota(tmp_path, membership(tmp_path, "0::/house/middle/room")) == 1.0


def test_a_container_that_sees_only_its_own_root_finds_the_limit_there(tmp_path: Path) -> None:
    """The path of /proc/self/cgroup may be the host's, and lead nowhere inside."""
    v2(tmp_path, "", "200000 100000")
    for line in ("0::/", "0::/system.slice/docker-0a1b.scope", "0::/../../elsewhere"):
        assert cgroup_quota(tmp_path, membership(tmp_path, line)) == 2.0


def test_limits_above_the_root_are_not_looked_for(tmp_path: Path) -> None:
    root = tmp_path / "mounted"
    v2(tmp_path, "", "100000 100000")
    v2(root, "house", "max 100000")
    assert cgroup_quota(root, membership(tmp_path, "0::/house")) is None


def test_version_1_reads_the_quota_of_its_cpu_controller(tmp_path: Path) -> None:
    v1(tmp_path, "house", 250_000)
    own = membership(tmp_path, "12:memory:/elsewhere", "4:cpu,cpuacct:/house", "1:name=systemd:/x")
    assert cgroup_quota(tmp_path, own) == 2.5


def test_version_1_counts_ancestors_too(tmp_path: Path) -> None:
    v1(tmp_path, "", -1)
    v1(tmp_path, "house", 100_000)
    v1(tmp_path, "house/room", -1)
    v1(tmp_path, "house/wide", 400_000)
    for group in ("/house/room", "/house/wide"):
        assert cgroup_quota(tmp_path, membership(tmp_path, f"4:cpu,cpuacct:{group}")) == 1.0


def test_version_1_in_a_container_finds_the_limit_at_its_root(tmp_path: Path) -> None:
    v1(tmp_path, "", 50_000)
    assert cgroup_quota(tmp_path, membership(tmp_path, "4:cpu,cpuacct:/docker/0a1b")) == 0.5


def test_version_1_without_a_limit_has_no_quota(tmp_path: Path) -> None:
    v1(tmp_path, "house", -1)
    assert cgroup_quota(tmp_path, membership(tmp_path, "4:cpu,cpuacct:/house")) is None


def test_both_versions_at_once_are_both_read(tmp_path: Path) -> None:
    v2(tmp_path, "house", "300000 100000")
    v1(tmp_path, "house", 200_000)
    own = membership(tmp_path, "4:cpu,cpuacct:/house", "0::/house")
    assert cgroup_quota(tmp_path, own) == 2.0


@pytest.mark.parametrize("content", ["", "100000", "a b", "100000 0", "1 2 3"])
def test_a_file_that_makes_no_sense_is_no_limit(tmp_path: Path, content: str) -> None:
    v2(tmp_path, "house", content)
    assert cgroup_quota(tmp_path, membership(tmp_path, "0::/house")) is None


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path, tmp_path / "missing") is None
    assert cgroup_quota(tmp_path, membership(tmp_path)) is None


def machine(
    root: Path,
    siblings: Sequence[Sequence[int]],
    *,
    hybrid: tuple[str, str] | None = None,
    capacities: Mapping[int, int] | None = None,
) -> Path:
    """A /sys/devices of these cores. siblings: the processors of each core. hybrid: Intel's two lists."""
    for core in siblings:
        for cpu in core:
            folder = root / f"system/cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(",".join(map(str, core)) + "\n")
    for cpu, capacity in (capacities or {}).items():
        (root / f"system/cpu/cpu{cpu}/cpu_capacity").write_text(f"{capacity}\n")
    for kind, cpus in zip(("cpu_core", "cpu_atom"), hybrid or (), strict=False):
        (root / kind).mkdir()
        (root / kind / "cpus").write_text(cpus + "\n")
    return root


def of_process(monkeypatch: pytest.MonkeyPatch, allowed: set[int], quota: float | None = None) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.setattr(threads, "cgroup_quota", lambda: quota)


FOUR = [[0], [1], [2], [3]]
TWO_OF_TWO = [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("allowed", "siblings", "quota", "expected"),
    [
        ({0, 1, 2, 3}, FOUR, None, 4),
        ({0, 1, 2, 3}, TWO_OF_TWO, None, 2),
        ({1}, FOUR, None, 1),
        ({0, 1, 2, 3}, FOUR, 2.9, 2),
        ({0, 1, 2, 3}, FOUR, 0.5, 1),
        ({0, 1, 2, 3}, FOUR, 64.0, 4),
    ],
)
def test_the_default_is_the_least_of_affinity_cores_and_quota(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    allowed: set[int],
    siblings: list[list[int]],
    quota: float | None,
    expected: int,
) -> None:
    """A quota is rounded down: an overrun one freezes every thread for the rest of the period."""
    of_process(monkeypatch, allowed, quota)
    assert default_num_threads(machine(tmp_path, siblings)) == expected


# Six cores of two threads each, then eight small ones: Core i5-13500.
HYBRID = [[2 * core, 2 * core + 1] for core in range(6)] + [[cpu] for cpu in range(12, 20)]


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (set(range(20)), 6),  # the large ones, once each
        (set(range(12)), 6),
        ({0, 1, 2, 3, 12, 13, 14}, 2),
        ({0, 1}, 1),
        (set(range(12, 20)), 8),  # pinned to small ones: they are what there is
        ({13}, 1),
    ],
)
def test_a_hybrid_processor_computes_on_its_performance_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allowed: set[int], expected: int
) -> None:
    of_process(monkeypatch, allowed)
    assert default_num_threads(machine(tmp_path, HYBRID, hybrid=("0-11", "12-19"))) == expected


def test_a_hybrid_processor_in_a_container_keeps_to_its_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of_process(monkeypatch, set(range(20)), quota=3.0)
    assert default_num_threads(machine(tmp_path, HYBRID, hybrid=("0-11", "12-19"))) == 3


def test_a_processor_of_small_cores_alone_uses_them_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The N100: four, and no list of kinds."""
    of_process(monkeypatch, {0, 1, 2, 3})
    assert default_num_threads(machine(tmp_path, FOUR)) == 4


@pytest.mark.parametrize(
    ("capacities", "expected"),
    [
        ((414, 414, 414, 414, 1024, 1024, 1024, 1024), 4),  # RK3588: A55 and A76
        ((250, 250, 250, 250, 760, 760, 760, 1024), 4),  # three sizes: only the smallest are left out
        ((1024,) * 8, 8),  # Raspberry Pi 5, Graviton
        ((430,) * 8, 8),
        ((1024, 1024, 512, 511), 3),
    ],
)
def test_little_cores_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capacities: tuple[int, ...], expected: int
) -> None:
    cores = [[cpu] for cpu in range(len(capacities))]
    of_process(monkeypatch, set(range(len(capacities))))
    assert default_num_threads(machine(tmp_path, cores, capacities=dict(enumerate(capacities)))) == expected


def test_a_process_pinned_to_little_cores_uses_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    capacities = {0: 414, 1: 414, 2: 1024, 3: 1024}
    of_process(monkeypatch, {0, 1})
    assert default_num_threads(machine(tmp_path, FOUR, capacities=capacities)) == 2


@pytest.mark.parametrize("content", ["", "x", "3-", "0-1,b", "-"])
def test_a_list_of_cores_that_makes_no_sense_leaves_nobody_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
) -> None:
    of_process(monkeypatch, {0, 1, 2, 3})
    assert default_num_threads(machine(tmp_path, FOUR, hybrid=(content, "2-3"))) == 4


def test_a_system_that_tells_nothing_has_a_core_a_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of_process(monkeypatch, {0, 1, 2})
    assert default_num_threads(tmp_path / "missing") == 3
    assert performance_processors(set(), tmp_path) == set()


def test_the_default_follows_this_process_affinity() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert default_num_threads() == 1
    finally:
        os.sched_setaffinity(0, before)
