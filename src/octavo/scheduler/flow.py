"""One user's open sequences, and the account that its users share."""

from __future__ import annotations

from octavo.scheduler.sequence import Rank, Sequence

QUANTUM = 256.0
"""Tokens of service between two sequences of a flow: a step's prompt. And what a user must be behind another
before a newcomer of the one takes blocks of the other, since taking them costs computing them again."""


class Flow:
    """The open sequences of one user of an account, in one class.

    counter: virtual tokens, those charged over the flow's weight. clock: computed tokens, charged or not.
    opened: the number of its opening, which settles ties. served_at: seconds on the scheduler's clock.
    num_waiting: sequences of it that have not begun. ranked: all of them, the most entitled first.
    """

    __slots__ = (
        "account",
        "background",
        "clock",
        "counter",
        "num_waiting",
        "opened",
        "ranked",
        "served_at",
        "user",
    )

    def __init__(self, account: Account, user: str, opened: int, counter: float, now: float) -> None:
        self.account = account
        self.background = account.background
        self.user = user
        self.opened = opened
        self.counter = counter
        self.clock = 0
        self.served_at = now
        self.num_waiting = 0
        self.ranked: list[tuple[Rank, Sequence]] = []

    @property
    def place(self) -> tuple[bool, float, int]:
        return self.background, self.counter, self.opened

    @property
    def gap(self) -> float:
        """Between two of its sequences, in virtual tokens."""
        return QUANTUM / self.weight

    @property
    def weight(self) -> float:
        """Users of an account who are here divide its weight."""
        return self.account.weight / max(1, len(self.account.flows))


class Account:
    """Whose flows divide one weight. level: the highest counter that one of them has left."""

    __slots__ = ("background", "flows", "level", "name", "weight")

    def __init__(self, name: str, background: bool, weight: float) -> None:
        self.name = name
        self.background = background
        self.weight = weight
        self.level = 0.0
        self.flows: dict[str, Flow] = {}
