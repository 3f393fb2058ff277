"""What this process may still take, and weights that would take more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.model.available_memory import (
    MemoryRefused,
    available_memory,
    cgroup_directories,
    machine_memory,
    memory_shortage,
)
from octavo.model.gguf import GGUFFile
from octavo.model.model import Model
from octavo.model.weights import packed_bytes

SUPERBLOCK_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def machine(tmp_path: Path, cgroup: str) -> tuple[Path, Path]:
    """A /proc with 8,000 KiB available, and an empty cgroup mount."""
    write(tmp_path / "proc/self", cgroup=cgroup)
    write(tmp_path / "proc", meminfo="MemTotal:       16000 kB\nMemAvailable:    8000 kB\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "proc", tmp_path / "cgroup"


def test_without_a_group_the_machine_decides(tmp_path: Path) -> None:
    assert available_memory(*machine(tmp_path, "0::/\n")) == 8000 * 1024


def test_the_tightest_level_of_version_two_decides(tmp_path: Path) -> None:
    proc, mount = machine(tmp_path, "0::/people/octavo\n")
    write(mount / "people/octavo", memory__max="max\n", memory__current="1000\n")
    write(mount / "people", memory__max="5000000\n", memory__current="3000000\n")
    write(mount / "people", memory__stat="inactive_file 500\n")
    assert available_memory(proc, mount) == 5_000_000 - 3_000_000 + 500


def test_version_one_is_read_too_also_from_inside_a_container(tmp_path: Path) -> None:
    proc, mount = machine(tmp_path, "4:cpu:/x\n3:memory:/docker/abc\n0::/\n")
    write(
        mount / "memory",
        memory__limit_in_bytes="2000000\n",
        memory__usage_in_bytes="1500000\n",
        memory__stat="inactive_file 7\ntotal_inactive_file 100000\n",
    )
    assert available_memory(proc, mount) == 2_000_000 - 1_500_000 + 100_000
    write(mount / "memory", memory__limit_in_bytes="9223372036854771712\n")
    assert available_memory(proc, mount) == 8000 * 1024


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    proc, mount = machine(tmp_path, "0::/a\n")
    write(mount / "a", memory__max="1000\n", memory__current="2000\n")
    assert available_memory(proc, mount) == 0


def test_this_machine_says_something_sensible() -> None:
    assert 0 < available_memory() <= machine_memory() < 1 << 50
    assert memory_shortage(0.0) == 0
    assert memory_shortage(1.0) > 0


def test_a_shortage_is_what_is_lacking_to_a_share_of_the_tightest_level(tmp_path: Path) -> None:
    proc, mount = machine(tmp_path, "0::/people/octavo\n")
    kib = 1024
    assert machine_memory(proc) == 16_000 * kib
    assert memory_shortage(0.5, proc, mount) == 0
    assert memory_shortage(0.75, proc, mount) == 4_000 * kib
    write(mount / "people", memory__max="1000000\n", memory__current="900000\n")
    write(mount / "people", memory__stat="inactive_file 50000\n")
    assert memory_shortage(0.1, proc, mount) == 0
    assert memory_shortage(0.2, proc, mount) == 200_000 - 150_000
    write(mount / "people/octavo", memory__max="1000\n", memory__current="2000\n")
    assert memory_shortage(0.1, proc, mount) == 1_100


def test_the_groups_that_account_for_us_are_found_up_to_a_containers_own_root(tmp_path: Path) -> None:
    proc, mount = machine(tmp_path, "3:memory:/docker/abc\n0::/people/octavo\n")
    write(mount / "people/octavo", memory__current="1\n")
    write(mount / "people", memory__current="1\n")
    assert cgroup_directories(proc, mount) == [mount / "people/octavo", mount / "people"]
    write(mount, memory__current="1\n")
    assert cgroup_directories(proc, mount)[-1] == mount


@pytest.mark.parametrize(
    "weight_type",
    [*("F32", "F16", "BF16"), *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"), *SUPERBLOCK_TYPES],
)
def test_the_header_tells_how_much_the_weights_will_take(
    make_tiny_model: Callable[..., Path], weight_type: str
) -> None:
    whole_superblocks: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    path = make_tiny_model(weight_type=weight_type, **whole_superblocks)
    with GGUFFile(path) as file:
        expected = packed_bytes(file)
    model = Model.load(path, num_threads=1)
    assert model.weight_bytes <= expected <= 1.08 * model.weight_bytes
    model.close()


def test_weights_that_do_not_fit_are_refused_before_any_is_packed(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("something was allocated")

    with GGUFFile(tiny_model_path) as file:
        needed = packed_bytes(file)
    monkeypatch.setattr("octavo.model.model.available_memory", lambda: needed - 1)
    monkeypatch.setattr("octavo.model.model.WeightStore", never)
    with pytest.raises(MemoryRefused) as refused:
        Model.load(tiny_model_path, num_threads=1)
    assert (refused.value.needed, refused.value.available) == (needed, needed - 1)
    assert str(tiny_model_path) in str(refused.value)
    monkeypatch.undo()
    monkeypatch.setattr("octavo.model.model.available_memory", lambda: needed)
    Model.load(tiny_model_path, num_threads=1).close()
