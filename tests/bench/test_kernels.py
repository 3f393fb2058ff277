"""`octavo bench kernels`: that it measures what it says, with sizes so small that it takes a second."""

from __future__ import annotations

import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from kernels.weights import QUANTIZED_TYPES
from octavo.bench import attention, int8_kv, paging, shared_prefix
from octavo.bench.attention import AttentionCases
from octavo.bench.attention_steps import AttentionShape, NewTokens
from octavo.bench.kernel_tables import print_report
from octavo.bench.kernels import KernelPlan, KernelReport, measure_kernels
from octavo.bench.matmul import MatmulShape, random_weights
from octavo.bench.paging import PagingCases
from octavo.bench.shapes import EIGHT_BILLION, MODELS, SMOLLM2, models_named
from octavo.bench.shared_prefix import SharedPrefix
from octavo.cli.main import main
from octavo.kernels import Matrix, ThreadPool, WeightStore, available_instruction_sets
from octavo.kernels._native import peak_int8, peak_int8_summed

_KIB = 1 << 10

TINY = KernelPlan(
    threads=1,
    shapes=[
        MatmulShape("tiny", "qkv", 96, 64),
        MatmulShape("tiny", "head", 160, 64, most_rows=4),
    ],
    types=("Q4_0", "Q8_0", "F16", "Q4_K", "IQ4_NL"),
    rows=(1, 4, 256, 512),
    heads=[AttentionShape("tiny", 4, 2, 16, 3)],
    attention=AttentionCases(contexts=(5, 300), streams=(1, 3), prompts=(300,), chunks=(400, 2000)),
    paging=PagingCases(block_sizes=(8, 16), streams=(2,), contexts=(40, 300)),
    shared_prefix=(SharedPrefix(3, 270, 20),),
    int8_kv=(NewTokens(2, 300),),
    repeats=2,
    cold_bytes=64 * _KIB,
    read_bytes=1024 * _KIB,
    most_bytes=200 * _KIB,
)
_ROW = {"f16": 2 * 2 * 16, "q8": 2 * (16 + 4)}
"""Bytes of a token's key and value in one of the two heads."""


@pytest.fixture(scope="module")
def report() -> KernelReport:
    return measure_kernels(TINY)


def test_every_case_is_measured_once(report: KernelReport) -> None:
    """A head with as many rows as its shape allows; no product whose rows are not whole blocks."""
    types = [type_ for type_ in TINY.types if type_ != "Q4_K"]
    expected = [("qkv", type_, rows) for type_ in types for rows in TINY.rows]
    expected += [("head", type_, rows) for type_ in types for rows in (1, 4)]
    assert [(r.shape, r.type, r.rows) for r in report.matmul] == expected
    assert report.left_out == [
        *(f"tiny {name} as Q4_K: rows of 64 weights are not whole blocks of 256" for name in ("qkv", "head")),
        "tiny chunk over f16, 1 x 2,000 tokens: keys and values of one layer are 0.2 MiB, 0.2 are allowed",
    ]
    decode = [(1, 5), (1, 300), (3, 5), (3, 300)]
    cases = [("decode", *case) for case in decode] + [("prefill", 1, 300), ("chunk", 1, 400)]
    both = [(kv_dtype, *case) for kv_dtype in ("f16", "q8") for case in cases]
    both.append(("q8", "chunk", 1, 2000))
    assert [(r.kv_dtype, r.kind, r.streams, r.context) for r in report.attention] == both
    assert [(r.kv_dtype, r.context, r.block_size, r.order) for r in report.paging] == [
        (kv_dtype, context, block_size, order)
        for kv_dtype in ("f16", "q8")
        for context in (40, 300)
        for block_size in (8, 16)
        for order in ("in order", "scattered")
    ]
    assert [(r.kv_dtype, r.users, r.common_tokens, r.own_tokens) for r in report.shared_prefix] == [
        ("f16", 3, 270, 20),
        ("q8", 3, 270, 20),
    ]
    assert [(r.streams, r.context) for r in report.int8_kv] == [(2, 300)]


