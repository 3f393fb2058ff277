"""The models whose products and heads `octavo bench kernels` measures, by their published configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.bench.attention_steps import AttentionShape
from octavo.bench.matmul import MOST_ROWS, MatmulShape

HEAD_ROWS = 64
"""Rows of an output head are sequences that get a token, not tokens of prompts."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that a layer's products follow from."""

    name: str
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    num_layers: int

    def matmuls(self) -> tuple[MatmulShape, ...]:
        """Q, K and V in one, a gate with its up: so they are computed."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

        def product(name: str, out: int, k: int, most_rows: int = MOST_ROWS) -> MatmulShape:
            return MatmulShape(self.name, name, out, k, most_rows)

        return (
            product("qkv", queries + 2 * keys, self.width),
            product("o", self.width, queries),
            MatmulShape(self.name, "gate+up", 2 * self.intermediate, self.width, gated=True),
            product("down", self.width, self.intermediate),
            product("head", self.vocabulary, self.width, HEAD_ROWS),
        )

    def heads(self) -> AttentionShape:
        return AttentionShape(self.name, self.num_heads, self.num_kv_heads, self.head_dim, self.num_layers)


SMOLLM2 = ModelShape("smollm2-135m", 576, 9, 3, 64, 1536, 49152, 30)
GEMMA3 = ModelShape("gemma-3-270m", 640, 4, 1, 256, 2048, 262144, 18)
ONE_BILLION = ModelShape("1b", 2048, 32, 8, 64, 8192, 128256, 16)
THREE_BILLION = ModelShape("3b", 3072, 24, 8, 128, 8192, 128256, 28)
EIGHT_BILLION = ModelShape("8b", 4096, 32, 8, 128, 14336, 128256, 32)
MODELS = (SMOLLM2, GEMMA3, ONE_BILLION, THREE_BILLION, EIGHT_BILLION)
"""The last three are Llama 3.2 1B, 3.2 3B and 3.1 8B."""


def models_named(names: Sequence[str]) -> tuple[ModelShape, ...]:
    """Raises ValueError for a name that is none of `MODELS`."""
    known = {model.name: model for model in MODELS}
    for name in names:
        if name not in known:
            raise ValueError(f"models are measured by the names {', '.join(known)}, not '{name}'")
    return tuple(known[name] for name in names)
