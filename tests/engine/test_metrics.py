"""What Prometheus sees, and what the log says of a finished request."""

from __future__ import annotations

import logging
import re
import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.fake_model import FakeModel, running_engine
from engine.reading import params, read, read_all
from octavo.engine.engine import Engine
from octavo.engine.generation import Generation
from octavo.engine.kv_memory import RELEASE_REASONS
from octavo.engine.metrics import Histogram, StepTimes


def scrape(engine: Engine) -> dict[str, float]:
    """Sample name (with its reason, where it has one) -> value."""
    registry = CollectorRegistry()
    registry.register(engine.collector)
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake"
            extra = [f"{key}={value}" for key, value in sample.labels.items() if key != "model_name"]
            samples[" ".join([sample.name, *extra])] = sample.value
    return samples


def test_gauges_are_the_schedulers_and_the_caches_own_numbers_at_every_step() -> None:
    model = FakeModel()
    shared = [i % 900 for i in range(100)]
    with running_engine(model, num_blocks_override=18, max_num_seqs=4, start=False) as engine:
        scheduler, cache = engine._scheduler, engine._loop._cache
        seen = []
        generations: list[Generation] = []

        def compare(_: object) -> None:
            numbers = scrape(engine)
            expected = {
                "num_requests_running": scheduler.num_running,
                "num_requests_waiting": scheduler.num_waiting,
                "num_requests_paused": scheduler.num_paused,
                "kv_cache_usage_perc": cache.num_used / 18,
                "kv_blocks_total": 18,
                "kv_blocks_used": cache.num_used,
                "kv_blocks_cached": cache.num_cached,
                "kv_blocks_free": cache.num_free,
                "kv_blocks_shared": cache.num_shared,
                "prefix_cache_queries_total": cache.prefix_queries,
                "prefix_cache_hits_total": cache.prefix_hits,
                "num_preemptions_total": scheduler.num_preemptions,
                "preempted_tokens_total": sum(one._request.sequence.num_lost_tokens for one in generations),
            }
            assert {name: numbers[f"octavo:{name}"] for name in expected} == expected
            assert cache.num_used + cache.num_cached + cache.num_free == 18
            seen.append(expected)

        model.before_step = compare
        generations += [engine.submit([*shared, i], params(60)) for i in range(6)]
        engine.start()
        read_all(generations)
    assert max(numbers["kv_blocks_shared"] for numbers in seen) > 0
    assert max(numbers["num_requests_waiting"] for numbers in seen) > 0
    assert max(numbers["num_preemptions_total"] for numbers in seen) > 0
    assert max(numbers["preempted_tokens_total"] for numbers in seen) > 0


def test_counters_and_histograms_after_a_known_load() -> None:
    with running_engine() as engine:
        for length in (10, 20):
            read(engine.submit([1] * length, params(5)))
        gone = engine.submit([2] * 30, params(2000))
        next(gone)
        gone.cancel()
        read(engine.submit([3] * 5, params(1)))
        numbers = scrape(engine)
    assert numbers["octavo:prompt_tokens_total"] == 10 + 20 + 30 + 5
    assert numbers["octavo:generation_tokens_total"] == 5 + 5 + gone.stats.num_output_tokens + 1
    assert numbers["octavo:request_success_total finished_reason=length"] == 3
    assert numbers["octavo:request_success_total finished_reason=abort"] == 1
    assert numbers["octavo:request_success_total finished_reason=stop"] == 0
    for name, count in (
        ("time_to_first_token_seconds", 4),
        ("request_queue_time_seconds", 4),
        ("e2e_request_latency_seconds", 4),
        ("inter_token_latency_seconds", 4 + 4 + gone.stats.num_output_tokens - 1),
    ):
        assert numbers[f"octavo:{name}_count"] == count, name
        assert numbers[f"octavo:{name}_bucket le=+Inf"] == count
        assert numbers[f"octavo:{name}_sum"] > 0
    assert numbers["octavo:engine_steps_total"] == len(engine.metrics.step_times.steps())


