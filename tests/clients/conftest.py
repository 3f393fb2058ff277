"""Servers that several tests share; each is a real process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.server_process import ServerProcess


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[ServerProcess]:
    """The real model with room for everybody."""
    with ServerProcess(
        smollm2_path, "--served-model-name", "smollm2", "--kv-cache-memory", "256MiB"
    ) as server:
        yield server


@pytest.fixture(scope="session")
def tiny(tiny_model_path: Path) -> Iterator[ServerProcess]:
    """Random weights and a limit of 256 tokens."""
    arguments = ("--served-model-name", "tiny", "--kv-cache-memory", "4MiB", "--max-model-len", "256")
    with ServerProcess(tiny_model_path, *arguments) as server:
        yield server
