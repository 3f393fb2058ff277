"""Attention against itself (paging, shared prefixes, int8): what is compared, and with what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from octavo.bench import huge_pages
from octavo.bench.attention_steps import AttentionShape, NewTokens, Room, bytes_at, numbers
from octavo.bench.huge_pages import HUGE_PAGE_BYTES, HugePages
from octavo.bench.int8_kv import measure_int8_kv
from octavo.bench.layers_in_turn import Places, pool_layers
from octavo.bench.paging import RUN_TOKENS, PagingCases, measure_paging
from octavo.bench.recorded import Ints, RecordedProgram, alternated, compared, ratios
from octavo.bench.shapes import MODELS
from octavo.bench.shared_prefix import SharedPrefix, measure_shared_prefixes
from octavo.kernels import ThreadPool, available_instruction_sets
from octavo.kernels._native import paged_attention
from octavo.kv.layout import BLOCK_SIZES, KV_DTYPES

_KIB = 1 << 10
TINY = AttentionShape("tiny", 4, 2, 16, 3)
ROOM = Room(cold_bytes=64 * _KIB, most_bytes=1024 * _KIB)
BASE = 0.5


def silent(_: str) -> None:
    pass


# --- rounds ---


def test_arms_take_turns_forwards_and_backwards_and_the_first_round_is_dropped() -> None:
    calls: list[tuple[str, int]] = []

    def arm(name: str, seconds: float) -> Callable[[int], float]:
        def step(turn: int) -> float:
            calls.append((name, turn))
            return seconds + turn

        return step

    taken = alternated([arm("a", 10), arm("b", 20)], lambda: 2.0, 4, 3)
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2), ("b", 3), ("a", 3)]
    assert taken == [[(10 + turn - 2) / 4 for turn in (1, 2, 3)], [(20 + turn - 2) / 4 for turn in (1, 2, 3)]]


@pytest.mark.parametrize(("seconds", "rounds"), [(1.0, 3), (0.1, 10), (1e-3, 24)])
def test_short_steps_get_more_rounds_up_to_eight_times_as_many(seconds: float, rounds: int) -> None:
    taken = alternated([lambda _: seconds], lambda: 0.0, 1, 3, least_seconds=0.95)
    assert [len(arm) for arm in taken] == [rounds]


def test_comparisons_have_two_rounds_a_repeat() -> None:
    assert [len(arm) for arm in compared([lambda _: 9.0, lambda _: 8.0], lambda: 0.0, 1, 5)] == [10, 10]


def test_a_ratio_is_of_the_same_round() -> None:
    """The machine becomes ten times as slow half way: the medians of both would say anything."""
    spread = ratios([1.1, 1.2, 1.3, 14.0, 15.0], [1.0, 1.0, 1.0, 10.0, 10.0])
    assert (spread.low, spread.median, spread.high) == pytest.approx((1.2, 1.3, 1.4))


# --- places ---


@pytest.mark.parametrize("shape", [model.heads() for model in MODELS], ids=lambda shape: shape.model)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_paged_places_are_like_those_of_a_pool(shape: AttentionShape, kv_dtype: str, block_size: int) -> None:
    """A layer begins at a page where it does in a pool, and extents are no multiples of 64 KiB."""
    layer_bytes = block_size * shape.token_bytes(kv_dtype)
    for most_mib in (4, 512):
        layers = pool_layers(shape, kv_dtype, NewTokens(1, 1024), Room(1, most_mib << 20))
        assert layers > 0
        places = Places.paged(shape, kv_dtype, block_size, 7, layers)
        assert places.nbytes == 7 * layers * places.place_bytes
        assert (layers * places.place_bytes) % (64 * _KIB) != 0
        if layer_bytes % 4096 == 0:
            assert places.place_bytes in (layer_bytes, layer_bytes + 4096)
        else:
            assert places.place_bytes in (layer_bytes, layer_bytes + 64)


def test_layers_of_a_pool_are_as_many_as_there_is_room_for_but_no_multiple_of_16() -> None:
    shape = AttentionShape("", 4, 2, 16, 20)
    new = NewTokens(2, 100)
    layer_bytes = new.layer_bytes(shape, "f16")
    assert layer_bytes == 2 * 100 * 2 * 64
    layers = [pool_layers(shape, "f16", new, Room(1, most * layer_bytes)) for most in (0, 1, 15, 16, 17, 99)]
    assert layers == [0, 1, 15, 15, 17, 20]


@pytest.mark.parametrize("block_size", [*BLOCK_SIZES, RUN_TOKENS])
def test_a_contiguous_buffer_holds_one_layer_without_a_gap(block_size: int) -> None:
    places = Places.contiguous(TINY, "q8", block_size, 6, 2)
    assert places.place_bytes == block_size * TINY.token_bytes("q8")
    assert places.of(np.arange(6, dtype=np.int32)).tolist() == list(range(12))
    assert places.nbytes == 12 * places.place_bytes


def test_blocks_of_a_layer_are_as_far_apart_as_extents() -> None:
    places = Places.paged(TINY, "f16", 8, 5, 3)
    assert places.of(np.array([4, 0, 2], dtype=np.int32)).tolist() == [12, 0, 6, 13, 1, 7, 14, 2, 8]
    assert places.num_places == 15


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("block_size", [*BLOCK_SIZES, RUN_TOKENS])
def test_the_same_bytes_are_keys_and_values_in_every_layout(kv_dtype: str, block_size: int) -> None:
    """Scales that are read where codes were meant would make an average of anything."""
    layer = numbers(block_size * TINY.token_bytes(kv_dtype))
    q = np.random.default_rng(0).uniform(-1, 1, (1, 4, 16)).astype(np.float32)
    one, last = np.ones(1, dtype=np.int32), np.array([block_size - 1], dtype=np.int32)
    offsets, table = np.array([0, 1], dtype=np.int32), np.zeros(1, dtype=np.int32)
    out = paged_attention(
        ThreadPool(1), layer, len(layer), 0, block_size, 2, q, last, one, offsets, table, kv_dtype=kv_dtype
    )
    low, high = (0.9, 1.4) if kv_dtype == "f16" else (59 * 0.002, 61 * 0.05)
    assert low < out.min() < out.max() < high


# --- huge pages ---


def test_huge_pages_begin_at_one_and_are_not_huge_before_they_are_written() -> None:
    memory = HugePages(3 * HUGE_PAGE_BYTES)
    assert memory.address % HUGE_PAGE_BYTES == 0
    assert not memory.are_huge
    view = bytes_at(memory.address, memory.nbytes)
    view[:] = 7
    assert int(view.sum()) == 7 * memory.nbytes
    del view
    memory.close()
    memory.close()


@pytest.mark.parametrize(("huge_kib", "are_huge"), [(4096, True), (2048, False)])
def test_the_system_tells_how_much_of_a_mapping_is_huge(
    huge_kib: int, are_huge: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HugePages(2 * HUGE_PAGE_BYTES)
    first, last = memory.address, memory.address + memory.nbytes
    smaps = tmp_path / "smaps"
    smaps.write_text(
        f"{first - 8192:x}-{first:x} rw-p 00000000 00:00 0\nAnonHugePages:      8192 kB\n"
        f"{first:x}-{last:x} rw-p 00000000 00:00 0\nRss: 4096 kB\nAnonHugePages:      {huge_kib} kB\n"
        f"{last:x}-{last + 8192:x} rw-p 00000000 00:00 0 [heap]\nAnonHugePages:      8192 kB\n"
    )
    monkeypatch.setattr(huge_pages, "_SMAPS", smaps)
    assert memory.are_huge is are_huge
    monkeypatch.setattr(huge_pages, "_SMAPS", tmp_path / "nowhere")
    assert not memory.are_huge


# --- what is compared, by steps that take as long as they are told ---


@dataclass
class Step:
    """What a program was bound to, and the tables it was given."""

    block_size: int
    kv_dtype: str
    place_bytes: int
    shares: bool
    tables: list[int]
    layers: int


@dataclass
class Clock:
    """Steps that attend take BASE and what `each_layer` says for each of their layers, others BASE."""

    new: NewTokens
    each_layer: Callable[[Step], float]
    steps: list[Step] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bound: dict[int, tuple[int, str, int]] = {}
        shares: dict[int, bool] = {}
        bind, seconds, share = RecordedProgram.bind, RecordedProgram.seconds, RecordedProgram.share_prefixes

        def noted_bind(
            program: RecordedProgram, address: int, extent: int, blocks: int, size: int, kv_dtype: str = "f16"
        ) -> None:
            bound[id(program)] = (size, kv_dtype, extent)
            bind(program, address, extent, blocks, size, kv_dtype)

        def noted_share(program: RecordedProgram, on: bool) -> None:
            shares[id(program)] = on
            share(program, on)

        def told(program: RecordedProgram, starts: Ints, lens: Ints, offsets: Ints, tables: Ints) -> float:
            before = program.kv_rows[1]
            seconds(program, starts, lens, offsets, tables)
            if id(program) not in bound:
                return BASE
            attended = program.kv_rows[1] - before
            layers = attended // (self.new.streams * self.new.context * TINY.num_kv_heads)
            size, kv_dtype, extent = bound[id(program)]
            step = Step(size, kv_dtype, extent, shares.get(id(program), True), tables.tolist(), layers)
            self.steps.append(step)
            return BASE + layers * self.each_layer(step)

        monkeypatch.setattr(RecordedProgram, "bind", noted_bind)
        monkeypatch.setattr(RecordedProgram, "share_prefixes", noted_share)
        monkeypatch.setattr(RecordedProgram, "seconds", told)


@pytest.mark.parametrize(("runs", "blocks"), [(2.0, 3.0), (3.0, 2.0)])
def test_paging_is_held_against_the_faster_contiguous_buffer(
    runs: float, blocks: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, contiguous_bytes = 3, 16 * TINY.token_bytes("f16")

    def each_layer(step: Step) -> float:
        of_layers = np.array(step.tables).reshape(layers, -1)
        if step.block_size == RUN_TOKENS:
            return runs
        if of_layers[0].tolist() == list(range(of_layers.shape[1])):
            assert step.place_bytes == contiguous_bytes
            return blocks
        return 5.0 if (np.diff(of_layers[0]) == TINY.num_layers).all() else 7.0

    clock = Clock(NewTokens(2, 300), each_layer)
    clock.install(monkeypatch)
    monkeypatch.setattr(HugePages, "are_huge", False)
    in_order, scattered = measure_paging(
        ThreadPool(1),
        available_instruction_sets()[0],
        shapes=[TINY],
        kv_dtypes=["f16"],
        cases=PagingCases(block_sizes=(16,), streams=(2,), contexts=(300,)),
        room=ROOM,
        repeats=1,
        say=silent,
    )
    assert (in_order.order, scattered.order) == ("in order", "scattered")
    for result, seconds in ((in_order, 5.0), (scattered, 7.0)):
        assert result.layers == layers
        assert result.seconds == pytest.approx(seconds)
        assert (result.runs_seconds, result.blocks_seconds) == pytest.approx((runs, blocks))
        assert result.contiguous == ("runs" if runs < blocks else "blocks")
        assert (result.ratio_low, result.ratio, result.ratio_high) == pytest.approx([seconds / 2] * 3)
        assert (result.huge_seconds, result.huge_ratio) == (None, None)
    # Every side attends as many tokens: three layers of two sequences.
    assert {step.layers for step in clock.steps} == {layers}
    assert {len(step.tables) for step in clock.steps} == {layers * 2 * 2, layers * 2 * 19}


def test_paging_in_huge_pages_is_a_ratio_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[int] = []
    whole_runs = RUN_TOKENS * TINY.token_bytes("q8")
    init = HugePages.__init__

    def noted(memory: HugePages, nbytes: int) -> None:
        init(memory, nbytes)
        addresses.append(memory.address)

    def told(program: RecordedProgram, *_: Ints) -> float:
        address, place_bytes = bound.get(id(program), (0, 0))
        if not address:
            return BASE
        return BASE + (1.0 if address in addresses else 4.0 if place_bytes == whole_runs else 8.0)

    def noted_bind(program: RecordedProgram, address: int, extent: int, *_: object) -> None:
        bound[id(program)] = (address, extent)

    bound: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(HugePages, "__init__", noted)
    monkeypatch.setattr(HugePages, "are_huge", True)
    monkeypatch.setattr(RecordedProgram, "bind", noted_bind)
    monkeypatch.setattr(RecordedProgram, "seconds", told)
    results = list(
        measure_paging(
            ThreadPool(1),
            available_instruction_sets()[0],
            shapes=[TINY],
            kv_dtypes=["q8"],
            cases=PagingCases(block_sizes=(8,), streams=(1,), contexts=(300,)),
            room=ROOM,
            repeats=1,
            say=silent,
        )
    )
    assert [result.ratio for result in results] == pytest.approx([2.0, 2.0])
    assert [result.huge_ratio for result in results] == pytest.approx([8.0, 8.0])


def test_shared_prefixes_are_held_against_copies_and_against_the_same_tables_read_by_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = SharedPrefix(users=3, common=270, own=20)
    blocks_each = 19  # of 290 tokens; the first 16 are common
    private: list[set[int]] = []
    owners: list[int] = []

    def each_layer(step: Step) -> float:
        users = np.array(step.tables).reshape(3, blocks_each)
        if len(set(step.tables)) == 3 * blocks_each:
            private.append(set(step.tables))
            return 6.0
        assert (users[:, :16] == users[0, :16]).all()
        assert len(set(step.tables)) == 16 + 3 * 3
        owners.append(users[0, 0])
        return 2.0 if step.shares else 3.0

    Clock(case.new, each_layer).install(monkeypatch)
    (result,) = measure_shared_prefixes(
        ThreadPool(1),
        available_instruction_sets()[0],
        shapes=[TINY],
        kv_dtypes=["q8"],
        cases=[case],
        room=ROOM,
        repeats=1,
        say=silent,
    )
    assert (result.private_seconds, result.plain_seconds, result.shared_seconds) == pytest.approx((6, 3, 2))
    assert (result.speedup_over_private, result.speedup_over_plain) == pytest.approx((3.0, 1.5))
    assert private[0] == set(range(3 * blocks_each))
    assert len(set(owners)) == 3  # each in its turn, or one would find what it has just read
    assert result.kv_bytes_attended == 3 * 290 * TINY.token_bytes("q8")
    assert result.kv_bytes_read == (256 + 3 * 34) * TINY.token_bytes("q8")  # one whole run is common
    assert result.kv_bytes_fraction == pytest.approx((256 + 3 * 34) / (3 * 290))


def test_eight_users_on_four_thousand_common_tokens_read_a_sixth() -> None:
    """Fifteen whole runs of 256 once; the rest, and up to 32 tokens of their own, by each."""
    common, each, own = 15 * 256, 4000 - 15 * 256, 32
    assert (common + 8 * (each + own)) * 6 == 8 * (4000 + own)


def test_int8_is_held_against_f16(monkeypatch: pytest.MonkeyPatch) -> None:
    new = NewTokens(2, 300)
    Clock(new, lambda step: 3.0 if step.kv_dtype == "q8" else 4.0).install(monkeypatch)
    (result,) = measure_int8_kv(
        ThreadPool(1),
        available_instruction_sets()[0],
        shapes=[TINY],
        cases=[new],
        room=ROOM,
        repeats=1,
        say=silent,
    )
    assert (result.q8_seconds, result.f16_seconds) == pytest.approx((3.0, 4.0))
    assert (result.ratio_low, result.ratio, result.ratio_high) == pytest.approx((0.75, 0.75, 0.75))
    assert result.bytes_ratio == pytest.approx((16 + 4) / 32)


# --- room ---


def test_layers_of_a_step_are_cold_when_the_next_one_comes() -> None:
    room = Room(cold_bytes=1000, most_bytes=4000)
    assert room.layers(30, 100) == 10
    assert room.layers(30, 600) == 4  # as a step has neighbours
    assert room.layers(30, 1500) == 2
    assert room.layers(2, 100) == 2
    assert room.layers(30, 4001) == 0
    assert room.sets(200) == 5
    assert room.sets(1000) == 1
    assert room.most_layers(30, 100) == 30
    assert room.most_layers(30, 600) == 6
    assert room.shared_by(2).most_layers(30, 600) == 3


def test_pairs_of_new_tokens_and_those_they_see() -> None:
    assert NewTokens(3, 10).pairs == 30
    assert NewTokens(1, 10, 10).pairs == 55
    assert NewTokens(2, 10, 3).pairs == 2 * (8 + 9 + 10)
