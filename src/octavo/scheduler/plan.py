"""What one step computes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from octavo.kv.kv_cache import BlockCopy
from octavo.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
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
    """

    chunks: tuple[ScheduledChunk, ...]
    num_tokens: int
    preemptions: tuple[Preemption, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def preempted(self) -> tuple[Sequence, ...]:
        """Who lost blocks, each once, in the order in which they were taken."""
        victims = (one.sequence for one in self.preemptions if one.reason is PreemptionReason.KV)
        return tuple(dict.fromkeys(victims))
