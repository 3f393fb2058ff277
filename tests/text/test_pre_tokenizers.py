from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text import pre_tokenizers
from octavo.text.byte_alphabet import CHARACTER_OF_BYTE, spelled_bytes


def words(name: str, text: str) -> list[str]:
    pieces = pre_tokenizers.build(pre_tokenizers.recipe_for(name)).pre_tokenize_str(text)
    spelled = [spelled_bytes(piece) for piece, _ in pieces]
    assert None not in spelled
    return [(word or b"").decode("utf-8", "replace") for word in spelled]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'm  here, 1234!\n", ["I", "'m", " ", " here", ",", " 1234", "!", "\n"]),
        ("smollm", "in 1234", ["in", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "I'M in 12345!!\n\nok", ["I", "'M", " in", " ", "123", "45", "!!\n\n", "ok"]),
        ("qwen2", "x1234 (a)\n  b", ["x", "1", "2", "3", "4", " (", "a", ")\n", " ", " b"]),
        ("qwen35", "e\u0301a 1", ["e\u0301a", " ", "1"]),
        ("deepseek-v3", "12345你好ok", ["123", "45", "你好", "ok"]),
        ("tekken", "HTTPServer 12", ["HTTPServer", " ", "1", "2"]),
        ("gpt-4o", "camelCase it's 1234", ["camel", "Case", " it's", " ", "123", "4"]),
        ("falcon", "a<b 12345", ["a", "<", "b", " ", "123", "45"]),
        ("default", "a|b 12345", ["a", "|", "b", " ", "123", "45"]),
    ],
)
def test_each_recipe_cuts_as_its_models_do(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


@given(st.sampled_from(pre_tokenizers.SUPPORTED), st.text())
def test_no_recipe_loses_or_adds_a_byte(name: str, text: str) -> None:
    pieces = pre_tokenizers.build(pre_tokenizers.recipe_for(name)).pre_tokenize_str(text)
    assert b"".join(spelled_bytes(piece) or b"?" for piece, _ in pieces) == text.encode()


def test_the_byte_alphabet_is_gpt_2s() -> None:
    assert len(set(CHARACTER_OF_BYTE)) == 256
    assert (CHARACTER_OF_BYTE[0x20], CHARACTER_OF_BYTE[0x0A], CHARACTER_OF_BYTE[0x41]) == ("Ġ", "Ċ", "A")
    assert spelled_bytes("".join(CHARACTER_OF_BYTE)) == bytes(range(256))
    assert spelled_bytes("a b") is None
