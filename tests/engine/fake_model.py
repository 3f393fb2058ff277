"""A model without weights whose answers betray every mistake of paging, sharing, rolling back or sampling.

The "KV" of a token is a hash of the token, its position and *all* KV before it, written to the arena through
the block table; the next token is a hash of everything read back through it. A block that is wrong, stale,
overwritten or out of order therefore changes the answer, and `answer` says what is right without any paging
at all.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from octavo.engine.engine import Engine, EngineConfig
from octavo.engine.memory_pressure import PressureSources
from octavo.kv.arena import Arena
from octavo.kv.layout import KVLayout
from octavo.model.batch import RaggedBatch
from octavo.model.config import ModelConfig

if TYPE_CHECKING:
    from octavo.kernels import Sampled

VOCAB_SIZE = 1000
_MASK = (1 << 64) - 1
_POSITION = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """splitmix64's finaliser (Steele et al. 2014): every input bit reaches every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_all(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _written(token_id: int, position: int, before: int) -> int:
    return _mix((token_id * 0xD1B54A32D192ED03 + position * _POSITION + before) & _MASK)


def _read(kv: npt.NDArray[np.uint64]) -> int:
    """What a reader makes of the KV of positions 0, 1, ...: sensitive to each value and to its place."""
    positions = np.arange(1, len(kv) + 1, dtype=np.uint64) * np.uint64(_POSITION)
    return int(_mix_all(kv ^ positions).sum(dtype=np.uint64))


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that follow `prompt`, computed with no blocks, no chunks and no engine."""
    kv: list[int] = []
    total = 0

    def append(token_id: int) -> int:
        value = _written(token_id, len(kv), total)
        kv.append(value)
        return (total + _mix(value ^ ((len(kv) * _POSITION) & _MASK))) & _MASK

    for token_id in prompt:
        total = append(token_id)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(_mix(total) % VOCAB_SIZE)
        total = append(tokens[-1])
    return tokens


@dataclass(frozen=True)
class FakeSampled:
    """What `Model.step` returns for a sampled row."""

    token_id: int
    logprob: float = -0.5
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class StepRecord:
    """One step as the model saw it: (start, length) of each chunk, and which of them sampled."""

    chunks: list[tuple[int, int]]
    samples: list[bool]

    @property
    def num_tokens(self) -> int:
        return sum(length for _, length in self.chunks)


class FakeModel:
    """`Model`'s surface over the hash above.

    before_step: called with every batch before anything is written; raise in it to fail the step.
    after_step: called after the writes; raise in it to fail a step that has already spoiled its blocks.
    tokens: replaces what a row would sample: called with (row, token) and returns the token to report.
    """

    def __init__(self, *, context_length: int = 8192) -> None:
        self.config = ModelConfig(
            architecture="llama",
            name="fake",
            num_layers=1,
            hidden_size=16,
            intermediate_size=16,
            num_heads=1,
            num_kv_heads=1,
            head_dim=16,
            vocab_size=VOCAB_SIZE,
            context_length=context_length,
            rms_norm_eps=1e-5,
            rope_dim=16,
            rope_freq_base=10000.0,
            rope_scaling_type="none",
            rope_scaling_factor=1.0,
            rope_original_context=context_length,
            rope_attn_factor=1.0,
            rope_beta_fast=32.0,
            rope_beta_slow=1.0,
            tie_word_embeddings=True,
        )
        self.weight_bytes = 1 << 20
        self.buffer_bytes = 1 << 16
        self.shared_prefix_attention = True
        self.attention_kv_bytes_read = 0
        self.attention_kv_bytes_attended = 0
        self.steps: list[StepRecord] = []
        self.before_step: Callable[[RaggedBatch], None] | None = None
        self.after_step: Callable[[RaggedBatch], None] | None = None
        self.tokens: Callable[[int, int], int] | None = None
        self._permits: threading.Semaphore | None = None
        self._arrived = threading.Semaphore(0)
        self._stands = False
        self._layout = self.kv_layout()
        self._store = np.empty(0, dtype=np.uint64)

    def kv_layout(self, block_size: int = 16, dtype: str = "f16") -> KVLayout:
        return KVLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=block_size, dtype=dtype)

    def bind(self, layout: KVLayout, arena: Arena) -> None:
        self._layout = layout
        self.attention_kv_bytes_read = self.attention_kv_bytes_attended = 0
        memory = (ctypes.c_uint64 * (arena.nbytes // 8)).from_address(arena.address)
        self._store = np.ctypeslib.as_array(memory)

    # --- stopping the engine between two steps ----------------------------------------------------

    def gate(self) -> None:
        """From now on every step waits for `let`."""
        self._permits = threading.Semaphore(0)

    def let(self, count: int = 1) -> None:
        """Let `count` steps pass, and come back when the last of them is under way."""
        assert self._permits is not None
        for _ in range(count):
            self.arrive()
            self._stands = False
            self._permits.release()

    def arrive(self) -> None:
        """Come back when the engine stands before a step, its batch built."""
        if not self._stands:
            assert self._arrived.acquire(timeout=20), "the engine has nothing to step"
        self._stands = True

    @property
    def gated(self) -> bool:
        return self._permits is not None

    def open(self) -> None:
        """Let every step pass again."""
        permits, self._permits = self._permits, None
        assert permits is not None
        permits.release()

    # --- the step ---------------------------------------------------------------------------------

    def step(self, batch: RaggedBatch) -> list[Sampled | None]:
        permits = self._permits
        if permits is not None:
            self._arrived.release()
            assert permits.acquire(timeout=20), "nobody lets the step pass"
        if self.before_step is not None:
            self.before_step(batch)
        assert batch.token_ids.dtype == batch.block_tables.dtype == np.int32
        sampled: list[FakeSampled | None] = []
        written: set[int] = set()
        seen: list[npt.NDArray[np.int64]] = []
        offset = 0
        for row, sampler in enumerate(batch.samplers):
            start, length = int(batch.chunk_starts[row]), int(batch.chunk_lens[row])
            table = batch.block_tables[batch.block_table_offsets[row] : batch.block_table_offsets[row + 1]]
            token_ids = batch.token_ids[offset : offset + length].tolist()
            offset += length
            slots = self._slots(table, start + length)
            seen.append(slots)
            total = self._write(slots, start, token_ids, written)
            token_id = _mix(total) % VOCAB_SIZE
            if self.tokens is not None:
                token_id = self.tokens(row, token_id)
            sampled.append(FakeSampled(token_id) if sampler is not None else None)
        assert offset == len(batch.token_ids)
        self._count_reads(np.concatenate(seen))
        if self.after_step is not None:
            self.after_step(batch)
        self.steps.append(
            StepRecord(
                list(zip(batch.chunk_starts.tolist(), batch.chunk_lens.tolist(), strict=True)),
                [sampler is not None for sampler in batch.samplers],
            )
        )
        return cast("list[Sampled | None]", sampled)

    def _slots(self, table: npt.NDArray[np.int32], num_tokens: int) -> npt.NDArray[np.int64]:
        """Where the KV of each position lies."""
        positions = np.arange(num_tokens)
        size, words = self._layout.block_size, self._layout.extent_bytes // 8
        return table[positions // size].astype(np.int64) * words + positions % size

    def _count_reads(self, slots: npt.NDArray[np.int64]) -> None:
        """slots: all that the chunks of a step have seen; sharing reads one that several see once."""
        read = len(np.unique(slots)) if self.shared_prefix_attention else len(slots)
        self.attention_kv_bytes_read += read * self._layout.row_bytes
        self.attention_kv_bytes_attended += len(slots) * self._layout.row_bytes

    def _write(
        self, slots: npt.NDArray[np.int64], start: int, token_ids: list[int], written: set[int]
    ) -> int:
        """Store a chunk and read the whole context back; what the reader makes of it."""
        total = _read(self._store[slots[:start]])
        for position, token_id in enumerate(token_ids, start):
            slot = int(slots[position])
            assert slot not in written, f"slot {slot} is written twice in one step"
            written.add(slot)
            value = _written(token_id, position, total)
            self._store[slot] = value
            total = (total + _mix(value ^ (((position + 1) * _POSITION) & _MASK))) & _MASK
        return _read(self._store[slots])


@dataclass(frozen=True)
class FakeTokenizer:
    """The only thing the engine asks of a tokenizer."""

    eos_token_ids: frozenset[int] = frozenset()


@contextmanager
def running_engine(
    model: FakeModel | None = None,
    *,
    eos: frozenset[int] = frozenset(),
    block_order: Sequence[int] | None = None,
    start: bool = True,
    pressure: PressureSources | None = None,
    **config: int | float | bool | str | None,
) -> Iterator[Engine]:
    """An engine over a fake model, closed at the end: a leaked block fails the test that leaked it."""
    config.setdefault("num_blocks_override", 256)
    engine = Engine(
        model if model is not None else FakeModel(),
        FakeTokenizer(eos),
        EngineConfig(**config),  # type: ignore[arg-type]
        block_order=block_order,
        pressure=pressure,
    )
    if start:
        engine.start()
    try:
        yield engine
    finally:
        engine.close()
