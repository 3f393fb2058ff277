from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.model.gguf import GGUFFile
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import InvalidTokenId, Tokenizer
from text.vocabularies import FIRST_BYTE, metadata

# T30: one character of several tokens, several of one visible sign, text that runs the other way.
TEXTS = [
    "😀 family: 👩‍👩‍👧‍👦, flag: 🇨🇭, hand: 👋🏽!",
    "东京都は日本の首都です。你好，世界！한국어 조선말",
    "e\u0301 n\u0303 Z\u0351\u036b\u0343\u036a\u0302 नमस्ते สวัสดี",
    "שלום עולם — مرحبا بالعالم، كيف الحال؟",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ①②③ ﷽ \U0010fffd \ufeff \u200f",
    "a real \ufffd stays, once",
]


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = [0, *sorted(min(place, len(ids)) for place in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(places)]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    with GGUFFile(smollm2_path) as file:
        return Tokenizer.from_gguf(file.metadata)


@pytest.mark.parametrize("text", TEXTS)
def test_t30_text_over_single_tokens_joins_to_the_text_and_never_shows_half_a_character(
    smollm2: Tokenizer, text: str
) -> None:
    detokenizer = Detokenizer(smollm2)
    pieces = [detokenizer.add([token_id]) for token_id in smollm2.encode(text)]
    assert "".join(pieces) == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")
    assert detokenizer.finish() == ""


@given(st.lists(st.sampled_from(TEXTS)).map("".join), st.lists(st.integers(0, 300)))
def test_real_text_is_the_same_however_it_arrives(smollm2: Tokenizer, text: str, cuts: list[int]) -> None:
    detokenizer = Detokenizer(smollm2)
    assert "".join(map(detokenizer.add, cut(smollm2.encode(text), cuts))) + detokenizer.finish() == text


@given(st.binary(), st.lists(st.integers(0, 100)))
def test_any_bytes_give_what_decoding_them_at_once_gives(data: bytes, cuts: list[int]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata())
    ids = [FIRST_BYTE + byte for byte in data]
    detokenizer = Detokenizer(tokenizer)
    joined = "".join(map(detokenizer.add, cut(ids, cuts))) + detokenizer.finish()
    assert joined == tokenizer.decode(ids) == data.decode("utf-8", "replace")


@given(st.lists(st.integers(0, 49151), max_size=60), st.lists(st.integers(0, 60)))
def test_any_tokens_of_a_real_vocabulary_give_what_decode_gives(
    smollm2: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    detokenizer = Detokenizer(smollm2)
    assert "".join(map(detokenizer.add, cut(ids, cuts))) + detokenizer.finish() == smollm2.decode(ids)


def test_a_character_is_shown_the_moment_it_is_whole() -> None:
    detokenizer = Detokenizer(Tokenizer.from_gguf(metadata()))
    shown = [detokenizer.add([FIRST_BYTE + byte]) for byte in "é😀".encode()]
    assert shown == ["", "é", "", "", "", "😀"]


def test_bytes_that_can_no_longer_become_a_character_are_not_held() -> None:
    detokenizer = Detokenizer(Tokenizer.from_gguf(metadata()))
    assert detokenizer.add([FIRST_BYTE + 0xF0, FIRST_BYTE + 0x9F, FIRST_BYTE + ord("a")]) == "\ufffda"
    assert detokenizer.add([FIRST_BYTE + 0xF0]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.add([FIRST_BYTE + ord("b")]) == "b"


def test_a_bad_id_takes_nothing() -> None:
    detokenizer = Detokenizer(Tokenizer.from_gguf(metadata()))
    with pytest.raises(InvalidTokenId):
        detokenizer.add([FIRST_BYTE + ord("a"), 10_000])
    assert detokenizer.add([FIRST_BYTE + ord("b")]) == "b"
