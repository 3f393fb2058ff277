"""What a simulation has shown, in numbers for people and for scripts."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.bench.arrivals import User
from octavo.bench.fairness import Difference, Service, jain_index, largest_of_all, vtc_bound
from octavo.bench.simulated_workloads import SimulatedWorkload
from octavo.bench.simulation import Outcome, SimulatedRequest

if TYPE_CHECKING:
    from rich.console import Console

MOST_USERS_NAMED = 24
"""Users with figures of their own in a report: those whose worst first token came last."""


MOSTLY = 0.1
"""Of the simulated time: whoever was backlogged for less has hardly been served meanwhile."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of many values: nearest rank, so each is one that occurred. All 0 where there was none."""

    median: float
    p95: float
    worst: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0)
        last = len(ordered) - 1
        return cls(ordered[round(0.5 * last)], ordered[round(0.95 * last)], ordered[-1])


@dataclass(frozen=True, slots=True)
class Served:
    """What became of some requests. Times in simulated seconds, of requests that came so far.

    first_token: from arrival to the first token. queue: from arrival to the beginning of the step that
    computed its first prompt token. largest_gap: between two tokens of one answer. num_computed: tokens,
    num_lost of them computed in vain. num_cached: prompt tokens that were found.
    """

    num_requests: int
    num_finished: int
    first_token: Percentiles
    queue: Percentiles
    largest_gap: float
    num_preemptions: int
    num_lost: int
    num_computed: int
    num_cached: int

    @classmethod
    def of(cls, requests: Sequence[SimulatedRequest]) -> Served:
        return cls(
            num_requests=len(requests),
            num_finished=sum(each.finished_at is not None for each in requests),
            first_token=Percentiles.of(
                each.first_token_at - each.arrived_at for each in requests if each.first_token_at is not None
            ),
            queue=Percentiles.of(
                max(0.0, each.scheduled_at - each.arrived_at)
                for each in requests
                if each.scheduled_at is not None
            ),
            largest_gap=max((each.largest_gap for each in requests), default=0.0),
            num_preemptions=sum(each.num_preemptions for each in requests),
            num_lost=sum(each.num_lost_tokens for each in requests),
            num_computed=sum(each.num_computed_tokens for each in requests),
            num_cached=sum(each.num_cached_tokens for each in requests),
        )


@dataclass(frozen=True, slots=True)
class ServedUser:
    """One user. service: computed tokens / weight. backlogged: seconds in which some request waited for its
    first token to be computed."""

    name: str
    weight: float
    background: bool
    service: float
    backlogged: float
    served: Served


@dataclass(frozen=True, slots=True)
class Fairness:
    """Of users who are not background, in computed tokens / weight.

    difference: the largest between two users over any span in which both were backlogged (of the
    `MOST_COMPARED` who were so longest). vtc_bound: what virtual token counters keep it below. jain: Jain's
    index of what each was served a second while backlogged, of those who were so for `MOSTLY` of the time at
    least; None where that is not two.
    """

    difference: Difference
    vtc_bound: float
    jain: float | None

    @classmethod
    def of(cls, outcome: Outcome, capacity_tokens: int) -> Fairness:
        services = [each for user, each in outcome.services.items() if not user.background]
        prompts = [each.num_prompt_tokens for each in outcome.requests if not each.user.background]
        waited = [each for each in services if each.backlogged_seconds >= max(MOSTLY * outcome.now, 1e-9)]
        rates = [each.served_while_backlogged / each.backlogged_seconds for each in waited]
        return cls(
            difference=largest_of_all(services),
            vtc_bound=vtc_bound(
                max(prompts, default=0),
                capacity_tokens,
                min((each.weight for each in services), default=1.0),
            ),
            jain=jain_index(rates) if len(rates) > 1 else None,
        )


@dataclass(frozen=True, slots=True)
class Planning:
    """Python's own time on this machine, wall seconds: nothing of it is decided by the seed.

    step: planning and committing one step. add: letting one request arrive. wall_seconds: of the simulation,
    its own books included.
    """

    step: Percentiles
    add: Percentiles
    wall_seconds: float
    steps_per_second: float


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """One simulation. seconds, busy_seconds: simulated, and those of steps. num_tokens: computed.

    pool_used, slots_filled, seats_used: fractions, means over the busy seconds. most_waiting: requests at
    once. step: simulated seconds of a step. cost_model_error: median relative error of what the scheduler's
    cost model expected. users: at most `MOST_USERS_NAMED`.
    """

    workload: str
    about: str
    num_users: int
    seed: int
    seconds: float
    busy_seconds: float
    num_steps: int
    num_tokens: int
    most_waiting: int
    pool_used: float
    slots_filled: float
    seats_used: float
    step: Percentiles
    cost_model_error: float
    served: Served
    fairness: Fairness
    users: tuple[ServedUser, ...]
    planning: Planning

    def as_json(self) -> dict[str, Any]:
        """Field names are stable: those of the dataclasses."""
        fields = dataclasses.asdict(self)
        fields["fairness"]["difference"] = self.fairness.difference._asdict()
        return fields


