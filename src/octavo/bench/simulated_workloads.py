"""Houses that the simulator knows by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.bench.arrivals import (
    Bursts,
    Client,
    ClosedLoop,
    Habits,
    Once,
    Pace,
    Poisson,
    User,
    made_up_tokens,
)

CHAT = Habits(question=40, answer=150, turns=6.0, system_prompt=made_up_tokens(120, "a chat"))
AGENT = Habits(question=700, answer=60, turns=4.0, system_prompt=made_up_tokens(1_500, "an agent"))
NIGHT_WORK = Habits(question=1_200, answer=200)
LONG_QUESTIONS = Habits(question=1_000, answer=64, spread=0.3)
LONG_ANSWERS = Habits(question=64, answer=400, spread=0.3)
THROUGHPUT = Habits(question=400, answer=64, spread=0.0)
ONE_LINE = Habits(question=60, answer=40, spread=0.4)

BACKLOG = 64
"""Requests that a backlogged user has open at any time."""


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """A kind of house.

    about: in a few words. num_users: unless another number is asked for. least_users: below which it is
    another house. rate: requests a second of each user who is not backlogged, were they answered at once;
    None where nobody asks at a rate. drains: whether what is open at the end is answered, or cut off.
    """

    name: str
    about: str
    num_users: int
    least_users: int
    rate: float | None
    drains: bool
    habits_of: Callable[[int, float], tuple[str, Pace, Habits, bool]]

    def clients(
        self,
        *,
        limit: int,
        seed: int = 0,
        num_users: int | None = None,
        rate: float | None = None,
        weights: Sequence[float] = (1.0,),
    ) -> list[Client]:
        """Everybody in the house. limit: tokens of a request. weights: of the users in turn.

        Raises: ValueError, if there are too few users or a limit has no room for a system prompt, or a rate
        is given where nobody has one, or is not positive.
        """
        count = self.num_users if num_users is None else num_users
        if count < self.least_users:
            raise ValueError(f"{self.name} needs at least {self.least_users} users, not {count}")
        if rate is not None and self.rate is None:
            raise ValueError(f"nobody in {self.name} asks at a rate")
        if rate is not None and not 0.0 < rate <= 1_000.0:
            raise ValueError(
                f"the rate is {rate} requests a second and user, it must be more than 0, at most 1,000"
            )
        clients = []
        for number in range(count):
            role, pace, habits, background = self.habits_of(number, rate or self.rate or 1.0)
            user = User(f"{role}-{number}", weights[number % len(weights)], background)
            clients.append(Client(user, pace, habits, limit, seed))
        return clients


def _home(number: int, rate: float) -> tuple[str, Pace, Habits, bool]:
    if number % 4 == 2:
        return "agent", Bursts(rate, 5.0), AGENT, False
    if number % 4 == 3:
        return "night", Poisson(rate), NIGHT_WORK, True
    return "chat", ClosedLoop(1.0 / rate), CHAT, False


def _two_backlogged(number: int, rate: float) -> tuple[str, Pace, Habits, bool]:  # noqa: ARG001
    habits = LONG_ANSWERS if number % 2 else LONG_QUESTIONS
    return ("answers" if number % 2 else "questions"), ClosedLoop(0.0, BACKLOG), habits, False


def _one_heavy(number: int, rate: float) -> tuple[str, Pace, Habits, bool]:
    if number == 0:
        return "heavy", ClosedLoop(0.0, BACKLOG), LONG_QUESTIONS, False
    return "light", ClosedLoop(1.0 / rate), CHAT, False


def _thousands(number: int, rate: float) -> tuple[str, Pace, Habits, bool]:  # noqa: ARG001
    return "user", Poisson(rate), ONE_LINE, False


def _at_once(number: int, rate: float) -> tuple[str, Pace, Habits, bool]:  # noqa: ARG001
    return "user", Once(), THROUGHPUT, False


WORKLOADS = {
    workload.name: workload
    for workload in (
        SimulatedWorkload(
            "home",
            "of four, two chat, one runs an agent, one has background work",
            4,
            1,
            1 / 30,
            True,
            _home,
        ),
        SimulatedWorkload(
            "two-backlogged",
            "long questions against long answers, 64 always open",
            2,
            2,
            None,
            False,
            _two_backlogged,
        ),
        SimulatedWorkload(
            "one-heavy-many-light",
            "one with 64 long prompts always open, the others chat",
            8,
            2,
            1 / 20,
            False,
            _one_heavy,
        ),
        SimulatedWorkload(
            "thousands", "everybody has a short question now and then", 1_000, 1, 1 / 60, False, _thousands
        ),
        SimulatedWorkload(
            "at-once",
            "one prompt of 400 tokens each, 64 generated: the defaults of octavo bench throughput",
            16,
            1,
            None,
            True,
            _at_once,
        ),
    )
}
