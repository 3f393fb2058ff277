"""`octavo bench kernels`: matrix products and attention against the limits of this machine, in one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.bench import attention as attention_bench
from octavo.bench import matmul as matmul_bench
from octavo.bench.attention import AttentionResult, AttentionShape, measure_attention
from octavo.bench.limits import Limits, measure_limits
from octavo.bench.machine import Machine, last_level_cache_bytes
from octavo.bench.matmul import MOST_ROWS, MatmulResult, MatmulShape, left_out, measure_matmuls
from octavo.bench.shapes import EIGHT_BILLION, MODELS, SMOLLM2, ModelShape
from octavo.kernels import ThreadPool, available_instruction_sets
from octavo.kernels.threads import default_num_threads

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PARTS = ("matmul", "attention")

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan:
    """What is measured and how thoroughly.

    threads, instruction_set: None fits the machine. cold_bytes: what pushes itself out of every cache when
    read in turn. read_bytes: of the array behind the read limit. most_bytes: of KV for one case, and of one
    matrix, which is measured with as many columns as fit.

    Raises: ValueError for a weight type or a number of rows that cannot be measured.
    """

    threads: int | None = None
    instruction_set: str | None = None
    parts: Sequence[str] = PARTS
    shapes: Sequence[MatmulShape] = tuple(shape for model in MODELS for shape in model.matmuls())
    types: Sequence[str] = matmul_bench.TYPES
    rows: Sequence[int] = matmul_bench.ROWS
    heads: Sequence[AttentionShape] = (SMOLLM2.heads(), EIGHT_BILLION.heads())
    contexts: Sequence[int] = attention_bench.CONTEXTS
    streams: Sequence[int] = attention_bench.STREAMS
    prompts: Sequence[int] = attention_bench.PROMPTS
    repeats: int = 5
    cold_bytes: int = field(default_factory=lambda: 4 * last_level_cache_bytes())
    read_bytes: int = field(default_factory=lambda: max(256 * _MIB, 8 * last_level_cache_bytes()))
    most_bytes: int = 512 * _MIB

    def __post_init__(self) -> None:
        for type_ in self.types:
            matmul_bench.check_type(type_)
        for rows in self.rows:
            if rows > MOST_ROWS:
                raise ValueError(f"a product is measured with up to {MOST_ROWS} rows, not with {rows}")

    def quick(self) -> KernelPlan:
        """A few seconds' worth of the first model: enough to see that a change did not make things worse."""
        return dataclasses.replace(
            self,
            shapes=[shape for shape in self.shapes if shape.model == self.shapes[0].model],
            types=self.types[:1] if tuple(self.types) == matmul_bench.TYPES else self.types,
            rows=(1, 8, 256) if tuple(self.rows) == matmul_bench.ROWS else self.rows,
            heads=self.heads[:1],
            contexts=(512, 4096),
            streams=(1, 8),
            prompts=(512,),
            repeats=3,
            read_bytes=max(128 * _MIB, 4 * last_level_cache_bytes()),
            most_bytes=128 * _MIB,
        )

    def repeated(self, repeats: int) -> KernelPlan:
        """Every case timed so often."""
        return dataclasses.replace(self, repeats=repeats)

    def of_models(self, models: Sequence[ModelShape]) -> KernelPlan:
        """The products and the heads of these."""
        return dataclasses.replace(
            self,
            shapes=[shape for model in models for shape in model.matmuls()],
            heads=[model.heads() for model in models],
        )


@dataclass(frozen=True, slots=True)
class KernelReport:
    """left_out: products that cannot be had in a type, a sentence each."""

    machine: Machine
    limits: Limits
    matmul: list[MatmulResult]
    attention: list[AttentionResult]
    left_out: list[str]

    def as_json(self) -> dict[str, Any]:
        """Field names are stable: those of the dataclasses."""
        return {"benchmark": "kernels", **dataclasses.asdict(self)}


