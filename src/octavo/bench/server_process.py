"""A server in a process of its own, watched from outside."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from octavo.bench.other_load import process_seconds

_POLL_SECONDS = 0.01


class ServerFailed(Exception):
    """The server did not come up; the message ends with what it had said."""


class ServerProcess:
    """Started by `with`, ready inside it, stopped at its end. Always on 127.0.0.1.

    command: what to run; "{port}" in it becomes a free port. ready_path: answered with 200 once ready.
    ready_seconds: from the start of the process to that answer.
    """

    def __init__(
        self, command: Sequence[str], *, ready_path: str = "/health", timeout: float = 120.0
    ) -> None:
        self.port = _free_port()
        self.ready_seconds = 0.0
        self._command = [part.replace("{port}", str(self.port)) for part in command]
        self._ready_path = ready_path
        self._timeout = timeout

    def __enter__(self) -> Self:
        """Raises ServerFailed."""
        self._output = tempfile.TemporaryFile()
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            # Nobody's octavo.toml: its keys and pinned prefixes are not what is measured.
            env={**os.environ, "XDG_CONFIG_HOME": os.devnull, "OCTAVO_CONFIG": ""},
        )
        try:
            while not self._is_ready():
                if self._process.poll() is not None:
                    raise ServerFailed(f"exit code {self._process.returncode}: {self._said()}")
                if time.perf_counter() - begin > self._timeout:
                    raise ServerFailed(f"not ready after {self._timeout:.0f} s: {self._said()}")
                time.sleep(_POLL_SECONDS)
        except BaseException:
            self._stop()
            raise
        self.ready_seconds = time.perf_counter() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_seconds(self) -> float:
        """Processor time used so far, user and system."""
        return process_seconds(self.pid)

    def resident_bytes(self) -> int:
        """Physical memory now."""
        return self._status("VmRSS")

    def peak_resident_bytes(self) -> int:
        """The most physical memory so far."""
        return self._status("VmHWM")

    def _status(self, field: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise ServerFailed(f"the system does not tell {field} of process {self.pid}")

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self._timeout)
        try:
            connection.request("GET", self._ready_path)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _said(self) -> str:
        self._output.seek(0)
        return self._output.read()[-2000:].decode(errors="replace").strip()

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
