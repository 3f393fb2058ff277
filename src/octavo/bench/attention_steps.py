"""Steps that do nothing but attention, over keys and values that fill memory as a pool fills it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

from octavo.bench.recorded import Ints, RecordedProgram, chunks_without_kv
from octavo.kernels import Program, ThreadPool
from octavo.kv.arena import Arena
from octavo.kv.layout import KVLayout

BLOCK_SIZE = 16

_FEWEST_LAYERS = 4
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one layer, and how many layers lie in a block between its first and its last byte."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int

    def layout(self, kv_dtype: str, block_size: int = BLOCK_SIZE) -> KVLayout:
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_size, kv_dtype)

    def token_bytes(self, kv_dtype: str) -> int:
        """Keys and values of one token in one layer."""
        return self.num_kv_heads * self.layout(kv_dtype).row_bytes

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class Room:
    """How many keys and values a case takes.

    cold_bytes: what pushes itself out of every cache when read in turn. most_bytes: of one case.
    """

    cold_bytes: int
    most_bytes: int

    def layers(self, num_layers: int, layer_bytes: int) -> int:
        """Of the model's, those that a step attends: enough to be cold when the next step comes, and four
        where that is less, as far as there is room. 0 where there is none for one."""
        wanted = max(-(-self.cold_bytes // layer_bytes), _FEWEST_LAYERS)
        return min(wanted, self.most_layers(num_layers, layer_bytes))

    def shared_by(self, count: int) -> Room:
        """What each of `count` may take of it."""
        return Room(self.cold_bytes, self.most_bytes // count)

    def most_layers(self, num_layers: int, layer_bytes: int) -> int:
        """Of the model's, as many as there is room for."""
        return min(num_layers, self.most_bytes // layer_bytes)

    def sets(self, step_bytes: int) -> int:
        """Short contexts fit a cache even over all layers: so many sets of sequences do not."""
        return -(-self.cold_bytes // step_bytes)

    def refusal(self, case: str, layer_bytes: int) -> str:
        """Why it is not measured, a sentence."""
        mib = 1 << 20
        return (
            f"{case}: keys and values of one layer are {layer_bytes / mib:,.1f} MiB, "
            f"{self.most_bytes / mib:,.1f} are allowed"
        )


class StoredKV:
    """Keys and values in the first `layers` layers of `num_blocks` blocks of a pool; the other layers' pages
    stay untouched."""

    def __init__(self, shape: AttentionShape, kv_dtype: str, layers: int, num_blocks: int) -> None:
        self.layout = shape.layout(kv_dtype)
        self.num_blocks = num_blocks
        self.arena = Arena(self.layout.extent_bytes, num_blocks)
        blocks = bytes_at(self.arena.address, self.arena.nbytes).reshape(num_blocks, -1)
        written = layers * self.layout.layer_bytes
        blocks[:, :written] = numbers(written)

    def __enter__(self) -> StoredKV:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.arena.close()

    def scattered(self) -> Ints:
        """Every block's id, as a pool hands them out that has been in use for long: in any order."""
        return scattered(self.num_blocks)


def scattered(num_blocks: int) -> Ints:
    """All ids, in an order drawn at random."""
    return np.random.default_rng(num_blocks).permutation(num_blocks).astype(np.int32)


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory of somebody who outlives this view of it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def fill(address: int, nbytes: int) -> None:
    """Memory with `numbers`."""
    piece = numbers(min(nbytes, _PIECE_BYTES))
    for at in range(0, nbytes, _PIECE_BYTES):
        count = min(_PIECE_BYTES, nbytes - at)
        bytes_at(address + at, count)[:] = piece[:count]


def numbers(nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes that are keys and values in any layout: 59 to 61 as int8, 0.9 to 1.4 as f16, 0.002 to 0.05 as the
    float scales of q8."""
    distinct = np.random.default_rng(0).integers(59, 62, min(nbytes, _PIECE_BYTES), dtype=np.uint8)
    return np.resize(distinct, nbytes)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What a step computes: the last `tokens` of each of `streams` sequences of `context` tokens, they
    included."""

    streams: int
    context: int
    tokens: int = 1

    def __str__(self) -> str:
        return f"{self.streams} x {self.context:,} tokens"

    @property
    def pairs(self) -> int:
        """Of a new token and one it sees."""
        return self.streams * (self.tokens * self.context - self.tokens * (self.tokens - 1) // 2)

    def layer_bytes(self, shape: AttentionShape, kv_dtype: str) -> int:
        """Keys and values of all sequences in one layer."""
        return self.streams * self.context * shape.token_bytes(kv_dtype)

    def blocks_each(self, block_size: int = BLOCK_SIZE) -> int:
        return -(-self.context // block_size)

    def num_blocks(self, block_size: int = BLOCK_SIZE) -> int:
        """Of all, where each sequence has its own."""
        return self.streams * self.blocks_each(block_size)

    def chunks(self, block_size: int, times: int = 1) -> tuple[Ints, Ints, Ints]:
        """chunk_starts, chunk_lens and block_table_offsets of a step that has them so many times."""
        count = times * self.streams
        return (
            np.full(count, self.context - self.tokens, dtype=np.int32),
            np.full(count, self.tokens, dtype=np.int32),
            np.arange(count + 1, dtype=np.int32) * np.int32(self.blocks_each(block_size)),
        )


class AttentionSteps:
    """Steps of `layers` layers, each of which stores the new tokens' keys and values and attends."""

    def __init__(self, pool: ThreadPool, instruction_set: str, shape: AttentionShape, layers: int) -> None:
        def record(program: Program, qkv: int) -> None:
            out = program.buffer(shape.num_heads * shape.head_dim)
            for _ in range(layers):
                program.attention(qkv, out, shape.num_heads, shape.num_kv_heads, shape.head_dim)

        self.layers = layers
        self.program = RecordedProgram(pool, instruction_set, shape.qkv_width, record)
        self._empty = RecordedProgram(pool, instruction_set, shape.qkv_width)
        self._empty.bind_nothing()

    def seconds(self, kv: StoredKV, new: NewTokens, tables: Ints) -> float:
        """Of a whole step. tables: of the sequences in order, each of `blocks_each` ids."""
        layout = kv.layout
        self.program.bind(kv.arena.address, layout.extent_bytes, kv.num_blocks, BLOCK_SIZE, layout.dtype)
        return self.program.seconds(*new.chunks(BLOCK_SIZE), tables)

    def seconds_without(self, new: NewTokens) -> float:
        """Of a step that embeds as many tokens and attends nothing."""
        return self._empty.seconds(*chunks_without_kv(new.streams * new.tokens))
