from __future__ import annotations

import ctypes

import pytest

from octavo.kv.arena import Arena
from octavo.kv.layout import PAGE_BYTES

EXTENT = 3 * PAGE_BYTES


def write(arena: Arena, block_id: int, byte: int) -> None:
    ctypes.memset(arena.address + block_id * arena.extent_bytes, byte, arena.extent_bytes)


def read(arena: Arena, block_id: int) -> bytes:
    return ctypes.string_at(arena.address + block_id * arena.extent_bytes, arena.extent_bytes)


def test_memory_is_taken_when_a_block_is_first_written() -> None:
    with Arena(EXTENT, 1000) as arena:
        assert arena.resident_bytes() == 0
        write(arena, 7, 1)
        write(arena, 999, 1)
        assert arena.resident_bytes() == 2 * EXTENT


def test_a_terabyte_costs_nothing_until_it_is_touched() -> None:
    # More than the machine has: only a mapping that reserves nothing can be this large.
    with Arena(1 << 30, 1 << 10) as arena:
        ctypes.memset(arena.address, 1, 1)
        assert ctypes.string_at(arena.address, 2) == b"\x01\x00"


def test_two_arenas_do_not_overlap() -> None:
    with Arena(EXTENT, 4) as one, Arena(EXTENT, 4) as other:
        for block_id in range(4):
            write(one, block_id, 1)
            write(other, block_id, 2)
        assert {read(one, block_id) for block_id in range(4)} == {bytes([1]) * EXTENT}
        assert {read(other, block_id) for block_id in range(4)} == {bytes([2]) * EXTENT}


def test_a_closed_arena_has_no_address() -> None:
    arena = Arena(EXTENT, 4)
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        _ = arena.address


@pytest.mark.parametrize(("extent_bytes", "num_blocks"), [(PAGE_BYTES + 1, 4), (0, 4), (PAGE_BYTES, 0)])
def test_sizes_that_are_not_whole_pages_or_empty_are_refused(extent_bytes: int, num_blocks: int) -> None:
    with pytest.raises(ValueError, match=str(extent_bytes if num_blocks else num_blocks)):
        Arena(extent_bytes, num_blocks)
