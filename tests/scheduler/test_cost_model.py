"""What a step takes, learned from noisy steps of a simulated machine."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.scheduler.cost_model import NOTHING, UNBOUNDED_TOKENS, CostModel, StepWork

SMOLLM2 = (2.3e-3, 0.48e-3, 0.92e-6, 0.38e-6)
PROMPTS = [StepWork.of([(0, 256)]), StepWork.of([(2000, 256)])]


class SimulatedMachine:
    """Takes what its coefficients say, with 20 % of noise, and ten times that in one of a hundred steps."""

    def __init__(self, seed: int, unlike: float = 2.0) -> None:
        """unlike: by which factor at most each coefficient differs from those of SmolLM2."""
        self.rng = random.Random(seed)
        factors = [math.exp(math.log(unlike) * self.rng.uniform(-1.0, 1.0)) for _ in SMOLLM2]
        self.coefficients = [own * factor for own, factor in zip(SMOLLM2, factors, strict=True)]
        self.slowness = 1.0

    def true(self, work: StepWork) -> float:
        c0, c1, c2, c3 = self.coefficients
        return self.slowness * (c0 + c1 * work.num_tokens + c2 * work.num_attended + c3 * work.num_pairs)

    def seconds(self, work: StepWork) -> float:
        noise = max(0.2, self.rng.gauss(1.0, 0.2))
        return self.true(work) * noise * (10.0 if self.rng.random() < 0.01 else 1.0)

    def streams(self, count: int | None = None) -> StepWork:
        """A step of streams only."""
        rng = self.rng
        return StepWork.of([(rng.randrange(20, 3000), 1) for _ in range(count or rng.randrange(1, 8))])

    def mixed(self) -> StepWork:
        """Streams, a part of a prompt, or both."""
        work = self.streams() if self.rng.random() < 0.9 else NOTHING
        if work is NOTHING or self.rng.random() < 0.4:
            work = work.added(self.rng.randrange(2000), self.rng.randrange(2, 256))
        return work

    def teach(self, model: CostModel, works: list[StepWork]) -> None:
        for work in works:
            model.observe(work, self.seconds(work))

    def error(self, model: CostModel) -> float:
        """Median relative error of predictions over mixed work."""
        return median(abs(seconds(model, work) / self.true(work) - 1.0) for work in self.several(101))

    def several(self, count: int) -> list[StepWork]:
        return [self.mixed() for _ in range(count)]


def seconds(model: CostModel, work: StepWork) -> float:
    predicted = model.predict(work)
    assert predicted is not None
    return predicted


def test_work_counts_single_tokens_by_keys_and_longer_chunks_by_pairs() -> None:
    work = StepWork.of([(99, 1), (10, 4), (0, 1)])
    assert work == StepWork(num_tokens=6, num_attended=100 + 1, num_pairs=11 + 12 + 13 + 14)
    assert NOTHING.added(99, 1).added(10, 4).added(0, 1) == work
    assert StepWork.of([]) == NOTHING


def test_nothing_is_predicted_before_the_first_step() -> None:
    model = CostModel()
    assert model.predict(PROMPTS[0]) is None
    assert model.coefficients is None
    with pytest.raises(ValueError, match="no step was observed"):
        model.tokens_within(1.0, NOTHING, 0)


def test_the_first_step_sets_everything() -> None:
    """On a machine of the usual proportions that is 30 times as fast, without noise."""
    machine = SimulatedMachine(0, unlike=1.0)
    machine.slowness = 1 / 30
    model = CostModel()
    first = StepWork.of([(300, 1)])
    model.observe(first, machine.true(first))
    for work in machine.several(20):
        assert seconds(model, work) == pytest.approx(machine.true(work))


def test_mixed_work_is_predicted_within_a_tenth_after_twenty_steps() -> None:
    errors = []
    for seed in range(40):
        machine, model = SimulatedMachine(seed, unlike=3.0), CostModel()
        machine.teach(model, machine.several(20))
        machine_errors = []
        for work in machine.several(60):
            machine_errors.append(abs(seconds(model, work) / machine.true(work) - 1.0))
            machine.teach(model, [work])
        errors.append(median(machine_errors))
    assert median(errors) <= 0.06
    assert max(errors) <= 0.12


@pytest.mark.parametrize("slowness", [0.5, 2.0])
@pytest.mark.parametrize("only_streams", [False, True])
def test_another_speed_is_followed_within_fifty_steps(slowness: float, only_streams: bool) -> None:
    """Also where only streams tell of it: a prompt takes twice as long then, too."""
    errors = []
    for seed in range(20):
        machine, model = SimulatedMachine(seed), CostModel()
        machine.teach(model, machine.several(200))
        machine.slowness = slowness
        assert machine.error(model) > 0.3
        machine.teach(model, [machine.streams() if only_streams else machine.mixed() for _ in range(50)])
        errors.append(machine.error(model))
    assert median(errors) <= 0.10
    assert max(errors) <= 0.20


@pytest.mark.parametrize("num_steps", [1_000, 5_000])
@pytest.mark.parametrize("count", [None, 1, 4])
def test_what_is_not_seen_for_long_stays_what_it_was(num_steps: int, count: int | None) -> None:
    """Streams only, in steps of one kind or several; then a prompt comes, and takes what is predicted."""
    for seed in range(4):
        machine, model = SimulatedMachine(seed), CostModel()
        machine.teach(model, machine.several(100))
        machine.teach(model, [machine.streams(count) for _ in range(num_steps)])
        for prompt in PROMPTS:
            assert 0.6 < seconds(model, prompt) / machine.true(prompt) < 1.6
        machine.teach(model, PROMPTS * 4)
        for prompt in PROMPTS:
            assert 0.75 < seconds(model, prompt) / machine.true(prompt) < 1.35


def test_who_has_only_seen_prompts_knows_streams_by_the_proportions() -> None:
    for seed in range(4):
        machine, model = SimulatedMachine(seed, unlike=1.0), CostModel()
        machine.teach(model, [machine.rng.choice(PROMPTS) for _ in range(2_000)])
        for work in (machine.streams(1), machine.streams(8)):
            assert 0.5 < seconds(model, work) / machine.true(work) < 2.0


def test_a_first_step_that_was_a_stall_is_soon_forgotten() -> None:
    for seed in range(10):
        machine, model = SimulatedMachine(seed), CostModel()
        first = machine.mixed()
        model.observe(first, 10.0 * machine.true(first))
        machine.teach(model, machine.several(30))
        assert machine.error(model) < 0.2


def test_one_stall_moves_a_prediction_by_less_than_a_tenth() -> None:
    machine, model = SimulatedMachine(5), CostModel()
    machine.teach(model, machine.several(100))
    before = seconds(model, PROMPTS[0])
    model.observe(PROMPTS[0], 1000.0 * before)
    assert before < seconds(model, PROMPTS[0]) < 1.1 * before


@pytest.mark.parametrize("nonsense", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_what_no_step_can_have_taken_is_ignored(nonsense: float) -> None:
    model = CostModel()
    model.observe(PROMPTS[0], nonsense)
    assert model.predict(PROMPTS[0]) is None
    model.observe(PROMPTS[0], 0.1)
    before = model.coefficients
    model.observe(PROMPTS[1], nonsense)
    model.observe(NOTHING, 0.1)
    assert model.coefficients == before


chunk = st.tuples(st.integers(0, 100_000), st.one_of(st.just(1), st.integers(1, 4096)))
works = st.builds(StepWork.of, st.lists(chunk, min_size=1, max_size=9))
taught = st.lists(st.tuples(works, st.floats(1e-6, 1e3)), min_size=1, max_size=30)


def model_of(steps: list[tuple[StepWork, float]]) -> CostModel:
    model = CostModel()
    for work, took in steps:
        model.observe(work, took)
    return model


@settings(deadline=None)
@given(taught, works, works)
def test_predictions_are_positive_and_grow_with_each_kind_of_work(
    steps: list[tuple[StepWork, float]], work: StepWork, more: StepWork
) -> None:
    model = model_of(steps)
    assert model.coefficients is not None
    assert all(0.0 < each < math.inf for each in model.coefficients)
    least = seconds(model, work)
    assert 0.0 < seconds(model, NOTHING) <= least
    for larger in (
        StepWork(work.num_tokens + more.num_tokens, work.num_attended, work.num_pairs),
        StepWork(work.num_tokens, work.num_attended + more.num_attended, work.num_pairs),
        StepWork(work.num_tokens, work.num_attended, work.num_pairs + more.num_pairs),
    ):
        assert seconds(model, larger) >= least


@settings(deadline=None)
@given(taught, st.one_of(st.just(NOTHING), works), st.integers(0, 100_000), st.floats(0.0, 10.0))
def test_tokens_within_is_the_most_that_is_predicted_to_fit(
    steps: list[tuple[StepWork, float]], work: StepWork, start: int, times: float
) -> None:
    model = model_of(steps)
    target = times * (seconds(model, work.added(start, 100)))
    most = model.tokens_within(target, work, start)
    assert 0 <= most <= UNBOUNDED_TOKENS
    if most:
        assert seconds(model, work.added(start, most)) <= target
    if most < UNBOUNDED_TOKENS:
        # One token alone has another price than two: the next two.
        assert seconds(model, work.added(start, most + 1)) > target
        assert seconds(model, work.added(start, most + 2)) > target


def test_tokens_within_no_bound_are_bounded() -> None:
    model = model_of([(PROMPTS[0], 0.1)])
    assert model.tokens_within(math.inf, NOTHING, 0) == UNBOUNDED_TOKENS
    assert model.tokens_within(math.nan, NOTHING, 0) == 0
    assert model.tokens_within(0.0, NOTHING, 0) == 0
