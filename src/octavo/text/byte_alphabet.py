"""GPT-2's byte alphabet: every byte written as one printable character, so that BPE can work on text.

A byte that prints stands for itself; the other 68 are written as U+0100, U+0101, ... in order. The space is
`Ġ` (U+0120), the newline `Ċ`. Source: Radford et al. 2019, `bytes_to_unicode` in the GPT-2 release.
"""

from __future__ import annotations

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(byte for byte in range(256) if byte not in _PRINTABLE)

CHARACTER_OF_BYTE: tuple[str, ...] = tuple(
    chr(256 + _HIDDEN.index(byte)) if byte in _HIDDEN else chr(byte) for byte in range(256)
)
"""256 strings of one character: how byte `i` is spelled in a vocabulary."""

_TO_LATIN1 = {ord(character): byte for byte, character in enumerate(CHARACTER_OF_BYTE)}
_LETTERS = frozenset(CHARACTER_OF_BYTE)


def spelled_bytes(spelling: str) -> bytes | None:
    """The bytes that a vocabulary entry spells, or None where it uses a character outside the alphabet."""
    if not _LETTERS.issuperset(spelling):
        return None
    return spelling.translate(_TO_LATIN1).encode("latin-1")
