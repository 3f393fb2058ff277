"""Octavo beside other engines: the same files, the same threads, the same client, in one run.

    python benchmarks/versus_peers.py [--models M,...] [--peers P,...] [--streams 1,2,4,8,16] [--context 128]
                                      [--prompt 512] [--threads N] [--instruction-set I] [--repetitions R]
                                      [--only W] [--quiet MINUTES] [--busy-neighbour] [--json F]
                                      [--markdown F]

Models
    Names of measured_files.py, which makes them on first use (smollm2-q4_1 is the shipped file, 1b-q4_0 has
    random weights in the shape of Llama 3.2 1B), names that `octavo pull` knows, or GGUF files. `all` stands
    for the eleven that the README quotes. Every table says what types the file holds.

Peers
    llamacpp          the build inside the xllamacpp wheel from PyPI, for AVX2 at most; its own C++ server
    llamacpp-native   llama-server of the same project built for this processor (build_llamacpp.py, once)
    openvino          OpenVINO GenAI's ContinuousBatchingPipeline. It has no HTTP server that takes token ids:
                      openvino_server.py is a thin one, and makes no text, which is in its favour. It chooses
                      its precision itself, bf16 where the processor has it; the printed line says which
    openvino-f32      the same, told to compute in f32
    Each lives in an environment of its own under build/. Where one does not take a file, the table says
    so and its words stand below.

What is measured
    prefill       one request of --prompt tokens (512), from its sending to its first token: prompt tokens a
                  second
    decode_N      N requests of --context tokens sent at once: tokens a second of all streams together, from
                  the moment the last of them has begun until the first has ended. 128 tokens are generated
                  for one stream, 64 for each of several, and more where the prompts take long
    end_to_end_8  eight requests of 400 tokens sent at once, 64 generated for each: seconds until the last
                  token of all

How
    All engines are servers in their own process on 127.0.0.1, asked over /v1/completions with streaming by
    the client of octavo.bench.client, which only stamps what arrives and reads it afterwards. An engine runs
    alone: the next is not started until it has stopped. Each repetition starts all of them once, warms each
    up with the requests of every workload, their prompts backwards and their answers cut to 4 tokens, which
    are not counted, and gives all the same prompts; the order is turned round every time.

    Prompts are token ids of random words, different for every request and repetition, and prefix caching is
    off everywhere: nothing can be reused. All decode greedily and past the end of text, so the counts of
    tokens are equal; they are checked against what was asked for. All have KV for the largest workload as
    f16, llama.cpp in as many slots as there are requests at once, and take the same number of threads.
    Everything not named here is the engine's default. Octavo takes the best instructions there are, or
    --instruction-set.

    --busy-neighbour: while an engine is measured, one process spins and competes for a core, pinned nowhere.

What is printed
    Medians over the repetitions, with the lowest and the highest. The ratio is the median of the
    repetitions' own ratios, in which much of the machine's mood cancels out; above 1 Octavo is faster. What
    other processes used meanwhile is measured and printed: llama.cpp suffers from them more than Octavo
    does, so a ratio from a busy machine flatters us. --quiet waits for the others to be still and counts
    only repetitions that nobody disturbed; the minutes are for each model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from comparison import (
    OCTAVO,
    Capacity,
    ModelResult,
    NothingMeasured,
    Repetition,
    Workload,
    compare,
    markdown,
    workloads,
    write,
)
from measured_files import NAMES, describe_types, measured_file
from octavo.bench.client import AnswerFailed, StreamedAnswer, stream_completions
from octavo.bench.machine import Machine
from octavo.bench.other_load import OtherLoad, wait_for_quiet
from octavo.bench.prompts import seeded_prompts
from octavo.bench.server_process import ServerFailed, ServerProcess
from octavo.cli.flags import count
from octavo.kernels.threads import default_num_threads
from octavo.model.catalog import resolve_model
from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile
from octavo.text.tokenizer import Tokenizer
from peers import INSTRUCTION_SETS, PEERS, Engine, Octavo, PeerMissing

ALL_MODELS = (
    *(f"smollm2-{kind}" for kind in ("q4_1", "q4_0", "q4_k", "q5_0", "q6_k", "q8_0")),
    *(f"1b-{kind}" for kind in ("q4_0", "q4_k", "q5_0", "q6_k", "q8_0")),
)
BUSY = 0.1
"""Processors' worth of other processes from which a run is called disturbed."""
READY_SECONDS = 300.0
WARM_UP_OUTPUT = 4
"""OpenVINO compiles a model of a thousand million weights when it loads it."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What is the same for all models. quiet_seconds: see --quiet; 0 counts every repetition."""

    engines: Mapping[str, Engine]
    chosen: Sequence[Workload]
    threads: int
    repetitions: int
    quiet_seconds: float
    busy_neighbour: bool

    @property
    def capacity(self) -> Capacity:
        return Capacity.of(self.chosen)


