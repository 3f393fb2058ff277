"""The native core: packed weights, the recorded program, paged attention, sampling (docs/kernels.md)."""

from __future__ import annotations

from octavo.kernels._native import (
    PACK_STRIP_BYTES,
    Matrix,
    Program,
    Sampled,
    Sampler,
    ThreadPool,
    WeightStore,
    available_instruction_sets,
)

__all__ = [
    "PACK_STRIP_BYTES",
    "Matrix",
    "Program",
    "Sampled",
    "Sampler",
    "ThreadPool",
    "WeightStore",
    "available_instruction_sets",
]
