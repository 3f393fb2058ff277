"""Ctrl-C before a command has got anywhere: it ends promptly, quietly and with 130."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo.cli.interrupts import INTERRUPTED, interrupts_end_the_process, interrupts_raise

PROMPTLY = 5.0
"""Seconds, on a machine with other work."""


@contextmanager
def command(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.cli.main", *arguments],
        stdin=subprocess.PIPE,  # nobody speaks, and nobody hangs up
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never came so far"
        time.sleep(0.005)


def interrupted(process: subprocess.Popen[str]) -> str:
    """Interrupt it, once. Returns: what it said on standard error."""
    process.send_signal(signal.SIGINT)
    output, said = process.communicate(timeout=PROMPTLY)
    assert process.returncode == INTERRUPTED == 130
    assert output == ""
    return said


@pytest.mark.parametrize(
    ("loaded", "later"),
    [("_multiarray_umath", 0.0), ("_native", 0.0), ("_native", 0.1), ("_native", 0.3)],
    ids=["importing", "loading", "loading on", "loaded"],
)
@pytest.mark.parametrize("arguments", [("chat",), ("bench", "throughput", "--model")], ids=["chat", "bench"])
def test_while_a_model_loads(
    smollm2_path: Path, arguments: tuple[str, ...], loaded: str, later: float
) -> None:
    with command(*arguments, str(smollm2_path)) as process:
        wait_until(lambda: loaded in Path(f"/proc/{process.pid}/maps").read_text(), process)
        time.sleep(later)
        assert interrupted(process) == ""


def test_while_kernels_are_measured() -> None:
    with command("bench", "kernels") as process:
        wait_until(lambda: "_native" in Path(f"/proc/{process.pid}/maps").read_text(), process)
        time.sleep(0.5)
        assert interrupted(process) == ""


def test_while_a_download_runs_nothing_is_left(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # pip connects, and nobody answers
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        environment = {"XDG_CACHE_HOME": str(tmp_path), "PIP_INDEX_URL": index, "no_proxy": "127.0.0.1"}
        with command("pull", "smollm2-135m", **environment) as process:
            wait_until(lambda: bool(list(tmp_path.rglob("pip.log"))), process)
            said = interrupted(process).splitlines()
    assert said[-1] == "octavo: interrupted; nothing half-written was kept"
    assert not [line for line in said if "Traceback" in line]
    assert [path.name for path in (tmp_path / "octavo" / "models").iterdir()] == [".lock"]


def test_inside_a_command_it_raises_only_where_that_is_asked_for() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_end_the_process():
        ends = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts_raise():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is ends is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_background_job_that_ignores_it_still_does() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_end_the_process(), interrupts_raise():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
