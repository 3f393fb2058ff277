"""What a step may still compute: tokens, and milliseconds while somebody streams."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.scheduler.cost_model import NOTHING, CostModel, StepWork
from octavo.scheduler.sequence import Sequence

LEAST_TARGET = 0.05
"""Seconds of a step where no target is given: twenty steps a second read fluently."""

OF_DECODE = 2.0
"""A step may take this much of what those who generate take alone, where that is more than the target."""

PROMPT_SHARE = 0.1
"""Of a step's time, for prompts, whatever those who generate take."""

ROW_TILE = 8
"""Rows that a matrix product computes at the price of fewer (docs/kernels.md): prompts get no less."""


class StepBudget:
    """Of one step.

        |<-- everybody who generates: one token each, set aside -->|<-- prompts, in order -->|
        |<------------------------- target, in seconds, as the cost model predicts --------->|

    The whole of `max_tokens` goes to prompts while nobody is read: no interactive sequence generates, or
    nothing has been measured yet.

    limit: predicted seconds that the step may take; None: no limit but tokens. over_target: those who
    generate take more than a given target alone. set_aside_work: theirs.
    """

    __slots__ = (
        "_cost_model",
        "_set_aside",
        "_target",
        "_work",
        "limit",
        "over_target",
        "set_aside_work",
        "tokens_left",
    )

    def __init__(self, max_tokens: int, cost_model: CostModel, target: float | None) -> None:
        """target: seconds; None: `LEAST_TARGET`, or more where those who generate need it."""
        self.tokens_left = max_tokens
        self.limit: float | None = None
        self.over_target = False
        self._set_aside: set[Sequence] = set()
        self._cost_model = cost_model
        self._target = target
        self._work = self.set_aside_work = NOTHING

    def set_aside(self, generating: Iterable[Sequence]) -> None:
        """One token for each; and the step has a limit if one of them is read."""
        self._set_aside = set(generating)
        self._work = self.set_aside_work = StepWork.of(
            [(one.num_computed_tokens, 1) for one in self._set_aside]
        )
        alone = self._cost_model.predict(self._work)
        if alone is None or all(one.background for one in self._set_aside):
            return
        target = self._target if self._target is not None else max(LEAST_TARGET, OF_DECODE * alone)
        self.limit = max(target, alone / (1 - PROMPT_SHARE))
        self.over_target = self._target is not None and alone > self._target

    def visit(self, sequence: Sequence) -> None:
        """Its turn has come, or it has lost its turn: nothing is set aside for it any longer."""
        self._set_aside.discard(sequence)

    @property
    def unassigned(self) -> int:
        """Tokens that are left beside those set aside."""
        return self.tokens_left - len(self._set_aside)

    def tokens_for(self, start: int, num_wanted: int, *, first_prompt: bool) -> int:
        """Tokens that a chunk which begins at position `start` may have, `num_wanted` at most."""
        allowed = min(num_wanted, self.unassigned)
        if self.limit is None or allowed <= 1:
            return allowed
        within = self._cost_model.tokens_within(self.limit, self._work, start)
        return min(allowed, max(within, ROW_TILE if first_prompt else 0))

    def spend(self, start: int, num_tokens: int) -> None:
        """A chunk was planned."""
        self.tokens_left -= num_tokens
        if num_tokens > 1:
            self._work = self._work.added(start, num_tokens)
