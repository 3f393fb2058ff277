"""Octavo beside llama.cpp: the same file, the same threads, the same client, in one run.

    python benchmarks/versus_llamacpp.py [--model M] [--threads N] [--instruction-set I] [--repetitions R]
                                          [--quiet MINUTES] [--json F] [--markdown F]

What is measured
    prefill       one request of 512 tokens, from its sending to its first token: prompt tokens a second
    decode x1     one request of 128 tokens, 128 generated: tokens a second between its first and last token
    decode x8     eight requests of 128 tokens sent at once, 64 generated for each: tokens a second of all
                  streams together, from the moment the last of them has begun until the first has ended
    8 x (400+64)  eight requests of 400 tokens sent at once, 64 generated for each: seconds until the last
                  token of all

How
    Both engines are servers in their own process on 127.0.0.1, asked over /v1/completions with streaming by
    the client of octavo.bench.client, which only stamps what arrives and reads it afterwards. llama.cpp is
    the build inside the xllamacpp wheel from PyPI, in an environment of its own (made on the first run), and
    its HTTP server is its own C++ one. An engine runs alone: the other is not started until it has stopped.
    Each repetition starts both once, warms each up with a request that is not counted, and gives both the
    same prompts; who goes first alternates.

    Prompts are token ids of random words, different for every request and repetition, and prefix caching is
    off on both sides: nothing can be reused. Both decode greedily and past the end of text, so the counts of
    tokens are equal; they are checked against what was asked for. Both have KV for 8,192 tokens as f16,
    llama.cpp in eight slots, and take the same number of threads. llama.cpp decides about flash attention
    itself; everything not named here is its default. The wheel is built for AVX2 at most, and Octavo takes
    the best there is: the printed line says what each used.

What is printed
    Medians over the repetitions, with the lowest and the highest. The ratio is the median of the
    repetitions' own ratios, in which much of the machine's mood cancels out; above 1 Octavo is faster. What
    other processes used meanwhile is measured and printed: llama.cpp suffers from them more than Octavo
    does, so a ratio from a busy machine flatters us. --quiet waits for the others to be still and counts
    only repetitions that nobody disturbed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo.bench.client import StreamedAnswer, stream_completions
from octavo.bench.machine import Machine
from octavo.bench.other_load import OtherLoad, wait_for_quiet
from octavo.bench.prompts import seeded_prompts
from octavo.bench.server_process import ServerProcess
from octavo.bench.spread import Spread
from octavo.kernels import available_instruction_sets
from octavo.kernels.threads import default_num_threads
from octavo.kv.layout import KVLayout
from octavo.model.catalog import DEFAULT_MODEL, resolve_model
from octavo.model.config import ModelConfig
from octavo.model.gguf import GGUFFile
from octavo.text.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
LLAMACPP_ENVIRONMENT = HERE.parent / "build" / "llamacpp"

ENGINES = ("llamacpp", "octavo")
KV_TOKENS = 8192
STREAMS = 8
BLOCK_SIZE = 16
BUSY = 0.1
"""Processors' worth of other processes from which a run is called disturbed."""


@dataclass(frozen=True, slots=True)
class Workload:
    """requests sent at once; input_len and output_len in tokens. measure: one number from their answers."""

    name: str
    what: str
    unit: str
    more_is_better: bool
    requests: int
    input_len: int
    output_len: int
    measure: Callable[[Sequence[StreamedAnswer]], float]


def _prefill_rate(answers: Sequence[StreamedAnswer]) -> float:
    return answers[0].prompt_tokens / answers[0].first_token_seconds


def _decode_rate(answers: Sequence[StreamedAnswer]) -> float:
    """While all of them decode."""
    begin = max(answer.first_token_at for answer in answers)
    end = min(answer.last_token_at for answer in answers)
    return sum(answer.tokens_between(begin, end) for answer in answers) / (end - begin)


def _wall_seconds(answers: Sequence[StreamedAnswer]) -> float:
    return max(a.last_token_at for a in answers) - min(a.sent_at for a in answers)