def main() -> int:
    args = _arguments()
    # Ended from outside, it still stops the server and the neighbour that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    every = workloads(args.streams, args.context, args.prompt)
    names = [workload.name for workload in every]
    unknown = [name for name in args.only or () if name not in names]
    if unknown:
        return _fail(f"--only {unknown[0]}: there is none; there are {', '.join(names)}")
    engines: dict[str, Engine] = {peer: PEERS[peer] for peer in args.peers}
    engines[OCTAVO] = Octavo(args.instruction_set)
    try:
        models = {name: _model_file(name) for name in args.models}
        described = {name: engine.describe() for name, engine in engines.items()}
    except (ModelFileError, PeerMissing) as error:
        return _fail(str(error))

    conditions = Conditions(
        engines=engines,
        chosen=[workload for workload in every if not args.only or workload.name in args.only],
        threads=args.threads,
        repetitions=args.repetitions,
        quiet_seconds=args.quiet * 60,
        busy_neighbour=args.busy_neighbour,
    )
    machine = Machine.now(args.threads, args.instruction_set)
    stated = _stated(machine, described, conditions)
    results = []
    for name, path in models.items():
        results.append(_measure_model(name, path, conditions))
        # Files are written after each model: hours of measuring are not lost to the last of them.
        if args.json and (args.json != "-" or len(results) == len(models)):
            write(args.json, _json(results, machine, described, conditions))
        if args.markdown and (args.markdown != "-" or len(results) == len(models)):
            write(args.markdown, markdown(results, list(engines), stated))
    _print_tables(results, list(engines), stated)
    return 0 if all(result.comparisons for result in results) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Octavo beside other engines.")
    flag = parser.add_argument
    flag("--models", type=_models, default=["smollm2-q4_1"], help="default: smollm2-q4_1")
    flag("--peers", type=_peers, default=["llamacpp", "openvino"], help="default: llamacpp,openvino")
    flag("--streams", type=_counts, default=[1, 2, 4, 8, 16], help="default: 1,2,4,8,16")
    flag("--context", type=count, default=128, help="prompt tokens of a decoding stream (default: 128)")
    flag("--prompt", type=count, default=512, help="tokens of a prefill (default: 512)")
    flag("--instruction-set", choices=INSTRUCTION_SETS, default=INSTRUCTION_SETS[0], help="of Octavo")
    flag("--threads", type=count, default=default_num_threads(), help="of each (default: %(default)s)")
    flag("--repetitions", type=count, default=5, help="default: %(default)s")
    flag("--only", metavar="WORKLOAD", action="append", help="such as prefill or decode_8; may be repeated")
    flag("--busy-neighbour", action="store_true", help="with a process that spins on a core")
    flag(
        "--quiet",
        type=float,
        default=0.0,
        metavar="MINUTES",
        help="count undisturbed repetitions only, and begin new ones for at most so long with each model",
    )
    flag("--json", metavar="FILE", help="write everything as JSON; - for standard output")
    flag("--markdown", metavar="FILE", help="write the tables for the README; - for standard output")
    return parser.parse_args()


def _counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def _models(text: str) -> list[str]:
    return list(ALL_MODELS) if text == "all" else text.split(",")


def _peers(text: str) -> list[str]:
    peers = text.split(",")
    for peer in peers:
        if peer not in PEERS:
            raise argparse.ArgumentTypeError(f"there is no peer '{peer}'; there are {', '.join(PEERS)}")
    return peers


def _model_file(name: str) -> Path:
    """Raises ModelFileError."""
    return measured_file(name) if name in NAMES else resolve_model(name)


def _measure_model(name: str, path: Path, conditions: Conditions) -> ModelResult:
    failures: dict[str, str] = {}
    runs = _repeat(name, path, conditions, failures)
    return ModelResult(
        model=name,
        file=path.name,
        types=describe_types(path),
        comparisons=[compare(workload, runs) for workload in conditions.chosen] if runs else [],
        failures=failures,
        other_processors=[run.other_processors for run in runs],
    )


