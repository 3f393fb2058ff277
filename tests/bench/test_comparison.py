"""The arithmetic of benchmarks/versus_peers.py, and its tables."""

from __future__ import annotations

import pytest

from comparison import (
    Capacity,
    ModelResult,
    NothingMeasured,
    Repetition,
    Workload,
    compare,
    decode_rate,
    markdown,
    prefill_rate,
    wall_seconds,
    workloads,
)
from octavo.bench.client import StreamedAnswer


def answer(sent: float, *arrivals: float) -> StreamedAnswer:
    return StreamedAnswer(
        sent, arrivals, prompt_tokens=100, completion_tokens=len(arrivals), text="a" * len(arrivals)
    )


def workload(name: str) -> Workload:
    [found] = [each for each in workloads([1, 8], 128) if each.name == name]
    return found


def test_rates_of_answers() -> None:
    answers = [answer(0.0, 1.0, 2.0, 3.0, 4.0, 5.0), answer(0.5, 2.5, 3.5, 4.5, 5.5)]
    assert prefill_rate(answers) == 100.0
    # Both decode from 2.5 to 5.0: 3.0, 4.0 and 5.0 of the first, 3.5 and 4.5 of the second.
    assert decode_rate(answers) == pytest.approx(5 / 2.5)
    assert wall_seconds(answers) == 5.5


def test_streams_that_never_decode_together_are_no_measurement() -> None:
    with pytest.raises(NothingMeasured, match=r"first of 2 streams ended 1\.00 s before"):
        decode_rate([answer(0.0, 1.0, 2.0), answer(0.0, 3.0, 4.0)])


def test_long_prompts_get_longer_answers_so_that_all_streams_meet() -> None:
    for context in (128, 512, 1024):
        for each in workloads([1, 2, 4, 8, 16], context):
            prompt_steps = each.requests * each.input_len / 256
            assert each.requests == 1 or each.output_len > prompt_steps
    assert workload("decode_1").output_len == 128
    assert workload("decode_8").output_len == 64


def test_capacity_fits_every_workload() -> None:
    for context in (128, 1024):
        chosen = workloads([1, 16], context)
        capacity = Capacity.of(chosen)
        assert capacity.sequences == 16
        assert all(each.input_len + each.output_len < capacity.tokens_each for each in chosen)
        assert capacity.tokens == 16 * capacity.tokens_each
    assert Capacity.of([workload("prefill")]) == Capacity(1, 768)


def repetition(**values: float) -> Repetition:
    return Repetition({engine: {"prefill": value} for engine, value in values.items()}, 0.0)


def test_the_ratio_is_the_median_of_the_repetitions_own() -> None:
    runs = [
        repetition(peer=10.0, octavo=40.0),
        repetition(peer=20.0, octavo=60.0),
        repetition(peer=5.0, octavo=10.0),
    ]
    found = compare(workload("prefill"), runs)
    assert found.values == {"peer": [10.0, 20.0, 5.0], "octavo": [40.0, 60.0, 10.0]}
    assert (found.ratios["peer"].low, found.ratios["peer"].median, found.ratios["peer"].high) == (2, 3, 4)
    assert found.spreads["octavo"].median == 40.0


def test_where_less_is_better_the_ratio_is_still_above_one_for_the_faster() -> None:
    run = Repetition({"peer": {"end_to_end_8": 6.0}, "octavo": {"end_to_end_8": 2.0}}, 0.0)
    assert compare(workload("end_to_end_8"), [run]).ratios["peer"].median == 3.0


def test_an_engine_that_failed_once_does_not_count() -> None:
    found = compare(workload("prefill"), [repetition(peer=1.0, octavo=2.0), repetition(octavo=2.0)])
    assert found.values == {"octavo": [2.0, 2.0]}
    assert found.ratios == {}


def test_a_table_says_who_failed_and_why() -> None:
    found = compare(workload("prefill"), [repetition(peer=200.0, octavo=500.0)])
    result = ModelResult("m", "m.gguf", "Q4_0 100 %", [found], {"other": "exit code 1: no"}, [0.05])
    text = markdown([result], ["peer", "other", "octavo"], ["a machine"])
    assert text.splitlines() == [
        "**m (Q4_0 100 %)**",
        "",
        "|  | peer | other | octavo | octavo / peer | octavo / other |",
        "|---|---|---|---|---|---|",
        "| prefill, 512 tokens | 200 tok/s (200-200) | fails, see below | 500 tok/s (500-500) "
        "| 2.50x (2.50-2.50) | - |",
        "",
        "- other: exit code 1: no",
        "- Other processes used 0.05 processors (at most 0.05); 1 repetitions.",
        "",
        "- a machine",
    ]
