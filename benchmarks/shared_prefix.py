"""Several users with one long text in common: what it costs when each has a copy, when all use the same KV
blocks, and when attention reads those blocks once for all.

    python benchmarks/shared_prefix.py [--model M] [--context 4000] [--tokens 256] [--dtypes f16,q8]
                                       [--threads N] [--instruction-set I] [--repetitions R]
                                       [--json F] [--markdown F]

Users
    Eight, sent at once. Each prompt is the same --context tokens of Python's language reference
    (tests/oracle/real_text.py) and a question of its own of about 40 tokens. Each user gets --tokens tokens,
    greedily and past the end of text, so that their counts are equal.

Arms
    private   --no-enable-prefix-caching       every user computes the text and holds a copy of its KV
    plain     --no-shared-prefix-attention     the text is computed and held once; each user's attention reads
                                               it on its own
    shared    (the defaults)                   the same, and it is read once a step for all users
    Each is an `octavo serve` of its own, started anew, asked over HTTP by the client of octavo.bench.client
    and warmed up with eight short requests of other text. Each repetition starts every arm with every type of
    KV once, in turned order every second time. The KV pool is so large that nobody waits for it.

What is measured
    decode         tokens a second of all users together, from the moment the last of them has its first token
                   until the first of them ends
    first token    from the sending of the requests
    KV read        bytes of keys and values that attention read, from octavo:attention_kv_bytes_read, for a
                   generated token; and of octavo:attention_kv_bytes_attended, what it would have read had
                   each request read its own. Both are differences between two scrapes of /metrics while all
                   users decoded and did nothing else
    KV held        octavo:kv_blocks_used at the later of these scrapes
    prompt tokens  found: octavo:prefix_cache_hits; computed: the others
    Private users begin one after another. --tokens must be so many that the first has not ended before the
    last begins; too few are refused, with the number that is enough.

What is printed
    Medians over the repetitions, with the lowest and the highest where they differ. The ratio is the median
    of the repetitions' own ratios; above 1 `shared` is better. All arms and repetitions must give every user
    the same text: where they do not, it is said, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from comparison import NothingMeasured, kv_dtypes, write
from metrics_watch import MetricsWatch
from octavo.bench.client import AnswerFailed, StreamedAnswer, stream_completions
from octavo.bench.machine import Machine
from octavo.bench.other_load import OtherLoad
from octavo.bench.prompts import seeded_prompts
from octavo.bench.server_process import ServerFailed, ServerProcess
from octavo.cli.flags import count
from octavo.engine.config import EngineConfig
from octavo.kernels import available_instruction_sets
from octavo.kernels.threads import default_num_threads
from octavo.kv.layout import KVLayout
from octavo.model.catalog import DEFAULT_MODEL, resolve_model
from octavo.model.config import ModelConfig
from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile
from octavo.text.tokenizer import Tokenizer
from sharing import (
    ARMS,
    PLAIN,
    PRIVATE,
    SHARED,
    Row,
    Run,
    cells,
    differences,
    markdown,
    measure,
    rows,
    tokens_before_all_begin,
)

# The text is the tests' own.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from oracle.real_text import real_text

FLAGS = MappingProxyType(
    {
        PRIVATE: ("--no-enable-prefix-caching",),
        PLAIN: ("--no-shared-prefix-attention",),
        SHARED: (),
    }
)
QUESTIONS = (
    "Which operations bind a name, and when is a name that has been bound in a block a local variable "
    "of that block, even above the line that binds it?",
    "What happens when a name is looked up in a class block, and why can the methods of a class not see "
    "the names that its body has bound?",
    "How do global and nonlocal statements change where a name is bound, and which error is raised if "
    "the name of a nonlocal statement cannot be found?",
    "Why are eval and exec not able to see the full environment of their caller, and which namespaces "
    "do they use to resolve and to bind names instead?",
    "What is an exception handler, in which order are handlers asked, and what does the interpreter do "
    "when an exception is not handled at all?",
    "When a module is imported for the first time, which steps are taken to find it, to create it and "
    "to initialise it, and in which order?",
    "How does a regular package differ from a namespace package, and what does the file __init__.py do "
    "when such a package is imported?",
    "What are finders and loaders, how do they work together on the meta path, and which exception is "
    "raised when none of them knows the module?",
)
FEWEST_TOGETHER = 8
"""Tokens that every user generates while all of them do, at least."""
WARM_UP_INPUT, WARM_UP_OUTPUT = 64, 8
BUSY = 0.1
"""Processors' worth of other processes from which a run is called disturbed."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What is the same for all servers. prompts: of each user, as token ids. warm_up: other prompts."""

    model: Path
    config: ModelConfig
    prompts: Sequence[Sequence[int]]
    warm_up: Sequence[Sequence[int]]
    context: int
    tokens: int
    threads: int
    instruction_set: str

    def layout(self, dtype: str) -> KVLayout:
        config = self.config
        return KVLayout(
            config.num_layers, config.num_kv_heads, config.head_dim, EngineConfig().block_size, dtype
        )

    def command(self, arm: str, dtype: str) -> list[str]:
        """Its pool holds a copy for each user, in whole 256s of tokens and 256 more: nobody waits for KV."""
        layout = self.layout(dtype)
        longest = max(map(len, self.prompts)) + self.tokens
        blocks = len(self.prompts) * (-(-longest // 256) + 1) * 256 // layout.block_size
        return [
            *(sys.executable, "-m", "octavo.cli.main", "serve", str(self.model), "--port", "{port}"),
            *("--threads", str(self.threads), "--instruction-set", self.instruction_set),
            *("--max-num-seqs", str(len(self.prompts)), "--kv-cache-dtype", dtype),
            *("--kv-cache-memory", str(blocks * layout.extent_bytes), *FLAGS[arm]),
        ]


def main() -> int:
    args = _arguments()
    # Ended from outside, it still stops the server that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        conditions = _conditions(args)
    except (ModelFileError, NothingMeasured) as error:
        print(error, file=sys.stderr)
        return 2
    machine = Machine.now(args.threads, args.instruction_set)
    try:
        measured = _repeat(conditions, args.dtypes, args.repetitions)
    except (ServerFailed, AnswerFailed, NothingMeasured) as error:
        print(error, file=sys.stderr)
        return 1

    tables = {dtype: rows(runs) for dtype, runs in measured.items()}
    notes = _notes(machine, conditions, measured)
    wrong = [f"{dtype}, {difference}" for dtype, runs in measured.items() for difference in differences(runs)]
    if args.json:
        write(args.json, _json(machine, conditions, measured, tables, wrong))
    if args.markdown:
        texts = [markdown(_title(conditions, dtype), table) for dtype, table in tables.items()]
        write(args.markdown, "\n\n".join([*texts, "\n".join(f"- {note}" for note in notes)]))
    if "-" not in (args.json, args.markdown):
        _print_tables(conditions, tables, notes)
    for difference in wrong:
        print(f"NOT THE SAME TEXT: {difference}", file=sys.stderr)
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Several users with one long text in common.")
    flag = parser.add_argument
    sets = available_instruction_sets()
    flag("--model", default=DEFAULT_MODEL, help="a GGUF file, or a name 'octavo pull' knows")
    flag("--context", type=count, default=4000, help="tokens all have in common (default: %(default)s)")
    flag("--tokens", type=count, default=256, help="generated for each (default: %(default)s)")
    flag("--dtypes", type=kv_dtypes, default=["f16"], help="types of KV: f16, q8 or f16,q8 (default: f16)")
    flag("--threads", type=count, default=default_num_threads(), help="default: %(default)s")
    flag("--instruction-set", choices=sets, default=sets[0], help="default: %(default)s")
    flag("--repetitions", type=count, default=3, help="default: %(default)s")
    flag("--json", metavar="FILE", help="write everything as JSON; - for standard output")
    flag("--markdown", metavar="FILE", help="write the tables for the README; - for standard output")
    return parser.parse_args()


def _conditions(args: argparse.Namespace) -> Conditions:
    """Raises: ModelFileError; NothingMeasured if the lengths leave nothing to measure."""
    path = resolve_model(args.model)
    with GGUFFile(path) as file:
        config = ModelConfig.from_gguf(file)
        tokenizer = Tokenizer.from_gguf(file.metadata)
    prompts = user_prompts(tokenizer, args.context)
    check_lengths([len(prompt) for prompt in prompts], args.tokens, config.context_length)
    return Conditions(
        model=path,
        config=config,
        prompts=prompts,
        warm_up=seeded_prompts(tokenizer, len(prompts), WARM_UP_INPUT),
        context=args.context,
        tokens=args.tokens,
        threads=args.threads,
        instruction_set=args.instruction_set,
    )


def user_prompts(tokenizer: Tokenizer, context: int) -> list[list[int]]:
    """The first `context` tokens of the text, and each question behind them.

    Raises: NothingMeasured if the text is shorter.
    """
    text = tokenizer.encode(real_text())
    if len(text) < context:
        raise NothingMeasured(f"--context {context}: the text has {len(text):,} tokens")
    return [
        text[:context] + tokenizer.encode(f"\n\nQuestion: {question}\nAnswer:", add_special=False)
        for question in QUESTIONS
    ]


def check_lengths(prompt_lens: Sequence[int], tokens: int, context_length: int) -> None:
    """Raises NothingMeasured if the model's context is too short for `tokens` behind a prompt, or `tokens`
    are so few that private users do not decode together."""
    longest = max(prompt_lens) + tokens
    if longest > context_length:
        raise NothingMeasured(
            f"prompts of {max(prompt_lens):,} tokens and --tokens {tokens} are {longest:,}; the model has a "
            f"context of {context_length:,}"
        )
    early = tokens_before_all_begin(prompt_lens, EngineConfig().max_num_batched_tokens)
    if tokens < early + FEWEST_TOGETHER:
        raise NothingMeasured(
            f"--tokens {tokens} is too few: where every user computes a prompt of {prompt_lens[0]:,} tokens, "
            f"the first generates up to {early} before the last begins; {early + FEWEST_TOGETHER} are enough"
        )


def _repeat(conditions: Conditions, dtypes: Sequence[str], repetitions: int) -> dict[str, list[Run]]:
    """The runs of each type of KV.

    Raises: ServerFailed, AnswerFailed, NothingMeasured.
    """
    runs: dict[str, list[Run]] = {dtype: [] for dtype in dtypes}
    servers = [(arm, dtype) for dtype in dtypes for arm in ARMS]
    for repetition in range(1, repetitions + 1):
        for arm, dtype in servers if repetition % 2 else reversed(servers):
            try:
                run = _run(conditions, arm, dtype, repetition)
            except (ServerFailed, AnswerFailed, NothingMeasured) as error:
                raise type(error)(f"{dtype} {arm}: {error}") from error
            runs[dtype].append(run)
            print(
                f"{repetition}/{repetitions} {dtype} {arm}: decode {run.values['decode']:.1f} tok/s, last "
                f"first token {run.values['first_token_last']:.2f} s, KV read {run.values['kv_read']:.1f} MB "
                f"a token (others used {run.other_processors:.2f} processors)",
                file=sys.stderr,
            )
    return runs


def _run(conditions: Conditions, arm: str, dtype: str, repetition: int) -> Run:
    with ServerProcess(conditions.command(arm, dtype)) as server:
        _ask(server.port, conditions.warm_up, WARM_UP_OUTPUT)
        others = OtherLoad([server.pid])
        with MetricsWatch(server.port) as watch:
            answers = _ask(server.port, conditions.prompts, conditions.tokens)
        used = others.processors()
    values = measure(answers, watch.scrapes, conditions.layout(dtype).extent_bytes)
    return Run(arm, repetition, values, tuple(answer.text for answer in answers), used)


def _ask(port: int, prompts: Sequence[Sequence[int]], output_len: int) -> list[StreamedAnswer]:
    """Raises AnswerFailed, also where the server counted other tokens than were asked for."""
    fields: dict[str, Any] = {"max_tokens": output_len, "temperature": 0, "ignore_eos": True}
    answers = stream_completions(port, [{"prompt": prompt, **fields} for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        counted = (answer.prompt_tokens, answer.completion_tokens)
        if counted != (len(prompt), output_len):
            raise AnswerFailed(f"asked for {len(prompt)} + {output_len} tokens, the server counted {counted}")
    return answers


def _title(conditions: Conditions, dtype: str) -> str:
    return (
        f"{conditions.model.name}, KV as {dtype}: {len(conditions.prompts)} users, {conditions.context:,} "
        f"tokens in common, {conditions.tokens} generated for each"
    )


def _notes(machine: Machine, conditions: Conditions, measured: Mapping[str, Sequence[Run]]) -> list[str]:
    """The facts without which the numbers mean nothing, a line each."""
    questions = [len(prompt) - conditions.context for prompt in conditions.prompts]
    notes = [
        f"{machine.describe()}; the text is Python {machine.python}'s, the questions have "
        f"{min(questions)} to {max(questions)} tokens"
    ]
    for dtype, runs in measured.items():
        if not differences(runs):
            notes.append(f"{dtype}: every user got the same text in all {len(runs)} runs")
    used = [run.other_processors for runs in measured.values() for run in runs]
    notes.append(
        f"Other processes used {median(used):.2f} processors (at most {max(used):.2f})"
        + (": the machine was not quiet, do not quote this" if max(used) > BUSY else "")
    )
    return notes


def _json(
    machine: Machine,
    conditions: Conditions,
    measured: Mapping[str, Sequence[Run]],
    tables: Mapping[str, Sequence[Row]],
    wrong: Sequence[str],
) -> str:
    report = {
        "benchmark": "shared_prefix",
        "machine": dataclasses.asdict(machine),
        "model": conditions.model.name,
        "prompt_tokens": [len(prompt) for prompt in conditions.prompts],
        "common_tokens": conditions.context,
        "generated_tokens": conditions.tokens,
        "arms": {arm: list(flags) for arm, flags in FLAGS.items()},
        "dtypes": {
            dtype: {
                "measures": [dataclasses.asdict(row) for row in tables[dtype]],
                "other_processors": [run.other_processors for run in runs],
                "texts": list(runs[0].texts),
            }
            for dtype, runs in measured.items()
        },
        "differences": list(wrong),
    }
    return json.dumps(report, indent=2)


def _print_tables(conditions: Conditions, tables: Mapping[str, Sequence[Row]], notes: Sequence[str]) -> None:
    # A file or a pipe is no terminal of 80 columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for dtype, table in tables.items():
        header, *lines = cells(table)
        printed = Table(*header, title=_title(conditions, dtype))
        for line in lines:
            printed.add_row(*line)
        console.print(printed)
    for note in notes:
        console.print(note, markup=False)


if __name__ == "__main__":
    sys.exit(main())
