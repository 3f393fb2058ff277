"""The operations an architecture is written in, and their recording into a native program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.kernels import Matrix, Program
from octavo.model.weights import Weights


@dataclass(frozen=True, slots=True)
class Rows:
    """Activations of the tokens of a step: float32[num_tokens, width]."""

    buffer: int
    width: int


class Network:
    """Records a model. Each method stands for one fused operation on all rows of a step.

    Buffers are reused as soon as their rows have been read: a network needs the memory of one layer,
    whatever its depth. Nothing here says on what kind of processor the program will run.
    """

    def __init__(self, program: Program, weights: Weights) -> None:
        self._program = program
        self._weights = weights
        self._free: dict[int, list[int]] = {}

    def embed(self, table: Matrix) -> Rows:
        """A row of the table for each token id."""
        out = self._take(table.in_features)
        self._program.embed(table, out.buffer)
        return out

    def rms_norm(self, x: Rows, weight: str, eps: float) -> Rows:
        """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019)."""
        out = self._take(x.width)
        self._program.rms_norm(x.buffer, self._weights.vector(weight, x.width), eps, out.buffer)
        return out

    def linear(self, x: Rows, matrices: Sequence[Matrix]) -> Rows:
        """x times each matrix, results side by side; x is used up."""
        out = self._take(sum(matrix.out_features for matrix in matrices))
        self._program.linear(x.buffer, list(matrices), out.buffer, False)
        self._give_back(x)
        return out

    def add_linear(self, residual: Rows, x: Rows, matrix: Matrix) -> None:
        """residual += x times matrix; x is used up."""
        self._program.linear(x.buffer, [matrix], residual.buffer, True)
        self._give_back(x)

    def rope_store_and_attend(self, qkv: Rows, num_heads: int, num_kv_heads: int, head_dim: int) -> Rows:
        """Rotate q and k, store k and v to their slots, attend over each row's sequence; qkv is used up."""
        out = self._take(num_heads * head_dim)
        self._program.attention(qkv.buffer, out.buffer, num_heads, num_kv_heads, head_dim)
        self._give_back(qkv)
        return out

    def gated_mlp(self, residual: Rows, x: Rows, gate: Matrix, up: Matrix, down: Matrix) -> None:
        """residual += (silu(x gate) * (x up)) down (Shazeer 2020); x is used up."""
        hidden = self._take(gate.out_features)
        self._program.gated_linear(x.buffer, gate, up, hidden.buffer)
        self._give_back(x)
        self.add_linear(residual, hidden, down)

    def logits(self, x: Rows, norm_weight: str, eps: float, head: Matrix) -> None:
        """Final norm and output head, for the rows that need them."""
        self._program.logits(x.buffer, self._weights.vector(norm_weight, x.width), eps, head)
        self._give_back(x)

    def rope(self, inverse_frequencies: npt.NDArray[np.float64], magnitude: float) -> None:
        """The angles of every layer's rotation: position * inverse_frequencies[i] for pair i."""
        self._program.rope(inverse_frequencies, magnitude)

    def _take(self, width: int) -> Rows:
        free = self._free.get(width)
        return Rows(free.pop() if free else self._program.buffer(width), width)

    def _give_back(self, rows: Rows) -> None:
        self._free.setdefault(rows.width, []).append(rows.buffer)
