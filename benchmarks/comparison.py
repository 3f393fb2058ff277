"""What versus_peers.py measures, and the arithmetic and the tables of its results."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from octavo.bench.client import StreamedAnswer
from octavo.bench.spread import Spread
from octavo.kv.layout import KV_DTYPES

OCTAVO = "octavo"
END_TO_END_STREAMS = 8


class NothingMeasured(Exception):
    """The answers hold no moment in which what was asked for could be measured."""


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


def workloads(streams: Sequence[int], context: int, prompt: int = 512) -> list[Workload]:
    """Prefill of `prompt` tokens, decode at each number of streams with `context`-token prompts, and 8
    requests end to end."""
    decode = [
        Workload(
            f"decode_{count}",
            f"decode, {count} stream{'s' if count > 1 else ''} of {context}-token contexts",
            "tok/s",
            True,
            count,
            context,
            _decode_len(count, context),
            decode_rate,
        )
        for count in streams
    ]
    return [
        Workload("prefill", f"prefill, {prompt:,} tokens", "tok/s", True, 1, prompt, 1, prefill_rate),
        *decode,
        Workload(
            f"end_to_end_{END_TO_END_STREAMS}",
            f"{END_TO_END_STREAMS} x (400 in + 64 out), end to end",
            "s",
            False,
            END_TO_END_STREAMS,
            400,
            64,
            wall_seconds,
        ),
    ]


def _decode_len(streams: int, context: int) -> int:
    """128 for one stream; for several 64, and more where their prompts take so many steps that the first
    stream would be over before the last begins: the engines compute 256 prompt tokens a step or more."""
    if streams == 1:
        return 128
    return 64 + max(0, streams * context - 2048) // 128


def prefill_rate(answers: Sequence[StreamedAnswer]) -> float:
    """Prompt tokens a second until the first token came."""
    return answers[0].prompt_tokens / answers[0].first_token_seconds


def decode_rate(answers: Sequence[StreamedAnswer]) -> float:
    """Tokens a second of all streams together, while all of them decode.

    Raises: NothingMeasured if at no moment all of them did.
    """
    begin = max(answer.first_token_at for answer in answers)
    end = min(answer.last_token_at for answer in answers)
    if end <= begin:
        raise NothingMeasured(
            f"the first of {len(answers)} streams ended {begin - end:.2f} s before the last one began"
        )
    return sum(answer.tokens_between(begin, end) for answer in answers) / (end - begin)


def wall_seconds(answers: Sequence[StreamedAnswer]) -> float:
    """From the first request to the last token of all."""
    return max(a.last_token_at for a in answers) - min(a.sent_at for a in answers)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sequences at once, and tokens of KV that each of them may need."""

    sequences: int
    tokens_each: int

    @classmethod
    def of(cls, chosen: Sequence[Workload]) -> Capacity:
        """Enough for every workload; tokens in whole 256s, which every engine's blocks divide."""
        longest = max(workload.input_len + workload.output_len for workload in chosen)
        return cls(max(workload.requests for workload in chosen), math.ceil((longest + 1) / 256) * 256)

    @property
    def tokens(self) -> int:
        return self.sequences * self.tokens_each


@dataclass(frozen=True, slots=True)
class Repetition:
    """Every engine once. values: of each engine that ran, by workload. other_processors: the busiest of
    their moments."""

    values: Mapping[str, Mapping[str, float]]
    other_processors: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload. values: of each engine that ran, one a repetition. ratios: to each peer, the repetitions'
    own ratios; above 1 Octavo is faster."""

    name: str
    what: str
    unit: str
    values: dict[str, list[float]]
    spreads: dict[str, Spread]
    ratios: dict[str, Spread]


def compare(workload: Workload, repetitions: Sequence[Repetition]) -> Comparison:
    """An engine counts if it has run in every repetition."""
    values = {
        engine: [repetition.values[engine][workload.name] for repetition in repetitions]
        for engine in repetitions[0].values
        if all(engine in repetition.values for repetition in repetitions)
    }
    ratios = {}
    for peer, theirs in values.items():
        if peer != OCTAVO and OCTAVO in values:
            pairs = zip(values[OCTAVO], theirs, strict=True)
            ratios[peer] = Spread.of(a / b if workload.more_is_better else b / a for a, b in pairs)
    spreads = {engine: Spread.of(measured) for engine, measured in values.items()}
    return Comparison(workload.name, workload.what, workload.unit, values, spreads, ratios)


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One model file on all engines.

    types: what the file's matrices hold. failures: why an engine has no values here, in its own words.
    other_processors: what processes that were not measured used, one a repetition.
    """

    model: str
    file: str
    types: str
    comparisons: list[Comparison]
    failures: dict[str, str]
    other_processors: list[float]

    @property
    def title(self) -> str:
        return f"{self.model} ({self.types})"

    def rows(self, engines: Sequence[str]) -> list[list[str]]:
        """A table's header and its rows: the values of `engines` in order, and the ratio to each peer."""
        peers = [engine for engine in engines if engine != OCTAVO]
        table = [["", *engines, *(f"{OCTAVO} / {peer}" for peer in peers)]]
        for each in self.comparisons:
            values = [
                spread_cell(each.spreads[engine], each.unit) if engine in each.spreads else "fails, see below"
                for engine in engines
            ]
            ratios = [ratio_cell(each.ratios[peer]) if peer in each.ratios else "-" for peer in peers]
            table.append([each.what, *values, *ratios])
        return table

    def notes(self) -> list[str]:
        """Sentences under the table."""
        notes = [f"{engine}: {why}" for engine, why in self.failures.items()]
        if self.other_processors:
            notes.append(
                f"Other processes used {median(self.other_processors):.2f} processors "
                f"(at most {max(self.other_processors):.2f}); {len(self.other_processors)} repetitions."
            )
        return notes


def spread_cell(spread: Spread, unit: str) -> str:
    digits = 0 if unit == "tok/s" and spread.median >= 100 else 1
    return f"{spread.median:.{digits}f} {unit} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def ratio_cell(spread: Spread) -> str:
    return f"{spread.median:.2f}x ({spread.low:.2f}-{spread.high:.2f})"


def markdown(results: Sequence[ModelResult], engines: Sequence[str], conditions: Sequence[str]) -> str:
    lines: list[str] = []
    for result in results:
        header, *rows = result.rows(engines)
        lines += [f"**{result.title}**", "", markdown_row(header), "|---" * len(header) + "|"]
        lines += [markdown_row(row) for row in rows]
        lines += ["", *(f"- {note}" for note in result.notes()), ""]
    return "\n".join([*lines, *(f"- {condition}" for condition in conditions)])


def kv_dtypes(text: str) -> tuple[str, ...]:
    """Types of KV from a flag, separated by commas. Raises argparse.ArgumentTypeError."""
    dtypes = tuple(text.split(","))
    if not set(dtypes) <= set(KV_DTYPES) or len(set(dtypes)) < len(dtypes):
        raise argparse.ArgumentTypeError(f"{text!r} is not different ones of {', '.join(KV_DTYPES)}")
    return dtypes


def write(target: str, text: str) -> None:
    """To a file, or to standard output for `-`."""
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")


def markdown_row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(cells)} |"
