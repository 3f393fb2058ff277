"""The arithmetic of benchmarks/shared_prefix.py, what it takes from /metrics, and its prompts."""

from __future__ import annotations

import dataclasses
import http.server
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from comparison import NothingMeasured
from metrics_watch import Counts, MetricsWatch, decode_phase
from octavo.bench.client import AnswerFailed, StreamedAnswer
from octavo.engine.config import EngineConfig
from octavo.engine.sampling_params import SamplingParams
from octavo.llm import LLM
from octavo.model.gguf import GGUFFile
from octavo.text.tokenizer import Tokenizer
from shared_prefix import QUESTIONS, check_lengths, user_prompts
from sharing import (
    MEASURES,
    PLAIN,
    PRIVATE,
    SHARED,
    Run,
    cells,
    differences,
    markdown,
    measure,
    rows,
    tokens_before_all_begin,
)

BEFORE = Counts(
    first_tokens=8,
    ended=8,
    bytes_read=1_000,
    bytes_attended=1_000,
    generated=64,
    cached=0,
    pauses=1,
    blocks_used=0,
)


def later(**changes: int) -> Counts:
    """`BEFORE`, plus what has been counted since."""
    return dataclasses.replace(BEFORE, **{name: getattr(BEFORE, name) + by for name, by in changes.items()})


def exposition(counts: Counts) -> str:
    """As a server writes it, with what nobody here asks for, and the endings in two samples."""
    return f"""# HELP octavo:kv_blocks_used KV blocks some request refers to
# TYPE octavo:kv_blocks_used gauge
octavo:kv_blocks_used{{model_name="m {{1}}"}} {counts.blocks_used:.1f}
octavo:prefix_cache_hits_total{{model_name="m"}} {float(counts.cached)}
octavo:num_preemptions_total{{model_name="m"}} {float(counts.pauses)}
octavo:generation_tokens_total{{model_name="m"}} {float(counts.generated)}
octavo:attention_kv_bytes_read_total{{model_name="m"}} {counts.bytes_read:e}
octavo:attention_kv_bytes_attended_total{{model_name="m"}} {counts.bytes_attended:e}
octavo:request_success_total{{finished_reason="stop",model_name="m"}} 1.0
octavo:request_success_total{{finished_reason="length",model_name="m"}} {counts.ended - 1:.1f}
octavo:time_to_first_token_seconds_bucket{{le="+Inf",model_name="m"}} 77.0
octavo:time_to_first_token_seconds_count{{model_name="m"}} {float(counts.first_tokens)}
octavo:time_to_first_token_seconds_sum{{model_name="m"}} 12.5
python_info 1.0
"""


def answer(sent: float, *arrivals: float, prompt_tokens: int = 100) -> StreamedAnswer:
    return StreamedAnswer(sent, arrivals, prompt_tokens, len(arrivals), "a" * len(arrivals))


SCRAPES = [
    BEFORE,
    later(bytes_read=500, bytes_attended=500, generated=3, first_tokens=1, blocks_used=10),
    # Both decode from here ...
    later(bytes_read=900, bytes_attended=900, generated=10, first_tokens=2, cached=40, blocks_used=11),
    later(bytes_read=950, bytes_attended=1_100, generated=12, first_tokens=2, cached=40, blocks_used=12),
    later(bytes_read=1_000, bytes_attended=1_300, generated=20, first_tokens=2, cached=40, blocks_used=13),
    # ... to here; what comes now is the rest of the other.
    later(bytes_read=9_000, bytes_attended=9_900, generated=99, first_tokens=2, ended=1, cached=40),
    later(bytes_read=9_500, bytes_attended=9_999, generated=101, first_tokens=2, ended=2, cached=40),
]


def test_counts_are_read_from_what_a_server_says() -> None:
    counts = later(bytes_read=123_456_789_000, first_tokens=3, ended=2, blocks_used=7)
    assert Counts.parse(exposition(counts)) == dataclasses.replace(counts, bytes_read=123_456_800_000)
    with pytest.raises(ValueError, match="no octavo:num_preemptions_total"):
        Counts.parse(exposition(counts).replace("num_preemptions", "num_pauses"))


