"""Typed access to the `tokenizer.*` keys of a model file, with faults that name key and value."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.model.errors import ModelFileError


class FileKeys:
    """The metadata of one file (`GGUFFile.metadata`). A key that is there is of its type, or the file is
    refused: what a converter wrote wrongly once may be wrong elsewhere too.

    Every getter raises ModelFileError.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def text(self, key: str) -> str | None:
        value = self._metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise _fault(key, value, "a text")
        return value

    def flag(self, key: str) -> bool | None:
        value = self._metadata.get(key)
        if value is not None and not isinstance(value, bool):
            raise _fault(key, value, "true or false")
        return value

    def texts(self, key: str) -> Sequence[str] | None:
        return self._list(key, str, "a list of texts")

    def whole_numbers(self, key: str) -> Sequence[int] | None:
        return self._list(key, int, "a list of whole numbers")

    def token_id(self, name: str) -> int | None:
        """`tokenizer.ggml.NAME_token_id`, which may still lie outside the vocabulary."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._metadata.get(key)
        if value is not None and type(value) is not int:  # a bool is an int to isinstance
            raise _fault(key, value, "a token id")
        return value

    def _list(self, key: str, kind: type, what: str) -> list[Any] | None:
        value = self._metadata.get(key)
        # In C for a quarter of a million tokens, and exact: a list of booleans holds no numbers.
        if value is not None and (not isinstance(value, list) or set(map(type, value)) - {kind}):
            raise _fault(key, value, what)
        return value


def _fault(key: str, value: object, what: str) -> ModelFileError:
    return ModelFileError(f"{key} is {reprlib.repr(value)}, not {what}")
