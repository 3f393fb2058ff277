"""What the engine counts, and how Prometheus sees it.

The engine thread records into plain lists and integers (well under a microsecond each); a scrape reads
them. Nothing here is registered globally: every engine has its own `EngineMetrics` and its own collector,
so two engines in one process never meet. Names follow vLLM's, with the prefix `octavo:`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from octavo.engine.kv_memory import KVMemory
    from octavo.engine.request import RequestStats
    from octavo.kv.kv_cache import KVCache
    from octavo.scheduler.scheduler import Scheduler

# Seconds. From the half millisecond of Python between two steps to the hour of a long document on a small
# machine.
WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
GAP_BUCKETS = (
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)
E2E_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 3600.0)
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
RATIO_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
OVERHEAD_BUCKETS = (0.00005, 0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)

FINISH_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts by upper bound, one writer."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values at or below it) as Prometheus wants them, "+Inf" last."""
        pairs, below = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            below += count
            pairs.append((bound, float(below)))
        return pairs


class StepTimes:
    """The last `capacity` steps: seconds in the native call, and seconds of Python since the call before.

    A gap is only recorded between two steps with no sleep in between. Every step of a benchmark can be
    looked at afterwards at the price of two appends a step.
    """

    __slots__ = ("_gaps", "_steps", "num_steps")

    def __init__(self, capacity: int = 8192) -> None:
        self.num_steps = 0
        self._steps: deque[float] = deque(maxlen=capacity)
        self._gaps: deque[float] = deque(maxlen=capacity)

    def record(self, seconds: float, gap: float | None) -> None:
        """A native call of `seconds`, `gap` seconds after the one before; None after a sleep."""
        self.num_steps += 1
        self._steps.append(seconds)
        if gap is not None:
            self._gaps.append(gap)

    def steps(self) -> list[float]:
        """Seconds inside `Model.step`, oldest first."""
        return list(self._steps)

    def gaps(self) -> list[float]:
        """Seconds from one native return to the next native entry, oldest first."""
        return list(self._gaps)


