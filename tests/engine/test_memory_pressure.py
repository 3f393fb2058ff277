"""Who is asked for how much, when the kernel tells of a stall or little memory is left."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.reading import wait_until
from octavo.engine.memory_pressure import (
    PORTION_BYTES,
    PressureSources,
    PressureWatcher,
    open_psi_trigger,
)
from octavo.model.available_memory import GIB, MIB


class Machine:
    """A /proc and a cgroup mount in a folder, 16 GiB, in group /box/octavo of version 2 without a limit.

    A trigger is one end of a connection: a byte that is urgent at the other polls as POLLPRI, as PSI does.
    """

    def __init__(self, folder: Path) -> None:
        self.proc, self.mount = folder / "proc", folder / "cgroup"
        self.group = self.mount / "box/octavo"
        for directory in (self.proc / "self", self.proc / "pressure", self.group):
            directory.mkdir(parents=True)
        (self.proc / "self/cgroup").write_text("0::/box/octavo\n")
        self.write(self.group / "memory.current", "1000\n")
        self.write(self.group / "memory.max", "max\n")
        self.available(8 * GIB)
        self.cold = 4 * GIB
        self.ends: dict[Path, socket.socket] = {}
        self.watched: dict[Path, socket.socket] = {}
        self.asked: list[int] = []

    def write(self, path: Path, text: str) -> None:
        """At once, so that nobody reads half of it."""
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)

    def available(self, nbytes: int) -> None:
        text = f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {nbytes // 1024} kB\n"
        self.write(self.proc / "meminfo", text)

    def open_trigger(self, path: Path) -> int:
        if path.parent == self.mount / "box":
            raise PermissionError(13, "not ours")
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.ends[path] = socket.create_connection(server.getsockname())
            self.watched[path], _ = server.accept()
        return os.dup(self.watched[path].fileno())

    def stall(self, path: Path) -> None:
        self.ends[path].send(b"!", socket.MSG_OOB)

    def cold_bytes(self) -> int:
        for end in self.watched.values():
            with contextlib.suppress(OSError):  # told once, as PSI does it
                end.recv(1, socket.MSG_OOB)
        return self.cold

    @contextmanager
    def watching(self, interval: float = 60.0) -> Iterator[PressureWatcher]:
        sources = PressureSources(self.proc, self.mount, interval, self.open_trigger)
        watcher = PressureWatcher(sources, cold_bytes=self.cold_bytes, relieve=self.asked.append)
        watcher.start()
        try:
            wait_until(lambda: len(self.ends) == 2)
            yield watcher
        finally:
            watcher.stop()
            for end in (*self.ends.values(), *self.watched.values()):
                end.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "octavo-memory"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_machine_and_every_group_that_lets_us_are_watched(machine: Machine) -> None:
    (machine.mount / "box/memory.current").write_text("5\n")
    with machine.watching():
        assert set(machine.ends) == {machine.proc / "pressure/memory", machine.group / "memory.pressure"}


def test_a_stall_in_our_group_takes_a_portion_at_once(machine: Machine) -> None:
    machine.cold = 100 * MIB
    with machine.watching():
        machine.stall(machine.group / "memory.pressure")
        wait_until(lambda: machine.asked == [PORTION_BYTES])


def test_lasting_stalls_empty_a_large_cache_in_a_few_portions(machine: Machine) -> None:
    with machine.watching():
        for number in range(1, 4):
            machine.stall(machine.group / "memory.pressure")
            wait_until(lambda number=number: len(machine.asked) == number)  # type: ignore[misc]
    assert machine.asked == [512 * MIB] * 3


@pytest.mark.parametrize(("available", "asked"), [(3 * GIB, [512 * MIB]), (5 * GIB, [])])
def test_a_stall_on_the_machine_counts_only_where_little_is_available(
    machine: Machine, available: int, asked: list[int]
) -> None:
    """It may be that of another group within its own limit."""
    machine.available(available)
    with machine.watching():
        machine.stall(machine.proc / "pressure/memory")
        wait_until(lambda: machine.asked == asked)
        time.sleep(0.05)
    assert machine.asked[:1] == asked


def test_little_available_memory_is_noticed_without_any_stall(machine: Machine) -> None:
    lacking = 16 * GIB // 20 - 600 * MIB
    with machine.watching(interval=0.01):
        time.sleep(0.05)
        assert machine.asked == []
        machine.available(600 * MIB)
        wait_until(lambda: len(machine.asked) > 2)
    assert machine.asked[0] == pytest.approx(lacking, abs=1)


def test_the_limit_of_a_group_is_a_machine_of_its_own(machine: Machine) -> None:
    machine.write(machine.group / "memory.max", f"{GIB}\n")
    with machine.watching(interval=0.01):
        machine.write(machine.group / "memory.current", f"{GIB - 10 * MIB}\n")
        wait_until(lambda: bool(machine.asked))
    assert machine.asked[0] == GIB // 20 - 10 * MIB


def test_nothing_is_asked_for_where_nothing_is_cold(machine: Machine) -> None:
    machine.cold = 0
    machine.available(0)
    with machine.watching(interval=0.01):
        machine.stall(machine.group / "memory.pressure")
        time.sleep(0.1)
    assert machine.asked == []


def test_a_group_that_goes_away_ends_nothing(machine: Machine) -> None:
    with machine.watching() as watcher:
        machine.ends[machine.group / "memory.pressure"].close()
        time.sleep(0.05)
        assert watcher._thread.is_alive()
        machine.available(GIB)
        machine.stall(machine.proc / "pressure/memory")
        wait_until(lambda: machine.asked == [512 * MIB])


def test_a_system_that_does_not_say_ends_the_watching_and_nothing_else(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with machine.watching(interval=0.01) as watcher:
        (machine.proc / "meminfo").unlink()
        wait_until(lambda: not watcher._thread.is_alive())
    assert "memory pressure is not watched any more" in caplog.text


def test_a_watcher_that_was_never_started_can_be_stopped(machine: Machine) -> None:
    PressureWatcher(PressureSources(machine.proc), cold_bytes=lambda: 1, relieve=lambda _: None).stop()


def test_the_kernel_takes_our_trigger() -> None:
    if not os.access("/proc/pressure/memory", os.W_OK):
        pytest.skip("this kernel has no PSI, or hides it")
    descriptor = open_psi_trigger(Path("/proc/pressure/memory"))
    os.close(descriptor)
    with pytest.raises(OSError, match=r"Invalid argument|Permission denied|not permitted"):
        open_psi_trigger(Path("/proc/self/clear_refs"))
