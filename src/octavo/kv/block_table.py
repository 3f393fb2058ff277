"""Where each part of one sequence lives."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from octavo.kv.block import Block


class BlockTable:
    """The blocks of one sequence in order of position: token `p` is in block `p // block_size`.

        position    0 ........ 15 | 16 ....... 31 | 32 ....... 47 |
        blocks      Block(7)      | Block(2)      | Block(40)     |
        block_ids   7             | 2             | 40            |    int32, as the native step reads it

    A table owns one reference to each of its blocks. Only `KVCache` changes a table.
    """

    __slots__ = ("block_ids", "blocks")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.block_ids = array("i")

    def __len__(self) -> int:
        return len(self.blocks)

    def append(self, block: Block) -> None:
        """Add the block of the next positions."""
        self.blocks.append(block)
        self.block_ids.append(block.block_id)

    def extend(self, blocks: Iterable[Block]) -> None:
        """Add several."""
        for block in blocks:
            self.append(block)

    def replace(self, index: int, block: Block) -> Block:
        """Put another block with the same content in a block's place; returns the one that was there."""
        replaced = self.blocks[index]
        self.blocks[index] = block
        self.block_ids[index] = block.block_id
        return replaced

    def cut(self, keep: int) -> list[Block]:
        """Shorten the table to `keep` blocks; returns the others, last first, the order the pool wants."""
        cut = self.blocks[keep:][::-1]
        del self.blocks[keep:]
        del self.block_ids[keep:]
        return cut
