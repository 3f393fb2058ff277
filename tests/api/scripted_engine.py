"""An engine whose tokens a test writes down: for endings and timings that a model cannot be made to show.

It keeps the contract of `octavo.engine` that the API relies on: `submit`, `Generation`, `EngineConfig`,
`Engine.longest_request`, and what is asked of the KV cache, which it notes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.engine.config import EngineConfig
from octavo.engine.kv_memory import KVCacheStatus
from octavo.engine.request import Delta, RequestFailed, RequestRefused, RequestStats, Standing
from octavo.engine.sampling_params import SamplingParams
from octavo.scheduler.share import NOBODYS, Share

Script = Sequence[Delta | Exception | float | Standing]
"""What one generation does in turn: hand out a delta, raise, wait so many seconds or until it is cancelled,
or stand somewhere until the next delta."""


@dataclass
class ScriptedGeneration:
    script: Script
    stats: RequestStats
    prompt_token_ids: list[int]
    params: SamplingParams
    choice_index: int
    group: str
    cache_salt: str
    share: Share
    cancelled: list[str] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    stands: Standing | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> str:
        return "running" if self.stats.finish_reason is None else "finished"

    def progress(self) -> RequestStats:
        return self.stats

    def standing(self) -> Standing | None:
        return self.stands

    def computed_output(self, count: int) -> list[int]:
        return self.output[:-1][:count]

    def cancel(self, reason: str = "abort") -> None:
        if not self.cancelled and self.stats.finish_reason is None:
            self.cancelled.append(reason)
            self.woken.set()

    async def __aiter__(self):  # type: ignore[no-untyped-def]
        for event in self.script:
            if isinstance(event, Exception):
                self.stats.finish_reason = "error"
                raise event
            if isinstance(event, float):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.woken.wait(), event)
            if self.cancelled:
                return
            if isinstance(event, Standing):
                self.stands = event
            if not isinstance(event, Delta):
                continue
            self.stands = None
            if self.stats.first_token_time is None:
                self.stats.first_token_time = 0.001
            self.output += event.token_ids
            self.stats.num_output_tokens = len(self.output)
            self.stats.finish_reason = event.finish_reason
            yield event


class ScriptedEngine:
    """`script(choice_index)` writes each generation; `generations` are all there were, in order of
    submission.
    """

    def __init__(self) -> None:
        self.reset(lambda _: [])

    def reset(self, script: Callable[[int], Script], longest_request: int = 256) -> None:
        """As new, with another script."""
        self.script = script
        self.config = EngineConfig()
        self.longest_request = longest_request
        self.generations: list[ScriptedGeneration] = []
        self.bounded: list[bool] = []
        self.refusal: RequestRefused | None = None
        self.is_healthy = True
        self.cached_tokens: Iterator[int] | None = None
        self.kv_cache_calls: list[int | str] = []
        self.kv_quotas: list[dict[str, int]] = []
        self.kv_cache_refusal: Exception | None = None

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,  # noqa: ARG002
        group: str = "",
        cache_salt: str = "",
        share: Share = NOBODYS,
        priority: int = 0,  # noqa: ARG002
        choice_index: int = 0,
        bounded: bool = True,
    ) -> ScriptedGeneration:
        self.bounded.append(bounded)
        if self.refusal is not None and len(self.generations) == 1:
            raise self.refusal
        stats = RequestStats(num_prompt_tokens=len(prompt_token_ids))
        if self.cached_tokens is not None:
            stats.num_cached_tokens = next(self.cached_tokens)
        generation = ScriptedGeneration(
            self.script(choice_index), stats, prompt_token_ids, params, choice_index, group, cache_salt, share
        )
        self.generations.append(generation)
        return generation

    def set_kv_quotas(self, quotas: Mapping[str, int]) -> None:
        self.kv_quotas.append(dict(quotas))

    def kv_cache_status(self) -> KVCacheStatus:
        return self._kv_cache("status")

    def release_kv_cache(self) -> KVCacheStatus:
        return self._kv_cache("release")

    def resize_kv_cache(self, budget_bytes: int) -> KVCacheStatus:
        return self._kv_cache(budget_bytes)

    def _kv_cache(self, call: int | str) -> KVCacheStatus:
        self.kv_cache_calls.append(call)
        if self.kv_cache_refusal is not None:
            raise self.kv_cache_refusal
        return KVCacheStatus(
            budget_bytes=70_000,
            target_blocks=16,
            num_blocks=20,
            num_used=5,
            num_cached=8,
            num_free=7,
            block_bytes=4_000,
            extent_bytes=4_096,
            resident_bytes=53_248,
        )

    def healthy(self) -> bool:
        return self.is_healthy


def deltas(token_ids: Sequence[int], finish_reason: str = "length") -> list[Delta]:
    """One token a delta, the reason on the last."""
    last = len(token_ids) - 1
    return [
        Delta([token_id], [], finish_reason if at == last else None) for at, token_id in enumerate(token_ids)
    ]


def failure(message: str = "a step failed: boom", code: str = "step_failed") -> RequestFailed:
    return RequestFailed(message, code=code)
