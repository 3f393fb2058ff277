"""How many bytes the keys and values of one token, one block and one extent take."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZES = (8, 16, 32)
KV_DTYPES = ("f16", "q8")
SCALE_BYTES = 4
PAGE_BYTES = 4096
CACHE_ALIAS_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a block: `block_size` tokens, all layers of one group, keys and values, one extent.

        |<--------------------------- extent_bytes ---------------------------->|
        |<-------------------- block_bytes -------------------->|    padding    |
        | layer 0: K | V | layer 1: K | V | ... | layer n-1: K | V |            |

    A layer as f16: K lies dimension by dimension, so that scores run along positions, and V position by
    position, so that the weighted sum runs along the head.

        | K: f16[num_kv_heads][head_dim][block_size] | V: f16[num_kv_heads][block_size][head_dim] |

    A layer as q8: a key or a value of one token and head is `head_dim` codes and one scale, the largest
    magnitude / 127; keys are rotated before (docs/kv-cache.md). Codes lie in pairs: two dimensions of a
    position in K, two positions of a dimension in V.

        | K of head 0 | ... | K of head num_kv_heads - 1 | V of head 0 | ... | V of head num_kv_heads - 1 |
        K of a head: | codes int8[head_dim / 2][block_size][2] | scales float32[block_size] |
        V of a head: | codes int8[block_size / 2][head_dim][2] | scales float32[block_size] |

    Raises: ValueError, if a size is not positive, the block size is not one of `BLOCK_SIZES`, the element
        type is not one of `KV_DTYPES`, or the head cannot be paired for q8.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "f16"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size is {self.block_size}, it must be one of {BLOCK_SIZES}")
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, it must be one of {KV_DTYPES}")
        if self.dtype == "q8" and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, it must be even to be stored as q8")

    @property
    def row_bytes(self) -> int:
        """Key and value of one token in one layer and KV head, bytes, scales included (256 or 136 for a head
        of 64)."""
        vector = self.head_dim + SCALE_BYTES if self.dtype == "q8" else 2 * self.head_dim
        return 2 * vector

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token over all layers, bytes (SmolLM2-135M: 23,040 as f16, 12,240 as q8)."""
        return self.num_layers * self.num_kv_heads * self.row_bytes

    @property
    def layer_bytes(self) -> int:
        """Keys and values of one block in one layer, bytes; layer `l` starts at `l * layer_bytes`."""
        return self.block_bytes // self.num_layers

    @property
    def block_bytes(self) -> int:
        """What the kernels read and write of a block, bytes."""
        return self.bytes_per_token * self.block_size

    @property
    def extent_bytes(self) -> int:
        """What a block takes in the arena and is charged for, bytes: whole pages, never a multiple of 64 KiB.

        Whole pages, because giving an extent back to the system rounds up and would wipe a neighbour's head.
        Not a multiple of 64 KiB, or the same place of every block would fall into the same cache sets.
        """
        padded = -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES
        return padded + PAGE_BYTES if padded % CACHE_ALIAS_BYTES == 0 else padded
