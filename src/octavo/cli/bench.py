"""`octavo bench`: measure this machine with this build, and simulate a house's load."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from octavo.cli.flags import count, milliseconds


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure kernels and throughput, simulate a house's load",
        description="Measure this machine with this build, or simulate a house's load on a machine like it.",
    )
    kinds = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    _add_kernels(kinds)
    _add_throughput(kinds)
    _add_simulate(kinds)
    parser.set_defaults(run=run)


def _add_kernels(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "kernels",
        usage="octavo bench kernels [OPTIONS]",
        help="how near matrix products and attention come to the machine's limits",
        description="Measure matrix products and paged attention, and in the same run what this machine "
        "could do at most: fp32 and int8 arithmetic, and reading memory. Attention is also held against "
        "itself: paged beside contiguous, shared prefixes beside copies, int8 beside f16. Without options it "
        "takes about three minutes on two idle cores and 1.5 GB (512 MiB for a matrix or the keys and values "
        "of a case; more than that where the last-level cache is larger than 128 MB).",
    )
    flag = parser.add_argument
    flag("--json", action="store_true", help="print JSON, with the machine's facts")
    flag("--quick", action="store_true", help="only a few cases and repeats")
    flag("--threads", type=count, metavar="N", help="threads that compute (default: performance cores)")
    flag("--instruction-set", metavar="NAME", help="kernels to use (default: the best this processor has)")
    flag("--only", choices=("matmul", "attention"), help="measure one of the two")
    flag(
        "--models",
        type=_words,
        metavar="M,...",
        help="whose products and heads: smollm2-135m, gemma-3-270m, 1b, 3b, 8b (default: the products of "
        "all, the heads of the first and the last)",
    )
    flag("--types", type=_words, metavar="T,...", help="weight types (default: Q4_0,Q8_0)")
    flag(
        "--rows",
        type=_counts,
        metavar="N,...",
        help="rows of a product, up to 512 (default: the powers of two; heads up to 64)",
    )
    flag(
        "--kv-dtypes",
        type=_words,
        metavar="T,...",
        help="types of the keys and values that attention reads (default: f16,q8)",
    )
    flag(
        "--repeats",
        type=count,
        metavar="N",
        help="timed repeats of each case, twice as many where ways are compared (default: 5, quick: 3)",
    )


def _add_throughput(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "throughput",
        usage="octavo bench throughput [OPTIONS]",
        help="tokens a second of a whole workload, without HTTP",
        description="Run seeded prompts of token ids through the engine, all given at once, and count "
        "tokens a second and the Python between two native steps.",
    )
    flag = parser.add_argument
    flag(
        "--model",
        default="smollm2-135m",
        help="a GGUF file, or a name that 'octavo pull' knows (default: %(default)s)",
    )
    flag("--num-prompts", type=count, default=16, metavar="N", help="how many (default: %(default)s)")
    flag(
        "--input-len",
        type=count,
        default=400,
        metavar="N",
        help="tokens of a prompt (default: %(default)s)",
    )
    flag(
        "--output-len",
        type=count,
        default=64,
        metavar="N",
        help="tokens of an answer (default: %(default)s)",
    )
    flag("--concurrency", type=count, default=8, metavar="N", help="computed together (default: %(default)s)")
    flag("--threads", type=count, metavar="N", help="threads that compute (default: performance cores)")
    flag("--seed", type=int, default=0, metavar="N", help="draws the prompts (default: %(default)s)")
    flag("--json", action="store_true", help="print JSON, with the machine's facts")


def _add_simulate(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "simulate",
        usage="octavo bench simulate [OPTIONS]",
        help="hours of a house's load in seconds: who waits how long, how evenly all are served",
        description="Run the scheduler and the block pool as they are, on a clock instead of a model: a step "
        "takes what one of SmolLM2-135M takes on two cores, answers have drawn lengths and made-up tokens.",
    )
    flag = parser.add_argument
    flag(
        "--workload",
        choices=("home", "two-backlogged", "one-heavy-many-light", "thousands", "at-once"),
        default="home",
        help="the house (default: %(default)s)",
    )
    flag(
        "--users",
        type=_counts,
        metavar="N,...",
        help="how many; several numbers: one simulation for each (default: the workload's own number)",
    )
    span = parser.add_mutually_exclusive_group()
    span.add_argument(
        "--minutes", type=_number, metavar="M", help="simulated minutes of asking (default: 60)"
    )
    span.add_argument("--hours", type=_number, metavar="H", help="the same in hours")
    flag(
        "--rate",
        type=_number,
        metavar="R",
        help="requests a second of each user who is not backlogged, were they answered at once",
    )
    flag("--weights", type=_numbers, metavar="W,...", help="of the users, in turn (default: 1)")
    flag("--seed", type=int, metavar="N", help="draws everything that is drawn (default: 0)")
    flag("--pool-tokens", type=count, metavar="N", help="tokens that the KV pool holds (default: 32768)")
    flag("--block-size", type=count, metavar="N", help="tokens of a block (default: 16)")
    flag("--max-num-seqs", type=count, metavar="N", help="requests computed together (default: 64)")
    flag("--max-num-batched-tokens", type=count, metavar="N", help="tokens of a step (default: 256)")
    flag("--max-model-len", type=count, metavar="N", help="tokens of the longest request (default: 8192)")
    flag("--scheduling-policy", choices=("fair", "fcfs", "priority"), help="who comes first (default: fair)")
    flag("--target-itl-ms", type=milliseconds, metavar="MS", help="of a step while somebody streams")
    flag("--speed", type=_number, metavar="X", help="how many times as fast as two cores (default: 1)")
    flag("--noise", type=_number, metavar="X", help="relative standard deviation of a step (default: 0)")
    flag("--stalls", type=_number, metavar="X", help="fraction of steps that take ten times (default: 0)")
    flag("--no-enable-prefix-caching", action="store_true", help="compute every prompt from its beginning")
    flag("--audit", action="store_true", help="prove the block accounting after every step; slow")
    flag("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Returns: 0 with the numbers on standard output, 1 where it cannot be measured, with the reason."""
    runs = {"kernels": _run_kernels, "throughput": _run_throughput, "simulate": _run_simulate}
    return runs[args.benchmark](args)


