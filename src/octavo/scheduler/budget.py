"""What a step may still compute: tokens, and milliseconds while somebody streams."""

from __future__ import annotations

from collections.abc import Collection

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

    While nobody is read (no interactive sequence generates), or nothing has been measured yet, prompts get
    all of `max_tokens`. Those of background work keep within the target too while anybody else is in the
    step, who would wait for them.

    over_target: those who generate take more than a given target alone. set_aside_work: theirs.
    """

    __slots__ = (
        "_background_limit",
        "_cost_model",
        "_limit",
        "_set_aside",
        "_target",
        "_work",
        "over_target",
        "set_aside_work",
        "tokens_left",
    )

    def __init__(self, max_tokens: int, cost_model: CostModel, target: float | None) -> None:
        """target: seconds; None: `LEAST_TARGET`, or more where those who generate need it."""
        self.tokens_left = max_tokens
        self.over_target = False
        self._limit: float | None = None  # predicted seconds of the step
        self._background_limit: float | None = None
        self._set_aside: set[Sequence] = set()
        self._cost_model = cost_model
        self._target = target
        self._work = self.set_aside_work = NOTHING

    def set_aside(self, generating: Collection[Sequence], *, interactive: bool) -> None:
        """One token for each of those who generate. interactive: the step is not only background work."""
        self._set_aside = set(generating)
        self._work = self.set_aside_work = StepWork.of([(one.num_computed_tokens, 1) for one in generating])
        alone = self._cost_model.predict(self._work)
        if alone is None or not interactive:
            return
        target = self._target if self._target is not None else max(LEAST_TARGET, OF_DECODE * alone)
        self._background_limit = max(target, alone / (1 - PROMPT_SHARE))
        if not all(one.background for one in generating):
            self._limit = self._background_limit
            self.over_target = self._target is not None and alone > self._target

    def visit(self, sequence: Sequence) -> None:
        """Its turn has come, or it has lost its turn: nothing is set aside for it any longer."""
        self._set_aside.discard(sequence)

    @property
    def unassigned(self) -> int:
        """Tokens that are left beside those set aside."""
        return self.tokens_left - len(self._set_aside)

    def tokens_for(self, sequence: Sequence, start: int, *, first_prompt: bool) -> int:
        """Tokens that the next chunk of a sequence, from position `start`, may have."""
        allowed = min(len(sequence.token_ids) - start, self.unassigned)
        limit = self._background_limit if sequence.background else self._limit
        if limit is None or allowed <= 1:
            return allowed
        within = self._cost_model.tokens_within(limit, self._work, start)
        return min(allowed, max(within, ROW_TILE if first_prompt else 0))

    def spend(self, start: int, num_tokens: int) -> None:
        """A chunk was planned."""
        self.tokens_left -= num_tokens
        if num_tokens > 1:
            self._work = self._work.added(start, num_tokens)
