"""Where the peers live: each in an environment of its own under build/, made when it is first needed."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

BUILD = Path(__file__).resolve().parent.parent / "build"


def environment_with(name: str, package: str, module: str) -> Path:
    """The interpreter of build/<name>, which can import `module` of the PyPI package.

    Raises: CalledProcessError if it cannot be installed.
    """
    python = BUILD / name / "bin" / "python"
    if not python.exists():
        venv.create(BUILD / name, with_pip=True)
    if subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode != 0:
        print(f"installing {package} into {BUILD / name}", file=sys.stderr)
        subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
    return python


def said_by(python: Path, code: str) -> str:
    """What a short program prints in an environment.

    Raises: CalledProcessError.
    """
    run = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return run.stdout.strip()


def xllamacpp_python() -> Path:
    """Raises: CalledProcessError."""
    return environment_with("llamacpp", "xllamacpp", "xllamacpp")


def xllamacpp_library() -> Path:
    """llama.cpp and ggml as one shared library: the wheel's extension module.

    Raises: CalledProcessError.
    """
    code = "import xllamacpp.xllamacpp as library; print(library.__file__)"
    return Path(said_by(xllamacpp_python(), code))
