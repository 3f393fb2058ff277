"""The model files that versus_peers.py measures: each made once, in a folder of its own, and reused.

    python benchmarks/measured_files.py [NAME...]      makes them and says what they hold; without names: all
    python benchmarks/measured_files.py --check        compares SmolLM2's with what llama-quantize makes

smollm2-q4_1      SmolLM2-135M-Instruct as it is shipped (`octavo pull smollm2-135m`)
smollm2-TYPE      the same, dequantised and quantised again as TYPE
1b-TYPE           random weights in the shape of Llama 3.2 1B (16 layers of width 2,048, 32 query and 8
                  key-value heads of 64, feed-forward 8,192) with SmolLM2's tokenizer and a tied head

TYPE is q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, f16 or bf16. Files lie in
`$XDG_CACHE_HOME/octavo/bench`, else `~/.cache/octavo/bench`; remove one to have it made anew.

The quantiser is llama.cpp's own (`ggml_quantize_chunk` of the library inside the xllamacpp wheel), and which
matrix gets which type is llama.cpp's recipe: q4_k is what it calls Q4_K_M, q3_k Q3_K_M, and so on. So the
head of most files is Q6_K, and rows that are not whole blocks of 256 take the type llama.cpp falls back to.
That is most of SmolLM2, whose width is 576: its q4_k has Q4_K and Q6_K in ffn_down only, and Q5_0 and Q8_0
elsewhere.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from build_llamacpp import QUANTIZE
from environments import xllamacpp_library
from octavo.bench.prompts import plain_words
from octavo.model.catalog import DEFAULT_MODEL, models_dir, resolve_model
from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile
from octavo.text.tokenizer import Tokenizer

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Quantize = Callable[[Floats, str], Bytes]
"""float32[rows, columns] and the name of a type to uint8[rows, bytes]."""

FALLBACK = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
}
"""What llama.cpp takes where rows are not whole blocks of 256 values."""

FILE_TYPES = {
    "q4_0": "MOSTLY_Q4_0",
    "q4_1": "MOSTLY_Q4_1",
    "q5_0": "MOSTLY_Q5_0",
    "q5_1": "MOSTLY_Q5_1",
    "q8_0": "MOSTLY_Q8_0",
    "q2_k": "MOSTLY_Q2_K",
    "q3_k": "MOSTLY_Q3_K_M",
    "q4_k": "MOSTLY_Q4_K_M",
    "q5_k": "MOSTLY_Q5_K_M",
    "q6_k": "MOSTLY_Q6_K",
    "iq4_nl": "MOSTLY_IQ4_NL",
    "iq4_xs": "MOSTLY_IQ4_XS",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
}
"""Our names and llama.cpp's."""

SHIPPED = "smollm2-q4_1"
NAMES = (*(f"smollm2-{kind}" for kind in FILE_TYPES), *(f"1b-{kind}" for kind in FILE_TYPES))


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A `llama` model with a tied head."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


ONE_BILLION = LlamaShape(
    num_layers=16, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8, head_dim=64
)


def bench_dir() -> Path:
    """The folder of the files made here; it may not exist yet."""
    return models_dir().parent / "bench"


def measured_file(name: str) -> Path:
    """The file of one of `NAMES`, made if it is not there yet.

    Raises: ModelFileError if there is no such name, or the shipped file has not been fetched.
    """
    if name not in NAMES:
        raise ModelFileError(f"'{name}' is none of the measured files: {', '.join(NAMES)}")
    shipped = resolve_model(DEFAULT_MODEL)
    if name == SHIPPED:
        return shipped
    model, _, kind = name.partition("-")
    path = bench_dir() / f"{name}.gguf"
    if path.exists():
        return path
    print(f"making {path}", file=sys.stderr)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named otherwise until it is whole: what is there under its name can be used.
    part = path.with_suffix(f".part-{os.getpid()}")
    try:
        quantize = GgmlQuantizer(xllamacpp_library())
        if model == "1b":
            write_random(part, ONE_BILLION, kind, quantize, tokenizer_of=shipped)
        else:
            write_requantized(part, shipped, kind, quantize)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def held_types(path: Path) -> dict[str, int]:
    """Weights a type in a file, most first; F32 (the norms) left out."""
    weights: Counter[str] = Counter()
    with GGUFFile(path) as file:
        for info in file.tensors.values():
            if info.type != "F32":
                weights[info.type] += int(np.prod(info.shape))
    return dict(weights.most_common())


def describe_types(path: Path) -> str:
    """For people: 'Q5_0 52 %, Q8_0 23 %' of the weights."""
    held = held_types(path)
    total = sum(held.values())
    return ", ".join(f"{kind} {100 * count / total:.0f} %" for kind, count in held.items())


