"""What `octavo serve` costs when nobody asks it anything.

    python benchmarks/idle_and_start.py [--model M] [--runs R] [--idle-seconds S] [--json]

Time from the start of the process to the first 200 of /health, over several runs; processor time of an idle
server, before its first request and with a warm cache after eight requests of 400 + 64 tokens at once;
resident memory at both moments, its peak while loading and its peak of all. Processor time is counted in
ticks of the system, usually 10 ms, which is 0.05 % of a core over 20 s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from octavo.bench.client import stream_completions
from octavo.bench.machine import Machine
from octavo.bench.prompts import seeded_prompts
from octavo.bench.server_process import ServerProcess
from octavo.bench.spread import Spread
from octavo.kernels import available_instruction_sets
from octavo.kernels.threads import default_num_threads
from octavo.model.catalog import DEFAULT_MODEL, resolve_model
from octavo.model.gguf import GGUFFile
from octavo.text.tokenizer import Tokenizer

SETTLING_SECONDS = 3.0
"""What a server does once after its last work, such as proving its books, is not idleness yet."""


@dataclass(frozen=True, slots=True)
class Report:
    """ready_seconds: of each run in turn, the first perhaps with cold caches. idle_percent: of a core."""

    benchmark: str
    machine: Machine
    model: str
    ready_seconds: list[float]
    ready: Spread
    idle_percent_before: float
    idle_percent_after: float
    idle_seconds: float
    file_bytes: int
    resident_at_start: int
    resident_peak_at_start: int
    resident_after_load: int
    resident_peak: int


def main() -> int:
    parser = argparse.ArgumentParser(description="Start, idleness and memory of octavo serve.")
    flag = parser.add_argument
    flag("--model", default=DEFAULT_MODEL, help="a GGUF file, or a name 'octavo pull' knows")
    flag("--runs", type=int, default=5, help="starts that are timed (default: %(default)s)")
    flag("--idle-seconds", type=float, default=20.0, help="of watching it idle (default: %(default)s)")
    flag("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    model = resolve_model(args.model)
    report = measure(model, args.runs, args.idle_seconds)
    if args.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print_report(report)
    return 0


def measure(model: Path, runs: int, idle_seconds: float) -> Report:
    """Raises: ServerFailed, AnswerFailed."""
    command = [sys.executable, "-m", "octavo.cli.main", "serve", str(model), "--port", "{port}"]
    machine = Machine.now(default_num_threads(), available_instruction_sets()[0])
    ready = []
    for _ in range(runs - 1):
        with ServerProcess(command) as server:
            ready.append(server.ready_seconds)
    with GGUFFile(model) as file:
        prompts = seeded_prompts(Tokenizer.from_gguf(file.metadata), 8, 400)
    with ServerProcess(command) as server:
        ready.append(server.ready_seconds)
        at_start, peak_at_start = server.resident_bytes(), server.peak_resident_bytes()
        before = _idle_percent(server, idle_seconds)
        fields = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
        stream_completions(server.port, [{"prompt": prompt, **fields} for prompt in prompts])
        after_load = server.resident_bytes()
        after = _idle_percent(server, idle_seconds)
        peak = server.peak_resident_bytes()
    return Report(
        benchmark="idle_and_start",
        machine=machine,
        model=model.name,
        ready_seconds=ready,
        ready=Spread.of(ready),
        idle_percent_before=before,
        idle_percent_after=after,
        idle_seconds=idle_seconds,
        file_bytes=model.stat().st_size,
        resident_at_start=at_start,
        resident_peak_at_start=peak_at_start,
        resident_after_load=after_load,
        resident_peak=peak,
    )


def _idle_percent(server: ServerProcess, seconds: float) -> float:
    """Of one core."""
    time.sleep(SETTLING_SECONDS)
    used, begin = server.cpu_seconds(), time.perf_counter()
    time.sleep(seconds)
    return 100 * (server.cpu_seconds() - used) / (time.perf_counter() - begin)


def print_report(report: Report) -> None:
    each = ", ".join(f"{seconds:.2f}" for seconds in report.ready_seconds)
    print(report.machine.describe())
    print(f"{report.model}, {_mb(report.file_bytes)}")
    print(f"  ready after          {report.ready.median:.2f} s (median of {each})")
    print(
        f"  idle processor use   {report.idle_percent_before:.2f} % of a core, "
        f"{report.idle_percent_after:.2f} % with a warm cache ({report.idle_seconds:.0f} s each)"
    )
    print(
        f"  resident memory      {_mb(report.resident_at_start)} at the start "
        f"(at most {_mb(report.resident_peak_at_start)} while loading), "
        f"{_mb(report.resident_after_load)} after 8 x (400 + 64) tokens, {_mb(report.resident_peak)} peak"
    )


def _mb(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


if __name__ == "__main__":
    sys.exit(main())
