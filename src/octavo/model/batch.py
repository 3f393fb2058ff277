"""What one step computes, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from octavo.kernels import Sampler


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Chunks of several sequences, back to back, prompts and single tokens alike.

        token_ids            | a a a a | b | c c |      [num_tokens]
        chunk_lens             4         1   2          [num_seqs]
        block_table_offsets  0         3   7     9      [num_seqs + 1]
        block_tables         | a a a | b b b b | c c |  [sum of the tables' lengths]

    A chunk may read blocks that an earlier chunk of the same batch writes.
    """

    token_ids: npt.NDArray[np.int32]
    chunk_starts: npt.NDArray[np.int32]
    """[num_seqs] absolute position of each chunk's first token."""
    chunk_lens: npt.NDArray[np.int32]
    block_table_offsets: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    samplers: Sequence[Sampler | None]
    """[num_seqs] one where the chunk's last row is to be sampled."""
