from __future__ import annotations

from array import array

from octavo.kv.block import Block
from octavo.kv.block_table import BlockTable


def table_of(*block_ids: int) -> BlockTable:
    table = BlockTable()
    table.extend(Block(block_id) for block_id in block_ids)
    return table


def test_ids_are_kept_as_int32_beside_the_blocks() -> None:
    table = table_of(7, 2, 40)
    assert table.block_ids == array("i", [7, 2, 40])
    assert table.block_ids.itemsize == 4
    assert len(bytes(table.block_ids)) == 12


def test_cutting_returns_the_tail_last_block_first() -> None:
    table = table_of(7, 2, 40, 5)
    assert [block.block_id for block in table.cut(1)] == [5, 40, 2]
    assert list(table.block_ids) == [7]
    assert [block.block_id for block in table.cut(0)] == [7]
    assert table.cut(0) == []


def test_a_replaced_block_changes_its_id_too() -> None:
    table = table_of(7, 2)
    assert table.replace(0, Block(9)).block_id == 7
    assert list(table.block_ids) == [9, 2]
    assert [block.block_id for block in table.blocks] == [9, 2]
