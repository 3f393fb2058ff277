"""Our tokens are llama.cpp's: for raw prompts, for chats through the file's template, and back to text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.model.gguf import GGUFFile
from octavo.text.chat_template import ChatTemplate
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer

ORACLE: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "llamacpp_smollm2.json").read_text("utf-8")
)
RAW: list[dict[str, Any]] = ORACLE["smollm2_q4_1_raw"]
CHAT: list[dict[str, Any]] = ORACLE["smollm2_q4_1_chat"]


def title(case: dict[str, Any]) -> str:
    return str(case["user"] or case["prompt"])[:30]


@pytest.fixture(scope="module")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    with GGUFFile(smollm2_path) as file:
        return file.metadata


@pytest.fixture(scope="module")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="module")
def template(metadata: dict[str, Any]) -> ChatTemplate:
    template = ChatTemplate.from_gguf(metadata)
    assert template is not None
    return template


@pytest.mark.parametrize("case", RAW, ids=title)
def test_a_raw_prompt_has_the_same_tokens(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert tokenizer.encode(case["prompt"], parse_special=True) == case["prompt_ids"]
    assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]


@pytest.mark.parametrize("case", CHAT, ids=title)
def test_a_chat_prompt_has_the_same_text_and_tokens(
    tokenizer: Tokenizer, template: ChatTemplate, case: dict[str, Any]
) -> None:
    prompt = template.render([{"role": "user", "content": case["user"]}])
    assert prompt == case["prompt"]
    assert tokenizer.encode(prompt, parse_special=True) == case["prompt_ids"]


@pytest.mark.parametrize("case", [*RAW, *CHAT], ids=title)
def test_an_answer_has_the_same_text_at_once_and_streamed(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert tokenizer.decode(case["output_ids"]) == case["text"]
    detokenizer = Detokenizer(tokenizer)
    streamed = "".join(detokenizer.add([token_id]) for token_id in case["output_ids"])
    assert streamed + detokenizer.finish() == case["text"]


def test_the_tokens_llama_cpp_stopped_at_end_an_answer_here(tokenizer: Tokenizer) -> None:
    last = {case["output_ids"][-1] for case in (*RAW, *CHAT) if case["stop"] == "eos"}
    assert last
    assert last <= tokenizer.eos_token_ids
