"""Code compiled for one instruction set must never stand in for the portable code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.toolchain import NATIVE, find_toolchain

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
PATHS = {
    "avx2": AVX2,
    "avxvnni": [*AVX2, "-mavxvnni"],
    "avx512vnni": [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"],
    "sse41": ["-msse4.1", "-mssse3"],
    "neon": ["-march=armv8.2-a+dotprod"],
}


@pytest.mark.parametrize("path", PATHS)
def test_the_file_of_a_path_shows_the_linker_nothing_but_its_table(path: str, tmp_path: Path) -> None:
    """An inline function with external linkage is merged with its twins, and the linker may keep this one.

    Compiled without optimisation, where nothing is inlined away: every such function would be seen.
    """
    toolchain = find_toolchain("aarch64" if path == "neon" else "x86_64")
    nm = shutil.which(f"{toolchain.prefix}nm")
    if nm is None:
        pytest.skip(f"needs {toolchain.prefix}nm")
    object_file = tmp_path / "kernels.o"
    subprocess.run(
        [toolchain.compiler, "-std=c++20", "-O0", *PATHS[path], "-c", str(NATIVE / f"kernels_{path}.cpp"),
         "-o", str(object_file)],
        check=True,
    )  # fmt: skip
    listed = subprocess.run(
        [nm, "--extern-only", "--defined-only", "--demangle", str(object_file)],
        check=True,
        capture_output=True,
        text=True,
    )
    symbols = [line.split(maxsplit=2)[2] for line in listed.stdout.splitlines() if line.strip()]
    # A pointer to the C++ runtime, the same wherever a compiler puts it; no code.
    symbols = [name for name in symbols if name != "DW.ref.__gxx_personality_v0"]
    assert symbols == [f"octavo::{path}_kernels()"]
