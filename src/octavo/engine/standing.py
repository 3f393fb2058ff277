"""Where somebody stands who waits, and why."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.scheduler.plan import WaitReason


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a request stands that has no token yet, or stands still.

    position: 1 is the next of those that wait; 0: it is being computed (a long prompt), or only stands still.
    reason: None where nothing keeps it. num_tokens: known ones, of which `num_computed_tokens` are done.
    estimate: seconds until its first, or next, token; None where nobody can tell yet.
    """

    position: int
    reason: WaitReason | None
    num_computed_tokens: int
    num_tokens: int
    estimate: float | None
