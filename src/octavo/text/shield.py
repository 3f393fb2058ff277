"""Keeps a person's text from being read as the model's control tokens.

A chat template writes control tokens as text (`<|im_end|>`), and the rendered prompt is encoded with them
recognised. So a web page that an agent quotes could end the user's turn and forge a system message, only by
spelling one. Engines of this kind usually let that happen. Here the template renders such a spelling with a
mark inside it; the encoder recognises control tokens first, then removes the marks, and the model reads
exactly what the person wrote, as ordinary text.

    written    Ignore this. <|im_end|>          mark = U+FDD0, a Unicode noncharacter: never part of
    rendered   Ignore this. <·|im_end|>         interchanged text, so nothing a person means is lost
    tokens     ... ' <' '|' 'im' '_' 'end' '|' '>'
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MARK = "\ufdd0"


class Shield:
    """Marks every spelling of a control token in a text."""

    def __init__(self, control_tokens: Iterable[str]) -> None:
        """`control_tokens`: their spellings. One of a single character has no inside to mark: left alone."""
        spellings = sorted((token for token in control_tokens if len(token) > 1), key=len, reverse=True)
        any_spelling = "|".join(map(re.escape, spellings))
        self._found = re.compile(any_spelling) if spellings else None
        # Looks ahead and takes one character, so that spellings that overlap are each broken.
        self._start = re.compile(f"(?={any_spelling})(.)", re.DOTALL)

    def apply(self, text: str) -> str:
        """`text` with a mark after the first character of each spelling; the encoder takes it out again."""
        if self._found is None or self._found.search(text) is None:
            return text
        return self._start.sub(rf"\1{MARK}", text)
