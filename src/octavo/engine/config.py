"""How one engine uses the machine."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kv.layout import KV_DTYPES
from octavo.scheduler.limits import SchedulingPolicy

MAX_TARGET_ITL_MS = 60_000
"""A minute between two tokens: whoever wants more wants no target."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and sizes of one engine.

    max_model_len: tokens of the longest request, prompt and answer together; None: the model's context.
    kv_cache_memory: bytes of the block pool; None: what fits the machine (`plan_memory`).
    num_blocks_override: blocks in the pool, whatever kv_cache_memory says.
    block_size: tokens a block; 8, 16 or 32.
    kv_cache_dtype: how keys and values are stored, "f16" or "q8" (int8 codes and a scale, see `KVLayout`).
    shared_prefix_attention: read the blocks that sequences of a step have in common once for all of them; the
    answers are the same bytes either way.
    max_num_seqs: requests computed together. max_num_batched_tokens: tokens a step, at least max_num_seqs.
    max_num_queued_reqs: requests that may wait (`OpenRequests.check` says when one does); 0: nobody may.
    scheduling_policy: who comes before whom, "fair", "fcfs" or "priority" (`SchedulingPolicy`).
    target_itl_ms: milliseconds that a step may take while somebody streams (`StepBudget`); None: what the
    machine's own speed suggests.
    stall_timeout: seconds without a completed step, while there is work, after which `Engine.healthy` says
    no.
    log_content: let the log quote exceptions, whose text may hold somebody's prompt.

    Raises: ValueError naming the field, what it is and what it may be.
    """

    max_model_len: int | None = None
    kv_cache_memory: int | None = None
    num_blocks_override: int | None = None
    block_size: int = 16
    kv_cache_dtype: str = "f16"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_num_queued_reqs: int = 256
    scheduling_policy: str = SchedulingPolicy.FAIR
    target_itl_ms: float | None = None
    enable_prefix_caching: bool = True
    shared_prefix_attention: bool = True
    stall_timeout: float = 60.0
    log_content: bool = False

    def __post_init__(self) -> None:
        if self.block_size not in (8, 16, 32):
            raise ValueError(f"block_size must be 8, 16 or 32, not {self.block_size}")
        if self.kv_cache_dtype not in KV_DTYPES:
            raise ValueError(f"kv_cache_dtype must be {' or '.join(KV_DTYPES)}, not {self.kv_cache_dtype!r}")
        for name, least in (
            ("max_model_len", 2),
            ("kv_cache_memory", 1),
            ("num_blocks_override", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_num_queued_reqs", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and must be at least max_num_seqs, "
                f"{self.max_num_seqs}: everyone who generates gets a token each step"
            )
        if self.scheduling_policy not in list(SchedulingPolicy):
            raise ValueError(
                f"scheduling_policy must be {', '.join(SchedulingPolicy)}, not {self.scheduling_policy!r}"
            )
        if self.target_itl_ms is not None and not 1 <= self.target_itl_ms <= MAX_TARGET_ITL_MS:
            raise ValueError(
                f"target_itl_ms must be from 1 to {MAX_TARGET_ITL_MS:,}, not {self.target_itl_ms:g}"
            )
        if not self.stall_timeout > 0:
            raise ValueError(f"stall_timeout must be more than 0 seconds, not {self.stall_timeout}")
