"""`octavo bench kernels`: matrix products and attention against the limits of this machine, in one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.bench import attention as attention_bench
from octavo.bench import int8_kv as int8_kv_bench
from octavo.bench import matmul as matmul_bench
from octavo.bench import paging as paging_bench
from octavo.bench import shared_prefix as shared_prefix_bench
from octavo.bench.attention import AttentionCases, AttentionResult, measure_attention
from octavo.bench.attention_steps import AttentionShape, NewTokens, Room
from octavo.bench.int8_kv import Int8KVResult, measure_int8_kv
from octavo.bench.limits import Limits, measure_limits
from octavo.bench.machine import Machine, last_level_cache_bytes
from octavo.bench.matmul import MOST_ROWS, MatmulResult, MatmulShape, measure_matmuls
from octavo.bench.paging import PagingCases, PagingResult, measure_paging
from octavo.bench.shapes import EIGHT_BILLION, MODELS, SMOLLM2, ModelShape
from octavo.bench.shared_prefix import SharedPrefix, SharedPrefixResult, measure_shared_prefixes
from octavo.kernels import ThreadPool, available_instruction_sets
from octavo.kernels.threads import default_num_threads
from octavo.kv.layout import KV_DTYPES

PARTS = ("matmul", "attention")

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan:
    """What is measured and how thoroughly.

    threads, instruction_set: None fits the machine. cold_bytes: what pushes itself out of every cache when
    read in turn. read_bytes: of the array behind the read limit. most_bytes: of KV for one case, and of one
    matrix, which is measured with as many columns as fit.

    Raises: ValueError for a type of weights or of keys and values, or a number of rows, that cannot be
        measured.
    """

    threads: int | None = None
    instruction_set: str | None = None
    parts: Sequence[str] = PARTS
    shapes: Sequence[MatmulShape] = tuple(shape for model in MODELS for shape in model.matmuls())
    types: Sequence[str] = matmul_bench.TYPES
    rows: Sequence[int] = matmul_bench.ROWS
    heads: Sequence[AttentionShape] = (SMOLLM2.heads(), EIGHT_BILLION.heads())
    kv_dtypes: Sequence[str] = KV_DTYPES
    attention: AttentionCases = field(default_factory=AttentionCases)
    paging: PagingCases = field(default_factory=PagingCases)
    shared_prefix: Sequence[SharedPrefix] = shared_prefix_bench.CASES
    int8_kv: Sequence[NewTokens] = int8_kv_bench.CASES
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
        for kv_dtype in self.kv_dtypes:
            if kv_dtype not in KV_DTYPES:
                raise ValueError(f"keys and values are measured as {', '.join(KV_DTYPES)}, not as {kv_dtype}")

    @property
    def room(self) -> Room:
        return Room(self.cold_bytes, self.most_bytes)

    def quick(self) -> KernelPlan:
        """A few seconds' worth of the first model: enough to see that a change did not make things worse."""
        return dataclasses.replace(
            self,
            shapes=[shape for shape in self.shapes if shape.model == self.shapes[0].model],
            types=self.types[:1] if tuple(self.types) == matmul_bench.TYPES else self.types,
            rows=(1, 8, 256) if tuple(self.rows) == matmul_bench.ROWS else self.rows,
            heads=self.heads[:1],
            attention=AttentionCases(contexts=(512, 4096), streams=(1, 8), prompts=(512,), chunks=()),
            paging=PagingCases(block_sizes=(16,), streams=(8,), contexts=(1024,)),
            shared_prefix=self.shared_prefix[:1],
            int8_kv=self.int8_kv[:1],
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
    """paging, shared_prefix, int8_kv: attention against itself. left_out: products that cannot be had in a
    type, and attention over more keys and values than there is room for, a sentence each."""

    machine: Machine
    limits: Limits
    matmul: list[MatmulResult]
    attention: list[AttentionResult]
    paging: list[PagingResult]
    shared_prefix: list[SharedPrefixResult]
    int8_kv: list[Int8KVResult]
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
    report = KernelReport(machine, limits, [], [], [], [], [], _left_out(plan))
    if "matmul" in plan.parts:
        report.matmul.extend(
            measure_matmuls(
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
        )
    if "attention" in plan.parts:
        _measure_attention(plan, pool, instruction_set, limits, say, report)
    return report


def _measure_attention(
    plan: KernelPlan,
    pool: ThreadPool,
    instruction_set: str,
    limits: Limits,
    say: Callable[[str], None],
    report: KernelReport,
) -> None:
    report.attention.extend(
        measure_attention(
            pool,
            instruction_set,
            limits,
            shapes=plan.heads,
            kv_dtypes=plan.kv_dtypes,
            cases=plan.attention,
            room=plan.room,
            repeats=plan.repeats,
            say=say,
        )
    )
    report.paging.extend(
        measure_paging(
            pool,
            instruction_set,
            shapes=plan.heads,
            kv_dtypes=plan.kv_dtypes,
            cases=plan.paging,
            room=plan.room,
            repeats=plan.repeats,
            say=say,
        )
    )
    report.shared_prefix.extend(
        measure_shared_prefixes(
            pool,
            instruction_set,
            shapes=plan.heads,
            kv_dtypes=plan.kv_dtypes,
            cases=plan.shared_prefix,
            room=plan.room,
            repeats=plan.repeats,
            say=say,
        )
    )
    if _compares_kv_dtypes(plan):
        report.int8_kv.extend(
            measure_int8_kv(
                pool,
                instruction_set,
                shapes=plan.heads,
                cases=plan.int8_kv,
                room=plan.room,
                repeats=plan.repeats,
                say=say,
            )
        )


def _compares_kv_dtypes(plan: KernelPlan) -> bool:
    return set(plan.kv_dtypes) == set(KV_DTYPES)


def _left_out(plan: KernelPlan) -> list[str]:
    sentences = []
    if "matmul" in plan.parts:
        sentences += matmul_bench.left_out(plan.shapes, plan.types)
    if "attention" in plan.parts:
        sentences += attention_bench.left_out(plan.heads, plan.kv_dtypes, plan.attention, plan.room)
        sentences += paging_bench.left_out(plan.heads, plan.kv_dtypes, plan.paging, plan.room)
        sentences += shared_prefix_bench.left_out(plan.heads, plan.kv_dtypes, plan.shared_prefix, plan.room)
        if _compares_kv_dtypes(plan):
            sentences += int8_kv_bench.left_out(plan.heads, plan.int8_kv, plan.room)
    return sentences
