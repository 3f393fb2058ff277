"""Steps whose keys and values lie wherever one likes, all in the same memory.

A recorded model finds layer l of a block l layers after the block's first byte, however its tables look. So
that a layer can have a buffer of its own, a step here is one of a program of one layer, in which each layer
of the model is a row tile of its own, with its own tables:

    paged        | block 0: layer 0 | layer 1 | ... | block 1: layer 0 | layer 1 | ... |
    contiguous   | layer 0: block 0 | block 1 | ... | layer 1: block 0 | block 1 | ... |

Loops over threads and layers in turn are those of a model's step, in one native call. A tile has an embedding
and a plan of its own, which a model's layers do not: beside the same blocks attended by recorded layers this
took 1 to 9 % longer, on all sides, so an excess of 3 % may be one of 3.3. (A call for each layer would add
the time in which sleeping threads wake up, which is more, and would make any ratio look better.)

The same memory, because it matters which: on a virtual machine two copies of the same buffer, read by the
same kernel, were up to 18 % apart. A step goes through more of it than the caches hold, so nobody finds what
another has read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.bench.attention_steps import AttentionShape, NewTokens, Room
from octavo.bench.recorded import Ints, RecordedProgram, chunks_without_kv
from octavo.kernels import Program, ThreadPool
from octavo.kv.layout import CACHE_ALIAS_BYTES, PAGE_BYTES

_LINE_BYTES = 64


def pool_layers(shape: AttentionShape, kv_dtype: str, new: NewTokens, room: Room) -> int:
    """Of the model's, as many as there is room for, but no multiple of 16: so many places of whole pages are
    always a multiple of 64 KiB, which no extent is."""
    layers = room.most_layers(shape.num_layers, new.layer_bytes(shape, kv_dtype))
    return layers - 1 if layers and layers % 16 == 0 else layers


@dataclass(frozen=True, slots=True)
class Places:
    """Where block i of layer l lies: in place l * of_layer + i * of_block, of place_bytes each."""

    kv_dtype: str
    block_size: int
    num_blocks: int
    layers: int
    place_bytes: int
    of_layer: int
    of_block: int

    @classmethod
    def paged(
        cls, shape: AttentionShape, kv_dtype: str, block_size: int, num_blocks: int, layers: int
    ) -> Places:
        """The extents of a pool for so many layers, which `pool_layers` has counted.

        A pool pads extents so that they are not multiples of 64 KiB. Here every place is padded, or none: by
        a page where layers are whole pages, so that those of a pool begin where pages do, else by a line.
        """
        place = block_size * shape.token_bytes(kv_dtype)
        padding = _LINE_BYTES if place % PAGE_BYTES else PAGE_BYTES
        while layers * place % CACHE_ALIAS_BYTES == 0:
            place += padding
        return cls(kv_dtype, block_size, num_blocks, layers, place, of_layer=1, of_block=layers)

    @classmethod
    def contiguous(
        cls, shape: AttentionShape, kv_dtype: str, block_size: int, num_blocks: int, layers: int
    ) -> Places:
        """A buffer for each layer, its blocks one behind the other."""
        place = block_size * shape.token_bytes(kv_dtype)
        return cls(kv_dtype, block_size, num_blocks, layers, place, of_layer=num_blocks, of_block=1)

    @property
    def num_places(self) -> int:
        return self.layers * self.num_blocks

    @property
    def nbytes(self) -> int:
        return self.num_places * self.place_bytes

    def of(self, ids: Ints) -> Ints:
        """The places of these blocks, layer after layer."""
        first = np.arange(self.layers, dtype=np.int32)[:, None] * np.int32(self.of_layer)
        return (first + ids * np.int32(self.of_block)).reshape(-1)


class LayersInTurn:
    """Steps that decode a token of each stream in `layers` layers, of one set of sequences after another."""

    def __init__(
        self,
        pool: ThreadPool,
        instruction_set: str,
        shape: AttentionShape,
        new: NewTokens,
        layers: int,
        sets: int,
    ) -> None:
        def record(program: Program, qkv: int) -> None:
            out = program.buffer(shape.num_heads * shape.head_dim)
            program.attention(qkv, out, shape.num_heads, shape.num_kv_heads, shape.head_dim)

        self.shape, self.new, self.layers, self.sets = shape, new, layers, sets
        self._program = RecordedProgram(pool, instruction_set, shape.qkv_width, record, new.streams)
        self._empty = RecordedProgram(pool, instruction_set, shape.qkv_width, row_tile=new.streams)
        self._empty.bind_nothing()

    @property
    def operations(self) -> int:
        """Layers that a step attends."""
        return self.layers * self.sets

    def paged(self, kv_dtype: str, block_size: int) -> Places:
        return Places.paged(self.shape, kv_dtype, block_size, self._num_blocks(block_size), self.layers)

    def contiguous(self, kv_dtype: str, block_size: int) -> Places:
        return Places.contiguous(self.shape, kv_dtype, block_size, self._num_blocks(block_size), self.layers)

    def _num_blocks(self, block_size: int) -> int:
        return self.sets * self.new.num_blocks(block_size)

    def arm(self, address: int, places: Places, ids: Ints) -> Callable[[int], float]:
        """Seconds of a step over the blocks with these ids, which may come in any order."""
        tables = np.concatenate([places.of(one_set) for one_set in ids.reshape(self.sets, -1)])
        chunks = self.new.chunks(places.block_size, self.operations)

        def step(_turn: int) -> float:
            self._program.bind(
                address, places.place_bytes, places.num_places, places.block_size, places.kv_dtype
            )
            return self._program.seconds(*chunks, tables)

        return step

    def seconds_without(self) -> float:
        """Of a step that embeds as many tokens and attends nothing."""
        return self._empty.seconds(*chunks_without_kv(self.operations * self.new.streams))
