"""Real English text of any length a test needs, which every Python has: its own language reference.

`pydoc_data.topics` holds what `help("import")` prints. Releases of Python differ in sentences here and
there, so numbers measured on this text are quoted with the release, and bounds have room.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pydoc_data.topics import topics

from octavo.text.tokenizer import Tokenizer

TOPICS = ("execmodel", "import", "objects", "compound")
"""The execution model, importing, objects, and compound statements: explained in sentences, not in tables."""

_UNDERLINE = re.compile(r"[*=~^\"-]{3,}")


def real_text() -> str:
    """Headings and paragraphs; examples of code, which are indented, are left out."""
    return "\n\n".join(paragraph for topic in TOPICS for paragraph in _paragraphs(topics[topic]))


def real_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first `count` tokens of it (SmolLM2, Python 3.11: there are about 11,500)."""
    tokens = tokenizer.encode(real_text())
    assert len(tokens) >= count, f"the text has {len(tokens):,} tokens, {count:,} are wanted"
    return tokens[:count]


def _paragraphs(topic: str) -> Iterator[str]:
    for paragraph in topic.split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        words = " ".join(line for line in lines if not _UNDERLINE.fullmatch(line)).split()
        if words and not lines[0].startswith(" "):
            yield " ".join(words)