def report_of(
    outcome: Outcome, *, workload: SimulatedWorkload, seed: int, capacity_tokens: int
) -> SimulationReport:
    """The figures of a simulation that has ended."""
    occupancy = outcome.occupancy
    num_steps = len(outcome.step_seconds)
    return SimulationReport(
        workload=workload.name,
        about=workload.about,
        num_users=len(outcome.services),
        seed=seed,
        seconds=outcome.now,
        busy_seconds=sum(outcome.step_seconds),
        num_steps=num_steps,
        num_tokens=outcome.num_tokens,
        most_waiting=outcome.most_waiting,
        pool_used=occupancy.mean("pool"),
        slots_filled=occupancy.mean("filled"),
        seats_used=occupancy.mean("seats"),
        step=Percentiles.of(outcome.step_seconds),
        cost_model_error=Percentiles.of(abs(error) for error in outcome.step_errors).median,
        served=Served.of(outcome.requests),
        fairness=Fairness.of(outcome, capacity_tokens),
        users=tuple(_worst_served(outcome)),
        planning=Planning(
            step=Percentiles.of(outcome.planning_seconds),
            add=Percentiles.of(outcome.adding_seconds),
            wall_seconds=outcome.wall_seconds,
            steps_per_second=num_steps / outcome.wall_seconds,
        ),
    )


def _worst_served(outcome: Outcome) -> list[ServedUser]:
    """In the order in which they came, where all are named."""
    requests: defaultdict[User, list[SimulatedRequest]] = defaultdict(list)
    for each in outcome.requests:
        requests[each.user].append(each)
    users = [_served_user(user, service, requests[user]) for user, service in outcome.services.items()]
    if len(users) > MOST_USERS_NAMED:
        users.sort(key=lambda user: user.served.first_token.worst, reverse=True)
    return users[:MOST_USERS_NAMED]


def _served_user(user: User, service: Service, requests: Sequence[SimulatedRequest]) -> ServedUser:
    return ServedUser(
        name=user.name,
        weight=user.weight,
        background=user.background,
        service=service.total,
        backlogged=service.backlogged_seconds,
        served=Served.of(requests),
    )


def print_report(report: SimulationReport, console: Console) -> None:
    """Tables for people: how long everybody waited, what they were given, what the machine did."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    span = (
        f"{report.seconds / 60:,.1f} minutes" if report.seconds >= 120.0 else f"{report.seconds:.2f} seconds"
    )
    console.print(f"{report.workload}: {report.num_users:,} users, simulated {span}, seed {report.seed}")
    console.print(f"({report.about})")
    waits = Table(title="seconds: median/95 of 100/worst", title_justify="left", box=SIMPLE_HEAD)
    given = Table(title="tokens", title_justify="left", box=SIMPLE_HEAD)
    for table, headings in (
        (waits, ("user", "asked", "open", "first token", "queue", "gap")),
        (given, ("user", "weight", "computed", "cached", "lost", "pauses", "backlogged s")),
    ):
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "user" else "right", no_wrap=True)
    for user in report.users:
        waits.add_row(user.name, *_waits(user.served))
        given.add_row(user.name, f"{user.weight:g}", *_given(user.served), f"{user.backlogged:,.0f}")
    left_out = report.num_users - len(report.users)
    if left_out:
        waits.add_row(f"({left_out:,} more)")
        given.add_row(f"({left_out:,} more)")
    waits.add_section()
    waits.add_row("everybody", *_waits(report.served))
    given.add_section()
    given.add_row("everybody", "", *_given(report.served))
    console.print(waits)
    console.print(given)
    for line in _facts(report):
        console.print(line, soft_wrap=True)


def _facts(report: SimulationReport) -> Iterator[str]:
    fairness, planning = report.fairness, report.planning
    yield (
        f"service: largest difference {fairness.difference.tokens:,.0f} tokens / weight, bound of virtual "
        f"token counters {fairness.vtc_bound:,.0f}"
    )
    if fairness.jain is not None:
        yield f"         Jain's index while backlogged {fairness.jain:.3f}"
    yield (
        f"pool:    {100 * report.pool_used:.1f} % in use, {100 * report.slots_filled:.1f} % of its slots "
        f"filled, {100 * report.seats_used:.1f} % of seats, at most {report.most_waiting:,} waited"
    )
    yield (
        f"steps:   {report.num_steps:,} of {1e3 * report.step.median:.1f} ms (median), busy "
        f"{100 * report.busy_seconds / report.seconds if report.seconds else 0.0:.1f} % of the time, "
        f"predicted within {100 * report.cost_model_error:.1f} %"
    )
    yield (
        f"Python:  planning a step {_three(1e6, planning.step)} microseconds, a request's arrival "
        f"{_three(1e6, planning.add)}"
    )
    yield f"         {planning.wall_seconds:.2f} s in all, {planning.steps_per_second:,.0f} steps a second"


def print_curve(reports: Sequence[SimulationReport], console: Console) -> None:
    """One line for each number of users."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = "planning in Python, microseconds: median/95 of 100/worst"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("users", "requests", "waited", "a step", "an arrival", "steps/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        planning = report.planning
        table.add_row(
            f"{report.num_users:,}",
            f"{report.served.num_requests:,}",
            f"{report.most_waiting:,}",
            _three(1e6, planning.step),
            _three(1e6, planning.add),
            f"{planning.steps_per_second:,.0f}",
        )
    console.print(table)


def _waits(served: Served) -> list[str]:
    return [
        f"{served.num_requests:,}",
        f"{served.num_requests - served.num_finished:,}",
        _three(1.0, served.first_token),
        _three(1.0, served.queue),
        f"{served.largest_gap:.2f}",
    ]


def _given(served: Served) -> list[str]:
    return [
        f"{served.num_computed:,}",
        f"{served.num_cached:,}",
        f"{served.num_lost:,}",
        f"{served.num_preemptions:,}",
    ]


def _three(unit: float, values: Percentiles) -> str:
    return "/".join(_short(unit * value) for value in (values.median, values.p95, values.worst))


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.2f}" if value < 10.0 else f"{value:.1f}" if value < 100.0 else f"{value:,.0f}"
