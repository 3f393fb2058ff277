"""Octavo: a server for language models at home, with one shared pool of paged KV memory.

    from octavo import LLM, SamplingParams

Names are imported when they are first used: a command line that only prints its help loads no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine.sampling_params import SamplingParams as SamplingParams
    from octavo.llm import LLM as LLM

    __version__: str

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from octavo.llm import LLM

        return LLM
    if name == "SamplingParams":
        from octavo.engine.sampling_params import SamplingParams

        return SamplingParams
    if name == "__version__":
        from importlib.metadata import version

        return version("octavo")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
