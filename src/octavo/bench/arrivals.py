"""Who asks what, and when: seeded users of a simulated machine."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

VOCAB_SIZE = 49_152
"""Made-up token ids are below this."""

_VOCABULARY = range(VOCAB_SIZE)
_WITHIN_A_BURST = 0.2  # seconds between two of its requests, mean


@dataclass(frozen=True, slots=True)
class User:
    """Whose a request is. weight: of the machine, beside others. background: nobody waits for it."""

    name: str
    weight: float = 1.0
    background: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0.0):
            raise ValueError(f"the weight of {self.name} is {self.weight}, it must be more than 0")


class Pace(Protocol):
    """When a user asks. All in seconds from now; None: not because of this."""

    def first(self, rng: random.Random) -> list[float]:
        """The first requests, counted from the beginning."""
        ...

    def after_asking(self, rng: random.Random) -> float | None:
        """The next request, counted from one that was just sent."""
        ...

    def after_answer(self, rng: random.Random) -> float | None:
        """The next request, counted from the end of an answer."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Whenever it occurs to them, however many answers are open. rate: requests a second."""

    rate: float

    def first(self, rng: random.Random) -> list[float]:
        return [rng.expovariate(self.rate)]

    def after_asking(self, rng: random.Random) -> float | None:
        return rng.expovariate(self.rate)

    def after_answer(self, rng: random.Random) -> float | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class Bursts:
    """`size` requests on the average, shortly one after the other, then a pause; `rate` a second in all."""

    rate: float
    size: float

    def first(self, rng: random.Random) -> list[float]:
        return [rng.expovariate(self.rate / self.size)]

    def after_asking(self, rng: random.Random) -> float | None:
        goes_on = 1.0 - 1.0 / self.size
        if rng.random() < goes_on:
            return rng.expovariate(1.0 / _WITHIN_A_BURST)
        pause = self.size * (1.0 / self.rate - goes_on * _WITHIN_A_BURST)
        return rng.expovariate(1.0 / max(pause, _WITHIN_A_BURST))

    def after_answer(self, rng: random.Random) -> float | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """An answer is read before the next question: `think` seconds on the average, `depth` at a time.

    With think 0 the user is always backlogged, if `depth` is more than can run together.
    """

    think: float
    depth: int = 1

    def first(self, rng: random.Random) -> list[float]:
        return [self._pause(rng) for _ in range(self.depth)]

    def after_asking(self, rng: random.Random) -> float | None:  # noqa: ARG002
        return None

    def after_answer(self, rng: random.Random) -> float | None:
        return self._pause(rng)

    def _pause(self, rng: random.Random) -> float:
        return rng.expovariate(1.0 / self.think) if self.think else 0.0


@dataclass(frozen=True, slots=True)
class Once:
    """One request, `at` seconds after the beginning."""

    at: float = 0.0

    def first(self, rng: random.Random) -> list[float]:  # noqa: ARG002
        return [self.at]

    def after_asking(self, rng: random.Random) -> float | None:  # noqa: ARG002
        return None

    def after_answer(self, rng: random.Random) -> float | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class Habits:
    """What a user asks for.

    question, answer: tokens of a turn, the median of a log-normal distribution whose logarithm has the
    standard deviation `spread`. turns: of a conversation, the mean of a geometric distribution; each has all
    before it in its prompt. system_prompt: the first tokens of every conversation.
    """

    question: int
    answer: int
    spread: float = 0.7
    turns: float = 1.0
    system_prompt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. num_output: tokens that its answer will have."""

    user: User
    prompt: list[int]
    num_output: int


@dataclass(slots=True)
class Client:
    """A user with its habits, and the conversations it can go on with.

    limit: tokens of a request, prompt and answer; a conversation that has become too long is not gone on
    with, and a question that is too long by itself is shortened. What is asked depends on `seed`, the user's
    name and what has been answered, and on nothing that others do.

    Raises: ValueError, if the system prompt leaves no room for a question and an answer.
    """

    user: User
    pace: Pace
    habits: Habits
    limit: int
    seed: int = 0
    rng: random.Random = field(init=False)
    _open: deque[list[int]] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        if len(self.habits.system_prompt) + 2 > self.limit:
            raise ValueError(
                f"a system prompt of {len(self.habits.system_prompt)} tokens leaves no room for a question "
                f"and an answer, the limit is {self.limit}"
            )
        self.rng = random.Random(f"{self.seed} {self.user.name}")

    def ask(self) -> Ask:
        """The next turn of the conversation that was answered first, or a new one."""
        habits = self.habits
        question, answer = self._draw(habits.question), self._draw(habits.answer)
        history = self._open.popleft() if self._open else list(habits.system_prompt)
        if len(history) + question + answer > self.limit:
            history = list(habits.system_prompt)
            room = self.limit - len(history)
            answer = min(answer, room - 1)
            question = min(question, room - answer)
        history += self.rng.choices(_VOCABULARY, k=question)
        return Ask(self.user, history, answer)

    def answered(self, token_ids: list[int]) -> None:
        """A request was answered. token_ids: its prompt and its answer."""
        if self.habits.turns > 1.0 and self.rng.random() >= 1.0 / self.habits.turns:
            self._open.append(token_ids)

    def _draw(self, median: int) -> int:
        return max(1, round(self.rng.lognormvariate(math.log(median), self.habits.spread)))


def made_up_tokens(count: int, seed: str) -> tuple[int, ...]:
    """Token ids that are the same for the same seed: a system prompt that users share."""
    return tuple(random.Random(seed).choices(_VOCABULARY, k=count))
