"""Sequences of tokens fed to a model in any pieces, their blocks scattered over the arena."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.kernels import Sampler
from octavo.kv.arena import Arena
from octavo.model.batch import RaggedBatch
from octavo.model.model import Model

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Piece:
    """Positions [start, start + num_tokens) of sequence `sequence`."""

    sequence: int
    start: int
    num_tokens: int


def ints(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


class PagedText:
    """Sequences with a block table each, and one model that computes pieces of them.

    Blocks are handed out in random order (`order` is the seed). Bytes that nobody has written are 0xFF, which
    makes halves and scales that are not numbers.
    shared: tokens of each text, whole blocks, that lie in the first text's blocks.
    """

    def __init__(
        self,
        model: Model,
        texts: Sequence[Sequence[int]],
        *,
        block_size: int = 16,
        dtype: str = "f16",
        order: int = 0,
        shared: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.texts = texts
        self.block_size = block_size
        adopted = [tokens // block_size for tokens in shared] or [0] * len(texts)
        counts = [-(-len(text) // block_size) - n for text, n in zip(texts, adopted, strict=True)]
        num_blocks = sum(counts) + 2
        ids = np.random.default_rng(order).permutation(num_blocks)
        self.tables: list[list[int]] = [table.tolist() for table in np.split(ids, np.cumsum(counts))[:-1]]
        for table, n in zip(self.tables, adopted, strict=True):
            table[:0] = self.tables[0][:n]
        self.layout = model.kv_layout(block_size, dtype)
        self.arena = Arena(self.layout.extent_bytes, num_blocks)
        self.memory()[:] = 0xFF
        self.use(model)

    def use(self, model: Model) -> None:
        """Go on with another model of the same file, on the same blocks."""
        self.model = model
        model.bind(self.layout, self.arena)

    def spoil_unused(self, ends: Sequence[int]) -> None:
        """0xFF to every block but those that hold the first `ends[i]` tokens of text i."""
        unused = np.ones(self.arena.num_blocks, dtype=np.bool_)
        for table, end in zip(self.tables, ends, strict=True):
            unused[table[: -(-end // self.block_size)]] = False
        self.memory()[unused] = 0xFF

    def memory(self) -> npt.NDArray[np.uint8]:
        """The arena itself: uint8[num_blocks, extent_bytes]."""
        raw = (ctypes.c_uint8 * self.arena.nbytes).from_address(self.arena.address)
        return np.ctypeslib.as_array(raw).reshape(self.arena.num_blocks, -1)

    def batch(self, pieces: Sequence[Piece], samplers: Sequence[Sampler | None] | None = None) -> RaggedBatch:
        tokens: list[int] = []
        tables: list[int] = []
        offsets = [0]
        for piece in pieces:
            end = piece.start + piece.num_tokens
            tokens += self.texts[piece.sequence][piece.start : end]
            tables += self.tables[piece.sequence][: -(-end // self.block_size)]
            offsets.append(len(tables))
        return RaggedBatch(
            token_ids=ints(tokens),
            chunk_starts=ints([piece.start for piece in pieces]),
            chunk_lens=ints([piece.num_tokens for piece in pieces]),
            block_table_offsets=ints(offsets),
            block_tables=ints(tables),
            samplers=[None] * len(pieces) if samplers is None else samplers,
        )

    def logits(self, *pieces: Piece) -> list[Floats]:
        """One step. Returns: for each piece float32[num_tokens, vocab_size]."""
        rows = self.model.logits(self.batch(pieces))
        return np.split(rows, np.cumsum([piece.num_tokens for piece in pieces])[:-1])

    def logits_in_chunks(self, size: int, sequence: int = 0) -> Floats:
        """A whole sequence, `size` tokens a step."""
        length = len(self.texts[sequence])
        return np.concatenate(
            [
                self.logits(Piece(sequence, start, min(size, length - start)))[0]
                for start in range(0, length, size)
            ]
        )