def tensor_type(kind: str, tensor: str, columns: int, num_layers: int, heads_a_kv_head: int) -> str:
    """The type that llama.cpp's recipe `kind` gives a matrix with a head that is tied; columns: of its rows.

    Source: llama_tensor_get_type_impl and tensor_type_fallback in llama.cpp's src/llama-quant.cpp, 2026-10.
    """
    chosen = _wanted_type(kind, tensor, columns, num_layers, heads_a_kv_head)
    return chosen if columns % _block_values(chosen) == 0 else FALLBACK[chosen]


def _wanted_type(kind: str, tensor: str, columns: int, num_layers: int, heads_a_kv_head: int) -> str:
    base = kind.upper()
    if base in ("F16", "BF16"):
        return base
    if tensor == "token_embd.weight":
        return "Q8_0" if base == "Q8_0" or columns % _block_values(base) else "Q6_K"
    layer, part = _layer_and_part(tensor)
    eighth = num_layers // 8
    more_bits = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    wide_groups = heads_a_kv_head >= 4
    exceptions: Mapping[tuple[str, str], str] = {
        ("Q2_K", "attn_v"): "Q4_K" if wide_groups else "Q3_K",
        ("Q2_K", "attn_output"): "Q3_K",
        ("Q2_K", "ffn_down"): "Q3_K",
        ("Q3_K", "attn_v"): "Q5_K" if layer < 2 else "Q4_K",
        ("Q3_K", "attn_output"): "Q4_K",
        ("Q3_K", "ffn_down"): "Q5_K" if layer < num_layers // 16 else "Q4_K",
        ("Q4_K", "attn_v"): "Q6_K" if more_bits else base,
        ("Q4_K", "ffn_down"): "Q6_K" if more_bits else base,
        ("Q5_K", "attn_v"): "Q6_K" if more_bits else base,
        ("Q5_K", "ffn_down"): "Q6_K" if more_bits else base,
        ("IQ4_NL", "attn_v"): "Q5_K" if wide_groups else base,
        ("IQ4_NL", "ffn_down"): "Q5_K" if layer < eighth else base,
        ("IQ4_XS", "attn_v"): "Q5_K" if wide_groups else base,
        ("IQ4_XS", "ffn_down"): "Q5_K" if layer < eighth else base,
    }
    return exceptions.get((base, part), base)


def _layer_and_part(tensor: str) -> tuple[int, str]:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor)
    if match is None:
        raise ValueError(f"the recipe knows no tensor '{tensor}'")
    return int(match[1]), match[2]


def _block_values(type_name: str) -> int:
    return int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][0])


