"""A server process is ready when it answers, watched while it runs, and gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.bench.client import stream_completions
from octavo.bench.other_load import OtherLoad, process_seconds, wait_for_quiet
from octavo.bench.server_process import ServerFailed, ServerProcess
from octavo.bench.spread import Spread

SERVE = [sys.executable, "-m", "octavo.cli.main", "serve"]


def test_octavo_serves_and_is_stopped(tiny_model_path: Path) -> None:
    command = [*SERVE, str(tiny_model_path), "--port", "{port}", "--threads", "1"]
    with ServerProcess(command) as server:
        assert 0 < server.ready_seconds < 120
        used = server.cpu_seconds()
        body = {"prompt": [70, 71, 72], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        answers = stream_completions(server.port, [body, body])
        assert [answer.completion_tokens for answer in answers] == [5, 5]
        assert 1 << 20 < server.resident_bytes() <= server.peak_resident_bytes()
        assert server.cpu_seconds() >= used > 0
        pid = server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_does_not_come_up_says_why() -> None:
    with (
        pytest.raises(ServerFailed, match=r"exit code 1: octavo: error: nowhere\.gguf"),
        ServerProcess([*SERVE, "nowhere.gguf", "--port", "{port}"]),
    ):
        pass


def test_a_server_that_never_answers_is_stopped() -> None:
    sleeper = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], timeout=0.5)
    with pytest.raises(ServerFailed, match="not ready after"), sleeper:
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(sleeper.pid, 0)


def test_the_time_of_measured_processes_is_not_that_of_others() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            begin = time.perf_counter()
            counted_as_other, measured = OtherLoad(), OtherLoad([busy.pid])
            used_before = process_seconds(busy.pid)
            deadline = time.monotonic() + 30
            while process_seconds(busy.pid) - used_before < 0.3:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            seconds = time.perf_counter() - begin
            difference = counted_as_other.processors() - measured.processors()
        finally:
            busy.kill()
    assert difference * seconds >= 0.2


def test_waiting_for_quiet_ends() -> None:
    assert wait_for_quiet(0.3, most_processors=-1.0, window=0.1) >= 0.0


def test_a_spread_is_median_and_ends() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)
    with pytest.raises(ValueError, match="nothing was measured"):
        Spread.of([])
