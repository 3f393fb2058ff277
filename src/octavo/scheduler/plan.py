"""What one step computes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from octavo.kv.kv_cache import BlockCopy
from octavo.scheduler.cost_model import NOTHING, StepWork
from octavo.scheduler.sequence import Sequence


class ScheduledChunk(NamedTuple):
    """Tokens `start` to `start + num_tokens` of a sequence, computed in this step.

    `samples`: the chunk reaches the last known token, so its last row's logits give the next one.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


class PreemptionReason(StrEnum):
    """Why a sequence stands still, or has lost blocks while it did.

    KV: the pool had no block for somebody more entitled, and took them from its tail.
    KV_FULL: the pool has no block for its own next token, and there is nobody behind it to take one from.
    """

    KV = "kv"
    KV_FULL = "kv_full"


class WaitReason(StrEnum):
    """Why a step computed nothing of a sequence. KV: the pool has no room for it yet. SEATS: as many as
    allowed are computed together. FAIR_SHARE: others are more entitled to what a step computes.
    """

    KV = "kv"
    SEATS = "seats"
    FAIR_SHARE = "fair share"


@dataclass(frozen=True, slots=True)
class Preemption:
    """What a step took from a sequence.

    num_lost_tokens: computed tokens whose blocks went; 0 where it only has to wait.
    pauses: False where it stood still before this.
    """

    sequence: Sequence
    reason: PreemptionReason
    num_lost_tokens: int
    pauses: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The chunks of a step in order of computation, and who lost blocks for them or found none.

    Who adopts a block that is computed in this step comes after the chunk that computes it. Nobody is in
    `chunks` and in `preempted`. `num_tokens` is the sum over the chunks. `copies` are to be made before
    anything is computed; what they copy is committed, and no block is in them twice as a destination.
    `work` decides how long the step takes, `predicted` is what the cost model expects: seconds, None before
    any step was measured.
    """

    chunks: tuple[ScheduledChunk, ...]
    num_tokens: int
    preemptions: tuple[Preemption, ...]
    copies: tuple[BlockCopy, ...] = ()
    work: StepWork = NOTHING
    predicted: float | None = None

    @property
    def preempted(self) -> tuple[Sequence, ...]:
        """Who lost blocks, each once, in the order in which they were taken."""
        victims = (one.sequence for one in self.preemptions if one.reason is PreemptionReason.KV)
        return tuple(dict.fromkeys(victims))
