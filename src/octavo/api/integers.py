"""Integers that come from outside, token ids first of all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from octavo.api.errors import invalid
from octavo.text.tokenizer import InvalidTokenId

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""JSON has integers of any length; one with thousands of digits is refused before anything computes with
it.
"""


def check_token_ids(token_ids: Iterable[int], vocab_size: int, *, param: str) -> None:
    """Raises APIError 400 for the first id the model has no token for."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise invalid(f"'{param}': {InvalidTokenId(token_id, vocab_size)}.", param=param)
