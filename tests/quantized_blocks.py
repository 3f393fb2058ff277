"""Blocks of quantised types as a GGUF file holds them, and random ones where `gguf` has no quantiser."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


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
    "Q2_K": Block(256, 84, (80, 82), 84),
    "Q3_K": Block(256, 110, (108,), 114),
    "Q4_K": Block(256, 144, (0, 2), 148),
    "Q5_K": Block(256, 176, (0, 2), 180),
    "Q6_K": Block(256, 210, (208,), 210),
    "IQ4_NL": Block(32, 18, (0,), 18),
    "IQ4_XS": Block(256, 136, (0,), 138),
}

TYPES_WITHOUT_QUANTISER = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""The `gguf` package reads them only."""

MIDDLES = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""Of the codes of types with minima: what the minimum must be, in scales, for weights around zero."""


def random_blocks(random: np.random.Generator, coding: str, rows: int, columns: int, spread: float) -> Bytes:
    """uint8[rows, bytes]: any codes and sub-scales, scaled so that weights deviate by about `spread`."""
    block = BLOCKS[coding]
    blocks = random.integers(0, 256, (rows, columns // block.values, block.bytes), dtype=np.uint8)

    def set_scales(scale: float) -> None:
        for at, factor in zip(block.halves, (1.0, MIDDLES.get(coding, 0.0)), strict=False):
            blocks[..., at : at + 2] = np.array([scale * factor], dtype=np.float16).view(np.uint8)

    set_scales(1.0)
    kind = gguf.GGMLQuantizationType[coding]
    set_scales(spread / float(gguf.quants.dequantize(blocks.reshape(rows, -1), kind).std()))
    return blocks.reshape(rows, -1)