def _run_kernels(args: argparse.Namespace) -> int:
    from octavo.bench.kernels import PARTS, KernelPlan, measure_kernels
    from octavo.bench.shapes import models_named

    chosen: dict[str, Any] = {
        name: getattr(args, name) for name in ("types", "rows", "kv_dtypes", "threads", "instruction_set")
    }
    try:
        plan = KernelPlan(
            parts=(args.only,) if args.only else PARTS,
            **{name: value for name, value in chosen.items() if value is not None},
        )
        if args.models is not None:
            plan = plan.of_models(models_named(args.models))
        if args.quick:
            plan = plan.quick()
        if args.repeats is not None:
            plan = plan.repeated(args.repeats)
        with _Progress() as progress:
            report = measure_kernels(plan, progress.say)
    except ValueError as error:
        return _refuse(str(error))
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        from rich.console import Console

        from octavo.bench.kernel_tables import print_report

        print_report(report, Console(highlight=False))
    return 0


def _run_throughput(args: argparse.Namespace) -> int:
    from octavo.bench.throughput import Workload, measure_throughput, print_report
    from octavo.engine.request import RequestRefused
    from octavo.model.available_memory import MemoryRefused
    from octavo.model.errors import ModelFileError

    workload = Workload(
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        concurrency=args.concurrency,
        seed=args.seed,
    )
    try:
        with _Progress() as progress:
            report = measure_throughput(args.model, workload, threads=args.threads, say=progress.say)
    except (ModelFileError, MemoryRefused, RequestRefused, ValueError) as error:
        return _refuse(str(error))
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        from rich.console import Console

        print_report(report, Console(highlight=False))
    return 0


def _run_simulate(args: argparse.Namespace) -> int:
    from octavo.bench.simulate import SimulationPlan, simulate
    from octavo.bench.simulated_workloads import WORKLOADS

    chosen: dict[str, Any] = {
        name: getattr(args, name)
        for name in (
            *("rate", "weights", "seed", "pool_tokens", "block_size", "max_num_seqs", "speed", "noise"),
            *("max_num_batched_tokens", "max_model_len", "stalls", "scheduling_policy", "target_itl_ms"),
        )
    }
    chosen["num_users"] = args.users
    chosen["minutes"] = args.minutes if args.hours is None else 60.0 * args.hours
    try:
        plan = SimulationPlan(
            workload=WORKLOADS[args.workload],
            enable_prefix_caching=not args.no_enable_prefix_caching,
            audits=args.audit,
            **{name: value for name, value in chosen.items() if value is not None},
        )
        with _Progress() as progress:
            reports = list(simulate(plan, progress.say))
    except ValueError as error:
        return _refuse(str(error))
    if args.json:
        runs = [report.as_json() for report in reports]
        print(json.dumps({"benchmark": "simulate", "runs": runs}, indent=2))
    else:
        from rich.console import Console

        from octavo.bench.simulation_report import print_curve, print_report

        console = Console(highlight=False)
        if len(reports) == 1:
            print_report(reports[0], console)
        else:
            print_curve(reports, console)
    return 0


class _Progress:
    """What is being measured, on one line of a terminal; silent elsewhere."""

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._line("")

    def say(self, text: str) -> None:
        self._line(f"measuring {text} ...")

    def _line(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _refuse(sentence: str) -> int:
    print(f"octavo: error: {sentence}", file=sys.stderr)
    return 1


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number")
    return number


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_number(part) for part in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))
