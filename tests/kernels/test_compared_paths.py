"""The native core without Python, its paths held against each other: also those of another processor.

`native/compare_paths.cpp` compares bytes; where a processor is not at hand, its emulator runs it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kernels.attention_batches import KINDS
from kernels.paged_kv import attend, random_chunk, random_kv
from kernels.paths import AVAILABLE, FUSED
from kernels.recorded import StoredKV, gated_and_normed
from kernels.toolchain import MACHINE, NATIVE, Toolchain, find_toolchain
from kernels.weights import TYPES, random_matrix, whole_blocks
from octavo.kernels import ThreadPool
from octavo.kernels._native import matmul

SOURCE = Path(__file__).with_name("native") / "compare_paths.cpp"
# As CMakeLists.txt compiles them.
FLAGS = ["-std=c++20", "-O3", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fno-math-errno"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
OWN_FLAGS = {
    "x86_64": {
        "avx2": AVX2,
        # Processors with AVX-512 VNNI run AVX-VNNI's kernels in their own encoding of its instructions.
        "avxvnni": [*AVX2, "-mavx512vl", "-mavx512vnni", "-DOCTAVO_AVXVNNI_AS_AVX512"],
        # GCC 12 warns of its own headers (bug 105593).
        "avx512vnni": [
            *AVX2,
            *(f"-mavx512{extension}" for extension in ("f", "bw", "dq", "vl", "vnni")),
            "-mprefer-vector-width=256",
            "-Wno-uninitialized",
            "-Wno-maybe-uninitialized",
        ],
    },
    "aarch64": {"neon": ["-march=armv8.2-a+dotprod"]},
}
PATHS = ("portable", "avx2", "avxvnni", "avx512vnni", "sse41", "neon")


def build(toolchain: Toolchain, machine: str, path: str, folder: Path) -> Path:
    """The program for `machine` with this path and the portable one. The others are empty tables."""
    sources = [SOURCE, *(NATIVE / f"{name}.cpp" for name in ("matrix", "thread_pool"))]
    own: dict[Path, list[str]] = {NATIVE / f"kernels_{name}.cpp": [] for name in PATHS}
    own[NATIVE / f"kernels_{path}.cpp"] = OWN_FLAGS[machine][path]
    own[NATIVE / "cpu_features.cpp"] = ["-DOCTAVO_AVXVNNI_AS_AVX512"]
    objects = []
    for source in (*sources, *own):
        objects.append(folder / f"{source.stem}.o")
        flags = [*FLAGS, *own.get(source, []), f"-I{NATIVE}"]
        subprocess.run([toolchain.compiler, *flags, "-c", source, "-o", objects[-1]], check=True)
    program = folder / "compare_paths"
    # Static where another processor's libraries would have to be found.
    static = [] if toolchain.native else ["-static"]
    subprocess.run([toolchain.compiler, *static, *objects, "-o", program, "-pthread"], check=True)
    return program


def find_emulator(machine: str) -> str:
    """Skips the test where there is none."""
    for name in (f"qemu-{machine}", f"qemu-{machine}-static"):
        if found := shutil.which(name):
            return found
    pytest.skip(f"needs qemu-{machine} (Debian: qemu-user)")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # it compiles
@pytest.mark.parametrize(
    ("machine", "path"),
    [("x86_64", "avx2"), ("x86_64", "avxvnni"), ("x86_64", "avx512vnni"), ("aarch64", "neon")],
)
def test_a_path_gives_the_bytes_of_the_portable_one(machine: str, path: str, tmp_path: Path) -> None:
    """Every type of weights, rows of every kind, attention over scattered blocks of both types."""
    toolchain = find_toolchain(machine)
    needed = "avx512vnni" if path == "avxvnni" else path
    if toolchain.native and needed not in FUSED:
        pytest.skip(f"this processor has no {needed}")
    emulator = [] if toolchain.native else [find_emulator(machine)]

    program = build(toolchain, machine, path, tmp_path)

    done = subprocess.run([*emulator, program, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{path}: ")
    # A path that is not there is refused: nothing passes because nothing was compared.
    refused = subprocess.run([*emulator, program, "mmx"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "'mmx' cannot run on this processor; available: " in refused.stderr


def fingerprint(instruction_set: str) -> str:
    """Of the bytes of every kernel."""
    found = hashlib.sha256()
    pool, random = ThreadPool(2), np.random.default_rng(0)
    for coding in TYPES:
        columns = whole_blocks(coding, 64)
        matrix = random_matrix(coding, 43, columns)
        x = random.standard_normal((18, columns)).astype(np.float32)
        for rows in (1, 3, 18):
            found.update(matmul(pool, matrix, x[:rows], instruction_set).tobytes())
    kv = random_kv(random, 300, 1, 64)
    chunks = [random_chunk(random, kv, 3, start, rows) for start, rows in ((299, 1), (280, 20))]
    for kind in KINDS.values():
        for out in attend(chunks, kind, instruction_set=instruction_set):
            found.update(out.tobytes())
    vectors = random.standard_normal((9, 32)).astype(np.float32)
    gated = gated_and_normed(vectors, vectors, 1e-5, instruction_set=instruction_set)
    found.update(gated.tobytes())
    for kv_dtype in ("f16", "q8"):
        stored = StoredKV(vectors, vectors, instruction_set=instruction_set, kv_dtype=kv_dtype)
        stored.run(range(9), 0, [0])
        found.update(stored.arena.tobytes())
    return found.hexdigest()


@pytest.mark.slow
@pytest.mark.skipif("sse41" not in AVAILABLE, reason="this processor has no SSE4.1")
def test_a_processor_without_avx_takes_sse41_and_gives_its_bytes() -> None:
    """Emulated, from import on: one AVX instruction outside the other paths' kernels would end it."""
    script = (
        "from octavo.kernels import available_instruction_sets\n"
        "from kernels.test_compared_paths import fingerprint\n"
        "print(*available_instruction_sets(), fingerprint(''))\n"
    )
    emulated = subprocess.run(
        [find_emulator(MACHINE), "-cpu", "Nehalem", sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert emulated.returncode == 0, emulated.stderr
    assert emulated.stdout.split() == ["sse41", "portable", fingerprint("sse41")]
