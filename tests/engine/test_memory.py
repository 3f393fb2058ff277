"""The arithmetic of memory, and where "available" comes from."""

from __future__ import annotations

import pytest

from engine.fake_model import FakeModel, FakeTokenizer, running_engine
from octavo.engine.engine import Engine, EngineConfig
from octavo.engine.memory import DEFAULT_POOL_CAP, MemoryPlan, plan_memory
from octavo.kv.arena import Arena
from octavo.kv.layout import KV_DTYPES, KVLayout
from octavo.model.available_memory import GIB, MIB, MemoryRefused

SMOLLM2 = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)
SMOLLM2_Q8 = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="q8")


def plan(
    layout: KVLayout = SMOLLM2,
    *,
    kv_cache_memory: int | None = None,
    num_blocks: int | None = None,
    model_context: int = 8192,
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    available: int = 16 * GIB,
) -> MemoryPlan:
    return plan_memory(
        layout,
        weight_bytes=98 * MIB,
        buffer_bytes=20 * MIB,
        model_context=model_context,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_memory=kv_cache_memory,
        num_blocks=num_blocks,
        available=available,
    )


def test_the_padding_of_an_extent_is_charged_to_the_budget() -> None:
    made = plan(kv_cache_memory=GIB)
    assert made.kv_bytes_per_token == 23_040
    assert made.block_bytes == 368_640
    assert made.extent_bytes == 368_640  # whole pages already, and no multiple of 64 KiB
    assert made.num_blocks == GIB // 368_640
    assert made.pool_bytes <= GIB < made.pool_bytes + made.extent_bytes
    padded = plan_memory(
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=8),
        weight_bytes=0,
        buffer_bytes=0,
        model_context=100,
        max_model_len=None,
        max_num_seqs=1,
        kv_cache_memory=10 * 4096,
        num_blocks=None,
        available=GIB,
    )
    assert (padded.block_bytes, padded.extent_bytes, padded.num_blocks) == (512, 4096, 10)


def test_q8_holds_most_of_twice_the_tokens_in_the_same_memory_and_is_named() -> None:
    f16, q8 = plan(kv_cache_memory=GIB), plan(SMOLLM2_Q8, kv_cache_memory=GIB)
    assert q8.num_blocks == GIB // 200_704
    assert 1.8 < q8.pool_tokens / f16.pool_tokens < 2
    assert "23,040 bytes a token (f16) x 16 = 368,640 a block" in "\n".join(f16.describe())
    kv = "12,240 bytes a token (q8) x 16 = 195,840 a block + 4,864 padding = 200,704"
    assert kv in "\n".join(q8.describe())


def test_the_longest_request_is_the_least_of_context_setting_and_pool() -> None:
    assert plan(kv_cache_memory=GIB).longest_request == 8192
    assert plan(kv_cache_memory=GIB, max_model_len=4096).longest_request == 4096
    assert plan(num_blocks=229, model_context=40_960).longest_request == 3_664  # T21
    described = "\n".join(plan(num_blocks=229, model_context=40_960).describe())
    assert "3,664 tokens" in described
    assert "limited by the pool; the model could take 40,960" in described
    assert "max_model_len" in "\n".join(plan(max_model_len=4096).describe())


def test_the_default_pool_leaves_half_of_the_machine_and_stops_at_the_cap() -> None:
    assert plan(available=2 * GIB).budget_bytes == GIB
    assert plan(available=64 * GIB).budget_bytes == DEFAULT_POOL_CAP
    few = plan(max_num_seqs=1, max_model_len=1000)
    assert few.num_blocks == 63, "more blocks than one request of 1,000 tokens can fill"


def test_asking_for_more_than_there_is_says_both_numbers() -> None:
    with pytest.raises(MemoryRefused, match=r"8\.00 GiB .* 8\.02 GiB, but 4\.00 GiB are") as refused:
        plan(kv_cache_memory=8 * GIB, available=4 * GIB)
    assert (refused.value.needed, refused.value.available) == (8 * GIB + 20 * MIB, 4 * GIB)
    with pytest.raises(MemoryRefused):
        plan(num_blocks=100_000, available=4 * GIB)


def test_less_than_one_block_is_refused() -> None:
    with pytest.raises(MemoryRefused, match=r"100,000 bytes is smaller than one block: 16 tokens .* 368,640"):
        plan(kv_cache_memory=100_000)
    with pytest.raises(MemoryRefused, match=r"16 tokens x 12,240 bytes \(q8\), padded to 200,704"):
        plan(SMOLLM2_Q8, kv_cache_memory=100_000)
    with pytest.raises(MemoryRefused):
        plan(available=20 * MIB + 1)


def test_an_engine_refuses_before_it_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_arena(*_: object) -> None:
        raise AssertionError("allocated first")

    monkeypatch.setattr(Arena, "__init__", no_arena)
    with pytest.raises(MemoryRefused):
        Engine(FakeModel(), FakeTokenizer(), EngineConfig(kv_cache_memory=1 << 50))


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("shared", [True, False])
def test_an_engine_tells_the_model_what_it_was_told(dtype: str, shared: bool) -> None:
    model = FakeModel()
    bound: list[KVLayout] = []
    bind = model.bind

    def note_and_bind(layout: KVLayout, arena: Arena) -> None:
        bound.append(layout)
        assert arena.extent_bytes == layout.extent_bytes
        bind(layout, arena)

    model.bind = note_and_bind  # type: ignore[method-assign]
    with running_engine(model, block_size=32, kv_cache_dtype=dtype, shared_prefix_attention=shared):
        assert [(layout.block_size, layout.dtype) for layout in bound] == [(32, dtype)]
        assert model.shared_prefix_attention is shared


def test_a_longest_request_beyond_the_models_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"9,000 .* 8,192"):
        Engine(FakeModel(), FakeTokenizer(), EngineConfig(max_model_len=9000))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 12),
        ("kv_cache_dtype", "q4"),
        ("max_model_len", 1),
        ("kv_cache_memory", 0),
        ("num_blocks_override", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", 63),
        ("stall_timeout", 0.0),
    ],
)
def test_an_impossible_setting_is_named(field: str, value: float | str) -> None:
    said = rf"^{field} (must be .* not {value!r}|is {value} and must be at least .*)$"
    with pytest.raises(ValueError, match=said):
        EngineConfig(**{field: value})  # type: ignore[arg-type]
