"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.api.openai.choices import PlacedLogprobs
from octavo.api.openai.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a probability of zero: JSON has no infinity."""


def chat_logprobs(placed: Sequence[PlacedLogprobs], tokenizer: Tokenizer) -> ChatLogprobs:
    content = []
    for (token_id, logprob, top), _ in placed:
        name, raw = _name(token_id, tokenizer)
        content.append(TokenLogprob(name, _finite(logprob), raw, [_top(*item, tokenizer) for item in top]))
    return ChatLogprobs(content)


def completion_logprobs(placed: Sequence[PlacedLogprobs], tokenizer: Tokenizer) -> CompletionLogprobs:
    shape = CompletionLogprobs([], [], [], [])
    for (token_id, logprob, top), offset in placed:
        name, _ = _name(token_id, tokenizer)
        shape.tokens.append(name)
        shape.token_logprobs.append(_finite(logprob))
        likely = {_name(other, tokenizer)[0]: _finite(value) for other, value in top}
        shape.top_logprobs.append(likely | {name: _finite(logprob)})
        shape.text_offset.append(offset)
    return shape


def _top(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    name, raw = _name(token_id, tokenizer)
    return TopLogprob(name, _finite(logprob), raw)


def _name(token_id: int, tokenizer: Tokenizer) -> tuple[str, list[int] | None]:
    """A token's text and bytes. A token that is part of a character is written as its bytes, as OpenAI
    does.
    """
    raw = tokenizer.token_bytes(token_id)
    if not raw:
        return tokenizer.token_text(token_id), None
    try:
        return raw.decode(), list(raw)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
