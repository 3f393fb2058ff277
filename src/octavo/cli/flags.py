"""How the values of flags are read, and how the engine's words for them become flags again."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def count(text: str) -> int:
    """A whole number of at least 1. Raises argparse.ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def byte_count(text: str) -> int:
    """`2GiB`, `512MiB`, `1.5GB` or a number of bytes. Raises argparse.ArgumentTypeError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 2GiB, 512MiB or 1073741824")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


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
