from __future__ import annotations

import pytest

from octavo.kv.layout import BLOCK_SIZES, KV_DTYPES, PAGE_BYTES, KVLayout


def test_smollm2_takes_23040_bytes_a_token_and_90_pages_a_block() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)
    assert layout.bytes_per_token == 23_040
    assert layout.block_bytes == 368_640
    assert layout.extent_bytes == 90 * PAGE_BYTES
    assert layout.layer_bytes * 30 == layout.block_bytes


def test_smollm2_as_q8_takes_12240_bytes_a_token_and_49_pages_a_block() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="q8")
    assert layout.row_bytes == 2 * (64 + 4)
    assert layout.bytes_per_token == 12_240
    assert layout.block_bytes == 195_840
    assert layout.layer_bytes * 30 == layout.block_bytes
    assert layout.extent_bytes == 49 * PAGE_BYTES  # 48 hold it, and are three times 64 KiB


@pytest.mark.parametrize("head_dim", [16, 48, 64, 256])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_parts_of_a_layer_add_up_to_its_bytes(block_size: int, head_dim: int) -> None:
    """Counted from the shapes in the docstring."""
    keys = values = 3 * head_dim * block_size * 2
    assert KVLayout(5, 3, head_dim, block_size).layer_bytes == keys + values
    key_codes = head_dim // 2 * block_size * 2
    value_codes = block_size // 2 * head_dim * 2
    scales = 4 * block_size
    q8 = KVLayout(5, 3, head_dim, block_size, "q8")
    assert q8.layer_bytes == 3 * (key_codes + scales) + 3 * (value_codes + scales)
    assert q8.layer_bytes == q8.num_kv_heads * block_size * q8.row_bytes
    assert q8.layer_bytes % 4 == 0  # the scales of every layer and head are aligned


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_an_extent_is_whole_pages_and_holds_its_block(dtype: str) -> None:
    for num_layers in (1, 2, 5, 30):
        for head_dim in (16, 48, 64, 256):
            for block_size in BLOCK_SIZES:
                layout = KVLayout(num_layers, 3, head_dim, block_size, dtype)
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
        ({"dtype": "f64"}, r"'f64', it must be one of \('f16', 'q8'\)"),
        ({"head_dim": 33, "dtype": "q8"}, "33"),
    ],
)
def test_a_wrong_size_is_refused_with_the_number(changes: dict[str, object], number: str) -> None:
    sizes: dict[str, object] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16}
    with pytest.raises(ValueError, match=number):
        KVLayout(**{**sizes, **changes})  # type: ignore[arg-type]
