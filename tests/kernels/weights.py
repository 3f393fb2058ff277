"""Matrices of every type as a GGUF file holds them, made of raw bytes or by the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

from octavo.kernels import Matrix, ThreadPool, WeightStore
from quantized_blocks import BLOCKS, TYPES_WITHOUT_QUANTISER, random_blocks

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

FLOAT_TYPES = ("F32", "F16", "BF16")
GROUP = 32
"""Activations that share a scale."""


QUANTIZED_TYPES = tuple(BLOCKS)
TYPES = FLOAT_TYPES + QUANTIZED_TYPES
TYPES_WITH_QUANTISER = tuple(coding for coding in TYPES if coding not in TYPES_WITHOUT_QUANTISER)


def whole_blocks(coding: str, columns: int) -> int:
    """`columns`, or as many more as make whole blocks of a quantised type."""
    values = BLOCKS[coding].values if coding in BLOCKS else 1
    return -(-columns // values) * values


def packed(coding: str, data: Bytes, rows: int, columns: int, threads: int = 1) -> Matrix:
    """data: uint8[nbytes], a tensor [rows, columns]."""
    return Matrix(WeightStore(), coding, data, rows, columns, ThreadPool(threads))


def quantize(values: Floats, coding: str) -> Bytes:
    """The tensor's bytes, by the reference quantiser."""
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[coding])
    return np.ascontiguousarray(raw).view(np.uint8).reshape(-1)


def dequantize(coding: str, data: Bytes, rows: int) -> Floats:
    """float32[rows, columns], by the reference dequantiser."""
    kind = gguf.GGMLQuantizationType[coding]
    if coding in FLOAT_TYPES:
        elements = {"F32": np.float32, "F16": np.float16, "BF16": np.uint8}[coding]
        values = gguf.quants.dequantize(data.view(elements).reshape(rows, -1), kind)
    else:
        values = gguf.quants.dequantize(data.reshape(rows, -1), kind)
    return np.asarray(values, dtype=np.float32)


def random_matrix(
    coding: str, rows: int, columns: int, *, seed: int = 0, threads: int = 1, spread: float = 1.0
) -> Matrix:
    """Weights with a deviation of `spread`, normally distributed where there is a quantiser."""
    random = np.random.default_rng(seed)
    if coding in TYPES_WITHOUT_QUANTISER:
        data = random_blocks(random, coding, rows, columns, spread).reshape(-1)
        return packed(coding, data, rows, columns, threads)
    values = (random.standard_normal((rows, columns)) * spread).astype(np.float32)
    return packed(coding, quantize(values, coding), rows, columns, threads)
