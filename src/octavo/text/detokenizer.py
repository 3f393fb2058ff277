"""Tokens to text while they arrive, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from octavo.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing answer.

    A token is bytes, and a character may need several tokens. Bytes that may still become a character are
    held; bytes that cannot are U+FFFD at once. So the pieces always join to exactly `Tokenizer.decode` of all
    tokens, however they are cut.

        tokens   f0 9f | 98 | 80 21
        add()    ""    | "" | "😀!"
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete. Raises InvalidTokenId and takes nothing."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        """What was held, as U+FFFD: nothing more will come. The detokenizer is then as new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
