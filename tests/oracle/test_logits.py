"""Octavo's logits against the float64 forward of the same file, position by position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kernels.paths import FUSED, WITHOUT_FMA
from octavo.model.model import Model
from octavo.text.tokenizer import Tokenizer
from oracle.fidelity import against_float64

TEXT = Path(__file__).parents[2] / "LICENSE"
POSITIONS = 1200
SUPERBLOCKS = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "head_dim": 64}
"""Rows of whole superblocks of 256 weights, which some types are made of."""


@pytest.fixture(
    scope="module", params=[FUSED[0], *(pytest.param(name, marks=pytest.mark.slow) for name in WITHOUT_FMA)]
)
def smollm2(smollm2_path: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    model = Model.load(smollm2_path, instruction_set=request.param)
    yield model
    model.close()


def test_real_text_on_smollm2_is_close_to_float64(smollm2: Model, smollm2_path: Path) -> None:
    """Two engines that agree to 0.005 nats cannot be told apart by sampling from them."""
    tokens = Tokenizer.from_gguf(smollm2.metadata).encode(TEXT.read_text())[:POSITIONS]
    assert len(tokens) == POSITIONS

    found = against_float64(smollm2, smollm2_path, tokens)

    print(found)
    assert found.mean <= 0.005
    assert found.same_top_share >= 0.98


# Activations are rounded to 8 bits, so a random network (whose layers amplify what a trained one forgives) is
# compared more loosely than real text; a wrong pair, head, scale or position shifts the KL by whole nats.
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"weight_type": "F32"}, id="f32"),
        pytest.param({"weight_type": "F16"}, id="f16"),
        pytest.param({"weight_type": "BF16"}, id="bf16"),
        pytest.param({"weight_type": "Q4_0"}, id="q4_0"),
        pytest.param({"weight_type": "Q4_1"}, id="q4_1"),
        pytest.param({"weight_type": "Q5_0"}, id="q5_0"),
        pytest.param({"weight_type": "Q5_1"}, id="q5_1"),
        pytest.param({"weight_type": "Q8_0"}, id="q8_0"),
        pytest.param({"weight_type": "Q2_K", **SUPERBLOCKS}, id="q2_k"),
        pytest.param({"weight_type": "Q3_K", **SUPERBLOCKS}, id="q3_k"),
        pytest.param({"weight_type": "Q4_K", **SUPERBLOCKS}, id="q4_k"),
        pytest.param({"weight_type": "Q5_K", **SUPERBLOCKS}, id="q5_k"),
        pytest.param({"weight_type": "Q6_K", **SUPERBLOCKS}, id="q6_k"),
        pytest.param({"weight_type": "IQ4_NL"}, id="iq4_nl"),
        pytest.param({"weight_type": "IQ4_XS", **SUPERBLOCKS}, id="iq4_xs"),
        pytest.param({"weight_type": "Q4_0", "embedding_type": "Q8_0", "tied": True}, id="tied"),
        pytest.param({"num_heads": 4, "num_kv_heads": 4}, id="one-query-a-key"),
        pytest.param({"num_heads": 6, "num_kv_heads": 2}, id="three-queries-a-key"),
        pytest.param({"num_heads": 8, "num_kv_heads": 1}, id="all-queries-one-key"),
        pytest.param({"head_dim": 48}, id="head-48"),
        pytest.param({"head_dim": 256, "num_heads": 2, "num_kv_heads": 1}, id="head-256"),
        pytest.param({"rope_dim": 8}, id="half-rotated"),
        pytest.param({"rope_freq_base": 500_000.0}, id="other-base"),
        pytest.param({"rope_scaling_type": "linear", "rope_scaling_factor": 4.0}, id="rope-linear"),
        pytest.param(
            {"rope_scaling_type": "yarn", "rope_scaling_factor": 8.0, "rope_original_context": 64},
            id="rope-yarn",
        ),
        pytest.param({"rope_freqs": (1.0, 1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0)}, id="rope-llama3"),
    ],
)
def test_every_shape_and_coding_is_close_to_float64(
    make_tiny_model: Callable[..., Path], changes: dict[str, object]
) -> None:
    path = make_tiny_model(**changes)
    model = Model.load(path)
    try:
        tokens = np.random.default_rng(1).integers(3, model.config.vocab_size, 300).tolist()
        found = against_float64(model, path, tokens)
    finally:
        model.close()
    assert found.mean <= 0.02
    assert found.same_top_share >= 0.9
