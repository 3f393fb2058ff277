"""The engines that Octavo is measured beside: how each is set up, started, and what it says of itself.

All are servers in a process of their own on 127.0.0.1 that answer /health and stream /v1/completions.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import build_llamacpp
from comparison import Capacity
from environments import environment_with, said_by, xllamacpp_python
from octavo.kernels import available_instruction_sets
from octavo.kv.layout import KVLayout
from octavo.model.config import ModelConfig
from octavo.model.gguf import GGUFFile

HERE = Path(__file__).resolve().parent
BLOCK_SIZE = 16


class PeerMissing(Exception):
    """The peer cannot be set up here; the message says what to do."""


class Engine(Protocol):
    """describe: sets the engine up if need be, and says version and what it computes with; raises
    PeerMissing or CalledProcessError. command: starts its server, "{port}" in it is to be replaced."""

    def describe(self) -> str: ...

    def command(self, model: Path, threads: int, capacity: Capacity) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Octavo:
    instruction_set: str

    def describe(self) -> str:
        return f"on {self.instruction_set}"

    def command(self, model: Path, threads: int, capacity: Capacity) -> list[str]:
        with GGUFFile(model) as file:
            config = ModelConfig.from_gguf(file)
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE)
        pool = layout.extent_bytes * (capacity.tokens // BLOCK_SIZE)
        return [
            *(sys.executable, "-m", "octavo.cli.main", "serve", str(model)),
            *("--port", "{port}", "--threads", str(threads), "--block-size", str(BLOCK_SIZE)),
            *("--instruction-set", self.instruction_set),
            *("--kv-cache-memory", str(pool), "--no-enable-prefix-caching"),
        ]


@dataclass(frozen=True, slots=True)
class LlamaCppWheel:
    """The build inside the xllamacpp wheel from PyPI, with llama.cpp's own C++ server."""

    def describe(self) -> str:
        code = (
            "import importlib.metadata, xllamacpp, re\n"
            "used = re.findall(r'(AVX\\w*|NEON|SVE) = 1', xllamacpp.get_system_info())\n"
            "print('xllamacpp', importlib.metadata.version('xllamacpp'), 'from PyPI, built for',"
            " (used or ['no vector instructions'])[-1])"
        )
        return said_by(xllamacpp_python(), code)

    def command(self, model: Path, threads: int, capacity: Capacity) -> list[str]:
        sizes = ["--slots", str(capacity.sequences), "--context", str(capacity.tokens)]
        script = [str(xllamacpp_python()), str(HERE / "llamacpp_server.py"), str(model)]
        return [*script, "--port", "{port}", "--threads", str(threads), *sizes]


@dataclass(frozen=True, slots=True)
class LlamaCppNative:
    """llama-server, built for this processor by build_llamacpp.py."""

    def describe(self) -> str:
        server = build_llamacpp.SERVER
        if not server.exists():
            raise PeerMissing(
                "llamacpp-native is not built yet (15 minutes or more): python benchmarks/build_llamacpp.py"
            )
        said = subprocess.run([server, "--version"], check=True, capture_output=True, text=True)
        version = re.search(r"version: (.*)", said.stdout + said.stderr)
        name = version[1].strip() if version else "of unknown version"
        return f"llama-server {name} out of {build_llamacpp.REQUIREMENT}, built with GGML_NATIVE"

    def command(self, model: Path, threads: int, capacity: Capacity) -> list[str]:
        return [
            *(str(build_llamacpp.SERVER), "--model", str(model), "--host", "127.0.0.1", "--port", "{port}"),
            *("--threads", str(threads), "--threads-batch", str(threads)),
            *("--parallel", str(capacity.sequences), "--ctx-size", str(capacity.tokens)),
            *("--no-cache-prompt", "--no-cache-idle-slots", "--cache-ram", "0", "--no-ui"),
        ]


@dataclass(frozen=True, slots=True)
class OpenVino:
    """OpenVINO GenAI's ContinuousBatchingPipeline behind openvino_server.py.

    precision: of the computation; None lets it choose.
    """

    precision: str | None = None

    def describe(self) -> str:
        code = (
            "import importlib.metadata, openvino\n"
            "chosen = openvino.Core().get_property('CPU', 'INFERENCE_PRECISION_HINT').get_type_name()\n"
            "group = openvino.Core().get_property('CPU', 'DYNAMIC_QUANTIZATION_GROUP_SIZE')\n"
            "print(importlib.metadata.version('openvino-genai'), chosen, group)"
        )
        version, chosen, group = said_by(self._python(), code).split()
        precision = f"{self.precision} as asked" if self.precision else f"{chosen}, its own choice here"
        return (
            f"openvino-genai {version} from PyPI, ContinuousBatchingPipeline behind a thin server of ours "
            f"that makes no text, computing in {precision}, activations quantised in groups of {group}"
        )

    def command(self, model: Path, threads: int, capacity: Capacity) -> list[str]:
        script = [str(self._python()), str(HERE / "openvino_server.py"), str(model)]
        sizes = ["--threads", str(threads), "--kv-tokens", str(capacity.tokens)]
        return [
            *(*script, "--port", "{port}", *sizes),
            *(["--precision", self.precision] if self.precision else []),
        ]

    def _python(self) -> Path:
        return environment_with("openvino", "openvino-genai", "openvino_genai")


PEERS: Mapping[str, Engine] = MappingProxyType(
    {
        "llamacpp": LlamaCppWheel(),
        "llamacpp-native": LlamaCppNative(),
        "openvino": OpenVino(),
        "openvino-f32": OpenVino("f32"),
    }
)
INSTRUCTION_SETS = available_instruction_sets()
