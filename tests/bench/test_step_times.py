"""The arithmetic of benchmarks/step_times.py, and what it records of an engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo.bench.step_costs import SMOLLM2_TWO_CORES
from octavo.llm import LLM
from octavo.scheduler.cost_model import StepWork
from step_times import WARM_UP, fitted, recorded, times_of


def steps(stalls: float = 0.0) -> list[tuple[StepWork, float]]:
    rng = random.Random(2)
    works = [
        StepWork.of([(rng.randrange(2_000), rng.choice([1, 1, rng.randrange(2, 256)])) for _ in range(4)])
        for _ in range(200)
    ]
    return [
        (work, SMOLLM2_TWO_CORES.seconds(work, rng) * (10.0 if rng.random() < stalls else 1.0))
        for work in works
    ]


def test_a_fit_finds_the_coefficients_in_spite_of_stalls() -> None:
    costs = SMOLLM2_TWO_CORES
    true = (costs.base, costs.per_token, costs.per_attended, costs.per_pair)
    coefficients, error = fitted(steps())
    assert coefficients == pytest.approx(true, rel=1e-6)
    assert error < 1e-6
    coefficients, error = fitted(steps(stalls=0.05))
    assert coefficients == pytest.approx(true, rel=0.1)
    assert error < 0.02


def test_errors_are_those_of_predictions_made_before() -> None:
    times = times_of(steps())
    assert times.num_steps == 200
    assert times.median_error < 1e-6, "the proportions of the first step are those of this machine"
    assert times_of(steps(stalls=0.1)).p95_error > 0.3
    with pytest.raises(ValueError, match=f"{WARM_UP} steps are too few"):
        times_of(steps()[:WARM_UP])


def test_every_step_of_a_load_is_recorded(tiny_model_path: Path) -> None:
    with LLM(tiny_model_path, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=64) as llm:
        before = llm.engine.metrics.step_times.num_steps
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("step_times.PROMPT_LENS", (20, 30))
            patch.setattr("step_times.ANSWER_LENS", (2, 5))
            patch.setattr("step_times.USERS", 2)
            patch.setattr("step_times.time.sleep", lambda _: None)
            rows = recorded(llm, 4, seed=1)
        assert len(rows) == llm.engine.metrics.step_times.num_steps - before > 4
    assert all(seconds > 0.0 for _, seconds in rows)
    assert sum(work.num_tokens for work, _ in rows) >= 4 * (20 + 1)
