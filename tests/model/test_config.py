"""What a file says about its network: read with the specification's defaults, and refused in one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.model.config import ModelConfig
from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile

LEAST: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelConfig]:
    """The configuration of a file with the least keys and these changes (None takes a key away)."""

    def from_keys(
        changes: dict[str, Any] | None = None,
        architecture: str = "llama",
        tensors: dict[str, tuple[int, ...]] | None = None,
    ) -> ModelConfig:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(os.fspath(path), architecture)
        for key, value in (LEAST | (changes or {})).items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif value is not None:
                writer.add_array(key, value)
        for name, shape in ({"token_embd.weight": (300, 64)} if tensors is None else tensors).items():
            writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with GGUFFile(path) as file:
            return ModelConfig.from_gguf(file)

    return from_keys


def test_smollm2(smollm2_path: Path) -> None:
    with GGUFFile(smollm2_path) as file:
        config = ModelConfig.from_gguf(file)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rope_dim) == (9, 3, 64, 64)
    assert (config.vocab_size, config.context_length, config.rope_freq_base) == (49_152, 8_192, 100_000.0)
    assert config.tie_word_embeddings
    assert config.rope_scaling_type == "none"


def test_defaults_of_the_specification(read: Callable[..., ModelConfig]) -> None:
    config = read()
    assert config.name == "model"  # the file's, where it does not say
    assert config.num_kv_heads == config.num_heads == 4
    assert config.head_dim == config.rope_dim == 16
    assert config.rope_freq_base == 10_000.0
    assert (config.rope_scaling_type, config.rope_scaling_factor) == ("none", 1.0)
    assert config.rope_original_context == config.context_length == 128
    assert config.vocab_size == 300


def test_heads_may_be_one_number_or_one_a_layer(read: Callable[..., ModelConfig]) -> None:
    assert read({"llama.attention.head_count_kv": 2}).num_kv_heads == 2
    assert read({"llama.attention.head_count_kv": [1, 1]}).num_kv_heads == 1
    assert read({"llama.feed_forward_length": [96, 96]}).intermediate_size == 96


def test_heads_need_not_divide_the_embedding_when_their_size_is_given(
    read: Callable[..., ModelConfig],
) -> None:
    config = read(
        {
            "llama.attention.head_count": 5,
            "llama.attention.key_length": 32,
            "llama.attention.value_length": 32,
            "llama.rope.dimension_count": 16,
        }
    )
    assert (config.num_heads, config.head_dim, config.rope_dim) == (5, 32, 16)


def test_the_head_is_tied_where_there_is_no_output_matrix(read: Callable[..., ModelConfig]) -> None:
    assert read().tie_word_embeddings
    own_head = {"token_embd.weight": (300, 64), "output.weight": (300, 64)}
    assert not read(tensors=own_head).tie_word_embeddings


def test_rope_scaling(read: Callable[..., ModelConfig]) -> None:
    linear = read({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert (linear.rope_scaling_type, linear.rope_scaling_factor) == ("linear", 4.0)
    old = read({"llama.rope.scale_linear": 2.0})
    assert (old.rope_scaling_type, old.rope_scaling_factor) == ("linear", 2.0)
    yarn = read(
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 8.0,
            "llama.rope.scaling.original_context_length": 64,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
        }
    )
    assert (yarn.rope_scaling_type, yarn.rope_scaling_factor, yarn.rope_original_context) == ("yarn", 8.0, 64)
    assert (yarn.rope_beta_fast, yarn.rope_beta_slow, yarn.rope_attn_factor) == (16.0, 1.0, 1.0)
    llama3 = read(tensors={"token_embd.weight": (300, 64), "rope_freqs.weight": (8,)})
    assert (llama3.rope_scaling_type, llama3.rope_scaling_factor) == ("llama3", 1.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 0}, "llama.block_count is 0, not a positive whole number"),
        ({"llama.block_count": "2"}, "llama.block_count is not a number"),
        ({"llama.block_count": True}, "llama.block_count is not a number"),
        ({"llama.context_length": 1.5}, "llama.context_length is 1.5, not a positive whole number"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base is nan, not a positive number"),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base is -1.0, not a positive number"),
        ({"llama.rope.freq_base": 1.0}, "llama.rope.freq_base is 1.0, not more than 1"),
        ({"llama.rope.scaling.yarn_beta_fast": 0.0}, "yarn_beta_fast is 0.0, not a positive number from"),
        ({"llama.rope.scaling.yarn_beta_slow": 2.0**100}, "e+30, not a positive number from 1e-20 to 1e+20"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.5},
            "'yarn' by 0.5 would shorten",
        ),
        ({"llama.rope.scaling.type": ["yarn"]}, "rope scaling ['yarn'] is not supported"),
        ({"llama.attention.head_count_kv": [True, True]}, "is not one positive whole number for each"),
        ({"llama.attention.head_count": 7}, "an embedding of 64 cannot be split into 7 heads"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads cannot share 3 key-value heads evenly"),
        ({"llama.attention.head_count_kv": [1, 2]}, "head_count_kv differs between layers"),
        ({"llama.attention.head_count_kv": [1]}, "is not one positive whole number for each of 2 layers"),
        ({"llama.attention.head_count_kv": [0, 0]}, "is not one positive whole number for each of 2 layers"),
        ({"llama.attention.value_length": 8}, "keys of 16 and values of 8 elements a head"),
        ({"llama.rope.dimension_count": 18}, "rope over 18 elements does not fit heads of 16"),
        ({"llama.rope.dimension_count": 7}, "rope over 7 elements does not fit heads of 16"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"llama.rope.scaling.type": "llama3"}, "rope scaling 'llama3' is not supported"),
        ({"llama.expert_count": 8}, "mixtures of experts are not supported"),
        ({"llama.attention.causal": False}, "models without causal attention are not supported"),
        ({"split.count": 3}, "one of 3 parts of a split model"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "the vocabulary has 2 tokens and token_embd.weight 300 rows"),
    ],
)
def test_contradictions_and_what_is_unsupported_are_one_sentence(
    read: Callable[..., ModelConfig], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelFileError, match=r"^[^\n]*model\.gguf: [^\n]+$") as caught:
        read(changes)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("attention.scale", 0.5, 0.25),
        ("attention.scale", 1.0, 0.0),
        ("attention.clamp_kqv", 8.0, 0.0),
        ("attention.max_alibi_bias", 8.0, 0.0),
        ("attention.output_scale", 0.5, 1.0),
        ("attention.shared_kv_layers", 1, 0),
        ("attention.sliding_window", 64, 128),
        ("attention.sliding_window", 1, 0),
        ("attention.temperature_length", 8192, 0),
        ("attention.temperature_scale", 0.1, 0.0),
        ("attn_logit_softcapping", 50.0, 0.0),
        ("final_logit_softcapping", 30.0, 0.0),
        ("logit_scale", 0.25, 1.0),
        ("residual_scale", 0.22, 1.0),
        ("embedding_scale", 12.0, 0.0),
        ("embedding_scale", float("nan"), 1.0),
        ("use_parallel_residual", True, False),
        ("rope.dimension_sections", [4, 4, 0, 0], [0, 0, 0, 0]),
        ("rope.scaling.alpha", 1000.0, 1.0),
        ("rope.scaling.attn_factor", 1.2, 1.0),
        ("rope.scaling.yarn_attn_factor", 1.2, 1.0),
        ("rope.scaling.yarn_ext_factor", 0.5, -1.0),
        ("rope.scaling.yarn_log_multiplier", 0.1, 0.0),
    ],
)
def test_what_changes_the_network_is_refused_unless_it_is_neutral(
    read: Callable[..., ModelConfig], key: str, value: object, neutral: object
) -> None:
    assert read({f"llama.{key}": neutral}) == read()
    with pytest.raises(ModelFileError, match=rf"llama\.{key} is .*, which changes the network"):
        read({f"llama.{key}": value})


def test_an_unsupported_architecture_names_the_supported_ones(read: Callable[..., ModelConfig]) -> None:
    with pytest.raises(ModelFileError, match="the architecture 'mamba' is not supported; supported: llama"):
        read(architecture="mamba")


def test_wrong_tensors_are_named(read: Callable[..., ModelConfig]) -> None:
    with pytest.raises(ModelFileError, match=r"'token_embd\.weight' is missing"):
        read(tensors={"w": (1,)})
    with pytest.raises(ModelFileError, match=r"token_embd\.weight is \[300, 32\], not \[vocabulary, 64\]"):
        read(tensors={"token_embd.weight": (300, 32)})
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight is F32 \[4\], not F32 \[8\]"):
        read(tensors={"token_embd.weight": (300, 64), "rope_freqs.weight": (4,)})