class EngineMetrics:
    """Everything recorded on the engine thread."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.time_to_first_token = Histogram(WAIT_BUCKETS)
        self.inter_token_latency = Histogram(GAP_BUCKETS)
        self.queue_time = Histogram(WAIT_BUCKETS)
        self.e2e_latency = Histogram(E2E_BUCKETS)
        self.step_time = Histogram(STEP_BUCKETS)
        self.step_gap = Histogram(OVERHEAD_BUCKETS)
        self.step_predicted = Histogram(STEP_BUCKETS)
        self.step_prediction_error = Histogram(RATIO_BUCKETS)
        self.step_times = StepTimes()
        self.failed_steps = 0
        self.attention_kv_bytes_read = 0
        self.attention_kv_bytes_attended = 0

    def step(self, seconds: float, gap: float | None) -> None:
        """One native call took `seconds`; `gap` seconds of Python lay before it (None after a sleep)."""
        self.step_times.record(seconds, gap)
        self.step_time.observe(seconds)
        if gap is not None:
            self.step_gap.observe(gap)

    def prediction(self, predicted: float, seconds: float) -> None:
        """A step that was expected to take `predicted` took `seconds`, with the Python before it."""
        self.step_predicted.observe(predicted)
        self.step_prediction_error.observe(abs(predicted - seconds) / seconds)

    def finish(self, stats: RequestStats) -> None:
        """A request ended; its stats are complete."""
        self.finished[stats.finish_reason or "error"] += 1
        if stats.total_time is not None:
            self.e2e_latency.observe(stats.total_time)


class EngineCollector:
    """A prometheus-client collector over one engine: `CollectorRegistry().register(engine.collector)`.

    Gauges are read from the scheduler and the cache at the moment of the scrape, so they cannot drift from
    them.
    """

    def __init__(
        self,
        metrics: EngineMetrics,
        scheduler: Scheduler,
        cache: KVCache,
        kv_memory: KVMemory,
        model_name: str,
        *,
        kv_cache_dtype: str,
    ) -> None:
        self._metrics = metrics
        self._scheduler = scheduler
        self._cache = cache
        self._kv_memory = kv_memory
        self._model_name = model_name
        self._kv_cache_dtype = kv_cache_dtype

    def collect(self) -> Iterator[Metric]:
        """One scrape. prometheus-client is imported here because start-up is counted and scrapes are not."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        metrics, scheduler, cache = self._metrics, self._scheduler, self._cache
        labels = [self._model_name]

        gauges: list[tuple[str, str, float]] = [
            ("num_requests_running", "Requests with KV that are being computed", scheduler.num_running),
            ("num_requests_waiting", "Requests waiting for their first step", scheduler.num_waiting),
            (
                "num_requests_paused",
                "Requests that gave up KV blocks and wait for room",
                scheduler.num_paused,
            ),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 1 = all", cache.num_used / cache.num_blocks),
            ("kv_blocks_total", "KV blocks in the pool", cache.num_blocks),
            ("kv_blocks_used", "KV blocks some request refers to", cache.num_used),
            ("kv_blocks_cached", "KV blocks nobody refers to, content still findable", cache.num_cached),
            ("kv_blocks_free", "KV blocks without content", cache.num_free),
            (
                "kv_blocks_pinned",
                "KV blocks that are held for prefixes of the configuration",
                cache.num_pinned,
            ),
            ("kv_blocks_shared", "KV blocks more than one request refers to", cache.num_shared),
            ("kv_cache_budget_bytes", "What the KV pool may take", self._kv_memory.budget_bytes),
            (
                "kv_cache_resident_bytes",
                "Physical memory that KV blocks take, as the system sees it",
                self._kv_memory.resident_bytes(),
            ),
        ]
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"octavo:{name}", text, labels=["model_name"])
            gauge.add_metric(labels, value)
            yield gauge

        settings = {
            "block_size": str(cache.block_size),
            "num_blocks": str(cache.target_blocks),
            "kv_cache_dtype": self._kv_cache_dtype,
        }
        info = GaugeMetricFamily(
            "octavo:cache_config_info", "How the KV cache is made", labels=["model_name", *settings]
        )
        info.add_metric([*labels, *settings.values()], 1)
        yield info

        counters: list[tuple[str, str, float]] = [
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix index", cache.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found there", cache.prefix_hits),
            (
                "kv_blocks_copied",
                "KV blocks of which a start was copied for another request",
                cache.num_copied,
            ),
            (
                "num_preemptions",
                "Times a request was paused for lack of KV blocks",
                scheduler.num_preemptions,
            ),
            (
                "preempted_tokens",
                "Computed tokens that pauses took from requests",
                scheduler.num_lost_tokens,
            ),
            ("prompt_tokens", "Prompt tokens of requests that produced a token", metrics.prompt_tokens),
            ("generation_tokens", "Tokens generated", metrics.generation_tokens),
            ("engine_steps", "Native steps completed", metrics.step_times.num_steps),
            ("engine_failed_steps", "Steps that raised", metrics.failed_steps),
            (
                "engine_steps_over_target",
                "Steps in which those who generate were expected to take more than --target-itl-ms alone",
                scheduler.num_steps_over_target,
            ),
            (
                "attention_kv_bytes_read",
                "Bytes of keys and values that attention read",
                metrics.attention_kv_bytes_read,
            ),
            (
                "attention_kv_bytes_attended",
                "Bytes it would have read had each request read its own",
                metrics.attention_kv_bytes_attended,
            ),
        ]
        for name, text, value in counters:
            counter = CounterMetricFamily(f"octavo:{name}", text, labels=["model_name"])
            counter.add_metric(labels, value)
            yield counter

        finished = CounterMetricFamily(
            "octavo:request_success", "Requests by how they ended", labels=["model_name", "finished_reason"]
        )
        for reason, number in metrics.finished.items():
            finished.add_metric([self._model_name, reason], number)
        yield finished

        released = CounterMetricFamily(
            "octavo:kv_blocks_released",
            "KV blocks whose memory went back to the system, by why",
            labels=["model_name", "reason"],
        )
        for reason, number in self._kv_memory.num_released.items():
            released.add_metric([self._model_name, reason], number)
        yield released

        histograms = [
            (
                "time_to_first_token_seconds",
                "From submission to the first token",
                metrics.time_to_first_token,
            ),
            ("inter_token_latency_seconds", "Between two tokens of a stream", metrics.inter_token_latency),
            ("request_queue_time_seconds", "From submission to the first step", metrics.queue_time),
            ("e2e_request_latency_seconds", "From submission to the end", metrics.e2e_latency),
            ("engine_step_seconds", "Inside the native call", metrics.step_time),
            ("engine_step_gap_seconds", "Native return to next native entry", metrics.step_gap),
            (
                "engine_step_predicted_seconds",
                "What the scheduler expected of a step, the Python before it included",
                metrics.step_predicted,
            ),
            (
                "engine_step_prediction_error_ratio",
                "How far off that was, as a part of what the step took",
                metrics.step_prediction_error,
            ),
        ]
        for name, text, histogram in histograms:
            family = HistogramMetricFamily(f"octavo:{name}", text, labels=["model_name"])
            family.add_metric(labels, buckets=histogram.cumulative(), sum_value=histogram.total)
            yield family
