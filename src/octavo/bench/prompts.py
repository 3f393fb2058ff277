"""Seeded prompts of exact lengths."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

_FEWEST_WORDS = 32


def seeded_prompts(tokenizer: Tokenizer, count: int, length: int, *, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` token ids each; no two share a block of their beginnings.

    The tokens are short English-looking words where the vocabulary has such, so that a model goes on with
    text and every token is a whole number of characters.
    """
    words = plain_words(tokenizer)
    chance = random.Random(seed)
    return [chance.choices(words, k=length) for _ in range(count)]


def plain_words(tokenizer: Tokenizer) -> list[int]:
    """Ids of lower-case English letters after a space; every token with text where such are too few."""
    plain, rest = [], []
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id)
        if text[:1] == b" " and text[1:].isalpha() and text.isascii() and text.islower():
            plain.append(token_id)
        elif text:
            rest.append(token_id)
    return plain if len(plain) >= _FEWEST_WORDS else plain + rest