def test_memory_is_told_as_it_is_and_as_it_may_be() -> None:
    with running_engine(num_blocks_override=18) as engine:
        numbers = scrape(engine)
        assert numbers["octavo:kv_cache_budget_bytes"] == 18 * 4096
        assert numbers["octavo:kv_cache_resident_bytes"] == 0
        read(engine.submit([1] * 40, params(8)))
        assert scrape(engine)["octavo:kv_cache_resident_bytes"] == 3 * 4096
        engine.resize_kv_cache(5 * 4096 + 1)
        engine.release_kv_cache()
        numbers = scrape(engine)
    assert numbers["octavo:kv_cache_budget_bytes"] == 5 * 4096 + 1
    assert numbers["octavo:kv_cache_resident_bytes"] == 0
    assert numbers["octavo:kv_blocks_total"] == 5
    assert numbers["octavo:cache_config_info block_size=16 kv_cache_dtype=f16 num_blocks=5"] == 1
    released = {
        reason: numbers[f"octavo:kv_blocks_released_total reason={reason}"] for reason in RELEASE_REASONS
    }
    assert released == {"idle": 0, "pressure": 0, "admin": 3, "resize": 0}


def test_the_cache_says_how_it_is_made() -> None:
    with running_engine(num_blocks_override=18, block_size=8, kv_cache_dtype="q8") as engine:
        settings = "block_size=8 kv_cache_dtype=q8 num_blocks=18"
        assert scrape(engine)[f"octavo:cache_config_info {settings}"] == 1


@pytest.mark.parametrize(("dtype", "row_bytes"), [("f16", 2 * 2 * 16), ("q8", 2 * (16 + 4))])
@pytest.mark.parametrize("shared", [True, False])
def test_the_bytes_that_attention_read_and_would_have_read(dtype: str, row_bytes: int, shared: bool) -> None:
    """Two requests with 64 tokens in common and one of their own are computed together for three steps."""
    common = list(range(64))
    with running_engine(kv_cache_dtype=dtype, shared_prefix_attention=shared, start=False) as engine:
        generations = [engine.submit([*common, 900 + i], params(3)) for i in range(2)]
        assert scrape(engine)["octavo:attention_kv_bytes_attended_total"] == 0
        engine.start()
        read_all(generations)
        numbers = scrape(engine)
    attended = 2 * (65 + 66 + 67)
    assert numbers["octavo:attention_kv_bytes_attended_total"] == attended * row_bytes
    read_once = 3 * 64 if shared else 0
    assert numbers["octavo:attention_kv_bytes_read_total"] == (attended - read_once) * row_bytes


def test_a_histogram_counts_at_or_below_each_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("0.1", 2.0), ("1.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == pytest.approx(8.65)


def test_step_times_keep_the_latest_in_order() -> None:
    times = StepTimes(capacity=4)
    times.record(0, None)
    for value in range(1, 10):
        times.record(value, value / 10)
    assert times.steps() == [6, 7, 8, 9]
    assert times.gaps() == [0.6, 0.7, 0.8, 0.9]
    assert times.num_steps == 10


def test_a_sleep_is_not_a_gap() -> None:
    with running_engine() as engine:
        for _ in range(3):
            read(engine.submit([1, 2], params(4)))
        times = engine.metrics.step_times
        assert times.num_steps == 12
        assert len(times.gaps()) == 9


def test_one_line_a_finished_request_and_no_content(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="octavo.engine"), running_engine() as engine:
        read(engine.submit([777] * 40, params(12), request_id="chat-7"))
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(lines) == 1
    assert re.fullmatch(
        r"request chat-7: prompt 40, cached 0, output 12, queue 0\.\d{3} s, first token 0\.\d{3} s, "
        r"[\d.]+ tokens/s, pauses 0, length",
        lines[0],
    )
    assert "777" not in lines[0]


def test_a_scrape_never_trips_over_a_request_that_comes_or_goes() -> None:
    """Scrapes run in another thread than the scheduler whose queues they count."""
    interval = sys.getswitchinterval()
    with running_engine(num_blocks_override=64) as engine:
        sys.setswitchinterval(1e-6)
        try:
            for _ in range(10):
                generations = [engine.submit([i + 1] * 5, params(1 + i % 7)) for i in range(64)]
                while engine.num_open:
                    for _ in range(50):
                        assert 0 <= engine.num_running <= 64
                    scrape(engine)
                read_all(generations)
        finally:
            sys.setswitchinterval(interval)
