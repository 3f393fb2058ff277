"""Matrices of every type as a GGUF file holds them, made of raw bytes or by the `gguf` package."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt

from octavo.kernels import Matrix, ThreadPool, WeightStore

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

FLOAT_TYPES = ("F32", "F16", "BF16")
GROUP = 32
"""Activations that share a scale."""


@dataclass(frozen=True)
class Block:
    """What a file holds for `values` consecutive weights of a row, in `bytes` bytes.

    halves: where the f16 scale and, if there is one, minimum stand. packed: bytes that it takes in memory.
    """

    values: int
    bytes: int
    halves: tuple[int, ...]
    packed: int


BLOCKS = {
    "Q4_0": Block(32, 18, (0,), 18),
    "Q4_1": Block(32, 20, (0, 2), 20),
    "Q5_0": Block(32, 22, (0,), 22),
    "Q5_1": Block(32, 24, (0, 2), 24),
    "Q8_0": Block(32, 34, (0,), 34),
}
QUANTIZED_TYPES = tuple(BLOCKS)
TYPES = FLOAT_TYPES + QUANTIZED_TYPES


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
    """Normally distributed weights."""
    values = (np.random.default_rng(seed).standard_normal((rows, columns)) * spread).astype(np.float32)
    return packed(coding, quantize(values, coding), rows, columns, threads)
