"""How well `CostModel` knows what the next step takes, and what a step of this machine costs.

    python benchmarks/step_times.py [--model M] [--threads N] [--runs R] [--prompts P] [--json]

Each run is a mixed load: six users who pause for up to a second between requests with prompts of 30 to 2,500
tokens and answers of 16 to 90, in steps of at most 256 tokens. Of each step its work and its seconds inside
the native call are recorded; then a cost model goes through them in order and predicts each before it sees
it. The coefficients of `octavo.bench.step_costs` are such fits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np

from octavo.bench.machine import Machine
from octavo.bench.prompts import seeded_prompts
from octavo.engine.sampling_params import SamplingParams
from octavo.kernels import Sampled
from octavo.llm import LLM
from octavo.model.batch import RaggedBatch
from octavo.model.catalog import DEFAULT_MODEL
from octavo.scheduler.cost_model import CostModel, StepWork

USERS = 6
PROMPT_LENS = (30, 100, 300, 600, 1_200, 2_500)
ANSWER_LENS = (16, 40, 90)
WARM_UP = 20
"""Steps from which nothing is counted: a cost model that knows nothing yet."""

Step = tuple[StepWork, float]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One run. median_error, p95_error: relative, of predictions made before each step but the first
    `WARM_UP`. coefficients: seconds of any step, a token, an attended key and a pair, of a fit to all steps;
    fit_error: median relative error of that fit."""

    num_steps: int
    seconds: float
    median_error: float
    p95_error: float
    coefficients: tuple[float, float, float, float]
    fit_error: float


def main() -> int:
    parser = argparse.ArgumentParser(description="What a step takes, and how well it is predicted.")
    flag = parser.add_argument
    flag("--model", default=DEFAULT_MODEL, help="a GGUF file, or a name 'octavo pull' knows")
    flag("--threads", type=int, help="threads that compute (default: performance cores)")
    flag("--runs", type=int, default=3, help="loads, each of other prompts (default: %(default)s)")
    flag("--prompts", type=int, default=28, help="of one load (default: %(default)s)")
    flag("--json", action="store_true", help="print JSON, with the machine's facts")
    args = parser.parse_args()
    with LLM(args.model, threads=args.threads, max_num_seqs=8, max_num_batched_tokens=256) as llm:
        machine = Machine.now(llm.model.num_threads, llm.model.instruction_set)
        runs = [times_of(recorded(llm, args.prompts, seed)) for seed in range(1, args.runs + 1)]
    if args.json:
        fields = [dataclasses.asdict(run) for run in runs]
        print(json.dumps({"benchmark": "step_times", "machine": dataclasses.asdict(machine), "runs": fields}))
        return 0
    print(machine.describe())
    for run in runs:
        base, token, key, pair = (1e6 * each for each in run.coefficients)
        print(
            f"{run.num_steps} steps in {run.seconds:.1f} s: predicted within {100 * run.median_error:.1f} % "
            f"(median), {100 * run.p95_error:.1f} % (95 of 100); fit {base:.0f} + {token:.0f} a token + "
            f"{key:.2f} a key + {pair:.2f} a pair microseconds, off by {100 * run.fit_error:.1f} % (median)"
        )
    return 0


def recorded(llm: LLM, num_prompts: int, seed: int) -> list[Step]:
    """The steps of one load, in order."""
    steps: list[Step] = []
    step = llm.model.step

    def timed(batch: RaggedBatch) -> list[Sampled | None]:
        begin = time.perf_counter()
        drawn = step(batch)
        seconds = time.perf_counter() - begin
        chunks = zip(batch.chunk_starts.tolist(), batch.chunk_lens.tolist(), strict=True)
        steps.append((StepWork.of(chunks), seconds))
        return drawn

    rng = random.Random(seed)
    prompts = [
        seeded_prompts(llm.tokenizer, 1, rng.choice(PROMPT_LENS), seed=1_000 * seed + number)[0]
        for number in range(num_prompts)
    ]

    def ask(user: int) -> None:
        own = random.Random(f"{seed} {user}")
        for prompt in prompts[user::USERS]:
            time.sleep(own.random())
            params = SamplingParams(temperature=0.0, max_tokens=own.choice(ANSWER_LENS), ignore_eos=True)
            llm.generate([prompt], params)

    with mock.patch.object(llm.model, "step", timed):
        users = [threading.Thread(target=ask, args=(user,)) for user in range(USERS)]
        for user in users:
            user.start()
        for user in users:
            user.join()
    return steps


def times_of(steps: Sequence[Step]) -> StepTimes:
    """Raises: ValueError where there are not more than `WARM_UP` steps."""
    if len(steps) <= WARM_UP:
        raise ValueError(f"{len(steps)} steps are too few: the first {WARM_UP} do not count")
    model, errors = CostModel(), []
    for work, seconds in steps:
        errors.append(abs((model.predict(work) or 0.0) / seconds - 1.0))
        model.observe(work, seconds)
    coefficients, fit_error = fitted(steps)
    return StepTimes(
        num_steps=len(steps),
        seconds=sum(seconds for _, seconds in steps),
        median_error=float(np.median(errors[WARM_UP:])),
        p95_error=float(np.quantile(errors[WARM_UP:], 0.95)),
        coefficients=coefficients,
        fit_error=fit_error,
    )


def fitted(steps: Sequence[Step]) -> tuple[tuple[float, float, float, float], float]:
    """Least squares of relative errors, those above 5 % counted by their size (Huber), and the median of what
    is left."""
    rows = [(1, work.num_tokens, work.num_attended, work.num_pairs) for work, _ in steps]
    relative = np.array(rows, dtype=np.float64) / np.array([[seconds] for _, seconds in steps])
    weights = np.ones(len(steps))
    for _ in range(50):
        answer = np.linalg.lstsq(relative * weights[:, None], weights, rcond=None)[0]
        errors = np.abs(relative @ answer - 1.0)
        weights = np.sqrt(0.05 / np.maximum(errors, 0.05))
    base, token, key, pair = (float(each) for each in answer)
    return (base, token, key, pair), float(np.median(errors))


if __name__ == "__main__":
    sys.exit(main())
