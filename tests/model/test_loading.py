"""What loading takes: never the weights and the file together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from model_files import TinyLlama, write_tiny_llama
from octavo.kernels import PACK_STRIP_BYTES
from octavo.model.gguf import GGUFFile

_MIB = 1 << 20

BESIDE_WEIGHTS = PACK_STRIP_BYTES + 24 * _MIB
"""The bound of docs/kernels.md: one strip of the file, and metadata, program and tables of a page or two."""

_LOAD = """
import json, sys
from octavo.model.model import Model

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

before = status("VmRSS")
model = Model.load(sys.argv[1], num_threads=2)
said = {"before": before, "peak": status("VmHWM"), "after": status("VmRSS"), "weights": model.weight_bytes}
print(json.dumps(said))
"""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Bytes resident beyond those of the interpreter and its modules."""

    weights: int
    peak: int
    after: int

    @classmethod
    def alone(cls, path: Path) -> Loaded:
        """The file, loaded by a process of its own."""
        command = [sys.executable, "-c", _LOAD, os.fspath(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        said = json.loads(done.stdout)
        return cls(said["weights"], said["peak"] - said["before"], said["after"] - said["before"])


@pytest.fixture(scope="module")
def wide_model_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """120 MiB in three matrices, each of several strips."""
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    shape = TinyLlama(num_layers=1, hidden_size=1024, intermediate_size=20480, weight_type="F16")
    yield write_tiny_llama(path, shape)
    path.unlink()


def test_loading_takes_the_packed_weights_and_a_strip_of_the_file(wide_model_path: Path) -> None:
    with GGUFFile(wide_model_path) as file:
        largest = max(info.nbytes for info in file.tensors.values())
        assert largest > 2 * PACK_STRIP_BYTES  # or the test would not see what happens within a tensor
    loaded = Loaded.alone(wide_model_path)
    assert loaded.weights > 3 * BESIDE_WEIGHTS  # or it would not see the file beside the weights
    assert loaded.peak <= loaded.weights + BESIDE_WEIGHTS
    assert loaded.after <= loaded.weights + BESIDE_WEIGHTS - PACK_STRIP_BYTES


def test_loading_the_real_model_takes_the_packed_weights_and_a_strip_of_the_file(smollm2_path: Path) -> None:
    loaded = Loaded.alone(smollm2_path)
    assert loaded.peak <= loaded.weights + BESIDE_WEIGHTS
    assert loaded.after <= loaded.weights + BESIDE_WEIGHTS - PACK_STRIP_BYTES


def test_pages_are_dropped_where_they_were_asked_to_be(wide_model_path: Path) -> None:
    with GGUFFile(wide_model_path) as file:
        info = file.tensors["blk.0.ffn_gate.weight"]
        data = file.data(info.name)
        data[:: 4 << 10].max()
        touched = _resident_of_mapping(wide_model_path)
        assert touched >= info.nbytes
        middle = info.offset + 8 * _MIB
        file.drop_pages(middle, middle + 16 * _MIB)
        around = 4 * _MIB  # one huge page of the page cache at either end
        dropped = touched - _resident_of_mapping(wide_model_path)
        assert 16 * _MIB <= dropped <= 16 * _MIB + around


def test_reading_ahead_maps_no_page_and_may_reach_beyond_the_end(wide_model_path: Path) -> None:
    size = wide_model_path.stat().st_size
    with GGUFFile(wide_model_path) as file:
        file.drop_pages()
        file.read_ahead(0, size + 32 * _MIB)
        file.read_ahead(size + 1, size + 2)
        assert _resident_of_mapping(wide_model_path) == 0


def _resident_of_mapping(path: Path) -> int:
    """Bytes of this file that are resident here."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    resident = 0
    for line in lines:
        if line.endswith(os.fspath(path)):
            resident += next(int(field.split()[1]) for field in lines if field.startswith("Rss:")) * 1024
    return resident
