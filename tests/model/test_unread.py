"""A part of the network that nobody computes is a refusal, never a silently wrong answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.model.errors import ModelFileError
from octavo.model.model import Model


@pytest.fixture
def with_tensors(tiny_model_path: Path, tmp_path: Path) -> Callable[[Mapping[str, Sequence[int]]], Path]:
    """The tiny model with more tensors of these shapes."""

    def make(more: Mapping[str, Sequence[int]]) -> Path:
        path = tmp_path / "more.gguf"
        reader = gguf.GGUFReader(tiny_model_path)
        writer = gguf.GGUFWriter(os.fspath(path), "llama")
        for field in reader.fields.values():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                kind = field.types[0]
                inner = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for name, shape in more.items():
            writer.add_tensor(name, np.ones(shape, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["blk.0.attn_q.bias"], "the tensors 'blk.0.attn_q.bias', so"),
        (
            ["blk.0.ffn_gate_inp.weight", "blk.1.attn_k.bias"],
            "'blk.0.ffn_gate_inp.weight', 'blk.1.attn_k.bias'",
        ),
        ([f"blk.{i}.attn_q.bias" for i in range(5)], "'blk.2.attn_q.bias' and 2 more, so"),
        (["blk.7.attn_q.weight"], "'blk.7.attn_q.weight'"),
        (["rope_factors_long.weight"], "'rope_factors_long.weight'"),
    ],
)
def test_tensors_that_nobody_reads_are_refused_by_name(
    with_tensors: Callable[[Mapping[str, Sequence[int]]], Path], names: list[str], said: str
) -> None:
    path = with_tensors(dict.fromkeys(names, (64,)))
    with pytest.raises(ModelFileError) as refused:
        Model.load(path, num_threads=1)
    assert str(path) in str(refused.value)
    assert said in str(refused.value)


def test_leftovers_of_old_converters_are_known_to_change_nothing(
    with_tensors: Callable[[Mapping[str, Sequence[int]]], Path],
) -> None:
    names = ["rope.freqs", "blk.0.attn_rot_embd", "blk.1.attn_rot_embd.weight"]
    Model.load(with_tensors(dict.fromkeys(names, (8,))), num_threads=1).close()