def test_counts_are_read_from_what_the_engine_says(tiny_model_path: Path) -> None:
    with LLM(tiny_model_path) as llm:
        prompt = list(range(70, 120))
        for _ in range(2):
            llm.generate([prompt], SamplingParams(max_tokens=5, ignore_eos=True))
        registry = CollectorRegistry()
        registry.register(llm.engine.collector)
        counts = Counts.parse(generate_latest(registry).decode())
    assert (counts.first_tokens, counts.ended, counts.generated, counts.cached) == (2, 2, 10, 49)
    assert counts.bytes_read == counts.bytes_attended > 0


def test_the_decode_phase_is_between_the_last_beginning_and_the_first_end() -> None:
    assert decode_phase(SCRAPES, 2) == (SCRAPES[2], SCRAPES[4])
    with pytest.raises(NothingMeasured, match=r"0 of 7 scrapes .* all 3 users"):
        decode_phase(SCRAPES, 3)
    with pytest.raises(NothingMeasured, match="1 of 5 scrapes"):
        decode_phase([*SCRAPES[:3], *SCRAPES[5:]], 2)


def test_measures_of_one_server() -> None:
    answers = [answer(0.0, 1.0, 2.0, 3.0, 4.0, 5.0), answer(0.5, 2.5, 3.5, 4.5, 5.5)]
    values = measure(answers, SCRAPES, block_bytes=1_000_000)
    assert values == {
        "decode": pytest.approx(5 / 2.5),
        "first_token_median": 1.5,
        "first_token_last": 2.0,
        "wall": 5.5,
        "kv_read": pytest.approx(100 / 10 / 1e6),
        "kv_read_share": 25.0,
        "kv_held": 13.0,
        "prompt_computed": 160,
        "prompt_cached": 40,
    }
    assert list(values) == [each.name for each in MEASURES]


def test_users_who_had_to_wait_for_kv_are_no_measurement() -> None:
    with pytest.raises(NothingMeasured, match="paused 3 times"):
        measure([answer(0.0, 1.0, 2.0)], [*SCRAPES, dataclasses.replace(SCRAPES[-1], pauses=4)], 1)


def test_tokens_of_the_first_before_the_last_begins_as_the_scheduler_deals_them_out() -> None:
    for prompt_lens in ([1_000] * 8, [4_040] * 8, [5, 7], [300] * 3):
        left, generated = list(prompt_lens), 0
        while any(left):
            budget = 256 - sum(not tokens for tokens in left)
            generated += not left[0]
            for user, tokens in enumerate(left):
                left[user] -= min(tokens, budget)
                budget -= min(tokens, budget)
            generated += not generated and not left[0]
        bound = tokens_before_all_begin(prompt_lens, 256)
        assert generated <= bound <= generated + 2


def run(arm: str, repetition: int, *, decode: float, wall: float, texts: Sequence[str] = ("a", "b")) -> Run:
    values = {each.name: 1.0 for each in MEASURES} | {"decode": decode, "wall": wall, "prompt_cached": 0.0}
    return Run(arm, repetition, values, tuple(texts), 0.0)


RUNS = [
    run(PRIVATE, 1, decode=10.0, wall=40.0),
    run(PLAIN, 1, decode=20.0, wall=20.0),
    run(SHARED, 1, decode=40.0, wall=10.0),
    # The second repetition goes the other way round.
    run(SHARED, 2, decode=30.0, wall=20.0),
    run(PLAIN, 2, decode=30.0, wall=20.0),
    run(PRIVATE, 2, decode=15.0, wall=30.0),
]


def test_ratios_are_of_one_repetition_and_above_one_where_the_shared_arm_is_better() -> None:
    table = {row.measure.name: row for row in rows(RUNS)}
    assert table["decode"].values == {PRIVATE: [10.0, 15.0], PLAIN: [20.0, 30.0], SHARED: [40.0, 30.0]}
    assert table["decode"].spreads[SHARED].median == 35.0
    ratios = {
        name: {arm: (each.low, each.median, each.high) for arm, each in table[name].ratios.items()}
        for name in ("decode", "wall", "prompt_cached")
    }
    assert ratios == {
        "decode": {PRIVATE: (2.0, 3.0, 4.0), PLAIN: (1.0, 1.5, 2.0)},
        "wall": {PRIVATE: (1.5, 2.75, 4.0), PLAIN: (1.0, 1.5, 2.0)},
        "prompt_cached": {},
    }


