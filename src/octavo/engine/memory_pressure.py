"""Watches whether others need the memory that cold KV blocks take.

    /proc/pressure/memory   the machine        a trigger (PSI): the kernel says when tasks stalled for lack
    CGROUP/memory.pressure  each group we are  of memory for 150 ms within 2 s; nothing wakes before
                            in
    /proc/meminfo, limits of these groups      looked at every few seconds: without swap there may be no stall
                                               before there is an out-of-memory kill

One thread, asleep in poll(2). The engine thread only gets a command when there is something to do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.model.available_memory import MIB, cgroup_directories, memory_shortage

logger = logging.getLogger("octavo.memory")

PSI_TRIGGER = b"some 150000 2000000\0"
"""Microseconds of stalled time, of microseconds watched; a window of whole 2 s needs no privilege."""

RESERVED_SHARE = 0.05
"""Of the machine and of each limited group: what falls short of this is given back at once."""

STALLED_SHARE = 0.25
"""A stall somewhere on the machine concerns us only when less than this is available: it may be that of
another group within its own limit, which nothing we give back would help."""

PORTION_BYTES = 64 * MIB
"""Given back for each stall that is told, or an eighth of what is cold, if that is more: gone within 16 s or
so of lasting pressure, and one short stall does not cost the cache."""

AGAIN_SECONDS = 1.0
"""Until the next look after something was given back."""


def open_psi_trigger(path: Path) -> int:
    """A descriptor that polls as POLLPRI when PSI_TRIGGER fires. Raises: OSError where that cannot be had."""
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(descriptor, PSI_TRIGGER)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@dataclass(frozen=True, slots=True)
class PressureSources:
    """Where to look.

    interval: seconds between looks at what is available.
    open_trigger: makes a descriptor that polls as POLLPRI from a file of the PSI kind.
    """

    proc: Path = Path("/proc")
    cgroup_mount: Path = Path("/sys/fs/cgroup")
    interval: float = 5.0
    open_trigger: Callable[[Path], int] = open_psi_trigger


THIS_MACHINE = PressureSources()


class PressureWatcher:
    """Calls `relieve(nbytes)` while others are short of memory and there is something cold to give back.

    Args:
        cold_bytes: what could be given back now; asked from the watcher's thread.
        relieve: asks for that many bytes, at least; returns at once.
    """

    def __init__(
        self, sources: PressureSources, *, cold_bytes: Callable[[], int], relieve: Callable[[int], None]
    ) -> None:
        self._sources = sources
        self._cold_bytes = cold_bytes
        self._relieve = relieve
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="octavo-memory", daemon=True)

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it. Once, started or not."""
        os.eventfd_write(self._stop, 1)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._stop)

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:  # the server does not need this thread; whoever looks for it finds why it has ended
            logger.exception("memory pressure is not watched any more")

    def _watch(self) -> None:
        sources = self._sources
        machine = sources.proc / "pressure/memory"
        groups = [
            directory / "memory.pressure"
            for directory in cgroup_directories(sources.proc, sources.cgroup_mount)
        ]
        with _triggers([machine, *groups], sources.open_trigger) as path_of:
            poll = select.poll()
            poll.register(self._stop, select.POLLIN)
            for descriptor in path_of:
                poll.register(descriptor, select.POLLPRI)
            seconds = sources.interval
            while True:
                events = dict(poll.poll(seconds * 1000))
                if self._stop in events:
                    return
                for descriptor, event in events.items():
                    if event & (select.POLLERR | select.POLLNVAL):  # its group is gone
                        poll.unregister(descriptor)
                stalled = [path_of[one] for one, event in events.items() if event & select.POLLPRI]
                wanted = self._wanted(
                    machine_stalled=machine in stalled,
                    group_stalled=any(path != machine for path in stalled),
                )
                if wanted:
                    self._relieve(wanted)
                seconds = min(AGAIN_SECONDS, sources.interval) if wanted else sources.interval

    def _wanted(self, *, machine_stalled: bool, group_stalled: bool) -> int:
        """Bytes to give back now."""
        cold = self._cold_bytes()
        if not cold:
            return 0
        shortage = self._shortage(RESERVED_SHARE)
        if group_stalled or (machine_stalled and self._shortage(STALLED_SHARE)):
            shortage = max(shortage, PORTION_BYTES, cold // 8)
        return shortage

    def _shortage(self, share: float) -> int:
        return memory_shortage(share, self._sources.proc, self._sources.cgroup_mount)


@contextlib.contextmanager
def _triggers(paths: Iterable[Path], open_trigger: Callable[[Path], int]) -> Iterator[dict[int, Path]]:
    """Descriptors of those files that take a trigger, by what they watch; closed at the end."""
    opened: dict[int, Path] = {}
    try:
        for path in paths:
            with contextlib.suppress(OSError):
                opened[open_trigger(path)] = path
        yield opened
    finally:
        for descriptor in opened:
            os.close(descriptor)
