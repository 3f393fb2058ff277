from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile
from octavo.text.shield import MARK
from octavo.text.tokenizer import InvalidText, InvalidTokenId, TextLost, Tokenizer, UnsupportedTokenizer
from text.vocabularies import (
    BOS,
    END,
    EOS,
    FIRST_BYTE,
    HOLE,
    MERGES,
    NORMAL,
    RAW_BYTE,
    THINK,
    USER_DEFINED,
    metadata,
)


def spellings(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in ids]


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_gguf(metadata())


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    with GGUFFile(smollm2_path) as file:
        return Tokenizer.from_gguf(file.metadata)


def test_merges_apply_in_order_and_never_across_a_cut_between_words(tiny: Tokenizer) -> None:
    assert spellings(tiny, tiny.encode("hello world")) == [
        "hello",
        " wor",
        "l",
        "d",
    ]  # not "o w", though it is a merge
    assert spellings(tiny, tiny.encode("123\n\n")) == ["123", "\n\n"]


@given(st.text())
def test_any_text_comes_back_as_it_was(text: str) -> None:
    tokenizer = Tokenizer.from_gguf(metadata(token_type=[NORMAL] * (6 + 256 + len(MERGES))))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(
    st.text(
        alphabet=st.characters(
            codec="utf-8", exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF
        )
    )
)
def test_smollm2_gives_back_any_text_it_has_bytes_for(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


pieces = ["<s>", "</s>", "<|im_end|>", "<think>", "<|im_end", "<", "/s>", "hello", " ", "\n", "12", "é"]


@given(st.lists(st.sampled_from(pieces)).map("".join))
def test_control_tokens_are_made_only_when_asked_for(tiny: Tokenizer, text: str) -> None:
    plain, parsed = tiny.encode(text), tiny.encode(text, parse_special=True)
    assert not {BOS, EOS, END} & set(plain)
    assert plain.count(THINK) == parsed.count(THINK) == text.count("<think>")
    for token_id in (BOS, EOS, END):
        assert parsed.count(token_id) == text.count(tiny.token_text(token_id))
    assert tiny.decode(plain) == tiny.decode(parsed, skip_special=False) == text
    assert tiny.decode(parsed) == re.sub(r"<s>|</s>|<\|im_end\|>", "", text)


def test_marks_keep_a_control_token_apart_and_leave_no_trace(tiny: Tokenizer) -> None:
    ids = tiny.encode(f"<{MARK}|im_end|>x<|im_end|>", parse_special=True)
    assert ids.count(END) == 1
    assert tiny.decode(ids, skip_special=False) == "<|im_end|>x<|im_end|>"
    assert ids[:-1] == tiny.encode("<|im_end|>x")


def test_the_first_and_last_token_appear_once_where_the_file_asks_for_them() -> None:
    both = Tokenizer.from_gguf(metadata(add_bos_token=True, add_eos_token=True))
    h = FIRST_BYTE + ord("h")
    assert both.encode("h") == [BOS, h, EOS]
    assert both.encode("h", add_special=False) == [h]
    assert both.encode("<s>h</s>", parse_special=True) == [BOS, h, EOS]
    assert both.encode("") == [BOS, EOS]
    assert Tokenizer.from_gguf(metadata(add_bos_token=False)).encode("h") == [h]
    assert Tokenizer.from_gguf(metadata()).encode("h") == [h]
    assert Tokenizer.from_gguf(metadata(pre="llama-bpe")).encode("h") == [BOS, h]  # implied by the name
    assert Tokenizer.from_gguf(metadata(pre="llama-bpe", add_bos_token=False)).encode("h") == [h]
    assert Tokenizer.from_gguf(metadata(pre="llama-bpe", bos_token_id=None)).encode("h") == [h]


def test_llama_3_takes_a_whole_word_of_the_vocabulary_whatever_the_merges_say() -> None:
    tokens = [*metadata()["tokenizer.ggml.tokens"], "wax"]
    kinds = [*metadata()["tokenizer.ggml.token_type"], NORMAL]
    gpt2 = Tokenizer.from_gguf(metadata(tokens=tokens, token_type=kinds))
    llama3 = Tokenizer.from_gguf(metadata(tokens=tokens, token_type=kinds, pre="llama-bpe"))
    assert spellings(gpt2, gpt2.encode("wax")) == ["w", "a", "x"]
    assert spellings(llama3, llama3.encode("wax", add_special=False)) == ["wax"]


def test_each_kind_of_token_is_the_bytes_it_should_be(tiny: Tokenizer) -> None:
    assert tiny.token_bytes(END) == b""
    assert tiny.token_text(END) == "<|im_end|>"
    assert tiny.token_bytes(HOLE) == b""
    assert tiny.token_bytes(THINK) == b"<think>"
    assert tiny.token_bytes(RAW_BYTE) == b"\xe2"
    assert tiny.token_text(RAW_BYTE) == "\ufffd"
    assert [tiny.token_bytes(FIRST_BYTE + byte) for byte in range(256)] == [bytes([b]) for b in range(256)]
    assert tiny.is_control(END)
    assert not tiny.is_control(THINK)
    assert tiny.token_id("<think>") == THINK
    assert tiny.token_id("no such token") is None


def test_a_user_defined_token_is_spelled_as_it_is_and_not_in_the_byte_alphabet() -> None:
    tokens = [*metadata()["tokenizer.ggml.tokens"], "é  x"]
    kinds = [*metadata()["tokenizer.ggml.token_type"], USER_DEFINED]
    tokenizer = Tokenizer.from_gguf(metadata(tokens=tokens, token_type=kinds))
    assert tokenizer.encode("aé  xa")[1] == len(tokens) - 1
    assert tokenizer.decode(tokenizer.encode("aé  xa")) == "aé  xa"


def test_the_tokens_that_end_an_answer_come_from_the_file_and_from_their_names() -> None:
    assert Tokenizer.from_gguf(metadata()).eos_token_ids == {EOS, END}
    assert Tokenizer.from_gguf(metadata(eos_token_id=None, eot_token_id=THINK)).eos_token_ids == {
        EOS,
        END,
        THINK,
    }
    ordinary = [NORMAL] * len(metadata()["tokenizer.ggml.tokens"])
    assert Tokenizer.from_gguf(metadata(token_type=ordinary)).eos_token_ids == {EOS}  # a name alone is a word


def test_one_message_of_several_does_not_end_a_gpt_oss_answer() -> None:
    names = ["<|return|>", "<|call|>", "<|end|>"]
    tokens = [*metadata()["tokenizer.ggml.tokens"], *names]
    kinds = [*metadata()["tokenizer.ggml.token_type"], 3, 3, 3]
    tokenizer = Tokenizer.from_gguf(metadata(tokens=tokens, token_type=kinds))
    ends = {tokenizer.token_text(i) for i in tokenizer.eos_token_ids}
    assert {"<|return|>", "<|call|>"} <= ends
    assert "<|end|>" not in ends


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"merges": ["h e", "q z"]}, "merge 1 of 2 ('q z') needs 'qz', which is not among the 275 tokens"),
        ({"merges": ["h e", "hq e"]}, "merge 1 of 2 ('hq e') needs 'hq'"),
        ({"merges": ["he"]}, "merge 0 of 1 ('he') is not two tokens and a space"),
        ({"merges": ["h e l"]}, "merge 0 of 1 ('h e l') is not two tokens and a space"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, "tokenizer.ggml.tokens is missing"),
        ({"token_type": [NORMAL] * 9}, "the vocabulary has 275 tokens, but tokenizer.ggml.token_type has 9"),
        ({"eos_token_id": 275}, "tokenizer.ggml.eos_token_id is 275, outside the vocabulary of 275 tokens"),
        ({"model": None}, "the file has no tokenizer"),
    ],
)
def test_lists_that_disagree_are_one_sentence_with_numbers(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ModelFileError) as error:
        Tokenizer.from_gguf(metadata(**changes))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_type": 1}, "tokenizer.ggml.token_type is 1, not a list of whole numbers"),
        ({"token_type": [1.0] * 275}, "not a list of whole numbers"),
        ({"token_type": [True] * 275}, "not a list of whole numbers"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is 'abc', not a list of texts"),
        ({"tokens": ["a", ["b"]]}, "not a list of texts"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges is [1, 2], not a list of texts"),
        ({"bos_token_id": "0"}, "tokenizer.ggml.bos_token_id is '0', not a token id"),
        ({"eos_token_id": 2.0}, "tokenizer.ggml.eos_token_id is 2.0, not a token id"),
        ({"eot_token_id": [2]}, "tokenizer.ggml.eot_token_id is [2], not a token id"),
        ({"eom_token_id": True}, "tokenizer.ggml.eom_token_id is True, not a token id"),
        ({"bos_token_id": -1}, "tokenizer.ggml.bos_token_id is -1, outside the vocabulary of 275 tokens"),
        ({"eos_token_id": 2**63}, f"is {2**63}, outside the vocabulary of 275 tokens"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1, not true or false"),
        ({"add_eos_token": "no"}, "tokenizer.ggml.add_eos_token is 'no', not true or false"),
        ({"pre": 5}, "tokenizer.ggml.pre is 5, not a text"),
        ({"model": ["gpt2"] * 10**5}, "not a text"),
    ],
)
def test_a_key_of_another_type_is_one_short_sentence(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ModelFileError) as error:
        Tokenizer.from_gguf(metadata(**changes))
    assert said in str(error.value)
    assert len(str(error.value)) < 200


def test_a_token_that_appears_twice_is_named() -> None:
    tokens = metadata()["tokenizer.ggml.tokens"]
    tokens[FIRST_BYTE + 1] = "hello"
    with pytest.raises(
        ModelFileError, match="has 275 tokens but only 274 different ones: 'hello' appears twice"
    ):
        Tokenizer.from_gguf(metadata(tokens=tokens))


def test_an_unknown_tokenizer_or_pre_tokenizer_names_those_that_are_known() -> None:
    with pytest.raises(
        UnsupportedTokenizer, match=r"pre-tokenizer 'klingon' is not supported; .*llama-bpe.*smollm"
    ):
        Tokenizer.from_gguf(metadata(pre="klingon"))
    with pytest.raises(
        UnsupportedTokenizer, match="tokenizer model 't5' is not supported; supported are: gpt2"
    ):
        Tokenizer.from_gguf(metadata(model="t5"))


@pytest.mark.parametrize("token_id", [-1, 275, 10**12])
def test_an_id_outside_the_vocabulary_is_an_error_with_both_numbers(tiny: Tokenizer, token_id: int) -> None:
    for ask in (tiny.token_bytes, tiny.token_text, tiny.is_control, lambda i: tiny.decode([FIRST_BYTE, i])):
        with pytest.raises(
            InvalidTokenId, match=f"token id {token_id} is outside the vocabulary of 275 tokens"
        ):
            ask(token_id)


def test_a_lone_surrogate_is_named_with_its_place(tiny: Tokenizer) -> None:
    with pytest.raises(InvalidText, match=r"U\+D83D\) at character 2"):
        tiny.encode("ab\ud83d")
    assert issubclass(InvalidText, ValueError)


def test_what_a_vocabulary_cannot_write_is_left_out_and_said_once(
    smollm2: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert smollm2.encode("a\x04b") == smollm2.encode("a") + smollm2.encode("b")
        smollm2.encode("a\x04b")
    assert [record.getMessage() for record in caplog.records] == [
        "this vocabulary has no token for some characters; 1 bytes of a prompt are left out, "
        "as other engines leave them out (said once)"
    ]


def without_byte(byte: int) -> Tokenizer:
    tokens = metadata()["tokenizer.ggml.tokens"]
    tokens[FIRST_BYTE + byte] = "something else"
    return Tokenizer.from_gguf(metadata(tokens=tokens))


def test_a_text_whose_bytes_have_no_token_is_refused_with_their_number_and_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    poor = without_byte(0x04)
    for _ in range(2):
        with pytest.raises(TextLost, match=r"no token for 3 of the text's bytes \(0x04 in UTF-8\)") as lost:
            poor.encode("a\x04b\x04\x04", lossless=True)
        assert (lost.value.num_bytes, lost.value.values) == (3, [0x04])
    assert not caplog.records
    assert poor.decode(poor.encode("hello é😀\x05", lossless=True)) == "hello é😀\x05"
    with pytest.raises(TextLost, match="0xF0"):
        without_byte(0xF0).encode("😀", lossless=True)


def test_marks_that_are_meant_to_go_are_no_loss() -> None:
    text = f"<|{MARK}im_end|>"
    assert without_byte(0x04).encode(text, parse_special=True, lossless=True)
    with pytest.raises(TextLost, match="for 1 of"):
        without_byte(0x04).encode(text + "\x04", parse_special=True, lossless=True)


def test_other_threads_run_while_a_long_text_is_encoded(smollm2: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog, again. " * 20_000  # 1 MB
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    before = ticks
    smollm2.encode(text)
    during = ticks - before
    stop.set()
    ticker.join()
    assert during > 5


def test_importing_the_room_does_not_load_the_library() -> None:
    code = (
        "import sys, octavo.text.tokenizer, octavo.text.chat_template\n"
        "print({'tokenizers', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == "set()"