def test_the_table_says_ranges_where_there_are_any() -> None:
    header, first, *_ = cells(rows(RUNS))
    assert header == ["", PRIVATE, PLAIN, SHARED, "shared to private", "shared to plain"]
    assert first == [
        "decode, all users together",
        "12.5 tok/s (10.0-15.0)",
        "25.0 tok/s (20.0-30.0)",
        "35.0 tok/s (30.0-40.0)",
        "3.00x (2.00-4.00)",
        "1.50x (1.00-2.00)",
    ]
    lines = markdown("m", rows(RUNS)).splitlines()
    assert lines[:4] == ["**m**", "", f"| {' | '.join(header)} |", "|---|---|---|---|---|---|"]
    assert lines[-1] == "| prompt tokens found | 0 tokens | 0 tokens | 0 tokens | - | - |"


def test_another_text_in_any_run_is_told() -> None:
    assert differences(RUNS) == []
    other = run(SHARED, 3, decode=1.0, wall=1.0, texts=("a", "bc"))
    assert differences([*RUNS, other]) == [
        "user 2, shared in repetition 3: differs from private in repetition 1 at character 1, 'c' for ''"
    ]


class _Script(http.server.BaseHTTPRequestHandler):
    """Answers with the next of the server's pages, and with the last one from then on."""

    protocol_version = "HTTP/1.1"
    pages: list[tuple[int, str]]

    def do_GET(self) -> None:
        assert self.path == "/metrics"
        status, page = self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(page.encode())))
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *_: object) -> None:
        """Tests have nobody to tell."""


@contextmanager
def scripted(pages: Sequence[tuple[int, str]]) -> Iterator[int]:
    """Yields the port."""
    handler = type("Handler", (_Script,), {"pages": list(pages)})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_a_watch_scrapes_from_the_beginning_to_the_end() -> None:
    with scripted([(200, exposition(scrape)) for scrape in SCRAPES]) as port:
        with MetricsWatch(port, seconds=60) as watch:
            assert watch.scrapes == SCRAPES[:1]
        assert watch.scrapes == SCRAPES[:2]
        with MetricsWatch(port, seconds=0.01) as watch:
            while len(watch.scrapes) < 5:
                time.sleep(0.01)
        assert watch.scrapes[:5] == SCRAPES[2:]
        assert set(watch.scrapes[5:]) <= {SCRAPES[-1]}


def test_a_scrape_that_fails_is_an_error() -> None:
    good = (200, exposition(BEFORE))
    with scripted([(404, "no such page")]) as port, pytest.raises(AnswerFailed, match="404: no such"):
        MetricsWatch(port).__enter__()
    with (
        scripted([good, (200, "")]) as port,
        pytest.raises(AnswerFailed, match="no octavo:"),
        MetricsWatch(port, seconds=60),
    ):
        pass
    # What went wrong inside is not hidden by it.
    with scripted([good, (200, "")]) as port, pytest.raises(KeyError), MetricsWatch(port, seconds=60):
        raise KeyError


def test_prompts_have_the_text_in_common_and_nothing_else(smollm2_path: Path) -> None:
    with GGUFFile(smollm2_path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    prompts = user_prompts(tokenizer, 4000)
    assert len(prompts) == len(QUESTIONS) == 8
    assert len({tuple(prompt[:4000]) for prompt in prompts}) == 1
    questions = [prompt[4000:] for prompt in prompts]
    assert all(30 <= len(question) <= 50 for question in questions)
    block_size = EngineConfig().block_size
    assert len({tuple(question[:block_size]) for question in questions}) == 8, "a block more in common"
    with pytest.raises(NothingMeasured, match=r"--context 99999: the text has 1\d,\d{3} tokens"):
        user_prompts(tokenizer, 99_999)


def test_lengths_that_leave_nothing_to_measure_are_refused() -> None:
    check_lengths([4_040] * 8, 123, 4_163)
    with pytest.raises(NothingMeasured, match=r"--tokens 122 is too few: .* 4,040 tokens, .* 115 .* 123 are"):
        check_lengths([4_040] * 8, 122, 8_192)
    with pytest.raises(NothingMeasured, match=r"4,040 tokens and --tokens 123 are 4,163; .* of 4,162"):
        check_lengths([4_040] * 8, 123, 4_162)
