"""Text to token ids and back, from the vocabulary inside a GGUF file: byte-level BPE.

The merging itself is the `tokenizers` library's; what the file says about its vocabulary (kinds of tokens,
the first and last token, which tokens end an answer) is read here. Metadata names: the GGUF specification,
`tokenizer.ggml.*`.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from octavo.model.errors import ModelFileError
from octavo.text import pre_tokenizers
from octavo.text.byte_alphabet import CHARACTER_OF_BYTE, spelled_bytes
from octavo.text.file_keys import FileKeys
from octavo.text.pre_tokenizers import UnsupportedTokenizer
from octavo.text.shield import MARK

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.models import Model
    from tokenizers.pre_tokenizers import PreTokenizer

__all__ = ["InvalidText", "InvalidTokenId", "TextLost", "Tokenizer", "UnsupportedTokenizer"]

_log = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_HIDDEN_KINDS = frozenset({_UNKNOWN, _CONTROL, _UNUSED})
_MATCHED_KINDS = frozenset({_UNKNOWN, _CONTROL, _USER_DEFINED})
_UTF8_BYTES = (*range(0xC0), *range(0xC2, 0xF5))

# Tokens that end a turn, by what they are called: a file often names one of the several its model stops with.
_END_NAMES = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "[EOT]",
        "<eos>",
        "</s>",
        "<｜end▁of▁sentence｜>",
    }
)


class InvalidText(ValueError):
    """The text cannot be written as UTF-8 (a lone surrogate)."""


class TextLost(ValueError):
    """The vocabulary has no token for some bytes of a text; `num_bytes` of them, with these `values`."""

    def __init__(self, num_bytes: int, values: Sequence[int]) -> None:
        named = ", ".join(f"0x{value:02X}" for value in values)
        super().__init__(
            f"this model's vocabulary has no token for {num_bytes:,} of the text's bytes ({named} in UTF-8)"
        )
        self.num_bytes = num_bytes
        self.values = values


class InvalidTokenId(ValueError):
    """A token id outside the vocabulary."""

    def __init__(self, token_id: int, vocab_size: int) -> None:
        super().__init__(f"token id {token_id} is outside the vocabulary of {vocab_size:,} tokens")
        self.token_id = token_id
        self.vocab_size = vocab_size


class Tokenizer:
    """One model's vocabulary. Every method may be called from any thread.

    A token is of one of these kinds (`tokenizer.ggml.token_type`):
        1 normal        bytes, spelled in GPT-2's alphabet; made by merges
        2 unknown       no text
        3 control       written by templates, never by people: `<|im_end|>`; no text of its own
        4 user-defined  taken whole wherever its spelling appears in a text: `<think>`
        5 unused        no text
        6 byte          one byte, spelled `<0xE2>`
    """

    def __init__(
        self,
        tokens: Sequence[str],
        kinds: Sequence[int],
        merges: Sequence[str],
        *,
        pre_tokenizer: str,
        bos_token_id: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        final_token_id: int | None = None,
        add_bos: bool | None = None,
    ) -> None:
        """Build from plain lists; `from_gguf` takes them out of a file's metadata.

        tokens: the spelling of each id; kinds: the kind of each id; merges: "left right", best first.
        eos_token_ids: those the file names; tokens known by name as ends of a turn are added.
        final_token_id: put at the end of every prompt (`add_eos_token`), or None.
        add_bos: whether a prompt begins with the first token; None: as the pre-tokenizer's name implies.
        Raises: UnsupportedTokenizer for the pre-tokenizer's name; ModelFileError where the lists disagree.
        """
        # The library starts threads of its own when given a batch; the cores here belong to the kernels.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers.models import BPE

        recipe = pre_tokenizers.recipe_for(pre_tokenizer)
        if len(kinds) != len(tokens):
            raise ModelFileError(
                f"the vocabulary has {len(tokens)} tokens, but tokenizer.ggml.token_type has {len(kinds)}"
            )
        self.vocab_size = len(tokens)
        self._tokens = tokens
        self._kinds = kinds
        ids = _ids_by_spelling(tokens)
        self._bytes: list[bytes | None] = [None] * len(tokens)  # worked out when first asked for
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids | self._ends_by_name(ids)
        wants_bos = recipe.add_bos if add_bos is None else add_bos
        self._first_token_id = bos_token_id if wants_bos else None
        self._final_token_id = final_token_id
        # SmolLM2 has no token for six control characters; bytes that UTF-8 never uses do not matter.
        self._has_bytes = bytes(byte for byte in range(256) if CHARACTER_OF_BYTE[byte] in ids)
        self._lacks_bytes = not set(_UTF8_BYTES) <= set(self._has_bytes)
        self._told_of_loss = False

        model = BPE(ids, _merge_pairs(merges, ids), ignore_merges=recipe.ignore_merges)
        pre = pre_tokenizers.build(recipe)
        matched = [(tokens[i], kind) for i, kind in enumerate(kinds) if kind in _MATCHED_KINDS and tokens[i]]
        always = [spelling for spelling, kind in matched if kind == _USER_DEFINED]
        every = [spelling for spelling, _ in matched]
        # Three front doors to one model (the library counts references to a model, it does not copy it).
        self._plain = _front_door(model, pre, always)
        self._with_control = _front_door(model, pre, every)
        self._with_shield = _front_door(model, pre, every, drop_marks=True)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from a file's metadata (`GGUFFile.metadata`).

        Raises: UnsupportedTokenizer for another kind of tokenizer, or an unknown pre-tokenizer name;
            ModelFileError where vocabulary, kinds, merges or special ids disagree, with numbers, or a key is
            of another type than its own.
        """
        keys = FileKeys(metadata)
        kind = keys.text("tokenizer.ggml.model")
        if kind is None:
            raise ModelFileError("the file has no tokenizer (tokenizer.ggml.model is missing)")
        if kind != "gpt2":
            raise UnsupportedTokenizer(kind, ("gpt2",), what="tokenizer model")
        tokens = _texts(keys, "tokenizer.ggml.tokens")
        named = {name: _special_id(keys, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
        ends = (named["eos"], named["eot"], named["eom"])
        return cls(
            tokens,
            keys.whole_numbers("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens),
            _texts(keys, "tokenizer.ggml.merges"),
            # Files older than the key have none; llama.cpp reads those as this name too.
            pre_tokenizer=keys.text("tokenizer.ggml.pre") or "default",
            bos_token_id=named["bos"],
            eos_token_ids=frozenset(i for i in ends if i is not None),
            final_token_id=named["eos"] if keys.flag("tokenizer.ggml.add_eos_token") else None,
            add_bos=keys.flag("tokenizer.ggml.add_bos_token"),
        )

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, lossless: bool = False
    ) -> list[int]:
        """The token ids of `text`. Other threads run meanwhile: a megabyte takes a quarter of a second.

        add_special: put the model's first (and last) token around it where the file asks for them. Never
            doubled: a template that writes the first token itself has it once.
        parse_special: read spellings of control tokens as those tokens. Yes for what a chat template
            rendered, and for the prompt of a raw completion, whose writer stands where the template stands
            (llama.cpp and vLLM do so too). No for text that is only somebody's words. User-defined tokens
            are read either way. Marks set by `shield` go after control tokens are recognised.
        lossless: refuse a text with bytes the vocabulary has no token for; otherwise they are left out, which
            the log says once.
        Raises: InvalidText with the position of a lone surrogate; TextLost.
        """
        num_bytes = _length_in_bytes(text)
        door = self._plain
        if parse_special:
            door = self._with_shield if MARK in text else self._with_control
            num_bytes -= len(MARK.encode()) * text.count(MARK)
        # A batch of one: unlike `encode` it releases the GIL and keeps no offsets (1.8 times as fast).
        ids: list[int] = door.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._lacks_bytes and (lossless or not self._told_of_loss):
            self._look_for_loss(text, num_bytes, ids, lossless=lossless)
        if add_special:
            first, final = self._first_token_id, self._final_token_id
            if first is not None and ids[:1] != [first]:
                ids.insert(0, first)
            if final is not None and ids[-1:] != [final]:
                ids.append(final)
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD. Raises InvalidTokenId.

        skip_special: leave control tokens out; otherwise they appear as they are spelled.
        """
        piece = self.token_bytes if skip_special else self.spoken_bytes
        return b"".join(map(piece, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text: b"" if control, unknown or unused. Raises InvalidTokenId."""
        if not 0 <= token_id < self.vocab_size:
            raise InvalidTokenId(token_id, self.vocab_size)
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._work_out_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """One token as a person can read it, control tokens too; part of a character shows as U+FFFD.

        Raises InvalidTokenId.
        """
        return self.spoken_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, spelling: str) -> int | None:
        """The id whose spelling in the vocabulary is exactly `spelling`, or None."""
        found: int | None = self._plain.token_to_id(spelling)
        return found

    def is_control(self, token_id: int) -> bool:
        """Whether the token has no text of its own. Raises InvalidTokenId."""
        if not 0 <= token_id < self.vocab_size:
            raise InvalidTokenId(token_id, self.vocab_size)
        return self._kinds[token_id] in _HIDDEN_KINDS

    def spoken_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text in which control tokens appear as they are spelled."""
        return self._tokens[token_id].encode() if self.is_control(token_id) else self.token_bytes(token_id)

    def _work_out_bytes(self, token_id: int) -> bytes:
        kind, spelling = self._kinds[token_id], self._tokens[token_id]
        if kind in _HIDDEN_KINDS:
            return b""
        if kind == _BYTE and (match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", spelling)) is not None:
            return bytes.fromhex(match[1])
        if kind == _USER_DEFINED:
            return spelling.encode()  # spelled as it is, not in the byte alphabet
        spelled = spelled_bytes(spelling)
        return spelling.encode() if spelled is None else spelled

    def _ends_by_name(self, ids: Mapping[str, int]) -> set[int]:
        found = {name: ids[name] for name in _END_NAMES if name in ids}
        if "<|return|>" in found and "<|call|>" in found:
            found.pop("<|end|>", None)  # gpt-oss: ends one message of several inside an answer
        # A word of ordinary text that happens to be spelled so ends nothing.
        return {i for i in found.values() if self._kinds[i] in (_CONTROL, _USER_DEFINED)}

    def _look_for_loss(self, text: str, num_bytes: int, ids: Sequence[int], *, lossless: bool) -> None:
        """Refuse or say once that something was left out: the reference tokenizers do so without a word."""
        suspects = text.encode().translate(None, delete=self._has_bytes)
        if not suspects:
            return
        # A word may have a token though one of its bytes alone has none.
        lost = num_bytes - sum(len(self.spoken_bytes(token_id)) for token_id in ids)
        if lost and lossless:
            raise TextLost(lost, sorted(set(suspects)))
        if lost:
            self._told_of_loss = True
            _log.warning(
                "this vocabulary has no token for some characters; %d bytes of a prompt are left out, "
                "as other engines leave them out (said once)",
                lost,
            )


def _front_door(
    model: Model, pre: PreTokenizer, matched: Sequence[str], *, drop_marks: bool = False
) -> tokenizers.Tokenizer:
    """`model` behind a search for the spellings in `matched`, which become tokens before anything is cut."""
    from tokenizers import AddedToken, Tokenizer, normalizers

    door = Tokenizer(model)
    door.pre_tokenizer = pre
    if drop_marks:
        door.normalizer = normalizers.Replace(MARK, "")
    # normalized=False: searched for in the text as it came, before any mark is dropped.
    door.add_tokens([AddedToken(spelling, normalized=False) for spelling in matched])
    return door


def _ids_by_spelling(tokens: Sequence[str]) -> dict[str, int]:
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    ids.pop("", None)  # a hole in the numbering; there may be several
    holes = tokens.count("")
    if len(ids) + holes != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if token and ids[token] != number)
        raise ModelFileError(
            f"the vocabulary has {len(tokens)} tokens but only {len(ids) + holes} different ones: "
            f"{twice!r} appears twice"
        )
    return ids


def _merge_pairs(merges: Sequence[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    known = ids.__contains__
    # The whole list at once, in C: a quarter of a million merges must not cost a second at start.
    if (
        sum(map(len, pairs)) == 2 * len(pairs)
        and all(map(known, itertools.chain.from_iterable(pairs)))
        and all(map(known, map("".join, pairs)))
    ):
        return cast("list[tuple[str, str]]", pairs)
    for number, (merge, parts) in enumerate(zip(merges, pairs, strict=True)):
        if len(parts) != 2:
            raise ModelFileError(f"merge {number} of {len(merges)} ({merge!r}) is not two tokens and a space")
        if missing := [token for token in (*parts, "".join(parts)) if token not in ids]:
            raise ModelFileError(
                f"vocabulary and merges disagree: merge {number} of {len(merges)} ({merge!r}) needs "
                f"{missing[0]!r}, which is not among the {len(ids)} tokens of the vocabulary"
            )
    raise AssertionError("the merges failed the check of the list, and each passed its own")


def _special_id(keys: FileKeys, name: str, vocab_size: int) -> int | None:
    token_id = keys.token_id(name)
    if token_id is not None and not 0 <= token_id < vocab_size:
        raise ModelFileError(
            f"tokenizer.ggml.{name}_token_id is {token_id}, outside the vocabulary of {vocab_size} tokens"
        )
    return token_id


def _texts(keys: FileKeys, key: str) -> Sequence[str]:
    texts = keys.texts(key)
    if not texts:
        raise ModelFileError(f"{key} is missing or empty")
    return texts


def _length_in_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidText(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "it cannot be written as UTF-8"
        ) from None
