from __future__ import annotations

import pytest

from octavo.kv.layout import BLOCK_SIZES, PAGE_BYTES, KVLayout


def test_smollm2_takes_23040_bytes_a_token_and_90_pages_a_block() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)
    assert layout.bytes_per_token == 23_040
    assert layout.block_bytes == 368_640
    assert layout.extent_bytes == 90 * PAGE_BYTES
    assert layout.layer_bytes * 30 == layout.block_bytes


def test_an_extent_is_whole_pages_and_holds_its_block() -> None:
    for num_layers in (1, 2, 5, 30):
        for head_dim in (16, 48, 64, 256):
            for block_size in BLOCK_SIZES:
                layout = KVLayout(num_layers, 3, head_dim, block_size)
                assert layout.extent_bytes % PAGE_BYTES == 0
                assert layout.block_bytes <= layout.extent_bytes < layout.block_bytes + 2 * PAGE_BYTES


def test_an_extent_is_never_a_multiple_of_64_kib() -> None:
    layout = KVLayout(num_layers=16, num_kv_heads=4, head_dim=64, block_size=8)
    assert layout.block_bytes == 2 * 64 * 1024
    assert layout.extent_bytes == layout.block_bytes + PAGE_BYTES


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"num_layers": 0}, "0"),
        ({"head_dim": -1}, "-1"),
        ({"block_size": 12}, "12"),
        ({"dtype": "f64"}, "f64"),
    ],
)
def test_a_wrong_size_is_refused_with_the_number(changes: dict[str, object], number: str) -> None:
    sizes: dict[str, object] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16}
    with pytest.raises(ValueError, match=number):
        KVLayout(**{**sizes, **changes})  # type: ignore[arg-type]
