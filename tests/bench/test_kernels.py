"""`octavo bench kernels`: that it measures what it says, with sizes so small that it takes a second."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from octavo.bench.attention import AttentionShape
from octavo.bench.kernels import KernelPlan, KernelReport, measure_kernels, print_report
from octavo.bench.matmul import TYPES, MatmulShape, random_weights
from octavo.cli.main import main
from octavo.kernels import Matrix, ThreadPool, WeightStore

_KIB = 1 << 10

TINY = KernelPlan(
    threads=1,
    shapes=[MatmulShape("tiny", "qkv", 96, 64)],
    rows=(1, 4, 256),
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
    assert [(r.type, r.rows) for r in report.matmul] == [(t, n) for t in TYPES for n in TINY.rows]
    decode = [(r.streams, r.context) for r in report.attention if r.kind == "decode"]
    assert decode == [(1, 5), (1, 300), (3, 5), (3, 300)]
    assert [r.context for r in report.attention if r.kind == "prefill"] == [300]


def test_rates_follow_from_the_times(report: KernelReport) -> None:
    for product in report.matmul:
        assert product.seconds_low <= product.seconds <= product.seconds_high
        assert product.gops == pytest.approx(2 * 96 * 64 * product.rows / product.seconds / 1e9)
        peak = report.limits.fp32_gflops if product.type == "F16" else report.limits.int8_gops
        assert product.percent_of_peak == pytest.approx(100 * product.gops / peak)
        assert product.percent_of_read == pytest.approx(100 * product.weight_gbs / report.limits.read_gbs)
    for layer in report.attention:
        pairs = layer.streams * layer.context if layer.kind == "decode" else 300 * 301 // 2
        assert layer.gflops == pytest.approx(4 * 4 * 16 * pairs / layer.seconds / 1e9)
        kv_bytes = layer.streams * layer.context * 2 * 2 * 16 * 2  # K and V, two heads of 16, f16
        assert layer.kv_gbs == pytest.approx(kv_bytes / layer.seconds / 1e9)


def test_weights_are_said_to_come_from_memory_only_where_all_copies_are_read(report: KernelReport) -> None:
    sizes = {type_: _packed_bytes(type_) for type_ in TYPES}
    for product in report.matmul:
        fills = product.copies * sizes[product.type] >= TINY.cold_bytes
        assert product.weights_from == ("memory" if fills else "cache")
        assert product.copies >= 2


def _packed_bytes(type_: str) -> int:
    return Matrix(WeightStore(), type_, random_weights(type_, 96, 64), 96, 64, ThreadPool(1)).nbytes


@pytest.mark.parametrize("type_", TYPES)
def test_random_weights_are_finite_and_vary(type_: str) -> None:
    matrix = Matrix(WeightStore(), type_, random_weights(type_, 96, 64), 96, 64, ThreadPool(1))
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
    for words in ("GFLOP/s fp32", *TYPES, "qkv", "96x64", "256", "3 streams", "prefill of 300"):
        assert words in output.getvalue()


def test_json_has_the_promised_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.bench.kernels.last_level_cache_bytes", lambda: 1 << 20)
    assert main(["bench", "kernels", "--json", "--quick", "--only", "matmul", *_ONE_CASE]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said) == {"benchmark", "machine", "limits", "matmul", "attention"}
    assert said["benchmark"] == "kernels"
    machine = said["machine"]
    assert machine["threads"] == 1
    assert machine["instruction_set"] == "portable"
    assert isinstance(machine["cpu_model"], str)
    assert isinstance(machine["date"], str)
    assert isinstance(machine["load_average"], float)
    assert all(said["limits"][name] > 0 for name in ("fp32_gflops", "int8_gops", "read_gbs", "read_bytes"))
    assert said["attention"] == []
    assert {product["shape"] for product in said["matmul"]} == {"qkv", "o", "gate+up", "down", "head"}
    for product in said["matmul"]:
        assert (product["type"], product["rows"]) == ("Q4_0", 1)
        for name in ("seconds", "gops", "weight_gbs", "percent_of_peak", "percent_of_read"):
            assert isinstance(product[name], float)
            assert product[name] > 0
        assert product["weights_from"] in ("memory", "cache")
        assert product["peak"] == "int8"


_ONE_CASE = [
    *("--types", "Q4_0", "--rows", "1", "--repeats", "1"),
    *("--threads", "1", "--instruction-set", "portable"),
]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--types", "Q9_9"], "weights are measured as Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, "),
        (["--rows", "1,257"], "up to 256 rows, not with 257"),
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