def test_rates_follow_from_the_times(report: KernelReport) -> None:
    for product in report.matmul:
        assert product.seconds_low <= product.seconds <= product.seconds_high
        out_features = {"qkv": 96, "head": 160}[product.shape]
        assert product.gops == pytest.approx(2 * out_features * 64 * product.rows / product.seconds / 1e9)
        passes = 2 if product.rows == 512 else 1  # of 256 rows, each of which reads the weights
        packed = _packed_bytes(product.type, out_features)
        assert product.weight_gbs == pytest.approx(packed * passes / product.seconds / 1e9)
        assert product.percent_of_read == pytest.approx(100 * product.weight_gbs / report.limits.read_gbs)
    for layer in report.attention:
        assert layer.seconds_low <= layer.seconds <= layer.seconds_high
        new = {"decode": 1, "prefill": layer.context, "chunk": 256}[layer.kind]
        pairs = layer.streams * sum(range(layer.context - new + 1, layer.context + 1))
        assert layer.gflops == pytest.approx(4 * 4 * 16 * pairs / layer.seconds / 1e9)
        kv_bytes = layer.streams * layer.context * 2 * _ROW[layer.kv_dtype]
        assert layer.kv_gbs == pytest.approx(kv_bytes / layer.seconds / 1e9)
        assert layer.percent_of_peak == pytest.approx(100 * layer.gflops / report.limits.fp32_gflops)
        assert layer.percent_of_read == pytest.approx(100 * layer.kv_gbs / report.limits.read_gbs)
        assert layer.kv_from == ("cache" if layer.kind == "prefill" else "memory")


def test_each_type_is_held_against_the_limit_of_its_arithmetic(report: KernelReport) -> None:
    limits = {
        "F16": ("fp32", report.limits.fp32_gflops),
        "Q4_0": ("int8_summed", report.limits.int8_summed_gops),
        "Q8_0": ("int8", report.limits.int8_gops),
        "IQ4_NL": ("int8", report.limits.int8_gops),
    }
    for product in report.matmul:
        name, limit = limits[product.type]
        assert product.peak == name
        assert product.percent_of_peak == pytest.approx(100 * product.gops / limit)


@pytest.mark.parametrize("instruction_set", available_instruction_sets())
def test_adding_before_widening_is_faster_where_widening_costs_instructions(instruction_set: str) -> None:
    """1.7 times as fast on AVX2; the same loop on paths that have nothing to widen. Best of several in turn:
    a neighbour slows either now and then."""
    pool, iterations = ThreadPool(1), 20_000 if instruction_set == "portable" else 200_000
    once, summed = [], []
    for _ in range(9):
        once.append(peak_int8(pool, iterations, instruction_set))
        summed.append(peak_int8_summed(pool, iterations, instruction_set))
    ratio = max(summed) / max(once)
    if instruction_set == "avx2":
        assert ratio > 1.2
    else:
        assert ratio > 0.7


def test_a_matrix_that_is_too_large_is_measured_with_fewer_columns() -> None:
    plan = dataclasses.replace(
        TINY, parts=("matmul",), types=("F16", "Q4_0"), rows=(1,), most_bytes=96 * 64 * 2, cold_bytes=1
    )
    report = measure_kernels(plan)
    assert [(r.type, r.shape, r.out_features) for r in report.matmul] == [
        ("F16", "qkv", 96),
        ("Q4_0", "qkv", 96),
        ("F16", "head", 96),
        ("Q4_0", "head", 160),
    ]
    for product in report.matmul:
        assert (product.copies, product.weights_from) == (1, "memory")  # alone it is more than cold_bytes


def test_the_models_have_the_sizes_of_their_configurations() -> None:
    """Weights in billions, embeddings once, as their model cards say."""
    billions = {"smollm2-135m": 0.135, "gemma-3-270m": 0.268, "1b": 1.236, "3b": 3.213, "8b": 7.505}
    assert {model.name for model in MODELS} == set(billions)
    for model in MODELS:
        *layer, head = model.matmuls()
        weights = model.num_layers * sum(s.out_features * s.in_features for s in layer)
        weights += head.out_features * head.in_features
        assert weights / 1e9 == pytest.approx(billions[model.name], rel=0.01), model.name
        heads = model.heads()
        qkv, o = layer[0], layer[1]
        assert o.in_features == heads.num_heads * heads.head_dim
        assert qkv.out_features == o.in_features + 2 * heads.num_kv_heads * heads.head_dim


def test_default_plans_cover_every_model_over_1_to_512_rows() -> None:
    plan = KernelPlan()
    assert {shape.model for shape in plan.shapes} == {model.name for model in MODELS}
    assert plan.rows == tuple(2**power for power in range(10))
    assert {shape.most_rows for shape in plan.shapes if shape.name != "head"} == {512}
    chosen = plan.of_models(models_named(["3b", "gemma-3-270m"]))
    assert [shape.model for shape in chosen.shapes] == 5 * ["3b"] + 5 * ["gemma-3-270m"]
    assert [(heads.model, heads.head_dim) for heads in chosen.heads] == [("3b", 128), ("gemma-3-270m", 256)]


