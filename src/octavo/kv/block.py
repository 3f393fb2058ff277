"""One block, as the pool sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.kv.prefix_index import PrefixNode


class Block:
    """A block's place in the arena, who refers to it, and what is known about its content.

    A block is in exactly one of three states:

        ref_count > 0                          in use; on no list
        ref_count == 0, node is not None       cached: found by its content, forgotten when its turn comes
        ref_count == 0, node is None           free: on the free list

    or *retired*: an extent that the pool has been shrunk by, on no list, without content and pages.

    `touched`: its pages may take physical memory, because it was handed out since they were last given back.

    Only `BlockPool` changes `ref_count`, `touched` and the links; only `PrefixIndex` changes `node`.
    """

    __slots__ = ("block_id", "newer", "node", "older", "ref_count", "touched")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.touched = False
        self.node: PrefixNode | None = None
        # The intrusive links of the free list. A block that is on no list points at itself.
        self.older: Block = self
        self.newer: Block = self

    def __repr__(self) -> str:
        known = "known" if self.node is not None else "unknown"
        return f"Block({self.block_id}, ref_count={self.ref_count}, content {known})"