def measure_kernels(plan: KernelPlan, say: Callable[[str], None] = lambda _: None) -> KernelReport:
    """Raises: ValueError for threads or an instruction set that cannot be had."""
    instruction_set = plan.instruction_set or available_instruction_sets()[0]
    pool = ThreadPool(default_num_threads() if plan.threads is None else plan.threads)
    machine = Machine.now(pool.num_threads, instruction_set)
    say("limits")
    limits = measure_limits(pool, instruction_set, read_bytes=plan.read_bytes, repeats=plan.repeats)
    matmul: list[MatmulResult] = []
    if "matmul" in plan.parts:
        matmul += measure_matmuls(
            pool,
            instruction_set,
            limits,
            shapes=plan.shapes,
            types=plan.types,
            rows=plan.rows,
            cold_bytes=plan.cold_bytes,
            most_bytes=plan.most_bytes,
            repeats=plan.repeats,
            say=say,
        )
    attention: list[AttentionResult] = []
    if "attention" in plan.parts:
        attention += measure_attention(
            pool,
            instruction_set,
            limits,
            shapes=plan.heads,
            contexts=plan.contexts,
            streams=plan.streams,
            prompts=plan.prompts,
            cold_bytes=plan.cold_bytes,
            most_bytes=plan.most_bytes,
            repeats=plan.repeats,
            say=say,
        )
    missing = left_out(plan.shapes, plan.types) if "matmul" in plan.parts else []
    return KernelReport(machine, limits, matmul, attention, missing)


def print_report(report: KernelReport, console: Console) -> None:
    """Tables for people."""
    limits = report.limits
    console.print(report.machine.describe())
    console.print(
        f"limits: {limits.fp32_gflops:.0f} GFLOP/s fp32, {limits.int8_gops:.0f} GOP/s int8, "
        f"{limits.int8_summed_gops:.0f} GOP/s int8_summed, "
        f"{limits.read_gbs:.1f} GB/s read over {limits.read_bytes // _MIB} MiB"
    )
    for model, type_ in dict.fromkeys((result.model, result.type) for result in report.matmul):
        products = [r for r in report.matmul if (r.model, r.type) == (model, type_)]
        console.print(_matmul_table(f"{model}, {type_}", products))
    for sentence in report.left_out:
        console.print(f"left out: {sentence}")
    for model in dict.fromkeys(result.model for result in report.attention):
        decode = [r for r in report.attention if r.model == model and r.kind == "decode"]
        if decode:
            console.print(_decode_table(model, decode))
        for r in report.attention:
            if r.model == model and r.kind == "prefill":
                console.print(
                    f"{model}, prefill of {r.context:,} tokens: {r.gflops:.1f} GFLOP/s, "
                    f"{r.percent_of_peak:.0f} % of fp32, {r.seconds * 1e3:.1f} ms a layer"
                )


def _matmul_table(title: str, results: Sequence[MatmulResult]) -> Table:
    shapes = list(dict.fromkeys((r.shape, r.out_features, r.in_features) for r in results))
    title += f": GOP/s (of {results[0].peak}), and GB/s (of read) for weights that come from memory"
    table = _table(title, ["rows", *(f"{name}\n{columns}x{k}" for name, columns, k in shapes)])
    cells = {(r.shape, r.rows): r for r in results}
    for rows in dict.fromkeys(result.rows for result in results):
        table.add_row(str(rows), *(_matmul_cell(cells.get((name, rows))) for name, _, _ in shapes))
    return table


def _matmul_cell(result: MatmulResult | None) -> str:
    if result is None:
        return ""
    cell = f"{result.gops:.0f} ({result.percent_of_peak:.0f} %)"
    if result.weights_from == "memory":
        cell += f"\n{result.weight_gbs:.1f} ({result.percent_of_read:.0f} %)"
    return cell


def _decode_table(model: str, results: Sequence[AttentionResult]) -> Table:
    streams = list(dict.fromkeys(result.streams for result in results))
    first = results[0]
    title = (
        f"{model}, decode, {first.num_heads} heads of {first.head_dim} over {first.num_kv_heads} of keys "
        "and values: GB/s of KV from memory (of read), and GFLOP/s (of fp32)"
    )
    table = _table(title, ["context", *(f"{count} stream{'s' * (count > 1)}" for count in streams)])
    cells = {(r.streams, r.context): r for r in results}
    for context in dict.fromkeys(result.context for result in results):
        table.add_row(f"{context:,}", *(_decode_cell(cells[count, context]) for count in streams))
    return table


def _decode_cell(result: AttentionResult) -> str:
    return (
        f"{result.kv_gbs:.1f} ({result.percent_of_read:.0f} %)\n"
        f"{result.gflops:.0f} ({result.percent_of_peak:.0f} %)"
    )


def _table(title: str, columns: Iterable[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table
