"""How the values of flags are read, and how the engine's words for them become flags again."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable


def count(text: str) -> int:
    """A whole number of at least 1. Raises argparse.ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def whole(text: str) -> int:
    """A whole number, 0 included. Raises argparse.ArgumentTypeError."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 0")
    return int(text)


def milliseconds(text: str) -> float:
    """A number above 0. Raises argparse.ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of milliseconds above 0")
    return value


def byte_count(text: str) -> int:
    """`2GiB`, `512MiB`, `1.5GB` or a number of bytes. Raises argparse.ArgumentTypeError."""
    from octavo.engine.memory import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


MODEL_FIELDS = ("num_threads",)
"""What `Model.load` calls the flags it is given."""

_SHORTER = {"num_threads": "threads"}
"""Fields whose flag is not spelled as they are."""


def flag_of(field: str) -> str:
    """max_model_len -> --max-model-len"""
    return f"--{_SHORTER.get(field, field).replace('_', '-')}"


def in_flags(sentence: str, fields: Iterable[str]) -> str:
    """What the engine says about its `fields`, in the words of somebody who typed flags."""
    return re.sub(rf"\b({'|'.join(fields)})\b", lambda field: flag_of(field[0]), sentence)
