from __future__ import annotations

import codecs
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.text_stream import TextStream
from octavo.text.tokenizer import InvalidTokenId, Tokenizer
from text.vocabularies import FIRST_BYTE, metadata

TOKENIZER = Tokenizer.from_gguf(metadata())
HELLO, WORLD = TOKENIZER.encode("hello", add_special=False), TOKENIZER.encode(" wor", add_special=False)

# Letters that make stops likely, and the bytes of one character that has three.
some_bytes = st.lists(st.sampled_from(b"ab\n" + "€".encode()), max_size=30).map(bytes)
stop_lists = st.lists(st.text(alphabet="ab\n€\ufffd", min_size=1, max_size=4), max_size=3)


def tokens(data: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]


def whole_characters(data: bytes) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def expected(data: bytes, stops: list[str], min_tokens: int) -> tuple[str, str | None, int]:
    """By str.find in the text of ever more tokens: what is shown, what matched, how many tokens belong."""
    free = whole_characters(data[:min_tokens])
    # At the end once more: what is left of a character is then text too.
    for count in [*range(min_tokens + 1, len(data) + 1), len(data)]:
        at_end = count == len(data)
        for text in [whole_characters(data[:count]), *([data.decode("utf-8", "replace")] if at_end else [])]:
            rest = text[len(free) :] if count > min_tokens else ""
            found = [(rest.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in rest]
            if found:
                end, _, stop = min(found)
                return free + rest[: end - len(stop)], stop, count
    return data.decode("utf-8", "replace"), None, len(data)


@given(some_bytes, stop_lists, st.integers(0, 8), st.lists(st.integers(0, 30)))
def test_however_tokens_are_cut_the_answer_ends_at_the_same_character_and_token(
    data: bytes, stops: list[str], min_tokens: int, cuts: list[int]
) -> None:
    ids = tokens(data)
    places = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    stream, shown, num_tokens = TextStream(TOKENIZER, stops, min_tokens=min_tokens), "", 0
    for start, end in pairwise(places):
        text, starts = stream.add(ids[start:end])
        shown += text
        num_tokens += len(starts)
    text, starts = stream.add([], last=True)
    assert (shown + text, stream.matched, num_tokens) == expected(data, stops, min_tokens)
    assert starts == []


@given(some_bytes, stop_lists)
def test_what_was_shown_is_never_taken_back(data: bytes, stops: list[str]) -> None:
    answer, _, _ = expected(data, stops, 0)
    stream, shown = TextStream(TOKENIZER, stops), ""
    for token_id in tokens(data):
        shown += stream.add([token_id]).text
        assert answer.startswith(shown)


def test_the_token_that_completes_a_stop_is_the_last_of_the_answer() -> None:
    stream = TextStream(TOKENIZER, ["lo w"])
    text, starts = stream.add([*HELLO, *WORLD, *HELLO, *HELLO], last=True)
    assert (text, stream.matched) == ("hel", "lo w")
    assert len(starts) == len(HELLO) + len(WORLD) == 2
    assert stream.add(HELLO, last=True) == ("", [])


def test_each_token_begins_where_the_text_before_it_ends_held_back_or_not() -> None:
    stream = TextStream(TOKENIZER, ["hello world"])
    assert stream.add(HELLO) == ("", [0])
    assert stream.add(WORLD) == ("", [5])
    assert stream.add(tokens("€".encode())) == ("hello wor€", [9, 9, 9])
    assert stream.add(HELLO, last=True) == ("hello", [10])


def test_a_stop_may_begin_in_one_token_and_end_inside_another() -> None:
    stream = TextStream(TOKENIZER, ["o w"])
    assert stream.add(HELLO).text == "hell"
    assert stream.add(WORLD).text == ""
    assert stream.matched == "o w"


def test_text_of_the_first_min_tokens_is_no_part_of_a_stop() -> None:
    stream = TextStream(TOKENIZER, ["ab"], min_tokens=3)
    assert stream.add(tokens(b"ababxab")).text == "ababx"
    assert stream.matched == "ab"


def test_half_a_character_within_min_tokens_is_no_stop_either() -> None:
    stream = TextStream(TOKENIZER, ["\ufffd"], min_tokens=2)
    assert stream.add(tokens("a€".encode()[:2]), last=True).text == "a\ufffd"
    assert stream.matched is None


def test_the_last_token_lets_everything_go() -> None:
    stream = TextStream(TOKENIZER, ["b\n\n"])
    assert stream.add(tokens(b"ab\n")).text == "a"
    assert stream.add(tokens("€".encode()[:1]), last=True).text == "b\n\ufffd"


def test_a_bad_stop_and_a_bad_token_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        TextStream(TOKENIZER, [""])
    with pytest.raises(InvalidTokenId):
        TextStream(TOKENIZER).add([TOKENIZER.vocab_size])
