"""What one step computes."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The chunks of a step in order of computation, and who lost blocks for them.

    Who adopts a block that is computed in this step comes after the chunk that computes it. Nobody is in
    `chunks` and in `preempted`. `num_tokens` is the sum over the chunks. `copies` are to be made before
    anything is computed; what they copy is committed, and no block is in them twice as a destination.
    """

    chunks: tuple[ScheduledChunk, ...]
    num_tokens: int
    preempted: tuple[Sequence, ...]
    copies: tuple[BlockCopy, ...] = ()
