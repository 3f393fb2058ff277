"""The `llama` architecture in float64 numpy: slow, plain, and independent of Octavo.

Written from the papers and the GGUF specification; the weights are read and dequantised by the `gguf`
package. Nothing is rounded on the way: what it says is what the file means, and engines are compared with it.

Sources: Touvron et al. 2023 (the network); Zhang & Sennrich 2019 (RMS norm); Shazeer 2020 (gated MLP); Su et
al. 2021 (rotary positions; GGUF files of this architecture rotate adjacent elements 2i, 2i + 1); Ainslie et
al. 2023 (grouped queries); Chen et al. 2023 (linear position interpolation); Peng et al. 2023 (YaRN).
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ROWS_AT_ONCE = 512
"""Of a head's scores: 18 MB where the text has 4,352 tokens, and no position behind the rows is computed."""


class Float64Llama:
    """One model, weights dequantised when they are needed (a layer at a time, so that memory stays small)."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(os.fspath(path))
        self._path = path
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.num_layers = int(self._key("block_count"))
        self.hidden_size = int(self._key("embedding_length"))
        self.num_heads = int(self._key("attention.head_count"))
        self.num_kv_heads = int(self._key("attention.head_count_kv", self.num_heads))
        self.head_dim = int(self._key("attention.key_length", self.hidden_size // self.num_heads))
        self.epsilon = float(self._key("attention.layer_norm_rms_epsilon"))
        self.rope_dim = int(self._key("rope.dimension_count", self.head_dim))
        self._frequencies, self._rope_gain = self._rope()

    def hidden(self, token_ids: npt.ArrayLike) -> Floats:
        """The state that the output head reads at each position: float64[tokens, hidden_size]."""
        tokens = np.asarray(token_ids, dtype=np.int64)
        cos, sin = self._rotation(len(tokens))
        x = self._weight("token_embd.weight")[tokens]
        for layer in range(self.num_layers):
            block = f"blk.{layer}."
            x = x + self._attention(block, self._norm(x, block + "attn_norm.weight"), cos, sin)
            x = x + self._mlp(block, self._norm(x, block + "ffn_norm.weight"))
        return self._norm(x, "output_norm.weight")

    def logits(self, hidden: Floats) -> Floats:
        """float64[tokens, vocabulary] for states given by `hidden`."""
        head = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        logits: Floats = hidden @ self._weight(head).T
        return logits

    def cached_hidden(self, token_ids: npt.ArrayLike) -> Floats:
        """As `hidden`, remembered in the user's cache for this file, these tokens and this code."""
        key = hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes())
        for file in (self._path, Path(__file__)):
            with file.open("rb") as source:
                key.update(hashlib.file_digest(source, "sha256").digest())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / "oracle"
        path = cache / f"float64-{key.hexdigest()[:32]}.npy"
        if path.exists():
            remembered: Floats = np.load(path)
            return remembered
        states = self.hidden(token_ids)
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        with unfinished.open("wb") as output:
            np.save(output, states)
        os.replace(unfinished, path)
        return states

    def _attention(self, block: str, x: Floats, cos: Floats, sin: Floats) -> Floats:
        """Causal, each key-value head read by `num_heads / num_kv_heads` query heads in a row."""
        length, group = len(x), self.num_heads // self.num_kv_heads
        queries = _rotate(self._heads(x, block + "attn_q.weight", self.num_heads), cos, sin)
        keys = _rotate(self._heads(x, block + "attn_k.weight", self.num_kv_heads), cos, sin)
        values = self._heads(x, block + "attn_v.weight", self.num_kv_heads)
        mixed = np.empty((length, self.num_heads, self.head_dim))
        for head in range(self.num_heads):
            head_keys, head_values = keys[:, head // group], values[:, head // group]
            for first in range(0, length, ROWS_AT_ONCE):
                end = min(first + ROWS_AT_ONCE, length)
                scores = queries[first:end, head] @ head_keys[:end].T / np.sqrt(self.head_dim)
                scores[np.arange(end) > np.arange(first, end)[:, None]] = -np.inf
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                weighted = weights @ head_values[:end]
                mixed[first:end, head] = weighted / weights.sum(axis=1, keepdims=True)
        out: Floats = mixed.reshape(length, -1) @ self._weight(block + "attn_output.weight").T
        return out

    def _mlp(self, block: str, x: Floats) -> Floats:
        gate = x @ self._weight(block + "ffn_gate.weight").T
        up = x @ self._weight(block + "ffn_up.weight").T
        out: Floats = (gate / (1.0 + np.exp(-gate)) * up) @ self._weight(block + "ffn_down.weight").T
        return out

    def _norm(self, x: Floats, name: str) -> Floats:
        scaled: Floats = (
            x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * self._weight(name)
        )
        return scaled

    def _heads(self, x: Floats, name: str, count: int) -> Floats:
        return (x @ self._weight(name).T).reshape(len(x), count, self.head_dim)

    def _rotation(self, length: int) -> tuple[Floats, Floats]:
        """Cosine and sine of each position's angle for each pair: float64[tokens, 1, rope_dim / 2]."""
        angles = np.arange(length)[:, None, None] * self._frequencies
        return np.cos(angles) * self._rope_gain, np.sin(angles) * self._rope_gain

    def _rope(self) -> tuple[Floats, float]:
        """Radians a position for each rotated pair, and the factor on what is rotated."""
        base = float(self._key("rope.freq_base", 10_000.0))
        factor = float(self._key("rope.scaling.factor", 1.0))
        kind = self._key("rope.scaling.type", "none")
        pair = np.arange(self.rope_dim // 2, dtype=np.float64)
        frequencies = base ** (-2.0 * pair / self.rope_dim)
        if "rope_freqs.weight" in self._tensors:
            return frequencies / self._weight("rope_freqs.weight"), 1.0
        if kind == "none":
            return frequencies, 1.0
        if kind == "linear":
            return frequencies / factor, 1.0
        assert kind == "yarn", kind
        original = float(self._key("rope.scaling.original_context_length"))

        def pair_that_turns(times: float) -> float:
            """The (fractional) pair that turns so often within the original context."""
            return self.rope_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair_that_turns(float(self._key("rope.scaling.yarn_beta_fast", 32.0)))), 0.0)
        high = min(
            math.ceil(pair_that_turns(float(self._key("rope.scaling.yarn_beta_slow", 1.0)))),
            self.rope_dim - 1.0,
        )
        interpolated = np.clip((pair - low) / max(high - low, 0.001), 0.0, 1.0)
        gain = (1.0 + 0.1 * np.log(factor)) * float(self._key("rope.scaling.attn_factor", 1.0))
        return frequencies * (1.0 - interpolated) + frequencies / factor * interpolated, gain

    def _weight(self, name: str) -> Floats:
        tensor = self._tensors[name]
        weights: Floats = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        return weights

    def _key(self, name: str, default: Any = None) -> Any:
        field = self._fields.get(f"llama.{name}")
        if field is None:
            assert default is not None, f"llama.{name} is missing"
            return default
        return field.contents()


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Turn the leading adjacent pairs of each head: x is float64[tokens, heads, head_dim]."""
    rotated = x.copy()
    width = 2 * cos.shape[-1]
    even, odd = x[..., 0:width:2], x[..., 1:width:2]
    rotated[..., 0:width:2] = even * cos - odd * sin
    rotated[..., 1:width:2] = even * sin + odd * cos
    return rotated
