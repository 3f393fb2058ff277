"""`octavo bench throughput` on a tiny model, and its seeded prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench.prompts import seeded_prompts
from octavo.bench.throughput import Workload, measure_throughput
from octavo.cli.main import main
from octavo.model.gguf import GGUFFile
from octavo.text.tokenizer import Tokenizer


def test_json_has_the_promised_fields(tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--num-prompts", "5", "--input-len", "20", "--output-len", "6"]
    others = ["--concurrency", "2", "--threads", "1", "--seed", "3", "--json"]
    assert main(["bench", "throughput", "--model", str(tiny_model_path), *lengths, *others]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["benchmark"] == "throughput"
    assert said["model"] == tiny_model_path.name
    assert said["machine"]["threads"] == 1
    assert said["workload"] == {
        "num_prompts": 5,
        "input_len": 20,
        "output_len": 6,
        "concurrency": 2,
        "seed": 3,
    }
    assert (said["prompt_tokens"], said["output_tokens"], said["cached_tokens"]) == (100, 30, 0)
    assert said["num_preemptions"] == 0
    assert said["prompt_tokens_per_second"] == pytest.approx(100 / said["seconds"])
    assert said["output_tokens_per_second"] == pytest.approx(30 / said["seconds"])
    assert said["total_tokens_per_second"] == pytest.approx(130 / said["seconds"])
    overhead = said["overhead"]
    # Two run together, so three rounds of six tokens, of which a chunked prompt may take one step more.
    assert overhead["num_steps"] >= 18
    assert 0 < overhead["percent"] < 100
    for name in ("gap", "step"):
        assert 0 < overhead[name]["low"] <= overhead[name]["median"] <= overhead[name]["high"]


def test_a_first_prompt_is_not_counted(tiny_model_path: Path) -> None:
    workload = Workload(num_prompts=1, input_len=8, output_len=4, concurrency=1)
    report = measure_throughput(tiny_model_path, workload, threads=1)
    assert report.overhead is not None
    assert report.overhead.num_steps == 4
    assert (report.prompt_tokens, report.output_tokens) == (8, 4)


def test_a_small_pool_shows_its_preemptions(tiny_model_path: Path) -> None:
    workload = Workload(num_prompts=4, input_len=32, output_len=64, concurrency=4)
    report = measure_throughput(tiny_model_path, workload, threads=1, num_blocks_override=12)
    assert report.num_preemptions > 0
    assert report.output_tokens == 4 * 64


def test_a_request_that_can_never_fit_is_one_sentence(
    tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(tiny_model_path), "--input-len", "2040", "--output-len", "9"]
    assert main(["bench", "throughput", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("octavo: error: 2,049 tokens are needed")
    assert captured.err.count("\n") == 1


def test_a_model_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", "--model", "nowhere.gguf"]) == 1
    assert capsys.readouterr().err == "octavo: error: nowhere.gguf: no such file\n"


def test_the_table_is_for_people(tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "2", "--input-len", "8", "--output-len", "3", "--threads", "1"]
    assert main(["bench", "throughput", "--model", str(tiny_model_path), *flags]) == 0
    said = capsys.readouterr().out
    for words in ("2 prompts of 8 tokens", "prompt tokens", "output tokens", "preemptions", "Python"):
        assert words in said


def test_prompts_are_exact_different_and_repeatable(tiny_model_path: Path) -> None:
    with GGUFFile(tiny_model_path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    prompts = seeded_prompts(tokenizer, 6, 33, seed=1)
    assert [len(prompt) for prompt in prompts] == [33] * 6
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 6
    assert prompts == seeded_prompts(tokenizer, 6, 33, seed=1)
    assert prompts != seeded_prompts(tokenizer, 6, 33, seed=2)
    # Control tokens have no bytes: a prompt must not end a turn by chance.
    assert all(tokenizer.token_bytes(token_id) for prompt in prompts for token_id in prompt)
