"""The `octavo` command around its sub-commands."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clients.server_process import wait_until
from octavo.cli.main import COMMANDS, main


def _octavo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert _octavo("--version").stdout.startswith("octavo 0.")
    assert main([]) == 2
    said = capsys.readouterr().out
    assert all(command in said for command in COMMANDS)


@pytest.mark.parametrize("arguments", [["sing"], ["serve", "--no-such-flag"], ["serve", "--port", "99999"]])
def test_a_wrong_command_line_is_2_and_a_usage_line(arguments: list[str]) -> None:
    result = _octavo(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: octavo")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=str)
def test_reading_a_command_line_loads_no_heavy_package(command: list[str]) -> None:
    program = (
        "import sys\n"
        "from octavo.cli.main import main\n"
        "try:\n"
        f"    main([*{command!r}, '--help'])\n"
        "except SystemExit:\n"
        "    heavy = {'numpy', 'starlette', 'uvicorn', 'jinja2', 'tokenizers', 'rich', 'asyncio'}\n"
        "    sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, f"loaded {result.stderr.strip()}"


def test_a_limit_of_the_engine_is_told_in_flags(tiny_model_path: Path) -> None:
    serve = _octavo("serve", str(tiny_model_path), "--port", "0", "--max-num-seqs", "500")
    assert serve.returncode == 1
    assert "--max-num-batched-tokens is 256 and must be at least --max-num-seqs, 500" in serve.stderr
    chat = _octavo("chat", str(tiny_model_path), "--top-p", "7")
    assert chat.returncode == 1
    assert chat.stderr == "octavo: error: --top-p must be a number above 0 and at most 1, got 7.0\n"


@pytest.mark.parametrize("after", [0.0, 0.1, 0.2, 0.3, 0.4])
def test_an_interrupted_start_ends_at_once_without_a_traceback(smollm2_path: Path, after: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "octavo.cli.main", "serve", str(smollm2_path), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: _listens(port))
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "Traceback" not in said
    assert process.returncode in (0, 130)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True