def _repeat(name: str, path: Path, conditions: Conditions, failures: dict[str, str]) -> list[Repetition]:
    """The repetitions that count. An engine that fails once is not started again; why, goes to `failures`."""
    with GGUFFile(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    runs: list[Repetition] = []
    deadline = time.monotonic() + conditions.quiet_seconds
    attempt = 0
    while len(runs) < conditions.repetitions:
        prompts = {
            workload.name: seeded_prompts(
                tokenizer, workload.requests, workload.input_len, seed=1000 * attempt + index
            )
            for index, workload in enumerate(conditions.chosen)
        }
        values: dict[str, Mapping[str, float]] = {}
        others = 0.0
        order = list(conditions.engines)
        for engine in order if attempt % 2 == 0 else reversed(order):
            if engine in failures:
                continue
            if conditions.quiet_seconds:
                wait_for_quiet(max(0.0, deadline - time.monotonic()), most_processors=BUSY)
            command = conditions.engines[engine].command(path, conditions.threads, conditions.capacity)
            try:
                values[engine], used = _run(command, conditions, prompts)
            except (ServerFailed, AnswerFailed, NothingMeasured) as error:
                failures[engine] = _in_short(str(error))
                print(f"{name} {engine} failed: {error}", file=sys.stderr)
                continue
            others = max(others, used)
            print(
                f"{name} {len(runs) + 1}/{conditions.repetitions} {engine}: "
                + ", ".join(f"{workload} {value:.1f}" for workload, value in values[engine].items())
                + f" (others used {used:.2f} processors)",
                file=sys.stderr,
            )
            if conditions.quiet_seconds and used > BUSY:
                break
        if not values:
            break
        if not conditions.quiet_seconds or others <= BUSY:
            runs.append(Repetition(values, others))
        attempt += 1
        if conditions.quiet_seconds and time.monotonic() > deadline:
            break
    if not runs and not failures:
        failures["nothing"] = f"no repetition was undisturbed in {conditions.quiet_seconds / 60:g} minutes"
    return runs


def _run(
    command: Sequence[str], conditions: Conditions, prompts: Mapping[str, list[list[int]]]
) -> tuple[dict[str, float], float]:
    """Start an engine, measure every workload, stop it. Returns the values and what others used meanwhile.

    Raises: ServerFailed, AnswerFailed, NothingMeasured.
    """
    with ServerProcess(command, timeout=READY_SECONDS) as server:
        for workload in conditions.chosen:  # what an engine makes once for a shape is not its speed
            _ask(server.port, _others_of(prompts[workload.name]), WARM_UP_OUTPUT)
        with _neighbour(conditions.busy_neighbour) as ours:
            others = OtherLoad([server.pid, *ours])
            measured = {}
            for workload in conditions.chosen:
                answers = _ask(server.port, prompts[workload.name], workload.output_len)
                measured[workload.name] = workload.measure(answers)
            return measured, others.processors()


def _others_of(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """As many and as long, but backwards: nothing can be reused."""
    return [list(reversed(prompt)) for prompt in prompts]


@contextlib.contextmanager
def _neighbour(wanted: bool) -> Iterator[list[int]]:
    """A process that never rests, while inside. Yields its id."""
    if not wanted:
        yield []
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield [process.pid]
    finally:
        process.kill()
        process.wait()


def _ask(port: int, prompts: Sequence[Sequence[int]], output_len: int) -> list[StreamedAnswer]:
    """Raises AnswerFailed, also where the server counted other tokens than were asked for."""
    fields: dict[str, Any] = {"max_tokens": output_len, "temperature": 0, "ignore_eos": True}
    # Octavo does not know `cache_prompt`; without it llama.cpp would look for a slot with a similar prompt.
    answers = stream_completions(port, [{"prompt": p, "cache_prompt": False, **fields} for p in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        counted = (answer.prompt_tokens, answer.completion_tokens)
        if counted != (len(prompt), output_len):
            raise AnswerFailed(f"asked for {len(prompt)} + {output_len} tokens, the server counted {counted}")
    return answers


def _in_short(error: str) -> str:
    """One line: what a server said last before it ended."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    first, last = lines[0], lines[-1]
    return first[:300] if first == last else f"{first.split(':')[0]}: {last[:300]}"


def _stated(machine: Machine, described: Mapping[str, str], conditions: Conditions) -> list[str]:
    """The facts without which the numbers mean nothing, a line each."""
    stated = [f"{machine.cpu_model}, {machine.threads} threads each, {machine.date}"]
    if conditions.busy_neighbour:
        stated.append("One process spun on a core all the time.")
    stated += [f"{name}: {text}" for name, text in described.items()]
    capacity = conditions.capacity
    return [*stated, f"KV for {capacity.sequences} x {capacity.tokens_each} tokens as f16"]


def _json(
    results: Sequence[ModelResult],
    machine: Machine,
    described: Mapping[str, str],
    conditions: Conditions,
) -> str:
    report = {
        "benchmark": "versus_peers",
        "machine": dataclasses.asdict(machine),
        "engines": dict(described),
        "busy_neighbour": conditions.busy_neighbour,
        "models": [dataclasses.asdict(result) for result in results],
    }
    return json.dumps(report, indent=2)


def _print_tables(results: Sequence[ModelResult], engines: Sequence[str], stated: Sequence[str]) -> None:
    # A file or a pipe is no terminal of 80 columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for result in results:
        header, *rows = result.rows(engines)
        table = Table(*header, title=result.title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        for note in result.notes():
            console.print(note, markup=False)
        if max(result.other_processors, default=0.0) > BUSY:
            console.print("The machine was not quiet, which llama.cpp suffers from more: do not quote this.")
    for line in stated:
        console.print(line, markup=False)


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
