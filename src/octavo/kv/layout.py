"""How many bytes the keys and values of one token, one block and one extent take."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZES = (8, 16, 32)
ELEMENT_BYTES = {"f16": 2}
PAGE_BYTES = 4096
_CACHE_ALIAS_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a block: `block_size` tokens, all layers of one group, keys and values, one extent.

        |<--------------------------- extent_bytes ---------------------------->|
        |<-------------------- block_bytes -------------------->|    padding    |
        | layer 0: K | V | layer 1: K | V | ... | layer n-1: K | V |            |

    In a layer, K is [num_kv_heads][head_dim][block_size] (so that a score loop runs along tokens) and V is
    [num_kv_heads][block_size][head_dim] (so that the weighted sum runs along the head).

    Raises: ValueError, if a size is not positive, the block size is not one of `BLOCK_SIZES`, or the element
        type is unknown.
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
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}, it must be one of {tuple(ELEMENT_BYTES)}")

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token over all layers, bytes (23,040 for SmolLM2-135M)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ELEMENT_BYTES[self.dtype]

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
        return padded + PAGE_BYTES if padded % _CACHE_ALIAS_BYTES == 0 else padded
