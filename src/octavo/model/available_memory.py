"""How many bytes this process may still take: the machine's free memory, or its control group's if that is
less. And how more than that is refused, by whoever wants it: `Model.load` before it packs weights, the engine
before it makes a pool.

A container's limit is invisible in /proc/meminfo, and the group above may be tighter than one's own, so every
level up to the mount point is read, for both versions of control groups. Page cache that the kernel can drop
(`inactive_file`) counts as free, as it does in MemAvailable.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a huge number near 2**63; nothing at home has an exbibyte."""


GIB = 1 << 30
MIB = 1 << 20


class MemoryRefused(Exception):
    """The asked-for memory does not fit, or is too little to work with; the message has both numbers."""

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.message = message
        self.needed = needed
        self.available = available


def format_bytes(count: int) -> str:
    """`4.00 GiB`, `93.4 MiB`, `23,040 bytes`."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    if count >= MIB:
        return f"{count / MIB:.1f} MiB"
    return f"{count:,} bytes"


def available_memory(proc: Path = Path("/proc"), cgroup_mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken without swapping or being killed for it; at least 0.

    Raises: OSError if the system does not say (no /proc/meminfo).
    """
    free = _meminfo_available(proc)
    for limit, usage in _cgroup_levels(proc, cgroup_mount):
        free = min(free, limit - usage)
    return max(free, 0)


def machine_memory(proc: Path = Path("/proc")) -> int:
    """Bytes of physical memory, whoever may use them. Raises: OSError if the system does not say."""
    return _meminfo(proc).get("MemTotal", 0)


def memory_shortage(
    share: float, proc: Path = Path("/proc"), cgroup_mount: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes that would have to be given back until `share` of the machine, and of each control group with a
    limit that this process is in, can be taken by others; 0 if that is so.

    Raises: OSError if the system does not say (no /proc/meminfo).
    """
    levels = [(machine_memory(proc), machine_memory(proc) - _meminfo_available(proc))]
    levels += _cgroup_levels(proc, cgroup_mount)
    return max(0, *(int(limit * share) - (limit - usage) for limit, usage in levels))


def _meminfo_available(proc: Path) -> int:
    fields = _meminfo(proc)
    return fields.get("MemAvailable", fields.get("MemFree", 0))


def _meminfo(proc: Path) -> dict[str, int]:
    fields = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    return fields


def cgroup_directories(proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Directories of the version 2 groups that this process is in, its own first.

    Without the root of all groups, which accounts for nothing; a container's own root does.
    """
    groups = _memory_groups(proc, mount)
    return [path for version, path in groups if version == 2 and (path / "memory.current").exists()]


def _memory_groups(proc: Path, mount: Path) -> list[tuple[int, Path]]:
    """(version, directory) of each group that accounts for this process's memory, up to the mount itself."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, root = 2, mount
        elif "memory" in controllers.split(","):
            version, root = 1, mount / "memory"
        else:
            continue
        # Inside a container the path may name directories that only the host sees; then the mount itself is
        # ours.
        relatives = [PurePosixPath(path.lstrip("/")), *PurePosixPath(path.lstrip("/")).parents]
        groups += [(version, root / relative) for relative in relatives]
    return groups


def _cgroup_levels(proc: Path, mount: Path) -> list[tuple[int, int]]:
    """(limit, usage) in bytes for each level that has a limit, version 1 and 2 alike."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
    levels = []
    for version, directory in _memory_groups(proc, mount):
        limit, usage = (_read_bytes(directory / name) for name in names[version])
        if limit is not None and usage is not None and limit < UNLIMITED:
            levels.append((limit, usage - _droppable(directory)))
    return levels


def _read_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _droppable(directory: Path) -> int:
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))
