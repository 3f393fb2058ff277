"""One generation: what is known of it, and how much of that is computed."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from octavo.kv.block_table import BlockTable
from octavo.kv.prefix_index import COMMON, Namespace
from octavo.scheduler.share import NOBODYS, Share

if TYPE_CHECKING:
    from octavo.scheduler.flow import Flow

Rank: TypeAlias = tuple[int, int, int]
"""Priority, age, arrival: the order among the sequences of a user. The less, the sooner."""

Seniority: TypeAlias = tuple[bool, float, int, int]
NOT_BEGUN: Seniority = (True, float("inf"), 0, 0)


class SequenceStatus(Enum):
    """Where a sequence is in its life.

    WAITING --admitted--> RUNNING <--blocks lacking / blocks again--> PAUSED;  each of them --> FINISHED
    """

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class Sequence:
    """A prompt and what was generated after it.

        |<------------------- num_tokens ------------------->|
        | prompt                       | generated           |
        |<- num_prompt_tokens -------->|
        |<----- num_computed_tokens ------>|  still to compute |
        |<- num_cached ->|   of the prompt, not computed by itself

    There is no prefill and no decode: each step moves `num_computed_tokens` toward `num_tokens`, and when it
    gets there a token is sampled and appended.

    Only the scheduler and the cache write the fields, but for two: the engine appends tokens, and sets `held`
    while nobody reads them.
    """

    __slots__ = (
        "arrival",
        "background",
        "block_table",
        "flow",
        "held",
        "namespace",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_seen_tokens",
        "owner",
        "priority",
        "rank",
        "seniority",
        "sequence_id",
        "share",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        sequence_id: str,
        prompt_token_ids: list[int],
        *,
        namespace: Namespace = COMMON,
        share: Share = NOBODYS,
        priority: int = 0,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError(f"sequence {sequence_id} has an empty prompt")
        self.sequence_id = sequence_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        # Who shares its content, and whose it is: for fairness, and when some must be forgotten.
        self.namespace = namespace
        self.share = share
        self.owner = share.account
        self.background = share.background
        # The lower, the more entitled: among those of the same user, or of everybody (`SchedulingPolicy`).
        self.priority = priority
        self.status = SequenceStatus.WAITING
        self.arrival = 0
        # Where it stands among everybody (`FairQueue`); no flow before it arrives and after its end.
        self.rank: Rank = (priority, 0, 0)
        self.flow: Flow | None = None
        # Fixed when it begins: class, virtual tokens, priority, arrival. The more, the sooner it is robbed.
        self.seniority: Seniority = NOT_BEGUN
        self.held = False
        self.block_table = BlockTable()
        self.num_computed_tokens = 0
        # Prompt tokens that were there before it had computed them itself, each counted once.
        self.num_cached_tokens = 0
        # The furthest it had come before a preemption threw it back.
        self.num_seen_tokens = 0
        # How often it was paused, and the tokens it has lost, which are computed again.
        self.num_preemptions = 0
        self.num_lost_tokens = 0

    @property
    def has_begun(self) -> bool:
        return self.seniority is not NOT_BEGUN

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    def append(self, token_id: int) -> None:
        """Add the token that was sampled."""
        self.token_ids.append(token_id)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id!r}, {self.status.value}, "
            f"{self.num_computed_tokens}/{self.num_tokens} computed, {len(self.block_table)} blocks)"
        )
