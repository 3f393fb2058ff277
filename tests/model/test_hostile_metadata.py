"""Whatever stands in a file's metadata, loading it works or is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile
from octavo.model.model import Model
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer

ABSENT_KEYS = [
    "split.count",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.add_eos_token",
    "llama.expert_count",
    "llama.attention.causal",
    "llama.attention.scale",
    "llama.attention.sliding_window",
    "llama.logit_scale",
    "llama.rope.scale_linear",
    "llama.rope.dimension_sections",
    "llama.rope.scaling.type",
    "llama.rope.scaling.factor",
    "llama.rope.scaling.attn_factor",
    "llama.rope.scaling.original_context_length",
    "llama.rope.scaling.yarn_beta_fast",
    "llama.rope.scaling.yarn_beta_slow",
]

single = (
    st.sampled_from([0, 1, 2, 7, -1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
    | st.sampled_from([0.0, 1.0, 2.0, -1.0, 1e-320, 1e-30, 1e30, 1e308, float("inf"), float("nan")])
    | st.sampled_from(["", "yarn", "linear", "llama", "gpt2", "{{ messages }}"])
    | st.booleans()
)
values = single | st.lists(single, max_size=3) | st.lists(st.lists(single, max_size=2), max_size=2)


@pytest.fixture(scope="module")
def keys(tiny_model_path: Path) -> list[str]:
    with GGUFFile(tiny_model_path) as file:
        return [*sorted(file.metadata), *ABSENT_KEYS]


def read(path: Path, changes: dict[str, Any]) -> None:
    """What `octavo serve` does with a file before it makes an engine."""

    class Changed(GGUFFile):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.metadata |= changes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.model.model.GGUFFile", Changed)
        model = Model.load(path, num_threads=1)
    Tokenizer.from_gguf(model.metadata).encode("hello")
    ChatTemplate.from_gguf(model.metadata)
    model.close()


@given(data=st.data(), yarn=st.booleans())
@settings(max_examples=150)
def test_any_metadata_is_read_or_refused_in_one_sentence(
    tiny_model_path: Path, keys: list[str], data: st.DataObject, yarn: bool
) -> None:
    changes: dict[str, Any] = {"llama.rope.scaling.type": "yarn"} if yarn else {}
    changes |= data.draw(st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=2))
    try:
        read(tiny_model_path, changes)
    except ModelFileError as refused:
        sentence = str(refused)
        assert "\n" not in sentence
        assert len(sentence) < 1000


def test_the_model_that_is_changed_is_a_good_one(tiny_model_path: Path) -> None:
    read(tiny_model_path, {})
    read(tiny_model_path, {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0})
