"""What a model file says about the shape of its network, checked and in one place.

Source: the GGUF specification's standardised keys (ggml, docs/gguf.md) with its defaults; the names of the
fields follow Hugging Face's configuration files.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile

SUPPORTED_ARCHITECTURES = ("llama",)
_SMALLEST, _LARGEST = 1e-20, 1e20
"""Of any number that is not a count: beyond, arithmetic with it would overflow somewhere later."""

_OFF_AT_0 = (0,)
_OFF_AT_1 = (0, 1)  # llama.cpp, whose converter writes the keys, reads 0 as "not given"
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_parallel_residual": _OFF_AT_0,
    "logit_scale": _OFF_AT_1,
    "residual_scale": _OFF_AT_1,
    "embedding_scale": _OFF_AT_1,
    "attn_logit_softcapping": _OFF_AT_0,
    "final_logit_softcapping": _OFF_AT_0,
    "attention.clamp_kqv": _OFF_AT_0,
    "attention.max_alibi_bias": _OFF_AT_0,
    "attention.output_scale": _OFF_AT_1,
    "attention.shared_kv_layers": _OFF_AT_0,
    "attention.temperature_length": _OFF_AT_0,
    "attention.temperature_scale": _OFF_AT_0,
    "rope.scaling.alpha": _OFF_AT_1,
    "rope.scaling.yarn_attn_factor": _OFF_AT_1,
    "rope.scaling.yarn_ext_factor": (1, -1),  # -1: the method decides
    "rope.scaling.yarn_log_multiplier": _OFF_AT_0,
    "rope.dimension_sections": ([], [0, 0, 0], [0, 0, 0, 0]),
}
"""Keys of the specification that change what a network computes and are not implemented, with the values at
which they change nothing. `tensor_data_layout` is not among them: files of this architecture say
`Meta AI original pth`, which is the order of rows that is expected here, or nothing.
"""

_ROPE_SCALING_TYPES = ("none", "linear", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers that define one network. All lengths are in elements, contexts in tokens."""

    architecture: str
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    """Tokens the model was trained to attend to; the longest request."""
    rms_norm_eps: float
    rope_dim: int
    """Leading elements of each head that are rotated, in adjacent pairs (2i, 2i + 1)."""
    rope_freq_base: float
    rope_scaling_type: str
    """`none`, `linear`, `yarn` (Peng et al. 2023), or `llama3`: the file's tensor `rope_freqs.weight`
    [rope_dim / 2] divides each pair's frequency."""
    rope_scaling_factor: float
    """How many times longer the context became; 1.0 where nothing is scaled."""
    rope_original_context: int
    """The context before scaling, in tokens; equals `context_length` where nothing is scaled."""
    rope_attn_factor: float
    """yarn: a factor on the rotated queries and keys, beside the one that the method itself prescribes."""
    rope_beta_fast: float
    """yarn: pairs that turn more often than this within the original context are left alone."""
    rope_beta_slow: float
    """yarn: pairs that turn less often than this within the original context are fully interpolated."""
    tie_word_embeddings: bool
    """The output head is the embedding matrix: the file has no `output.weight`."""

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> ModelConfig:
        """Read and check the configuration.

        Raises: ModelFileError if the architecture is not supported, a required key is missing or of the wrong
        type, or the numbers contradict each other or the tensors.
        """
        keys = _Keys(file)
        architecture = keys.architecture()
        keys.refuse_what_changes_the_network()

        num_layers = keys.integer("block_count")
        hidden_size = keys.integer("embedding_length")
        num_heads = keys.integer_same_in_all_layers("attention.head_count", num_layers)
        num_kv_heads = keys.integer_same_in_all_layers("attention.head_count_kv", num_layers, num_heads)
        head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise keys.fault(
                f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly"
            )
        if "attention.key_length" not in keys and hidden_size % num_heads:
            raise keys.fault(f"an embedding of {hidden_size} cannot be split into {num_heads} heads")
        value_dim = keys.integer("attention.value_length", head_dim)
        if value_dim != head_dim:
            raise keys.fault(
                f"keys of {head_dim} and values of {value_dim} elements a head are not supported"
            )
        rope_dim = keys.integer("rope.dimension_count", head_dim)
        if rope_dim % 2 or rope_dim > head_dim:
            raise keys.fault(f"rope over {rope_dim} elements does not fit heads of {head_dim}")
        context_length = keys.integer("context_length")
        keys.refuse_other_attention(head_dim, context_length)
        scaling_type, scaling_factor = keys.rope_scaling(rope_dim)
        return cls(
            architecture=architecture,
            name=keys.name(),
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=keys.integer_same_in_all_layers("feed_forward_length", num_layers),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=keys.vocab_size(hidden_size),
            context_length=context_length,
            rms_norm_eps=keys.positive("attention.layer_norm_rms_epsilon"),
            rope_dim=rope_dim,
            rope_freq_base=keys.rope_freq_base(),
            rope_scaling_type=scaling_type,
            rope_scaling_factor=scaling_factor,
            rope_original_context=keys.integer("rope.scaling.original_context_length", context_length),
            rope_attn_factor=keys.positive("rope.scaling.attn_factor", 1.0),
            rope_beta_fast=keys.positive("rope.scaling.yarn_beta_fast", 32.0),
            rope_beta_slow=keys.positive("rope.scaling.yarn_beta_slow", 1.0),
            tie_word_embeddings="output.weight" not in file.tensors,
        )


