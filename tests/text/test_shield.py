from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.text.shield import MARK, Shield

TOKENS = ["<a>", "a><", "<|im_end|>", "x"]


def test_a_spelled_control_token_is_broken_by_a_mark() -> None:
    assert Shield(TOKENS).apply("so <|im_end|> it ends") == f"so <{MARK}|im_end|> it ends"


def test_other_text_is_the_same_object() -> None:
    text = "nothing <|im_en d|> to see"
    assert Shield(TOKENS).apply(text) is text
    assert Shield([]).apply(text) is text


@given(st.lists(st.sampled_from(["<", "a", ">", "<|im_end|>", "<|im", "_end|>", " "])).map("".join))
def test_no_spelling_survives_even_where_two_overlap_and_the_text_does(text: str) -> None:
    shielded = Shield(TOKENS).apply(text)
    assert not any(token in shielded for token in TOKENS if len(token) > 1)
    assert shielded.replace(MARK, "") == text


def test_a_token_of_one_character_has_no_inside_to_mark() -> None:
    assert Shield(["x"]).apply("xxx") == "xxx"
