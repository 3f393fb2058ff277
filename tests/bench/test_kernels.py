"""`octavo bench kernels`: that it measures what it says, with sizes so small that it takes a second."""

from __future__ import annotations

import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from kernels.weights import QUANTIZED_TYPES
from octavo.bench.attention import AttentionShape
from octavo.bench.kernels import KernelPlan, KernelReport, measure_kernels, print_report
from octavo.bench.matmul import MatmulShape, random_weights
from octavo.bench.shapes import MODELS, models_named
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
    contexts=(5, 300),
    streams=(1, 3),
    prompts=(300,),
    repeats=2,
    cold_bytes=64 * _KIB,
    read_bytes=1024 * _KIB,
    most_bytes=64 * _KIB,
)


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
        f"tiny {name} as Q4_K: rows of 64 weights are not whole blocks of 256" for name in ("qkv", "head")
    ]
    decode = [(r.streams, r.context) for r in report.attention if r.kind == "decode"]
    assert decode == [(1, 5), (1, 300), (3, 5), (3, 300)]
    assert [r.context for r in report.attention if r.kind == "prefill"] == [300]


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
        pairs = layer.streams * layer.context if layer.kind == "decode" else 300 * 301 // 2
        assert layer.gflops == pytest.approx(4 * 4 * 16 * pairs / layer.seconds / 1e9)
        kv_bytes = layer.streams * layer.context * 2 * 2 * 16 * 2  # K and V, two heads of 16, f16
        assert layer.kv_gbs == pytest.approx(kv_bytes / layer.seconds / 1e9)


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
    plan = dataclasses.replace(TINY, parts=("attention",)).of_models(models_named(["gemma-3-270m"]))
    report = measure_kernels(plan)
    assert (report.matmul, report.left_out) == ([], [])
    assert {(r.num_heads, r.num_kv_heads, r.head_dim) for r in report.attention} == {(4, 1, 256)}


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
        layer_bytes = layer.streams * layer.context * 128
        assert layer.layers == 1 or layer.layers * layer_bytes <= TINY.most_bytes


def test_the_tables_name_every_measurement(report: KernelReport) -> None:
    output = io.StringIO()
    print_report(report, Console(file=output, width=200))
    named = ("GFLOP/s fp32", "GOP/s int8_summed", *TINY.types, "qkv", "96x64", "256", "3 streams")
    for words in (*named, "prefill of 300", "left out: tiny head as Q4_K"):
        assert words in output.getvalue()


def test_json_has_the_promised_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.bench.kernels.last_level_cache_bytes", lambda: 1 << 20)
    assert main(["bench", "kernels", "--json", "--quick", "--only", "matmul", *_ONE_CASE]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said) == {"benchmark", "machine", "limits", "matmul", "attention", "left_out"}
    assert said["benchmark"] == "kernels"
    machine = said["machine"]
    assert machine["threads"] == 1
    assert machine["instruction_set"] == "portable"
    assert isinstance(machine["cpu_model"], str)
    assert isinstance(machine["date"], str)
    assert isinstance(machine["load_average"], float)
    limits = ("fp32_gflops", "int8_gops", "int8_summed_gops", "read_gbs", "read_bytes")
    assert all(said["limits"][name] > 0 for name in limits)
    assert said["attention"] == []
    assert {product["shape"] for product in said["matmul"]} == {"qkv", "o", "gate+up", "down", "head"}
    for product in said["matmul"]:
        assert (product["type"], product["rows"]) == ("Q4_0", 1)
        for name in ("seconds", "gops", "weight_gbs", "percent_of_peak", "percent_of_read"):
            assert isinstance(product[name], float)
            assert product[name] > 0
        assert product["weights_from"] in ("memory", "cache")
        assert (product["model"], product["peak"]) == ("smollm2-135m", "int8_summed")


_ONE_CASE = [
    *("--types", "Q4_0", "--rows", "1", "--repeats", "1"),
    *("--threads", "1", "--instruction-set", "portable"),
]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--types", "Q9_9"], "weights are measured as Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, "),
        (["--rows", "1,513"], "up to 512 rows, not with 513"),
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
