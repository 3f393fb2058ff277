"""Build llama.cpp's own server for this very processor: the peer `llamacpp-native` of versus_peers.py.

    python benchmarks/build_llamacpp.py [--jobs N]

The sources come from PyPI: the source distribution of llama-cpp-python holds a whole llama.cpp. Only
`llama-server` and `llama-quantize` are built, with GGML_NATIVE (every instruction the processor has),
without web pages and TLS, into build/llamacpp-native. cmake and ninja are those of `make build`. Takes 15 to
25 minutes with one compiler.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from environments import BUILD

REQUIREMENT = "llama-cpp-python==0.3.36"
FOLDER = BUILD / "llamacpp-native"
SERVER = FOLDER / "build" / "bin" / "llama-server"
QUANTIZE = FOLDER / "build" / "bin" / "llama-quantize"

_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Build llama.cpp's server for this processor.")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at once (default: %(default)s)")
    jobs = parser.parse_args().jobs
    if jobs < 1:
        parser.error(f"--jobs is {jobs} and must be at least 1")
    sources = FOLDER / "llama.cpp"
    if not sources.is_dir():
        _fetch(FOLDER)
    # cmake and ninja lie beside this interpreter; a PATH with them first, for cmake looks for ninja too.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    options = [f"-D{name}={value}" for name, value in _OPTIONS.items()]
    build = FOLDER / "build"
    for command in (
        ["cmake", "-S", str(sources), "-B", str(build), "-G", "Ninja", *options],
        ["cmake", "--build", str(build), "-j", str(jobs), "--target", "llama-server", "llama-quantize"],
    ):
        subprocess.run(command, check=True, env=environment)
    print(SERVER)
    return 0


def _fetch(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    source_only = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder)]
    subprocess.run([*pip, *source_only, REQUIREMENT], check=True)
    [archive] = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar:
            # llama_cpp_python-<version>/vendor/llama.cpp/...
            _, _, inside = member.name.partition("/")
            if inside.startswith("vendor/llama.cpp/"):
                member.name = inside.removeprefix("vendor/")
                tar.extract(member, folder, filter="data")
    archive.unlink()


if __name__ == "__main__":
    sys.exit(main())
