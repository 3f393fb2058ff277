"""A step is sized in milliseconds while somebody reads a stream. T19 on a machine that is only a clock."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench.step_costs import SMOLLM2_TWO_CORES
from octavo.kv.kv_cache import KVCache
from octavo.scheduler.budget import LEAST_TARGET, OF_DECODE, PROMPT_SHARE, ROW_TILE, StepBudget
from octavo.scheduler.cost_model import CostModel, StepWork
from octavo.scheduler.limits import SchedulerConfig
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.share import Share

NO_NOISE = random.Random(0)


def learned(speed: float = 1.0) -> CostModel:
    """A cost model that has seen the machine often enough to be exact."""
    costs = SMOLLM2_TWO_CORES.faster(speed)
    model = CostModel()
    for _ in range(300):
        for start, count in ((100, 1), (500, 1), (2000, 1), (0, 256), (1000, 100), (3000, 256), (0, 16)):
            work = StepWork.of([(start, count)])
            model.observe(work, costs.seconds(work, NO_NOISE))
    return model


MODEL = learned()


@pytest.fixture
def model() -> CostModel:
    return MODEL


def generating(number: int, length: int, *, background: bool = False) -> Sequence:
    """One that has computed all it knows but one token."""
    one = Sequence(f"stream {number}", [1] * length, share=Share(f"{number}", background=background))
    one.num_computed_tokens = length - 1
    return one


def waiting(length: int, *, background: bool = False) -> Sequence:
    return Sequence("prompt", [2] * length, share=Share("reader", background=background))


def tokens_beside(
    model: CostModel, streams: list[Sequence], prompt: Sequence, target: float | None, max_tokens: int = 256
) -> int:
    """Tokens that the prompt gets when all of the streams have had theirs."""
    budget = StepBudget(max_tokens, model, target)
    budget.set_aside(streams, interactive=not all(one.background for one in [*streams, prompt]))
    for one in streams:
        budget.visit(one)
        budget.spend(one.num_computed_tokens, 1)
    return budget.tokens_for(prompt, 0, first_prompt=True)


def seconds_beside(model: CostModel, streams: list[Sequence], num_tokens: int) -> float:
    work = StepWork.of([(one.num_computed_tokens, 1) for one in streams])
    seconds = model.predict(work.added(0, num_tokens) if num_tokens else work)
    assert seconds is not None
    return seconds


def test_nobody_streams_and_prompts_get_everything(model: CostModel) -> None:
    assert tokens_beside(model, [], waiting(3000), 0.05) == 256


def test_before_anything_was_measured_prompts_get_everything() -> None:
    assert tokens_beside(CostModel(), [generating(1, 100)], waiting(3000), 0.05) == 255


def test_beside_a_stream_a_prompt_gets_what_fits_the_target_and_not_a_token_less(model: CostModel) -> None:
    streams = [generating(1, 500)]
    tokens = tokens_beside(model, streams, waiting(3000), 0.05)
    assert 32 < tokens < 200
    assert seconds_beside(model, streams, tokens) <= 0.05 < seconds_beside(model, streams, tokens + 1)


def test_background_streams_are_read_by_nobody(model: CostModel) -> None:
    streams = [generating(1, 500, background=True)]
    assert tokens_beside(model, streams, waiting(3000), 0.05) == 255
    assert tokens_beside(model, streams, waiting(3000, background=True), 0.05) == 255


def test_a_background_prompt_keeps_within_the_target_beside_anybody_else(model: CostModel) -> None:
    budget = StepBudget(256, model, 0.05)
    budget.set_aside([], interactive=True)
    chat, job = waiting(20), waiting(3000, background=True)
    assert budget.tokens_for(chat, 0, first_prompt=True) == 20
    budget.spend(0, 20)
    tokens = budget.tokens_for(job, 0, first_prompt=False)
    seconds = model.predict(StepWork.of([(0, 20), (0, tokens)]))
    assert tokens > 16
    assert seconds is not None
    assert seconds <= 0.05


@given(num_streams=st.integers(1, 60), context=st.integers(2, 4000), target=st.floats(0.001, 0.3))
@settings(max_examples=100, deadline=None)
def test_prompts_have_a_tenth_of_the_step_and_a_row_tile_at_least(
    num_streams: int, context: int, target: float
) -> None:
    streams = [generating(number, context) for number in range(num_streams)]
    tokens = tokens_beside(MODEL, streams, waiting(3000), target)
    alone, with_prompt = seconds_beside(MODEL, streams, 0), seconds_beside(MODEL, streams, tokens)
    assert tokens >= min(ROW_TILE, 256 - num_streams)
    limit = max(target, alone / (1 - PROMPT_SHARE))
    one_more = seconds_beside(MODEL, streams, tokens + 1)
    assert with_prompt <= limit * (1 + 1e-9) or tokens == ROW_TILE
    assert one_more > limit * (1 - 1e-9) or tokens == 256 - num_streams


def test_the_target_is_fifty_milliseconds_or_twice_what_streams_take(model: CostModel) -> None:
    few, many = [generating(1, 100)], [generating(number, 2000) for number in range(40)]
    for streams, target in (
        (few, LEAST_TARGET),
        (many, OF_DECODE * seconds_beside(model, many, 0)),
    ):
        tokens = tokens_beside(model, streams, waiting(3000), None)
        assert seconds_beside(model, streams, tokens) <= target
        if tokens < 256 - len(streams):
            assert target < seconds_beside(model, streams, tokens + 1)
    assert OF_DECODE * seconds_beside(model, many, 0) > LEAST_TARGET


def test_a_target_that_streams_exceed_alone_is_reported(model: CostModel) -> None:
    streams = [generating(number, 2000) for number in range(40)]
    alone = seconds_beside(model, streams, 0)
    for target, over in ((alone * 1.01, False), (alone * 0.99, True), (None, False)):
        budget = StepBudget(256, model, target)
        budget.set_aside(streams, interactive=True)
        assert budget.over_target is over


class Machine:
    """Steps of a scheduler on a clock; who has had a token when."""

    def __init__(self, target: float, *, num_blocks: int = 2000) -> None:
        config = SchedulerConfig(64, 256, 8192, target_itl=target)
        self.scheduler = Scheduler(KVCache(num_blocks, 16), config, learned())
        self.now = 0.0
        self.num_steps = 0
        self.tokens: dict[Sequence, list[float]] = {}
        self.first_step: dict[Sequence, int] = {}

    def add(self, name: str, length: int, account: str) -> Sequence:
        one = Sequence(name, [sum(map(ord, name)) * 1000 + i for i in range(length)], share=Share(account))
        self.scheduler.add(one, self.now)
        self.tokens[one] = []
        return one

    def step(self) -> StepPlan:
        plan = self.scheduler.step(self.now)
        seconds = SMOLLM2_TWO_CORES.seconds(plan.work, NO_NOISE)
        self.now += seconds
        self.num_steps += 1
        self.scheduler.commit(plan, seconds)
        for chunk in plan.chunks:
            if chunk.samples:
                chunk.sequence.append(7)
                self.tokens[chunk.sequence].append(self.now)
                self.first_step.setdefault(chunk.sequence, self.num_steps)
        return plan


@pytest.mark.parametrize("same_user", [True, False])
@pytest.mark.parametrize("target", [0.03, 0.05, 0.1])
def test_t19_a_stream_flows_while_a_document_is_read_and_the_short_one_behind_it_is_answered(
    target: float, same_user: bool
) -> None:
    alone = Machine(target)
    document = alone.add("document", 2000, "b")
    while not alone.tokens[document]:
        alone.step()
    solo_speed = 2000 / alone.now

    machine = Machine(target)
    stream = machine.add("stream", 30, "a")
    for _ in range(20):
        machine.step()
    document = machine.add("document", 2000, "b")
    asked_at = machine.now
    machine.step()
    short = machine.add("short", 20, "b" if same_user else "c")
    asked_in = machine.num_steps
    while not machine.tokens[document]:
        machine.step()
    times = [when for when in machine.tokens[stream] if when >= asked_at]
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) <= 1.1 * target
    assert machine.first_step[short] - asked_in <= 3
    speed = 2000 / (machine.tokens[document][0] - asked_at)
    assert speed >= (0.75 if target >= 0.05 else 0.6) * solo_speed