class GgmlQuantizer:
    """llama.cpp's reference quantisers, called in its shared library.

    Raises: OSError if the library cannot be loaded, AttributeError if it does not export them.
    """

    def __init__(self, library: Path) -> None:
        self._quantize_chunk = ctypes.CDLL(str(library)).ggml_quantize_chunk
        self._quantize_chunk.restype = ctypes.c_size_t
        # type, source, destination, first value, rows, columns, importance
        self._quantize_chunk.argtypes = [
            *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
            *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
        ]

    def __call__(self, values: Floats, type_name: str) -> Bytes:
        kind = gguf.GGMLQuantizationType[type_name]
        rows, columns = values.shape
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        coded = np.empty((rows, columns // block_values * block_bytes), dtype=np.uint8)
        source = np.ascontiguousarray(values, dtype=np.float32)
        written = self._quantize_chunk(
            int(kind), source.ctypes.data, coded.ctypes.data, 0, rows, columns, None
        )
        if written != coded.nbytes:
            raise RuntimeError(f"{type_name}: the quantiser wrote {written:,} of {coded.nbytes:,} bytes")
        return coded


def write_requantized(path: Path, source: Path, kind: str, quantize: Quantize) -> None:
    """A `llama` file with a tied head again, its matrices as the recipe `kind` wants them."""
    with GGUFFile(source) as file:
        heads = file.metadata["llama.attention.head_count"] // file.metadata["llama.attention.head_count_kv"]
        num_layers = file.metadata["llama.block_count"]
        writer = gguf.GGUFWriter(path, "llama")
        _copy_fields(writer, source, lambda name: name != "general.file_type")
        writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
        for name, info in file.tensors.items():
            data = file.data(name)
            if info.type == "F32" and len(info.shape) == 1:
                writer.add_tensor(name, data.view(np.float32))
                continue
            wanted = tensor_type(kind, name, info.shape[-1], num_layers, heads)
            values = gguf.quants.dequantize(
                data.reshape(info.shape[0], -1), gguf.GGMLQuantizationType[info.type]
            )
            _add_coded(writer, name, quantize(values, wanted), wanted)
        _finish(writer)


def write_random(
    path: Path, shape: LlamaShape, kind: str, quantize: Quantize, *, tokenizer_of: Path, seed: int = 0
) -> None:
    """A model of random weights of sane size with the tokenizer of another file; equal arguments give equal
    bytes.

    A matrix takes its rows at random from a few hundred quantised ones: quantising a thousand million values
    would take minutes, and no engine is faster for rows that it meets twice. Tokens that are no plain words
    have rows of a hundredth of the size in the tied head, so that a model that talks nonsense always talks
    whole characters. (Not of zeros: OpenVINO divides by their scale.)
    """
    random = np.random.default_rng(seed)
    with GGUFFile(tokenizer_of) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    writer = gguf.GGUFWriter(path, "llama")
    _copy_fields(writer, tokenizer_of, lambda name: name.startswith("tokenizer."))
    writer.add_name(f"random weights, {shape.num_layers} layers of {shape.hidden_size}")
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    writer.add_quantization_version(2)
    writer.add_vocab_size(tokenizer.vocab_size)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)

    pools: dict[tuple[str, int], Bytes] = {}
    for name, rows, columns in _matrices_and_norms(shape, tokenizer.vocab_size):
        if columns == 0:
            writer.add_tensor(name, np.ones(rows, dtype=np.float32))
            continue
        heads = shape.num_heads // shape.num_kv_heads
        wanted = tensor_type(kind, name, columns, shape.num_layers, heads)
        if (wanted, columns) not in pools:
            values = random.standard_normal((_POOL_ROWS, columns), dtype=np.float32) * columns**-0.5
            pools[wanted, columns] = quantize(values.astype(np.float32), wanted)
        coded = pools[wanted, columns][random.integers(0, _POOL_ROWS, rows)]
        if name == "token_embd.weight":
            quiet = np.ones(rows, dtype=bool)
            quiet[plain_words(tokenizer)] = False
            small = 0.01 * columns**-0.5 * random.standard_normal((1, columns), dtype=np.float32)
            coded[quiet] = quantize(small, wanted)
        _add_coded(writer, name, coded, wanted)
    _finish(writer)


_POOL_ROWS = 256


def _matrices_and_norms(shape: LlamaShape, vocab_size: int) -> Iterator[tuple[str, int, int]]:
    """Names, rows and columns; 0 columns for a norm."""
    hidden, wide = shape.hidden_size, shape.intermediate_size
    query, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "token_embd.weight", vocab_size, hidden
    for layer in range(shape.num_layers):
        for part, rows, columns in (
            *(("attn_norm", hidden, 0), ("attn_q", query, hidden), ("attn_k", keys, hidden)),
            *(("attn_v", keys, hidden), ("attn_output", hidden, query), ("ffn_norm", hidden, 0)),
            *(("ffn_gate", wide, hidden), ("ffn_up", wide, hidden), ("ffn_down", hidden, wide)),
        ):
            yield f"blk.{layer}.{part}.weight", rows, columns
    yield "output_norm.weight", hidden, 0


def _copy_fields(writer: gguf.GGUFWriter, source: Path, wanted: Callable[[str], bool]) -> None:
    """Metadata with the types it has in the file; the architecture is the writer's."""
    for field in gguf.GGUFReader(source).fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture" or not wanted(field.name):
            continue
        kind: Any = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=element)


def _add_coded(writer: gguf.GGUFWriter, name: str, coded: Bytes, type_name: str) -> None:
    writer.add_tensor(name, coded, raw_dtype=gguf.GGMLQuantizationType[type_name])


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check() -> int:
    """Every file of SmolLM2 that is made here, against llama.cpp's own tool: types and bytes."""
    if not QUANTIZE.exists():
        print(f"{QUANTIZE} is not built yet: python benchmarks/build_llamacpp.py", file=sys.stderr)
        return 1
    shipped, differing = resolve_model(DEFAULT_MODEL), 0
    for kind, file_type in FILE_TYPES.items():
        name = f"smollm2-{kind}"
        if name == SHIPPED:
            continue
        with tempfile.TemporaryDirectory() as folder:
            theirs = Path(folder) / "theirs.gguf"
            recipe = file_type.removeprefix("MOSTLY_")
            command = [str(QUANTIZE), "--allow-requantize", str(shipped), str(theirs), recipe, "1"]
            subprocess.run(command, check=True, capture_output=True)
            with GGUFFile(theirs) as their_file, GGUFFile(measured_file(name)) as our_file:
                different = [
                    tensor
                    for tensor in {*their_file.tensors, *our_file.tensors}
                    if not _same_tensor(tensor, their_file, our_file)
                ]
        print(f"{name}: {len(different)} tensors differ from llama-quantize's {recipe} {different[:3]}")
        differing += len(different)
    return 1 if differing else 0


def _same_tensor(name: str, one: GGUFFile, other: GGUFFile) -> bool:
    if name not in one.tensors or name not in other.tensors:
        return False
    same_type = one.tensors[name].type == other.tensors[name].type
    return same_type and one.data(name).tobytes() == other.data(name).tobytes()


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the model files that versus_peers.py measures.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--check", action="store_true", help="needs what build_llamacpp.py builds")
    args = parser.parse_args()
    if args.check:
        return _check()
    for name in args.names or NAMES:
        try:
            path = measured_file(name)
        except ModelFileError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{name}: {path.stat().st_size / 1e6:,.0f} MB, {describe_types(path)}, {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
