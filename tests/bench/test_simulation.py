"""The simulator: the same for the same seed, nobody is lost, and its counts add up."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from octavo.bench.arrivals import Client, ClosedLoop, Habits, Once, Poisson, User, made_up_tokens
from octavo.bench.simulate import SimulationPlan, simulate
from octavo.bench.simulated_workloads import WORKLOADS
from octavo.bench.simulation import NothingPlanned, Outcome, Simulation
from octavo.bench.simulation_report import MOST_USERS_NAMED, Percentiles, SimulationReport
from octavo.bench.step_costs import SMOLLM2_TWO_CORES, StepCosts
from octavo.cli.main import main
from octavo.kv.kv_cache import KVCache
from octavo.scheduler.cost_model import StepWork
from octavo.scheduler.limits import SchedulerConfig
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.scheduler import Scheduler

CHAT = Habits(question=40, answer=30, turns=4.0, system_prompt=made_up_tokens(50, "chat"))
EXACT = StepCosts(base=0.5, per_token=1 / 64, per_attended=0.0, per_pair=0.0)
"""In floating-point numbers without rounding, for steps of few tokens."""


def house(clients: Sequence[Client], num_blocks: int = 60, **options: Any) -> tuple[Simulation, KVCache]:
    """Audited after every step, unless told otherwise."""
    cache = KVCache(num_blocks, 16)
    defaults: dict[str, Any] = {"costs": SMOLLM2_TWO_CORES, "until": 60.0, "audits": True}
    simulation = Simulation(clients, cache, SchedulerConfig(8, 64, 10_000), **(defaults | options))
    return simulation, cache


def crowd(limit: int = 900, seed: int = 0) -> list[Client]:
    """Too many for a pool of 60 blocks."""
    long = Habits(question=200, answer=120)
    return [
        Client(User("chat-a"), ClosedLoop(2.0), CHAT, limit, seed),
        Client(User("chat-b"), ClosedLoop(2.0), CHAT, limit, seed),
        Client(User("reader"), Poisson(0.2), long, limit, seed),
        Client(User("night", background=True), ClosedLoop(0.0, depth=2), long, limit, seed),
    ]


def once(name: str, *, at: float, question: int, answer: int) -> Client:
    return Client(User(name), Once(at), Habits(question, answer, spread=0.0), 1_000)


def decided(report: SimulationReport) -> dict[str, Any]:
    """What the seed decides of a report."""
    fields = report.as_json()
    del fields["planning"]
    return fields


def test_a_simulation_is_decided_by_its_seed() -> None:
    plan = SimulationPlan(minutes=5.0, noise=0.2, stalls=0.01, pool_tokens=6_000, seed=7)
    first, second = (next(simulate(plan)) for _ in range(2))
    assert decided(first) == decided(second)
    other = next(simulate(dataclasses.replace(plan, seed=8)))
    assert decided(first) != decided(other)


def finished(outcome: Outcome) -> bool:
    return all(request.finished_at is not None for request in outcome.requests)


def test_everybody_is_answered_in_a_pool_that_is_too_small_and_no_block_is_left() -> None:
    for seed in range(3):
        simulation, cache = house(crowd(seed=seed), seed=seed)
        outcome = simulation.run()
        assert len(outcome.requests) > 20
        assert finished(outcome)
        assert sum(request.num_preemptions for request in outcome.requests) > 5
        assert cache.num_used == 0
        assert simulation.scheduler.num_running == simulation.scheduler.num_waiting == 0


def test_counts_add_up() -> None:
    simulation, cache = house(crowd())
    outcome = simulation.run()
    for request in outcome.requests:
        assert request.num_generated_tokens == request.num_output_tokens
        known = request.num_prompt_tokens + request.num_generated_tokens - 1  # the last is not computed
        again = request.num_computed_tokens + request.num_cached_tokens - known
        # What was lost is computed again, but where it was still to be found.
        assert 0 <= again <= request.num_lost_tokens
    requests, services = outcome.requests, outcome.services
    assert outcome.num_tokens == sum(request.num_computed_tokens for request in requests)
    assert outcome.num_tokens == sum(service.total for service in services.values())
    assert sum(request.num_cached_tokens for request in requests) == cache.prefix_hits > 0
    assert sum(request.num_lost_tokens for request in requests) == simulation.scheduler.num_lost_tokens > 0
    for user, service in services.items():
        own = [request for request in requests if request.user == user]
        waits = [(request.scheduled_at or 0.0) - request.arrived_at for request in own]
        assert 0.0 < service.backlogged_seconds <= sum(max(0.0, wait) for wait in waits) + 1e-6
        assert list(service.times) == sorted(service.times)


def test_moments_of_a_request_are_in_order() -> None:
    simulation, _ = house(crowd())
    outcome = simulation.run()
    for one in outcome.requests:
        assert one.scheduled_at is not None
        assert one.first_token_at is not None
        assert one.finished_at is not None
        assert (
            0.0 <= one.arrived_at <= one.scheduled_at < one.first_token_at <= one.finished_at <= outcome.now
        )
        assert (one.largest_gap > 0.0) == (one.num_output_tokens > 1)
        assert one.largest_gap <= one.finished_at - one.first_token_at


def test_one_request_takes_what_its_steps_take() -> None:
    """A prompt of 100 in steps of 64, then three tokens: 64 + 36 rows and two of one."""
    simulation, _ = house([once("one", at=7.0, question=100, answer=3)], costs=EXACT)
    outcome = simulation.run()
    (request,) = outcome.requests
    assert (request.arrived_at, request.scheduled_at) == (7.0, 7.0), "the clock jumps to the arrival"
    assert list(outcome.step_seconds) == [0.5 + rows / 64 for rows in (64, 36, 1, 1)]
    assert request.first_token_at == 7.0 + 1.5 + 0.5 + 36 / 64
    assert request.finished_at == outcome.now == 7.0 + 4 * 0.5 + 102 / 64
    assert request.largest_gap == 0.5 + 1 / 64
    assert outcome.occupancy.seconds == sum(outcome.step_seconds)


def test_what_arrives_during_a_step_waits_for_its_end() -> None:
    clients = [once("first", at=1.0, question=64, answer=1), once("second", at=1.25, question=64, answer=1)]
    simulation, _ = house(clients, costs=EXACT)
    outcome = simulation.run()
    first, second = outcome.requests
    assert (first.scheduled_at, first.first_token_at) == (1.0, 2.5)
    assert (second.arrived_at, second.scheduled_at, second.first_token_at) == (1.25, 2.5, 4.0)
    assert [service.backlogs for service in outcome.services.values()] == [[], [(1.25, 2.5)]]
    assert outcome.most_waiting == 1


def test_a_shared_system_prompt_is_computed_once() -> None:
    """Each of two users asks one question after the same 64 tokens."""
    habits = Habits(question=20, answer=2, spread=0.0, system_prompt=made_up_tokens(64, "shared"))
    clients = [Client(User(name), Poisson(0.05), habits, 1_000) for name in "ab"]
    simulation, _ = house(clients, until=100.0)
    outcome = simulation.run()
    assert len(outcome.requests) > 2
    assert [request.num_cached_tokens for request in outcome.requests] == [0] + [64] * (
        len(outcome.requests) - 1
    )


def test_what_is_open_at_the_end_is_cut_off_where_a_house_does_not_drain() -> None:
    clients = [Client(User("busy"), ClosedLoop(0.0, depth=20), CHAT, 900)]
    simulation, cache = house(clients, until=30.0, drains=False)
    outcome = simulation.run()
    open_ones = [request for request in outcome.requests if request.finished_at is None]
    assert len(open_ones) == 20
    assert 30.0 <= outcome.now < 31.0
    assert cache.num_used == 0
    assert outcome.services[clients[0].user].backlogs[-1][1] == outcome.now


def test_a_scheduler_that_plans_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "step", lambda *_: StepPlan((), 0, ()))
    simulation, _ = house([Client(User("one"), ClosedLoop(1e9), CHAT, 900)], until=1e12)
    with pytest.raises(NothingPlanned, match="1 requests are open"):
        simulation.run()


def test_the_cost_model_learns_the_simulated_machine() -> None:
    plan = SimulationPlan(workload=WORKLOADS["two-backlogged"], minutes=3.0, speed=3.0, noise=0.1)
    report = next(simulate(plan))
    assert report.cost_model_error < 0.12
    assert next(simulate(dataclasses.replace(plan, noise=0.0))).cost_model_error < 0.001


def test_steps_of_a_faster_machine_take_their_part_and_noise_is_seeded() -> None:
    work = StepWork.of([(100, 1), (0, 50)])
    rng = random.Random(1)
    usual = SMOLLM2_TWO_CORES.seconds(work, rng)
    assert SMOLLM2_TWO_CORES.faster(4.0).seconds(work, rng) == pytest.approx(usual / 4.0)
    assert rng.random() == random.Random(1).random(), "without noise nothing is drawn"
    noisy = dataclasses.replace(SMOLLM2_TWO_CORES, noise=0.2, stalls=0.1)
    drawn = [noisy.seconds(work, random.Random(seed)) / usual for seed in range(1_000)]
    assert 0.07 < sum(each > 2.0 for each in drawn) / 1_000 < 0.13
    assert 0.17 < (sum((each - 1.0) ** 2 for each in drawn if each <= 2.0) / 900) ** 0.5 < 0.23
    for nonsense in (0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="times as fast"):
            SMOLLM2_TWO_CORES.faster(nonsense)
    with pytest.raises(ValueError, match="no costs of a step"):
        StepCosts(0.0, 0.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"noise is 1\.5"):
        StepCosts(1.0, 0.0, 0.0, 0.0, noise=1.5)


def test_percentiles_are_values_that_occurred() -> None:
    assert Percentiles.of(range(101)) == Percentiles(50, 95, 100)
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 3.0)
    assert Percentiles.of([]) == Percentiles(0.0, 0.0, 0.0)


def test_weights_and_the_background_are_in_the_report() -> None:
    plan = SimulationPlan(minutes=4.0, weights=(1.0, 4.0), seed=2)
    report = next(simulate(plan))
    computed = {user.name: user.served.num_computed for user in report.users}
    assert {user.name: (user.service, user.background) for user in report.users} == {
        "chat-0": (computed["chat-0"], False),
        "chat-1": (computed["chat-1"] / 4.0, False),
        "agent-2": (computed["agent-2"], False),
        "night-3": (computed["night-3"] / 4.0, True),
    }
    assert report.fairness.vtc_bound == 2 * plan.pool_tokens


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["bench", "simulate", *arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_command_prints_who_waited_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = command(capsys, "--minutes", "5", "--seed", "3")
    assert code == 0
    for word in ("home: 4 users", "chat-0", "night-3", "everybody", "token counters 65,536", "Python:"):
        assert word in text


def test_the_command_prints_a_line_for_each_number_of_users(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = command(capsys, "--workload", "thousands", "--users", "10,1200", "--minutes", "0.2")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines() if line.strip()[:1].isdigit()] == ["10", "1,200"]


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--workload one-heavy-many-light --users 30 --hours 0.02 --rate 0.2 --weights 1,2 --json"
    code, text, _ = command(capsys, *arguments.split())
    assert code == 0
    (run,) = json.loads(text)["runs"]
    assert run["workload"] == "one-heavy-many-light"
    assert run["num_users"] == 30
    assert len(run["users"]) == MOST_USERS_NAMED
    assert run["fairness"]["difference"]["tokens"] > 0.0
    assert run["served"]["num_requests"] >= run["served"]["num_finished"] > 0
    assert run["planning"]["step"]["median"] > 0.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--workload", "two-backlogged", "--rate", "1"), "asks at a rate"),
        (("--pool-tokens", "20"), "less than two blocks"),
        (("--minutes", "0"), "0.0 minutes cannot be simulated"),
        (("--max-num-seqs", "300"), "must have room for one token of each sequence"),
        (("--max-model-len", "1000"), "system prompt of 1500 tokens"),
        (("--speed", "0"), "times as fast"),
        (("--noise", "2"), "noise is 2.0"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    code, text, error = command(capsys, *arguments)
    assert (code, text) == (1, "")
    assert error.startswith("octavo: error: ")
    assert sentence in error


def test_prefix_caching_off_finds_nothing() -> None:
    on = next(simulate(SimulationPlan(minutes=10.0)))
    off = next(simulate(SimulationPlan(minutes=10.0, enable_prefix_caching=False)))
    assert on.served.num_cached > 0
    assert off.served.num_cached == 0
    assert off.num_tokens > 1.2 * on.num_tokens


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_command_knows_every_house(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, text, _ = command(capsys, "--workload", name, "--users", "4", "--minutes", "0.1")
    assert code == 0
    assert text.startswith(f"{name}: 4 users")
