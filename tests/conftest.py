"""What every room's tests share: the real model, tiny ones, and the audit after every step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from model_files import cached_tiny_llama
from octavo.model.catalog import DEFAULT_MODEL, KNOWN_MODELS
from octavo.model.download import pull

# Every engine under test proves its books after every step, also those in processes that a test starts.
os.environ.setdefault("OCTAVO_AUDIT", "1")

# No test reads the octavo.toml of whoever runs it, nor does a server that a test starts.
os.environ["XDG_CONFIG_HOME"] = os.devnull
os.environ.pop("OCTAVO_CONFIG", None)

# A background job of a shell script ignores Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared two-core machine stalls now and then; a stall is not a failure.
settings.register_profile("octavo", deadline=None)
settings.load_profile("octavo")


class _Silent:
    def note(self, text: str) -> None:
        """Tests have nobody to tell."""

    def progress(self, stage: str, done: int, total: int) -> None:
        """Tests have nobody to tell."""


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M, fetched when it is not there yet."""
    path = KNOWN_MODELS[DEFAULT_MODEL].path
    return path if path.is_file() else pull(DEFAULT_MODEL, _Silent()).path


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_tiny_model(weight_type="F32", tied=True)`: a file of these fields of `model_files.TinyLlama`."""
    folder = tmp_path_factory.mktemp("tiny-models")

    def make(**changes: object) -> Path:
        return cached_tiny_llama(folder, **changes)

    return make


@pytest.fixture(scope="session")
def tiny_model_path(make_tiny_model: Callable[..., Path]) -> Path:
    """A two-layer `llama` with random weights and a real byte-level vocabulary of about 300 tokens."""
    return make_tiny_model()