WORKLOADS = (
    Workload("prefill", "prefill, 512 tokens", "tok/s", True, 1, 512, 1, _prefill_rate),
    Workload("decode_1", "decode, 1 stream", "tok/s", True, 1, 128, 128, _decode_rate),
    Workload(
        "decode_8", "decode, 8 streams of 128-token contexts", "tok/s", True, STREAMS, 128, 64, _decode_rate
    ),
    Workload(
        "end_to_end_8", "8 x (400 in + 64 out), end to end", "s", False, STREAMS, 400, 64, _wall_seconds
    ),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload on both engines, a value for each repetition; ratio above 1: Octavo is faster."""

    name: str
    what: str
    unit: str
    llamacpp: Spread
    octavo: Spread
    ratio: Spread
    llamacpp_values: list[float]
    octavo_values: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description="Octavo beside llama.cpp.")
    flag = parser.add_argument
    flag("--model", default=DEFAULT_MODEL, help="a GGUF file, or a name 'octavo pull' knows")
    flag(
        "--instruction-set",
        choices=available_instruction_sets(),
        default=available_instruction_sets()[0],
        help="of Octavo (default: %(default)s)",
    )
    flag("--threads", type=int, default=default_num_threads(), help="of each engine (default: %(default)s)")
    flag("--repetitions", type=int, default=5, help="default: %(default)s")
    flag("--only", choices=[workload.name for workload in WORKLOADS], action="append")
    flag(
        "--quiet",
        type=float,
        default=0.0,
        metavar="MINUTES",
        help="count undisturbed repetitions only, and begin new ones for at most so long",
    )
    flag("--json", metavar="FILE", help="write everything as JSON; - for standard output")
    flag("--markdown", metavar="FILE", help="write the table for the README; - for standard output")
    args = parser.parse_args()

    model = resolve_model(args.model)
    python = llamacpp_python()
    commands = {
        "llamacpp": _llamacpp_command(python, model, args.threads),
        "octavo": _octavo_command(model, args.threads, args.instruction_set),
    }
    chosen = [workload for workload in WORKLOADS if not args.only or workload.name in args.only]
    with GGUFFile(model) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    machine = Machine.now(args.threads, args.instruction_set)
    runs = _repeat(commands, chosen, tokenizer, args.repetitions, args.quiet * 60)
    if not runs:
        print(f"no repetition was undisturbed in {args.quiet:g} minutes", file=sys.stderr)
        return 1
    disturbance = [run.other_processors for run in runs]
    values = {engine: [run.values[engine] for run in runs] for engine in ENGINES}
    comparisons = [_compare(workload, values) for workload in chosen]
    version = _llamacpp_version(python)
    if args.json:
        report = {
            "benchmark": "versus_llamacpp",
            "model": model.name,
            "machine": dataclasses.asdict(machine),
            "xllamacpp": version,
            "repetitions": len(runs),
            "other_processors": dataclasses.asdict(Spread.of(disturbance)),
            "workloads": [dataclasses.asdict(comparison) for comparison in comparisons],
        }
        _write(args.json, json.dumps(report, indent=2))
    if args.markdown:
        _write(args.markdown, _markdown(comparisons, machine, model, version, disturbance))
    _print_table(comparisons, machine, model, version, disturbance)
    return 0


@dataclass(frozen=True, slots=True)
class Run:
    """One repetition on both engines. values: of each engine, by workload. other_processors: the busier of
    the two moments."""

    values: Mapping[str, Mapping[str, float]]
    other_processors: float


def _repeat(
    commands: Mapping[str, Sequence[str]],
    workloads: Sequence[Workload],
    tokenizer: Tokenizer,
    repetitions: int,
    quiet_seconds: float,
) -> list[Run]:
    """quiet_seconds: see --quiet; 0 counts every repetition."""
    runs: list[Run] = []
    deadline = time.monotonic() + quiet_seconds
    attempt = 0
    while len(runs) < repetitions:
        prompts = {
            workload.name: seeded_prompts(
                tokenizer, workload.requests, workload.input_len, seed=1000 * attempt + index
            )
            for index, workload in enumerate(workloads)
        }
        values: dict[str, Mapping[str, float]] = {}
        others = 0.0
        for engine in ENGINES if attempt % 2 == 0 else reversed(ENGINES):
            if quiet_seconds:
                wait_for_quiet(max(0.0, deadline - time.monotonic()), most_processors=BUSY)
            values[engine], used = _run(commands[engine], workloads, prompts)
            others = max(others, used)
            print(
                f"{len(runs) + 1}/{repetitions} {engine}: "
                + ", ".join(f"{name} {value:.1f}" for name, value in values[engine].items())
                + f" (others used {used:.2f} processors)",
                file=sys.stderr,
            )
            if quiet_seconds and used > BUSY:
                break
        if not quiet_seconds or others <= BUSY:
            runs.append(Run(values, others))
        attempt += 1
        if quiet_seconds and time.monotonic() > deadline:
            break
    return runs


def llamacpp_python() -> Path:
    """The interpreter of an environment that has xllamacpp, made if it is not there.

    Raises: CalledProcessError if it cannot be installed.
    """
    python = LLAMACPP_ENVIRONMENT / "bin" / "python"
    if not python.exists():
        venv.create(LLAMACPP_ENVIRONMENT, with_pip=True)
    if subprocess.run([python, "-c", "import xllamacpp"], capture_output=True).returncode != 0:
        print("installing xllamacpp", file=sys.stderr)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "xllamacpp"], check=True)
    return python


def _llamacpp_version(python: Path) -> str:
    """The package's version, and the widest vector instructions its build may use."""
    code = (
        "import importlib.metadata, xllamacpp, re\n"
        "used = re.findall(r'(AVX\\w*|NEON|SVE) = 1', xllamacpp.get_system_info())\n"
        "print(importlib.metadata.version('xllamacpp'), 'on', (used or ['no vector instructions'])[-1])"
    )
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def _llamacpp_command(python: Path, model: Path, threads: int) -> list[str]:
    script = str(HERE / "llamacpp_server.py")
    sizes = ["--slots", str(STREAMS), "--context", str(KV_TOKENS)]
    return [str(python), script, str(model), "--port", "{port}", "--threads", str(threads), *sizes]


def _octavo_command(model: Path, threads: int, instruction_set: str) -> list[str]:
    with GGUFFile(model) as file:
        config = ModelConfig.from_gguf(file)
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE)
    pool = layout.extent_bytes * (KV_TOKENS // BLOCK_SIZE)
    return [
        *(sys.executable, "-m", "octavo.cli.main", "serve", str(model)),
        *("--port", "{port}", "--threads", str(threads), "--block-size", str(BLOCK_SIZE)),
        *("--instruction-set", instruction_set),
        *("--kv-cache-memory", str(pool), "--no-enable-prefix-caching"),
    ]


def _run(
    command: Sequence[str], workloads: Sequence[Workload], prompts: Mapping[str, list[list[int]]]
) -> tuple[dict[str, float], float]:
    """Start an engine, measure every workload, stop it. Returns the values and what others used meanwhile."""
    with ServerProcess(command) as server:
        _ask(server.port, [list(range(100, 132))], 8)
        others = OtherLoad([server.pid])
        measured = {}
        for workload in workloads:
            answers = _ask(server.port, prompts[workload.name], workload.output_len)
            measured[workload.name] = workload.measure(answers)
        return measured, others.processors()


def _ask(port: int, prompts: Sequence[Sequence[int]], output_len: int) -> list[StreamedAnswer]:
    fields: dict[str, Any] = {"max_tokens": output_len, "temperature": 0, "ignore_eos": True}
    # Octavo does not know `cache_prompt`; without it llama.cpp would look for a slot with a similar prompt.
    answers = stream_completions(port, [{"prompt": p, "cache_prompt": False, **fields} for p in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        counted = (answer.prompt_tokens, answer.completion_tokens)
        if counted != (len(prompt), output_len):
            raise RuntimeError(f"asked for {len(prompt)} + {output_len} tokens, the server counted {counted}")
    return answers


def _compare(workload: Workload, values: Mapping[str, Sequence[Mapping[str, float]]]) -> Comparison:
    theirs, ours = ([one[workload.name] for one in values[engine]] for engine in ENGINES)
    pairs = zip(theirs, ours, strict=True)
    ratios = [b / a if workload.more_is_better else a / b for a, b in pairs]
    return Comparison(
        name=workload.name,
        what=workload.what,
        unit=workload.unit,
        llamacpp=Spread.of(theirs),
        octavo=Spread.of(ours),
        ratio=Spread.of(ratios),
        llamacpp_values=theirs,
        octavo_values=ours,
    )


def _spread(spread: Spread, unit: str) -> str:
    digits = 0 if unit == "tok/s" and spread.median >= 100 else 1
    return f"{spread.median:.{digits}f} {unit} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f}x ({spread.low:.2f}-{spread.high:.2f})"


def _conditions(machine: Machine, model: Path, version: str, disturbance: Sequence[float]) -> str:
    return (
        f"{model.name}; xllamacpp {version}; {machine.cpu_model}, {machine.threads} threads, "
        f"Octavo on {machine.instruction_set}; {machine.date}; "
        f"other processes used {median(disturbance):.2f} processors (at most {max(disturbance):.2f})"
    )


def _print_table(
    comparisons: Sequence[Comparison],
    machine: Machine,
    model: Path,
    version: str,
    disturbance: Sequence[float],
) -> None:
    console = Console(highlight=False)
    console.print(_conditions(machine, model, version, disturbance))
    table = Table("", "llama.cpp", "Octavo", "Octavo is faster by")
    for c in comparisons:
        table.add_row(c.what, _spread(c.llamacpp, c.unit), _spread(c.octavo, c.unit), _ratio(c.ratio))
    console.print(table)
    if max(disturbance) > BUSY:
        console.print(
            "The machine was not quiet, which llama.cpp suffers from more: do not quote these ratios."
        )


def _markdown(
    comparisons: Sequence[Comparison],
    machine: Machine,
    model: Path,
    version: str,
    disturbance: Sequence[float],
) -> str:
    lines = ["| | llama.cpp | Octavo | ratio |", "|---|---|---|---|"]
    lines += [
        f"| {c.what} | {_spread(c.llamacpp, c.unit)} | {_spread(c.octavo, c.unit)} | {_ratio(c.ratio)} |"
        for c in comparisons
    ]
    return "\n".join([*lines, "", _conditions(machine, model, version, disturbance) + "."])


def _write(target: str, text: str) -> None:
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
