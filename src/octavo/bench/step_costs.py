"""How long a step of a simulated machine takes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from octavo.scheduler.cost_model import StepWork

STALL = 10.0
"""How many times its usual seconds a step takes that stalls."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What `CostModel` learns of a machine, known exactly.

    base: seconds of any step. per_token, per_attended, per_pair: seconds of each unit of `StepWork`. noise:
    standard deviation of a step's relative error, cut off at a fifth of the usual seconds. stalls: of how
    many steps one takes `STALL` times as long, as a fraction.

    Raises: ValueError, if a coefficient is negative or no number, no step would take time, the noise is not
        from 0 to 1 or the stalls are not.
    """

    base: float
    per_token: float
    per_attended: float
    per_pair: float
    noise: float = 0.0
    stalls: float = 0.0

    def __post_init__(self) -> None:
        costs = (self.base, self.per_token, self.per_attended, self.per_pair)
        if (
            not all(math.isfinite(cost) and cost >= 0.0 for cost in costs)
            or not self.base + self.per_token > 0.0
        ):
            raise ValueError(f"{costs} are no costs of a step: seconds, not negative, some for every step")
        for name in ("noise", "stalls"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be from 0 to 1")

    def seconds(self, work: StepWork, rng: random.Random) -> float:
        """Seconds of one step; `rng` is drawn from only where there is noise."""
        usual = (
            self.base
            + self.per_token * work.num_tokens
            + self.per_attended * work.num_attended
            + self.per_pair * work.num_pairs
        )
        if self.noise:
            usual *= max(0.2, rng.gauss(1.0, self.noise))
        if self.stalls and rng.random() < self.stalls:
            usual *= STALL
        return usual

    def faster(self, times: float) -> StepCosts:
        """A machine on which everything takes one `times`-th. Raises ValueError, if that is not positive."""
        if not (math.isfinite(times) and times > 0.0):
            raise ValueError(f"no machine is {times} times as fast")
        return replace(
            self,
            base=self.base / times,
            per_token=self.per_token / times,
            per_attended=self.per_attended / times,
            per_pair=self.per_pair / times,
        )


SMOLLM2_TWO_CORES = StepCosts(base=2.3e-3, per_token=0.48e-3, per_attended=0.92e-6, per_pair=0.38e-6)
"""SmolLM2-135M (Q4_1) on two threads of a server's processor with AVX-512: a least squares fit of relative
errors, large ones weighed down, to 1,037 real steps of one to 256 tokens; off by 5 % (median)."""
