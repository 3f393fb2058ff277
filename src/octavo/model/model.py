"""A loaded model: weights packed, network recorded, ready to be bound to an arena and stepped."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.kernels import Program, Sampled, ThreadPool, WeightStore
from octavo.kernels.threads import default_num_threads
from octavo.kv.arena import Arena
from octavo.kv.layout import KVLayout
from octavo.model.available_memory import MemoryRefused, available_memory, format_bytes
from octavo.model.batch import RaggedBatch
from octavo.model.config import ModelConfig
from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile
from octavo.model.llama import record_llama
from octavo.model.network import Network
from octavo.model.weights import Weights, packed_bytes

ROW_TILE = 256
"""Tokens that pass through the network together; activation buffers have this many rows."""

ARCHITECTURES: Mapping[str, Callable[[ModelConfig, Weights, Network], None]] = {"llama": record_llama}


class Model:
    """One model on one thread pool. `step` may be called by one thread at a time."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        metadata: Mapping[str, Any],
        program: Program,
        store: WeightStore,
        num_threads: int,
    ) -> None:
        self.path = path
        self.config = config
        self.metadata = metadata
        self.num_threads = num_threads
        self.weight_bytes = store.used_bytes
        self._program: Program | None = program
        self._arena: Arena | None = None
        self._kv_row_bytes = 0

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        num_threads: int | None = None,
        instruction_set: str | None = None,
    ) -> Model:
        """Read, repack and record a GGUF file.

        num_threads: of a step, the calling thread included; None fits the machine.
        instruction_set: a name of `octavo.kernels.available_instruction_sets()`; None takes the best.
        Raises: ModelFileError for a file that cannot be served; MemoryRefused, before anything is packed, for
        weights larger than the available memory; ValueError for an instruction set or a number of threads
        that cannot be had.
        """
        with GGUFFile(path) as file:
            config = ModelConfig.from_gguf(file)
            threads = default_num_threads() if num_threads is None else num_threads
            pool = _thread_pool(threads)
            _refuse_too_large(file)
            program = Program(pool, instruction_set or "", ROW_TILE)
            store = WeightStore(packed_bytes(file))
            weights = Weights(file, store, pool)
            try:
                ARCHITECTURES[config.architecture](config, weights, Network(program, weights))
            except ValueError as fault:  # a shape that the kernels do not have
                raise ModelFileError(f"{file.path}: {fault}") from None
            weights.refuse_unread()
            file.drop_pages()  # the header's, and what was mapped around tensors
            return cls(file.path, config, file.metadata, program, store, threads)

    @property
    def buffer_bytes(self) -> int:
        """Activations, logits and scratch of a step, in bytes."""
        return self._loaded().buffer_bytes

    @property
    def instruction_set(self) -> str:
        return self._loaded().instruction_set

    @property
    def shared_prefix_attention(self) -> bool:
        """Whether sequences of a step with equal first blocks have them read once for all. It changes no
        byte of what is computed; may be set between steps."""
        return self._loaded().shared_prefix_attention

    @shared_prefix_attention.setter
    def shared_prefix_attention(self, on: bool) -> None:
        self._loaded().shared_prefix_attention = on

    @property
    def attention_kv_bytes_read(self) -> int:
        """Keys and values that attention has read since `bind`, in bytes."""
        return self._loaded().kv_rows_read * self._kv_row_bytes

    @property
    def attention_kv_bytes_attended(self) -> int:
        """What it would have read if every sequence had read all of its own, in bytes since `bind`."""
        return self._loaded().kv_rows_attended * self._kv_row_bytes

    def kv_layout(self, block_size: int = 16, dtype: str = "f16") -> KVLayout:
        """How a block of this model's KV lies in memory.

        dtype: one of `octavo.kv.layout.KV_DTYPES`.
        Raises: ValueError for a block size or a type that does not exist.
        """
        return KVLayout(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_size=block_size,
            dtype=dtype,
        )

    def bind(self, layout: KVLayout, arena: Arena) -> None:
        """Use this arena's blocks from the next step on.

        Raises: ValueError for a block size the kernels do not have or an extent that is too small.
        """
        program = self._loaded()
        program.bind(arena.address, arena.extent_bytes, arena.num_blocks, layout.block_size, layout.dtype)
        self._arena = arena  # its memory must outlive every step
        self._kv_row_bytes = layout.row_bytes

    def step(self, batch: RaggedBatch) -> list[Sampled | None]:
        """Compute every chunk and sample: one native call, the interpreter lock released.

        Returns: for each sequence a Sampled where it has a sampler (token_id -1: no token could be drawn),
        else None.
        Raises: ValueError, before any work, for a batch that does not fit the model or the arena.
        """
        return self._loaded().step(
            batch.token_ids,
            batch.chunk_starts,
            batch.chunk_lens,
            batch.block_table_offsets,
            batch.block_tables,
            batch.samplers,
        )

    def logits(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        """The step with the logits of every row, float32[num_tokens, vocab_size], and nothing sampled."""
        return self._loaded().logits_of_all_rows(
            batch.token_ids,
            batch.chunk_starts,
            batch.chunk_lens,
            batch.block_table_offsets,
            batch.block_tables,
        )

    def drop_metadata(self) -> None:
        """Forget the file's metadata, once tokenizer and chat template are made: nobody else reads it, and
        the merges alone of a large vocabulary are tens of megabytes.
        """
        self.metadata = {}

    def close(self) -> None:
        """Give weights, buffers and threads back; idempotent. The arena stays its owner's."""
        self._program = None
        self._arena = None

    def _loaded(self) -> Program:
        if self._program is None:
            raise RuntimeError("the model is closed")
        return self._program


def _thread_pool(num_threads: int) -> ThreadPool:
    """Raises: ValueError that names the parameter, also where the system has no such number of threads."""
    try:
        return ThreadPool(num_threads)
    except (ValueError, RuntimeError) as fault:
        raise ValueError(f"num_threads {num_threads:,} cannot be had: {fault}") from fault


def _refuse_too_large(file: GGUFFile) -> None:
    """Raises: MemoryRefused where the packed weights cannot fit beside what already runs on this machine."""
    needed, available = packed_bytes(file), available_memory()
    if needed > available:
        raise MemoryRefused(
            f"{file.path}: the weights need {format_bytes(needed)}, "
            f"but {format_bytes(available)} are available",
            needed=needed,
            available=available,
        )
