"""Compilers for the processors that the kernels are written for."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "src" / "octavo" / "kernels" / "native"
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


@dataclass(frozen=True)
class Toolchain:
    """compiler: a path. prefix: of the names of the other tools. native: what it makes runs here."""

    compiler: str
    prefix: str
    native: bool


def find_toolchain(machine: str) -> Toolchain:
    """For "x86_64" or "aarch64". Skips the test, with the reason, where there is none."""
    native = machine == MACHINE
    prefix = "" if native else f"{machine}-linux-gnu-"
    names = (os.environ.get("CXX"), "c++", "g++", "clang++") if native else (f"{prefix}g++",)
    for name in names:
        if name and (compiler := shutil.which(name)):
            return Toolchain(compiler, prefix, native)
    pytest.skip(f"needs a C++ compiler for {machine}")
