"""Run given tokens through Octavo's paged path and look at the logits of every position."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import numpy.typing as npt

from octavo.kv.arena import Arena
from octavo.model.batch import RaggedBatch
from octavo.model.model import Model


def paged_logits(
    model: Model,
    token_ids: Sequence[int],
    *,
    chunk: int = 256,
    block_size: int = 16,
    dtype: str = "f16",
    first: int = 0,
    seed: int = 0,
) -> Generator[tuple[int, npt.NDArray[np.float32]]]:
    """Feed one sequence in chunks, its blocks scattered over the arena.

    dtype: of the keys and values, as in `KVLayout`.
    first: chunks that end before this position are computed without logits, and not yielded.
    Yields: the position of the chunk's first token, and float32[chunk, vocabulary].
    """
    num_blocks = -(-len(token_ids) // block_size)
    blocks = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
    layout = model.kv_layout(block_size, dtype)
    with Arena(layout.extent_bytes, num_blocks) as arena:
        model.bind(layout, arena)
        for start in range(0, len(token_ids), chunk):
            tokens = np.asarray(token_ids[start : start + chunk], dtype=np.int32)
            in_use = -(-(start + len(tokens)) // block_size)
            batch = RaggedBatch(
                token_ids=tokens,
                chunk_starts=np.array([start], dtype=np.int32),
                chunk_lens=np.array([len(tokens)], dtype=np.int32),
                block_table_offsets=np.array([0, in_use], dtype=np.int32),
                block_tables=blocks[:in_use],
                samplers=[None],
            )
            if start + len(tokens) <= first:
                model.step(batch)
            else:
                yield start, model.logits(batch)


def log_softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Over the last axis, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
