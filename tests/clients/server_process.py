"""A real server in a process of its own, the way a person starts one."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import openai

START_SECONDS = 60
END_SECONDS = 30


class ServerProcess:
    """`octavo serve` with `arguments` on a free port of 127.0.0.1; ready when the constructor returns.

    url: without a path. started_in: seconds from the command to the line that says ready, as the server
        counts them.
    """

    def __init__(self, model: str | Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo.cli.main", "serve", str(model), "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.output: list[str] = []
        self.log: list[str] = []
        self._ready: queue.Queue[re.Match[str] | None] = queue.Queue()
        for stream, lines in ((self.process.stdout, self.output), (self.process.stderr, self.log)):
            threading.Thread(target=self._read, args=(stream, lines), daemon=True).start()
        ready = self._ready.get(timeout=START_SECONDS)
        if ready is None:
            raise AssertionError(f"the server ended with {self.process.wait()}: {self.log}")
        self.started_in = float(ready[1])
        self.url = ready[2]

    def _read(self, stream: Iterator[str], lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))
            if match := re.match(r"ready after ([\d.]+) s at (http://\S+)", line):
                self._ready.put(match)
        self._ready.put(None)

    def openai(self, api_key: str = "unused") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, timeout=120, api_key=api_key)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120)

    def metric(self, name: str, **label: str) -> float:
        """The sum over all labels of one metric, or over those with this one, without its prefix."""
        text = httpx.get(f"{self.url}/metrics").text
        asked = "".join(f'{key}="{value}"[^}}]*' for key, value in label.items())
        labels = rf"{{[^}}]*{asked}}}" if label else r"(?:{.*?})?"
        values = re.findall(rf"^octavo:{name}{labels} (\S+)$", text, re.MULTILINE)
        assert values, f"there is no metric {name}"
        return sum(map(float, values))

    def cpu_seconds(self) -> float:
        """Processor time of the whole process so far, user and system."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end. Returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(END_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = self.end() if self.process.poll() is None else self.process.returncode
        if error is None:
            # Ending checks for leaked blocks: a server that lost one does not exit with 0.
            assert code == 0, self.log
            assert not [line for line in self.log if "Traceback" in line], self.log


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Raises AssertionError if `condition` stays false."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def together(*work: Callable[[], None]) -> Iterator[None]:
    """Run every function in a thread of its own beside the body; raises the first that one of them raised."""
    failures: list[BaseException] = []

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(300)
    if failures:
        raise failures[0]
