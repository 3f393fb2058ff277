"""Rotary position embedding: the frequency of each pair, with the scaling a file asks for."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from octavo.model.config import ModelConfig


def rope_frequencies(
    config: ModelConfig, factors: npt.NDArray[np.float32] | None
) -> tuple[npt.NDArray[np.float64], float]:
    """Radians a position for each pair, float64[rope_dim / 2], and a factor on the rotated vectors.

    factors: the file's `rope_freqs.weight` [rope_dim / 2], which divides the frequencies (Llama 3), or None.
    Raises: ValueError for a divisor that is not positive.
    Sources: Su et al. 2021; linear interpolation, Chen et al. 2023; YaRN, Peng et al. 2023, section 3.
    """
    pairs = np.arange(config.rope_dim // 2, dtype=np.float64)
    frequencies = config.rope_freq_base ** (-2.0 * pairs / config.rope_dim)
    if config.rope_scaling_type == "llama3" and factors is not None:
        if not (factors > 0.0).all():
            raise ValueError("the tensor 'rope_freqs.weight' has divisors that are not positive")
        return frequencies / factors.astype(np.float64), 1.0
    if config.rope_scaling_type == "linear":
        return frequencies / config.rope_scaling_factor, 1.0
    if config.rope_scaling_type == "yarn":
        return _yarn(config, pairs, frequencies)
    return frequencies, 1.0


def _yarn(
    config: ModelConfig, pairs: npt.NDArray[np.float64], frequencies: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], float]:
    """Fast pairs keep their frequency, slow ones are interpolated, with a ramp between."""

    def pair_turning(turns: float) -> float:
        """The pair that turns this often within the original context."""
        return (
            config.rope_dim
            * math.log(config.rope_original_context / (turns * 2.0 * math.pi))
            / (2.0 * math.log(config.rope_freq_base))
        )

    low = max(math.floor(pair_turning(config.rope_beta_fast)), 0)
    high = min(math.ceil(pair_turning(config.rope_beta_slow)), config.rope_dim - 1)
    kept = 1.0 - np.clip((pairs - low) / max(high - low, 0.001), 0.0, 1.0)
    scaled = frequencies / config.rope_scaling_factor * (1.0 - kept) + frequencies * kept
    magnitude = config.rope_attn_factor * (1.0 + 0.1 * math.log(config.rope_scaling_factor))
    return scaled, magnitude
