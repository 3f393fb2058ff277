"""Write small GGUF files with random weights, so that a test runs a whole model in milliseconds.

The writer and the quantisers are those of the `gguf` package: what our reader and kernels see, others made.
Types that it cannot quantise get random blocks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from quantized_blocks import TYPES_WITHOUT_QUANTISER, random_blocks

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = range(3)

# In the order of rank, in the byte alphabet of GPT-2, where `Ġ` is the space and `Ċ` the newline.
_MERGES = (
    "h e,t he,Ġ the,i n,e r,a n,o n,r e,Ġ t,Ġ a,o r,e n,a t,i s,e s,Ġ i,Ġ s,an d,Ġ and,o u,Ġ w,in g,Ġ c,i t,"
    "Ġ o,Ġ in,o f,Ġ of,Ġ b,l l,a s,s t,a l,e d,i on,t ion,Ġ is,Ġ p,y ou,Ġ you,Ċ Ċ,Ġ Ġ,ĠĠ ĠĠ,u s,s er,u ser"
)
_NORMAL, _CONTROL = 1, 3


@dataclass(frozen=True, kw_only=True)
class TinyLlama:
    """The shape and coding of a `llama` model. The default has two query heads for each key-value head."""

    num_layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    context_length: int = 2048
    weight_type: str = "Q4_0"
    """Of the matrices, any that we serve. Norms are F32, as in every published file."""
    embedding_type: str | None = None
    """The embedding and the head; `weight_type` where None."""
    tied: bool = False
    rope_dim: int | None = None
    rope_freq_base: float = 10_000.0
    rope_scaling_type: str | None = None
    rope_scaling_factor: float = 1.0
    rope_original_context: int | None = None
    rope_freqs: Sequence[float] | None = None
    """Llama 3's divisors of the frequencies, one a rotated pair."""
    seed: int = 0
    vocabulary: bool = True
    """False leaves the tokenizer out."""


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + rest.index(byte)) for byte in range(256)]


def tiny_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (control tokens, then the 256 bytes, then what the merges make) and merges."""
    merges = _MERGES.split(",")
    made = [merge.replace(" ", "") for merge in merges]
    return [*CONTROL_TOKENS, *byte_alphabet(), *made], merges


def write_tiny_llama(path: str | os.PathLike[str], model: TinyLlama | None = None) -> Path:
    """Write the model to `path`; equal descriptions give equal bytes. Returns the path."""
    model = model or TinyLlama()
    tokens, merges = tiny_vocabulary()
    writer = gguf.GGUFWriter(os.fspath(path), "llama")
    writer.add_name("Tiny")
    writer.add_block_count(model.num_layers)
    writer.add_context_length(model.context_length)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(model.rope_dim or model.head_dim)
    writer.add_rope_freq_base(model.rope_freq_base)
    if model.rope_scaling_type is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(model.rope_scaling_type))
        writer.add_rope_scaling_factor(model.rope_scaling_factor)
    if model.rope_original_context is not None:
        writer.add_rope_scaling_orig_ctx_len(model.rope_original_context)
    if model.vocabulary:
        _add_vocabulary(writer, tokens, merges)
    _add_weights(writer, model, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def cached_tiny_llama(folder: Path, **changes: Any) -> Path:
    """A file of this description in `folder`, written when it is first asked for."""
    model = TinyLlama(**changes)
    name = hashlib.sha256(repr(dataclasses.astuple(model)).encode()).hexdigest()[:16]
    path = folder / f"tiny-{name}.gguf"
    return path if path.exists() else write_tiny_llama(path, model)


def _add_vocabulary(writer: gguf.GGUFWriter, tokens: list[str], merges: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    controls = len(CONTROL_TOKENS)
    writer.add_token_types([_CONTROL] * controls + [_NORMAL] * (len(tokens) - controls))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(IM_START)
    writer.add_eos_token_id(IM_END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


def _add_weights(writer: gguf.GGUFWriter, model: TinyLlama, vocab_size: int) -> None:
    random = np.random.default_rng(model.seed)
    query, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, wide = model.hidden_size, model.intermediate_size

    def matrix(name: str, rows: int, columns: int, scale: float, coding: str) -> None:
        kind = gguf.GGMLQuantizationType[coding]
        if coding in TYPES_WITHOUT_QUANTISER:
            writer.add_tensor(name, random_blocks(random, coding, rows, columns, scale), raw_dtype=kind)
            return
        values = (random.standard_normal((rows, columns)) * scale).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def norm(name: str) -> None:
        values: npt.NDArray[np.float32] = random.uniform(0.5, 1.5, hidden).astype(np.float32)
        writer.add_tensor(name, values)

    # Small embeddings: what the layers add must outweigh them, or a tied model only repeats its input.
    embedding_type = model.embedding_type or model.weight_type
    matrix("token_embd.weight", vocab_size, hidden, 0.3, embedding_type)
    for layer in range(model.num_layers):
        block = f"blk.{layer}."
        norm(block + "attn_norm.weight")
        # Sharp scores, so that a wrong key shows in the output.
        matrix(block + "attn_q.weight", query, hidden, 2.0 * hidden**-0.5, model.weight_type)
        matrix(block + "attn_k.weight", keys, hidden, hidden**-0.5, model.weight_type)
        matrix(block + "attn_v.weight", keys, hidden, hidden**-0.5, model.weight_type)
        matrix(block + "attn_output.weight", hidden, query, query**-0.5, model.weight_type)
        norm(block + "ffn_norm.weight")
        matrix(block + "ffn_gate.weight", wide, hidden, hidden**-0.5, model.weight_type)
        matrix(block + "ffn_up.weight", wide, hidden, hidden**-0.5, model.weight_type)
        matrix(block + "ffn_down.weight", hidden, wide, wide**-0.5, model.weight_type)
    norm("output_norm.weight")
    if not model.tied:
        matrix("output.weight", vocab_size, hidden, 3.0 * hidden**-0.5, embedding_type)
    if model.rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(model.rope_freqs, dtype=np.float32))
