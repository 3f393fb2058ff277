"""Small vocabularies for the tests of `text`: every byte, some merges, tokens of every kind."""

from __future__ import annotations

from typing import Any

from octavo.text.byte_alphabet import CHARACTER_OF_BYTE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BOS, EOS, END, THINK, HOLE, RAW_BYTE = range(6)
FIRST_BYTE = 6
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2", "12 3", "Ċ Ċ", "o Ġw", "' s", "a Ġ"]


def metadata(**changes: Any) -> dict[str, Any]:
    """A `gpt2` tokenizer's metadata; `changes` by the last part of the key, None removes one."""
    special = ["<s>", "</s>", "<|im_end|>", "<think>", "[PAD4]", "<0xE2>"]
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*special, *CHARACTER_OF_BYTE, *(merge.replace(" ", "") for merge in MERGES)],
        "token_type": [CONTROL, CONTROL, CONTROL, USER_DEFINED, UNUSED, BYTE]
        + [NORMAL] * (256 + len(MERGES)),
        "merges": list(MERGES),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    keys |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