class _Keys:
    """Typed access to the keys of the file's architecture, with faults that name file and key."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._prefix = ""

    def fault(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self._file.path}: {what}")

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._file.metadata

    def architecture(self) -> str:
        architecture = self._file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise self.fault("the file does not name its architecture (general.architecture)")
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise self.fault(
                f"the architecture '{architecture}' is not supported; "
                f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        self._prefix = architecture + "."
        return architecture

    def refuse_what_changes_the_network(self) -> None:
        """Keys that other files of the same architecture carry and that would silently give wrong answers."""
        parts = self._file.metadata.get("split.count", 1)
        if parts != 1:
            raise self.fault(
                f"this is one of {_shown(parts)} parts of a split model; merge the parts into one file first"
            )
        if self._number("expert_count", 0):
            raise self.fault("mixtures of experts are not supported")
        if self._file.metadata.get(self._prefix + "attention.causal", True) is not True:
            raise self.fault("models without causal attention are not supported")
        for key, neutral in _NEUTRAL.items():
            if key in self and self._file.metadata[self._prefix + key] not in neutral:
                raise self._not_supported(key)

    def refuse_other_attention(self, head_dim: int, context_length: int) -> None:
        """Scores are scaled by 1 / sqrt(head_dim), and every token sees all tokens before it."""
        scale = self._number("attention.scale", 0)
        if scale != 0 and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-5):
            raise self._not_supported("attention.scale")
        window = self._number("attention.sliding_window", 0)
        if 0 < window < context_length:
            raise self._not_supported("attention.sliding_window")

    def name(self) -> str:
        name = self._file.metadata.get("general.name")
        return name if isinstance(name, str) and name else self._file.path.stem

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._number(key, default)
        if not isinstance(value, int) or value < 1:
            raise self.fault(f"{self._prefix}{key} is {value}, not a positive whole number")
        return value

    def integer_same_in_all_layers(self, key: str, num_layers: int, default: int | None = None) -> int:
        """Some converters write one number, others one a layer."""
        values = self._file.metadata.get(self._prefix + key)
        if not isinstance(values, list):
            return self.integer(key, default)
        if len(values) != num_layers or not all(type(value) is int and value >= 1 for value in values):
            raise self.fault(
                f"{self._prefix}{key} is not one positive whole number for each of {num_layers} layers"
            )
        if len(set(values)) != 1:
            raise self.fault(f"{self._prefix}{key} differs between layers, which is not supported")
        return int(values[0])

    def positive(self, key: str, default: float | None = None) -> float:
        value = float(self._number(key, default))
        if not _SMALLEST <= value <= _LARGEST:
            raise self.fault(
                f"{self._prefix}{key} is {value}, not a positive number from {_SMALLEST} to {_LARGEST}"
            )
        return value

    def rope_freq_base(self) -> float:
        """Pairs turn ever more slowly, each by a power of the base."""
        base = self.positive("rope.freq_base", 10_000.0)
        if base <= 1.0:
            raise self.fault(f"{self._prefix}rope.freq_base is {base}, not more than 1")
        return base

    def rope_scaling(self, rope_dim: int) -> tuple[str, float]:
        """The kind of scaling and its factor."""
        kind = self._file.metadata.get(self._prefix + "rope.scaling.type", "none")
        factor = self.positive("rope.scaling.factor", 1.0)
        if "rope.scaling.type" not in self and "rope.scale_linear" in self:  # files from before 2023-11
            kind, factor = "linear", self.positive("rope.scale_linear")
        frequencies = self._file.tensors.get("rope_freqs.weight")
        if frequencies is not None:
            if kind not in ("none", "llama3"):
                raise self.fault(
                    f"rope scaling {_shown(kind)} together with the tensor rope_freqs.weight is not supported"
                )
            if frequencies.type != "F32" or frequencies.shape != (rope_dim // 2,):
                raise self.fault(
                    f"rope_freqs.weight is {frequencies.type} {list(frequencies.shape)}, "
                    f"not F32 [{rope_dim // 2}]"
                )
            kind = "llama3"
        if kind not in _ROPE_SCALING_TYPES or (kind == "llama3" and frequencies is None):
            raise self.fault(
                f"rope scaling {_shown(kind)} is not supported; supported: "
                f"{', '.join(_ROPE_SCALING_TYPES[:3])} and the tensor rope_freqs.weight"
            )
        if kind != "yarn" and self.positive("rope.scaling.attn_factor", 1.0) != 1.0:
            raise self._not_supported("rope.scaling.attn_factor")
        if kind not in ("linear", "yarn"):
            return kind, 1.0
        if factor < 1.0:
            raise self.fault(f"rope scaling '{kind}' by {factor} would shorten the context")
        return kind, factor

    def vocab_size(self, hidden_size: int) -> int:
        """Rows of the embedding matrix, which every token id must find."""
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise self.fault("the tensor 'token_embd.weight' is missing")
        if len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
            raise self.fault(f"token_embd.weight is {list(embedding.shape)}, not [vocabulary, {hidden_size}]")
        tokens = self._file.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != embedding.shape[0]:
            raise self.fault(
                f"the vocabulary has {len(tokens):,} tokens and token_embd.weight {embedding.shape[0]:,} rows"
            )
        return embedding.shape[0]

    def _not_supported(self, key: str) -> ModelFileError:
        key = self._prefix + key
        return self.fault(
            f"{key} is {_shown(self._file.metadata[key])}, which changes the network and is not supported"
        )

    def _number(self, key: str, default: float | None) -> Any:
        value = self._file.metadata.get(self._prefix + key, default)
        if value is None:
            raise self.fault(f"{self._prefix}{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(f"{self._prefix}{key} is not a number")
        return value


def _shown(value: object) -> str:
    """A value from the file, short whatever it holds."""
    return reprlib.repr(value)
