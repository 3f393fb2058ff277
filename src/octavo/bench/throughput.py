"""`octavo bench throughput`: a whole workload through the engine, without HTTP."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.bench.machine import Machine
from octavo.bench.prompts import seeded_prompts
from octavo.bench.spread import Spread
from octavo.engine.sampling_params import SamplingParams
from octavo.llm import LLM

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from octavo.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`num_prompts` different prompts of `input_len` tokens, `output_len` generated for each whatever they
    say, at most `concurrency` computed together. Lengths in tokens."""

    num_prompts: int = 16
    input_len: int = 400
    output_len: int = 64
    concurrency: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepOverhead:
    """Python between two native calls, without the pauses where there was nothing to do.

    gap: seconds from one native return to the next native entry. step: seconds inside the native call.
    percent: all gaps, of all gaps and steps together.
    """

    num_steps: int
    gap: Spread
    step: Spread
    percent: float


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """prompt_tokens were computed or found cached (cached_tokens of them); rates are over the whole wall
    time, so that `total_tokens_per_second` is the sum of the other two. seconds: from the submission of all
    prompts to the last token."""

    machine: Machine
    model: str
    workload: Workload
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    num_preemptions: int
    overhead: StepOverhead | None

    def as_json(self) -> dict[str, Any]:
        """Field names are stable: those of the dataclasses."""
        return {"benchmark": "throughput", **dataclasses.asdict(self)}


def measure_throughput(
    model: str | Path,
    workload: Workload,
    *,
    threads: int | None = None,
    say: Callable[[str], None] = lambda _: None,
    **engine_config: Any,
) -> ThroughputReport:
    """engine_config: further fields of EngineConfig.

    Raises: ModelFileError for the file, MemoryRefused, RequestRefused where a prompt can never fit.
    """
    with LLM(
        model,
        threads=threads,
        max_num_seqs=workload.concurrency,
        max_num_batched_tokens=max(256, workload.concurrency),
        **engine_config,
    ) as llm:
        machine = Machine.now(llm.model.num_threads, llm.model.instruction_set)
        params = SamplingParams(temperature=0.0, max_tokens=workload.output_len, ignore_eos=True)
        prompts = seeded_prompts(
            llm.tokenizer, workload.num_prompts + 1, workload.input_len, seed=workload.seed
        )
        say("a first prompt, not counted")
        llm.generate([prompts.pop()], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        before = _Counters(llm.engine)
        say(f"{workload.num_prompts} prompts")
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
        prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        output_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        return ThroughputReport(
            machine=machine,
            model=llm.model.path.name,
            workload=workload,
            seconds=seconds,
            prompt_tokens=prompt_tokens,
            cached_tokens=sum(output.num_cached_tokens for output in outputs),
            output_tokens=output_tokens,
            prompt_tokens_per_second=prompt_tokens / seconds,
            output_tokens_per_second=output_tokens / seconds,
            total_tokens_per_second=(prompt_tokens + output_tokens) / seconds,
            num_preemptions=_Counters(llm.engine).preemptions - before.preemptions,
            overhead=before.overhead_since(llm.engine),
        )


class _Counters:
    """What the engine had counted at one moment."""

    def __init__(self, engine: Engine) -> None:
        times = engine.metrics.step_times
        self._num_steps = times.num_steps
        self._num_gaps = len(times.gaps())
        self.preemptions = int(
            sum(
                sample.value
                for family in engine.collector.collect()
                if family.name == "octavo:num_preemptions"
                for sample in family.samples
                if not sample.name.endswith("_created")
            )
        )

    def overhead_since(self, engine: Engine) -> StepOverhead | None:
        """None where no step followed another."""
        times = engine.metrics.step_times
        steps, gaps = times.steps(), times.gaps()
        if len(steps) == times.num_steps:  # else the engine remembers only its latest steps: all are ours
            steps, gaps = steps[self._num_steps :], gaps[self._num_gaps :]
        if not gaps:
            return None
        return StepOverhead(
            num_steps=times.num_steps - self._num_steps,
            gap=Spread.of(gaps),
            step=Spread.of(steps),
            percent=100 * sum(gaps) / (sum(gaps) + sum(steps)),
        )


def print_report(report: ThroughputReport, console: Console) -> None:
    """A table for people."""
    from rich.table import Table

    work = report.workload
    console.print(report.machine.describe())
    table = Table(
        title=f"{report.model}: {work.num_prompts} prompts of {work.input_len} tokens, {work.output_len} "
        f"generated for each, {work.concurrency} together",
        title_justify="left",
        show_header=False,
    )
    table.add_row("wall time", f"{report.seconds:.2f} s")
    table.add_row("prompt tokens", f"{report.prompt_tokens:,}", f"{report.prompt_tokens_per_second:.1f}/s")
    table.add_row("output tokens", f"{report.output_tokens:,}", f"{report.output_tokens_per_second:.1f}/s")
    table.add_row("together", "", f"{report.total_tokens_per_second:.1f}/s")
    table.add_row("found cached", f"{report.cached_tokens:,}")
    table.add_row("preemptions", f"{report.num_preemptions:,}")
    if report.overhead is not None:
        gap, step = report.overhead.gap, report.overhead.step
        table.add_row("steps", f"{report.overhead.num_steps:,}", f"{step.median * 1e3:.2f} ms each (median)")
        table.add_row(
            "Python between steps",
            f"{report.overhead.percent:.1f} %",
            f"{gap.median * 1e6:.0f} microseconds (median; {gap.low * 1e6:.0f} to {gap.high * 1e6:.0f})",
        )
    console.print(table)