def test_heads_of_256_with_one_key_value_head_are_measured() -> None:
    plan = dataclasses.replace(TINY, parts=("attention",), most_bytes=4096 * _KIB)
    plan = plan.of_models(models_named(["gemma-3-270m"]))
    report = measure_kernels(plan)
    assert (report.matmul, report.left_out) == ([], [])
    said = report.as_json()
    measured = [result for part in _LISTS[1:] for result in said[part]]
    assert {(r["num_heads"], r["num_kv_heads"], r["head_dim"]) for r in measured} == {(4, 1, 256)}


def test_weights_are_said_to_come_from_memory_only_where_all_copies_are_read(report: KernelReport) -> None:
    for product in report.matmul:
        fills = product.copies * _packed_bytes(product.type, product.out_features) >= TINY.cold_bytes
        assert product.weights_from == ("memory" if fills else "cache")
        assert product.copies >= 2


def _packed_bytes(type_: str, rows: int) -> int:
    return Matrix(WeightStore(), type_, random_weights(type_, rows, 64), rows, 64, ThreadPool(1)).nbytes


@pytest.mark.parametrize("type_", [*QUANTIZED_TYPES, "F16", "BF16"])
def test_random_weights_are_finite_and_vary(type_: str) -> None:
    matrix = Matrix(WeightStore(), type_, random_weights(type_, 96, 256), 96, 256, ThreadPool(1))
    values = matrix.dequantize()
    assert np.isfinite(values).all()
    assert values.std() > 0.01


def test_short_contexts_and_short_prompts_stay_within_the_memory_they_are_given(report: KernelReport) -> None:
    for layer in report.attention:
        layer_bytes = layer.streams * layer.context * 2 * _ROW[layer.kv_dtype]
        assert 1 <= layer.layers <= 3
        assert layer.layers * layer_bytes <= TINY.most_bytes


def test_contexts_reach_from_128_to_32k_and_little_is_left_out_for_want_of_memory() -> None:
    plan = KernelPlan(cold_bytes=128 << 20)
    assert plan.attention.contexts == tuple(2**power for power in (7, 9, 10, 11, 12, 13, 14, 15))
    assert plan.attention.streams == (1, 2, 4, 8, 16)
    assert attention.left_out([SMOLLM2.heads()], ("f16", "q8"), plan.attention, plan.room) == []
    missing = attention.left_out([EIGHT_BILLION.heads()], ("f16", "q8"), plan.attention, plan.room)
    too_many = ("8 x 32,768", "16 x 16,384", "16 x 32,768")
    assert [sentence.split(":")[0] for sentence in missing] == [
        f"8b decode over {kv_dtype}, {tokens} tokens" for kv_dtype in ("f16", "q8") for tokens in too_many
    ]
    for heads in plan.heads:
        assert paging.left_out([heads], ("f16", "q8"), plan.paging, plan.room) == []
        assert shared_prefix.left_out([heads], ("f16", "q8"), plan.shared_prefix, plan.room) == []
        assert int8_kv.left_out([heads], plan.int8_kv, plan.room) == []


def test_what_has_no_room_is_said_and_not_measured() -> None:
    plan = dataclasses.replace(TINY, parts=("attention",), kv_dtypes=("f16",), most_bytes=20 * _KIB)
    report = measure_kernels(plan)
    assert {(r.streams, r.context) for r in report.attention} == {(1, 5), (3, 5)}
    assert [r.context for r in report.paging] == [40] * 4
    assert (report.shared_prefix, report.int8_kv) == ([], [])
    assert [sentence.split(":")[0] for sentence in report.left_out] == [
        *(f"tiny decode over f16, {count} x 300 tokens" for count in (1, 3)),
        "tiny prefill over f16, 1 x 300 tokens",
        *(f"tiny chunk over f16, 1 x {context} tokens" for context in ("400", "2,000")),
        "paging of tiny f16, 2 x 300 tokens",
        "shared prefix of tiny f16, 3 x (270 + 20) tokens",
    ]
    assert report.left_out[-2].endswith("keys and values of one layer are 0.1 MiB, 0.0 are allowed")


def test_the_tables_name_every_measurement(report: KernelReport) -> None:
    output = io.StringIO()
    print_report(report, Console(file=output, width=200))
    named = ("GFLOP/s fp32", "GOP/s int8_summed", *TINY.types, "qkv", "96x64", "256", "3 streams")
    for words in (*named, *_ATTENTION_WORDS, "left out: tiny head as Q4_K"):
        assert words in output.getvalue()


