"""The files that benchmarks/versus_peers.py measures: llama.cpp's recipes of types, and that what is made can
be served."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

import measured_files
from measured_files import (
    ONE_BILLION,
    Bytes,
    Floats,
    LlamaShape,
    held_types,
    tensor_type,
    write_random,
    write_requantized,
)
from model_files import CONTROL_TOKENS, TinyLlama, write_tiny_llama
from octavo.bench.prompts import plain_words
from octavo.engine.sampling_params import SamplingParams
from octavo.llm import LLM
from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile
from octavo.text.tokenizer import Tokenizer

SMOLLM2 = LlamaShape(
    num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64
)
TINY = LlamaShape(
    num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16
)


def quantize(values: Floats, type_name: str) -> Bytes:
    """The `gguf` package's quantisers, which know the types without sub-blocks."""
    coded: Bytes = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name])
    return coded


def types_of(kind: str, shape: LlamaShape) -> dict[str, Counter[str]]:
    """How many layers have which type, by part; "head" for the tied head."""
    heads = shape.num_heads // shape.num_kv_heads

    def chosen(tensor: str, columns: int) -> str:
        return tensor_type(kind, tensor, columns, shape.num_layers, heads)

    parts = dict.fromkeys(("attn_q", "attn_v", "attn_output", "ffn_gate", "ffn_up"), shape.hidden_size)
    parts["ffn_down"] = shape.intermediate_size
    found = {
        part: Counter(chosen(f"blk.{layer}.{part}.weight", columns) for layer in range(shape.num_layers))
        for part, columns in parts.items()
    }
    return {**found, "head": Counter([chosen("token_embd.weight", shape.hidden_size)])}


@pytest.mark.parametrize("kind", ["q4_0", "q5_0", "q8_0"])
def test_plain_types_hold_everywhere_but_in_the_head(kind: str) -> None:
    found = types_of(kind, ONE_BILLION)
    assert found.pop("head") == {"Q8_0" if kind == "q8_0" else "Q6_K": 1}
    assert all(part == {kind.upper(): 16} for part in found.values())
    assert types_of(kind, SMOLLM2)["head"] == {"Q8_0": 1}  # 576 is no multiple of 256


def test_q4_k_gives_half_of_the_layers_more_bits() -> None:
    found = types_of("q4_k", ONE_BILLION)
    assert found["attn_v"] == found["ffn_down"] == {"Q6_K": 8, "Q4_K": 8}
    assert found["attn_q"] == found["ffn_up"] == {"Q4_K": 16}
    assert found["head"] == {"Q6_K": 1}


def test_rows_that_are_no_whole_blocks_of_256_fall_back() -> None:
    found = types_of("q4_k", SMOLLM2)
    assert found["attn_q"] == {"Q5_0": 30}
    assert found["attn_v"] == {"Q8_0": 14, "Q5_0": 16}
    assert found["ffn_down"] == {"Q6_K": 14, "Q4_K": 16}
    assert types_of("q6_k", SMOLLM2)["ffn_up"] == {"Q8_0": 30}
    assert types_of("q2_k", SMOLLM2)["ffn_up"] == {"Q4_0": 30}


def test_an_unknown_tensor_is_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"no tensor 'output\.weight'"):
        tensor_type("q4_0", "output.weight", 256, 16, 4)


def test_random_files_are_served_and_say_only_words(tmp_path: Path) -> None:
    tokenizer_of = write_tiny_llama(tmp_path / "tokenizer.gguf")
    path = tmp_path / "random.gguf"
    write_random(path, TINY, "q4_0", quantize, tokenizer_of=tokenizer_of)
    assert set(held_types(path)) == {"Q4_0", "Q8_0"}  # Q8_0: the head, whose rows of 64 cannot be Q6_K
    with LLM(path) as llm:
        [answer] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 20
    with GGUFFile(path) as file:
        words = plain_words(Tokenizer.from_gguf(file.metadata))
        head = file.data("token_embd.weight").reshape(file.tensors["token_embd.weight"].shape[0], -1)
        sizes = np.abs(gguf.quants.dequantize(head, gguf.GGMLQuantizationType.Q8_0)).max(axis=1)
    silent = np.setdiff1d(np.arange(len(sizes)), words)
    assert len(silent) >= len(CONTROL_TOKENS)
    assert 0 < sizes[silent].max() < sizes[words].min() / 20


def test_random_files_are_equal_for_equal_arguments(tmp_path: Path) -> None:
    tokenizer_of = write_tiny_llama(tmp_path / "tokenizer.gguf")
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        write_random(tmp_path / name, TINY, "q8_0", quantize, tokenizer_of=tokenizer_of, seed=seed)
    one, same, other = ((tmp_path / name).read_bytes() for name in ("one", "same", "other"))
    assert one == same
    assert one != other


def test_quantising_again_keeps_metadata_norms_and_values(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "q4_1.gguf", TinyLlama(weight_type="Q4_1", tied=True))
    path = tmp_path / "q8_0.gguf"
    write_requantized(path, source, "q8_0", quantize)
    with GGUFFile(source) as before, GGUFFile(path) as after:
        assert after.metadata == {**before.metadata, "general.file_type": gguf.LlamaFileType.MOSTLY_Q8_0}
        assert list(after.tensors) == list(before.tensors)
        for name, info in before.tensors.items():
            if info.type == "F32":
                assert bytes(after.data(name)) == bytes(before.data(name))
                continue
            assert after.tensors[name].type == "Q8_0"
            old, new = (
                gguf.quants.dequantize(
                    file.data(name).reshape(info.shape[0], -1),
                    gguf.GGMLQuantizationType[file.tensors[name].type],
                )
                for file in (before, after)
            )
            # Half a step of Q8_0, and the rounding of its f16 scale.
            assert np.abs(old - new).max() <= np.abs(old).max() / 127


def test_a_file_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_llama(tmp_path / "q4_1.gguf", TinyLlama(weight_type="Q4_1", tied=True))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured_files, "resolve_model", lambda _: source)
    monkeypatch.setattr(measured_files, "xllamacpp_library", lambda: tmp_path)
    made = []

    def quantizer(_: Path) -> measured_files.Quantize:
        made.append(1)
        return quantize

    monkeypatch.setattr(measured_files, "GgmlQuantizer", quantizer)
    path = measured_files.measured_file("smollm2-q4_0")
    assert path == tmp_path / "octavo" / "bench" / "smollm2-q4_0.gguf"
    assert measured_files.measured_file("smollm2-q4_0") == path
    assert len(made) == 1
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert measured_files.measured_file("smollm2-q4_1") == source


def test_an_unknown_name_is_an_error_that_lists_the_others() -> None:
    with pytest.raises(ModelFileError, match="'1b-q9' is none of the measured files: smollm2-q4_0"):
        measured_files.measured_file("1b-q9")
