from __future__ import annotations

import ctypes
import mmap

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


def test_released_extents_are_no_longer_resident_and_read_as_zeros() -> None:
    with Arena(EXTENT, 12) as arena:
        for block_id in range(10):
            write(arena, block_id, 7)
        arena.release([4, 1, 9, 2, 11])
        assert arena.resident_bytes() == 6 * EXTENT
        for block_id in range(10):
            assert read(arena, block_id) == bytes([0 if block_id in (1, 2, 4, 9) else 7]) * EXTENT
        arena.release([])
        assert arena.resident_bytes(4) == 4 * EXTENT, "what was read is there again, as zeros"


def test_extents_side_by_side_are_released_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    with Arena(EXTENT, 12) as arena:

        class Recorded:
            closed = False

            def madvise(self, *arguments: int) -> None:
                calls.append(arguments)

        mapping = arena._mapping
        monkeypatch.setattr(arena, "_mapping", Recorded())
        arena.release([7, 3, 2, 8, 4, 0])
        monkeypatch.setattr(arena, "_mapping", mapping)
    dontneed = mmap.MADV_DONTNEED
    assert calls == [
        (dontneed, 0, EXTENT),
        (dontneed, 2 * EXTENT, 3 * EXTENT),
        (dontneed, 7 * EXTENT, 2 * EXTENT),
    ]


@pytest.mark.parametrize("ids", [[0, 4], [-1, 2]])
def test_an_extent_that_is_not_there_is_refused_before_anything_is_released(ids: list[int]) -> None:
    with Arena(EXTENT, 4) as arena:
        for block_id in range(4):
            write(arena, block_id, 7)
        with pytest.raises(ValueError, match=rf"extents {ids[0]} to {ids[1]} are not among 4"):
            arena.release(ids)
        assert arena.resident_bytes() == 4 * EXTENT


def test_only_the_first_extents_are_counted_where_that_is_asked_and_none_once_closed() -> None:
    arena = Arena(EXTENT, 100)
    write(arena, 3, 1)
    write(arena, 50, 1)
    assert (arena.resident_bytes(), arena.resident_bytes(50), arena.resident_bytes(51)) == (
        2 * EXTENT,
        EXTENT,
        2 * EXTENT,
    )
    arena.close()
    assert arena.resident_bytes() == 0
    with pytest.raises(ValueError, match="closed"):
        arena.release([3])


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