def test_json_has_the_promised_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.bench.kernels.last_level_cache_bytes", lambda: 1 << 20)
    assert main(["bench", "kernels", "--json", "--quick", "--only", "matmul", *_ONE_CASE]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said) == {*_LISTS, "benchmark", "machine", "limits", "left_out"}
    assert said["benchmark"] == "kernels"
    machine = said["machine"]
    assert machine["threads"] == 1
    assert machine["instruction_set"] == "portable"
    assert isinstance(machine["cpu_model"], str)
    assert isinstance(machine["date"], str)
    assert isinstance(machine["load_average"], float)
    limits = ("fp32_gflops", "int8_gops", "int8_summed_gops", "read_gbs", "read_bytes")
    assert all(said["limits"][name] > 0 for name in limits)
    for part in _LISTS[1:]:
        assert said[part] == []
    assert {product["shape"] for product in said["matmul"]} == {"qkv", "o", "gate+up", "down", "head"}
    for product in said["matmul"]:
        assert (product["type"], product["rows"]) == ("Q4_0", 1)
        for name in ("seconds", "gops", "weight_gbs", "percent_of_peak", "percent_of_read"):
            assert isinstance(product[name], float)
            assert product[name] > 0
        assert product["weights_from"] in ("memory", "cache")
        assert (product["model"], product["peak"]) == ("smollm2-135m", "int8_summed")


_LISTS = ("matmul", "attention", "paging", "shared_prefix", "int8_kv")
_ATTENTION_WORDS = (
    "tiny, decode from f16",
    "tiny, decode from q8",
    "tiny, prefill of 300 tokens over f16",
    "tiny, the last chunk of 2,000 tokens over q8",
    "tiny, paged from q8",
    "blocks of 16",
    "scattered",
    "tiny, 3 users on 270 common tokens and 20 of their own, q8",
    "tiny, 2 streams of 300 tokens: q8 takes",
)


def test_attention_in_json(report: KernelReport) -> None:
    """Field names are a promise."""
    said = json.loads(json.dumps(report.as_json()))
    fields = {
        "attention": "kind context streams kv_dtype kv_from layers seconds seconds_low seconds_high gflops "
        "kv_gbs percent_of_peak percent_of_read",
        "paging": "kv_dtype streams context layers block_size order seconds blocks_seconds runs_seconds "
        "huge_seconds contiguous ratio ratio_low ratio_high huge_ratio",
        "shared_prefix": "kv_dtype users common_tokens own_tokens layers private_seconds plain_seconds "
        "shared_seconds speedup_over_private speedup_over_private_low speedup_over_private_high "
        "speedup_over_plain speedup_over_plain_low speedup_over_plain_high kv_bytes_attended kv_bytes_read "
        "kv_bytes_fraction",
        "int8_kv": "streams context layers f16_seconds q8_seconds ratio ratio_low ratio_high bytes_ratio",
    }
    for part, names in fields.items():
        for result in said[part]:
            heads = [result.pop(name) for name in ("model", "num_heads", "num_kv_heads", "head_dim")]
            assert heads == ["tiny", 4, 2, 16]
            assert list(result) == names.split()
            assert all(value > 0 for value in result.values() if isinstance(value, (int, float)))


def test_kv_dtypes_are_chosen_by_a_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One type alone has nothing beside it."""
    plans: list[KernelPlan] = []

    def measure(plan: KernelPlan, _say: object) -> KernelReport:
        plans.append(plan)
        return measure_kernels(dataclasses.replace(TINY, parts=plan.parts, kv_dtypes=plan.kv_dtypes))

    monkeypatch.setattr("octavo.bench.kernels.measure_kernels", measure)
    assert main(["bench", "kernels", "--json", "--only", "attention", "--kv-dtypes", "q8"]) == 0
    assert [plan.kv_dtypes for plan in plans] == [("q8",)]
    said = json.loads(capsys.readouterr().out)
    for part in ("attention", "paging", "shared_prefix"):
        assert {result["kv_dtype"] for result in said[part]} == {"q8"}
    assert (said["matmul"], said["int8_kv"]) == ([], [])


_ONE_CASE = [
    *("--types", "Q4_0", "--rows", "1", "--repeats", "1"),
    *("--threads", "1", "--instruction-set", "portable"),
]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--types", "Q9_9"], "weights are measured as Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, "),
        (["--rows", "1,513"], "up to 512 rows, not with 513"),
        (["--kv-dtypes", "q8,f8"], "keys and values are measured as f16, q8, not as f8"),
        (["--models", "1b,70b"], "smollm2-135m, gemma-3-270m, 1b, 3b, 8b, not '70b'"),
        (["--instruction-set", "mmx"], "instruction set 'mmx' cannot run on this processor"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", "--quick", "--json", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("octavo: error: ")
    assert captured.err.count("\n") == 1
    assert sentence in captured.err
