"""The arithmetic of memory, done before anything is allocated and printed at start.

| weights | buffers | pool = num_blocks x extent_bytes                      | left to the machine |
                    |<- longest request ->| (the most one request may use)  |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.kv.layout import KVLayout
from octavo.model.available_memory import MemoryRefused, format_bytes

DEFAULT_SHARE_OF_AVAILABLE = 0.5
"""A home machine has other work; blocks are only touched when used, but a full cache keeps what it
touched."""

DEFAULT_POOL_CAP = 4 << 30
"""Bytes. 180,000 tokens of SmolLM2, 32,000 of an 8B model: beyond this the owner should ask for it."""

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(text: str) -> int:
    """`2GiB`, `512MiB`, `1.5GB` or a number of bytes. Raises ValueError with what it may be."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"'{text[:64]}' is not a size such as 2GiB, 512MiB or 1073741824")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the engine will use, in bytes unless said otherwise.

    pool_bytes: num_blocks x extent_bytes, padding included: never more than budget_bytes.
    longest_request: tokens, prompt and output together = min(model_context, max_model_len, pool_tokens).
    """

    weight_bytes: int
    buffer_bytes: int
    kv_dtype: str
    kv_bytes_per_token: int
    block_size: int
    block_bytes: int
    extent_bytes: int
    num_blocks: int
    budget_bytes: int
    available_bytes: int
    model_context: int
    max_model_len: int | None

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.extent_bytes

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def longest_request(self) -> int:
        limits = [self.model_context, self.pool_tokens]
        if self.max_model_len is not None:
            limits.append(self.max_model_len)
        return min(limits)

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.buffer_bytes + self.pool_bytes

    def describe(self) -> list[str]:
        """The arithmetic in lines a person can check."""
        padding = self.extent_bytes - self.block_bytes
        limit = f"{self.longest_request:,} tokens, prompt and answer together"
        if self.longest_request < self.model_context:
            why = "max_model_len" if self.longest_request == self.max_model_len else "the pool"
            limit += f" (limited by {why}; the model could take {self.model_context:,})"
        else:
            limit += " (the model's own limit)"
        return [
            f"weights          {format_bytes(self.weight_bytes)}",
            f"buffers          {format_bytes(self.buffer_bytes)}",
            f"KV               {self.kv_bytes_per_token:,} bytes a token ({self.kv_dtype}) x "
            f"{self.block_size} = {self.block_bytes:,} a block + {padding:,} padding = {self.extent_bytes:,}",
            f"pool             {self.num_blocks:,} blocks x {self.extent_bytes:,} = "
            f"{format_bytes(self.pool_bytes)}, {self.pool_tokens:,} tokens",
            f"longest request  {limit}",
            f"total            {format_bytes(self.total_bytes)}, pool pages taken only when first used",
        ]


def plan_memory(
    layout: KVLayout,
    *,
    weight_bytes: int,
    buffer_bytes: int,
    model_context: int,
    max_model_len: int | None,
    max_num_seqs: int,
    kv_cache_memory: int | None,
    num_blocks: int | None,
    available: int,
) -> MemoryPlan:
    """Size the pool. Call it when the weights are loaded and nothing of the pool is.

    kv_cache_memory: the pool's budget in bytes; None takes half of what is available, at most
    DEFAULT_POOL_CAP and never more than max_num_seqs requests of full length could fill. num_blocks: an
    exact size instead.
    available: bytes, see `available_memory`.

    Raises: MemoryRefused if the pool and the buffers do not fit in `available`, or the budget is less than
    a block.
    """
    extent, block_size = layout.extent_bytes, layout.block_size
    longest = min(model_context, max_model_len) if max_model_len is not None else model_context
    if num_blocks is not None:
        budget = num_blocks * extent
    elif kv_cache_memory is not None:
        budget = kv_cache_memory
    else:
        most_useful = max_num_seqs * -(-longest // block_size) * extent
        budget = min(int(available * DEFAULT_SHARE_OF_AVAILABLE), DEFAULT_POOL_CAP, most_useful)
    needed = budget + buffer_bytes
    if needed > available:
        raise MemoryRefused(
            f"a KV cache of {format_bytes(budget)} and buffers of {format_bytes(buffer_bytes)} need "
            f"{format_bytes(needed)}, but {format_bytes(available)} are available",
            needed=needed,
            available=available,
        )
    if budget < extent:
        raise MemoryRefused(
            f"a KV cache of {budget:,} bytes is smaller than one block: {block_size} tokens x "
            f"{layout.bytes_per_token:,} bytes ({layout.dtype}), padded to {extent:,}",
            needed=extent,
            available=budget,
        )
    return MemoryPlan(
        weight_bytes=weight_bytes,
        buffer_bytes=buffer_bytes,
        kv_dtype=layout.dtype,
        kv_bytes_per_token=layout.bytes_per_token,
        block_size=block_size,
        block_bytes=layout.block_bytes,
        extent_bytes=extent,
        num_blocks=num_blocks if num_blocks is not None else budget // extent,
        budget_bytes=budget,
        available_bytes=available,
        model_context=model_context,
        max_model_len=max_model_len,
    )
