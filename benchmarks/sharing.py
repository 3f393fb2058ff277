"""What shared_prefix.py measures on each server, and the arithmetic and the tables of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from comparison import NothingMeasured, decode_rate, markdown_row, ratio_cell, wall_seconds
from metrics_watch import Counts, decode_phase
from octavo.bench.client import StreamedAnswer
from octavo.bench.spread import Spread

ARMS = PRIVATE, PLAIN, SHARED = ("private", "plain", "shared")
_DIGITS = {"tok/s": 1, "s": 2, "MB": 1, "%": 1, "tokens": 0}


def tokens_before_all_begin(prompt_lens: Sequence[int], step_tokens: int) -> int:
    """What the first user generates at most until the last one begins, if every user computes a whole prompt:
    one token in each step, whose other tokens belong to the prompts of the others."""
    others = sum(prompt_lens[1:])
    return -(-others // (step_tokens - len(prompt_lens) + 1)) + 1


@dataclass(frozen=True, slots=True)
class Measure:
    """One row. better: whether more or less of it is; `neither` has no ratio."""

    name: str
    what: str
    unit: str
    better: Literal["more", "less", "neither"]


MEASURES = (
    Measure("decode", "decode, all users together", "tok/s", "more"),
    Measure("first_token_median", "first token, median user", "s", "less"),
    Measure("first_token_last", "first token, last user", "s", "less"),
    Measure("wall", "until the last token of all", "s", "less"),
    Measure("kv_read", "KV read for a generated token", "MB", "less"),
    Measure("kv_read_share", "KV read of KV attended to", "%", "neither"),
    Measure("kv_held", "KV held while all decode", "MB", "less"),
    Measure("prompt_computed", "prompt tokens computed", "tokens", "less"),
    Measure("prompt_cached", "prompt tokens found", "tokens", "neither"),
)


def measure(
    answers: Sequence[StreamedAnswer], scrapes: Sequence[Counts], block_bytes: int
) -> dict[str, float]:
    """A value for each of `MEASURES`. scrapes: of one server, the first before its users were sent and the
    last after all were answered. block_bytes: what a KV block takes.

    Raises: NothingMeasured, also if a user had to wait for KV: that would be a measurement of something else.
    """
    pauses = scrapes[-1].pauses - scrapes[0].pauses
    if pauses:
        raise NothingMeasured(f"users were paused {pauses} times for lack of KV blocks")
    begin, end = decode_phase(scrapes, len(answers))
    read = end.bytes_read - begin.bytes_read
    first_tokens = [answer.first_token_seconds for answer in answers]
    cached = scrapes[-1].cached - scrapes[0].cached
    return {
        "decode": decode_rate(answers),
        "first_token_median": median(first_tokens),
        "first_token_last": max(first_tokens),
        "wall": wall_seconds(answers),
        "kv_read": read / (end.generated - begin.generated) / 1e6,
        "kv_read_share": 100 * read / (end.bytes_attended - begin.bytes_attended),
        "kv_held": end.blocks_used * block_bytes / 1e6,
        "prompt_computed": sum(answer.prompt_tokens for answer in answers) - cached,
        "prompt_cached": cached,
    }


@dataclass(frozen=True, slots=True)
class Run:
    """One server. values: by name of measure. texts: of each user. other_processors: what processes that were
    not measured used."""

    arm: str
    repetition: int
    values: Mapping[str, float]
    texts: tuple[str, ...]
    other_processors: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measure. values: of each arm, one a repetition. ratios: from each other arm to the shared one, the
    repetitions' own; above 1 the shared one is better."""

    measure: Measure
    values: dict[str, list[float]]
    spreads: dict[str, Spread]
    ratios: dict[str, Spread]


def rows(runs: Sequence[Run]) -> list[Row]:
    """Of `MEASURES`. runs: of one type of KV, every arm once in each repetition, in order of repetitions."""
    by_arm = {arm: [run for run in runs if run.arm == arm] for arm in ARMS}
    table = []
    for each in MEASURES:
        values = {arm: [run.values[each.name] for run in ran] for arm, ran in by_arm.items()}
        ratios = {}
        for arm in ARMS:
            if arm != SHARED and each.better != "neither":
                pairs = zip(values[SHARED], values[arm], strict=True)
                ratios[arm] = Spread.of(
                    ours / theirs if each.better == "more" else theirs / ours for ours, theirs in pairs
                )
        spreads = {arm: Spread.of(measured) for arm, measured in values.items()}
        table.append(Row(each, values, spreads, ratios))
    return table


def cells(table: Sequence[Row]) -> list[list[str]]:
    """A header, and a line for each row."""
    others = [arm for arm in ARMS if arm != SHARED]
    lines = [["", *ARMS, *(f"{SHARED} to {arm}" for arm in others)]]
    for row in table:
        values = [_cell(row.spreads[arm], row.measure.unit) for arm in ARMS]
        ratios = [ratio_cell(row.ratios[arm]) if arm in row.ratios else "-" for arm in others]
        lines.append([row.measure.what, *values, *ratios])
    return lines


def _cell(spread: Spread, unit: str) -> str:
    """The range only where it is visible."""
    middle, low, high = (f"{value:,.{_DIGITS[unit]}f}" for value in (spread.median, spread.low, spread.high))
    return f"{middle} {unit}" + (f" ({low}-{high})" if low != high else "")


def markdown(title: str, table: Sequence[Row]) -> str:
    header, *lines = cells(table)
    return "\n".join(
        [
            f"**{title}**",
            "",
            markdown_row(header),
            "|---" * len(header) + "|",
            *(markdown_row(line) for line in lines),
        ]
    )


def differences(runs: Sequence[Run]) -> list[str]:
    """Where a run's texts are not those of the first run; all have the same users. A sentence each."""
    first = runs[0]
    found = []
    for run in runs[1:]:
        for user, (expected, text) in enumerate(zip(first.texts, run.texts, strict=True), 1):
            if text != expected:
                at = next(
                    (i for i, (a, b) in enumerate(zip(expected, text, strict=False)) if a != b),
                    min(len(expected), len(text)),
                )
                found.append(
                    f"user {user}, {run.arm} in repetition {run.repetition}: differs from {first.arm} in "
                    f"repetition {first.repetition} at character {at}, {text[at : at + 20]!r} for "
                    f"{expected[at : at + 20]!r}"
                )
    return found
