"""Rotary frequencies against formulas written down anew from the papers, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from octavo.model.config import ModelConfig
from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile
from octavo.model.model import Model
from octavo.model.rope import rope_frequencies

Doubles = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def config(tiny_model_path: Path) -> ModelConfig:
    with GGUFFile(tiny_model_path) as file:
        return ModelConfig.from_gguf(file)


def rotations(config: ModelConfig, **changes: Any) -> tuple[Doubles, float]:
    return rope_frequencies(replace(config, **changes), None)


@pytest.mark.parametrize("rope_dim", [2, 16, 64, 128])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 1e6])
def test_a_pair_turns_by_a_power_of_the_base(config: ModelConfig, rope_dim: int, base: float) -> None:
    """Su et al. 2021, section 3.2.2: theta_i = base ^ (-2 (i - 1) / d), i = 1 ... d / 2."""
    frequencies, magnitude = rotations(config, rope_dim=rope_dim, rope_freq_base=base)
    expected = [1.0 / base ** (2 * i / rope_dim) for i in range(rope_dim // 2)]
    assert np.allclose(frequencies, expected, rtol=1e-14, atol=0.0)
    assert magnitude == 1.0


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 7.5])
def test_linear_scaling_shrinks_every_position(config: ModelConfig, factor: float) -> None:
    """Chen et al. 2023, equation 3: position m becomes m L / L'."""
    plain, _ = rotations(config)
    scaled, magnitude = rotations(config, rope_scaling_type="linear", rope_scaling_factor=factor)
    positions = np.array([1.0, 100.0, 131_071.0])
    assert np.allclose(np.outer(positions, scaled), np.outer(positions / factor, plain), rtol=1e-14)
    assert magnitude == 1.0


def llama3_factors(dim: int, base: float, factor: float, low: float, high: float, original: int) -> Doubles:
    """What a converter writes to rope_freqs.weight, from transformers' definition of rope type `llama3`."""
    factors = []
    for i in range(dim // 2):
        wavelength = 2 * math.pi * base ** (2 * i / dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1.0 / ((1 - smooth) / factor + smooth))
    return np.array(factors)


def test_llama_3_divides_each_frequency_by_the_files_factor(config: ModelConfig) -> None:
    """Llama 3.1 8B: 128 dimensions, base 500,000, factor 8, bands 1 and 4, 8,192 tokens."""
    factors = llama3_factors(128, 500_000.0, 8.0, 1.0, 4.0, 8192)
    assert factors.min() == 1.0
    assert factors.max() == 8.0
    assert ((factors > 1.0) & (factors < 8.0)).any()
    changed = replace(config, rope_dim=128, rope_freq_base=500_000.0, rope_scaling_type="llama3")

    frequencies, magnitude = rope_frequencies(changed, factors.astype(np.float32))

    expected = 500_000.0 ** (-np.arange(0, 128, 2) / 128) / factors.astype(np.float32)
    assert np.allclose(frequencies, expected, rtol=1e-14, atol=0.0)
    assert magnitude == 1.0


def yarn(dim: int, base: float, factor: float, original: int, fast: float, slow: float) -> Doubles:
    """Peng et al. 2023, section 3.2 and definition 2, with the ramp over pairs of the authors' code."""

    def correction(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(correction(fast)), 0), min(math.ceil(correction(slow)), dim - 1)
    frequencies = []
    for i in range(dim // 2):
        theta = base ** (-2 * i / dim)
        gamma = 1.0 - min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append((1 - gamma) * theta / factor + gamma * theta)
    return np.array(frequencies)


@pytest.mark.parametrize("factor", [2.0, 4.0, 16.0, 32.0])
@pytest.mark.parametrize(
    ("dim", "base", "original"), [(128, 10_000.0, 4096), (64, 10_000.0, 2048), (128, 1e6, 32_768)]
)
@pytest.mark.parametrize(("fast", "slow"), [(32.0, 1.0), (16.0, 2.0)])
def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones(
    config: ModelConfig, factor: float, dim: int, base: float, original: int, fast: float, slow: float
) -> None:
    changes = {
        "rope_dim": dim,
        "rope_freq_base": base,
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": factor,
        "rope_original_context": original,
        "rope_beta_fast": fast,
        "rope_beta_slow": slow,
    }
    frequencies, magnitude = rotations(config, **changes)

    plain = base ** (-np.arange(0, dim, 2) / dim)
    assert np.allclose(frequencies, yarn(dim, base, factor, original, fast, slow), rtol=1e-13, atol=0.0)
    assert frequencies[0] == plain[0]
    # Section 3.3: a pair that never turns once within the original context is interpolated in full.
    never = plain * original < 2 * math.pi * slow * 0.7
    assert np.allclose(frequencies[never], plain[never] / factor, rtol=1e-12, atol=0.0)
    # Equation 22: attention's temperature goes into the rotated vectors.
    assert magnitude == pytest.approx(0.1 * math.log(factor) + 1.0, rel=1e-15)


def test_yarn_multiplies_the_files_own_attention_factor(config: ModelConfig) -> None:
    changes: dict[str, Any] = {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0}
    _, plain = rotations(config, **changes)
    _, scaled = rotations(config, rope_attn_factor=0.5, **changes)
    assert scaled == pytest.approx(0.5 * plain, rel=1e-15)


def test_yarn_where_all_pairs_turn_fast_stays_finite(config: ModelConfig) -> None:
    """An original context of a few tokens leaves no room between the two ends of the ramp."""
    frequencies, _ = rotations(
        config, rope_scaling_type="yarn", rope_scaling_factor=4.0, rope_original_context=1
    )
    assert np.isfinite(frequencies).all()
    assert (frequencies > 0.0).all()


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("nan")])
def test_divisors_that_are_not_positive_are_a_fault_of_the_file(
    make_tiny_model: Callable[..., Path], divisor: float
) -> None:
    path = make_tiny_model(rope_freqs=[1.0] * 7 + [divisor])
    with pytest.raises(ModelFileError, match=r"^[^\n]*\.gguf: [^\n]*'rope_freqs\.weight' has [^\n]+$"):
        Model.load(path, num_threads=1)
