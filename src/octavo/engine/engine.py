"""The engine's front door: sizes the pool, takes requests, refuses what can never fit, opens and closes.

What happens behind it is in `step_loop`, what comes out of it in `generation`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from octavo.engine.config import EngineConfig
from octavo.engine.fault import ENGINE_STOPPED
from octavo.engine.generation import Generation, LoopMailbox
from octavo.engine.kv_memory import KVCacheRefused, KVCacheStatus, KVMemory
from octavo.engine.memory import MemoryPlan, plan_memory
from octavo.engine.memory_pressure import THIS_MACHINE, PressureSources, PressureWatcher
from octavo.engine.metrics import EngineCollector, EngineMetrics
from octavo.engine.open_requests import OpenRequests
from octavo.engine.request import Request, RequestRefused, Standing
from octavo.engine.step_loop import BatchStepper, StepLoop
from octavo.kv.arena import Arena
from octavo.kv.kv_cache import KVCache
from octavo.kv.prefix_index import Namespace
from octavo.model.available_memory import available_memory, machine_memory
from octavo.scheduler.limits import SchedulerConfig, SchedulingPolicy
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.share import NOBODYS, Share

if TYPE_CHECKING:
    from octavo.engine.sampling_params import SamplingParams
    from octavo.kv.layout import KVLayout
    from octavo.model.config import ModelConfig

__all__ = ["Engine", "EngineConfig"]

SWITCH_INTERVAL = 0.0005
"""Seconds another thread may keep the interpreter while the engine waits for it; Python's own is ten times
that."""

MAX_BLOCKS = 2**31 - 1
"""Block tables hold 32-bit ids."""

STOP_GRACE = 5.0
"""Seconds `close` waits beyond its timeout for the step in progress, which cannot be interrupted."""


class PagedModel(BatchStepper, Protocol):
    """What the engine needs of `octavo.model.model.Model`."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...

    shared_prefix_attention: bool

    def kv_layout(self, block_size: int = 16, dtype: str = "f16") -> KVLayout: ...
    def bind(self, layout: KVLayout, arena: Arena) -> None: ...


class EndTokens(Protocol):
    """What the engine needs of `octavo.text.tokenizer.Tokenizer`."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...


class Engine:
    """Continuous batching over one model and one block pool. Every public method is thread-safe.

    Raises (constructor): MemoryRefused before anything is allocated, ValueError where max_model_len is more
    than the model's context.
    """

    def __init__(
        self,
        model: PagedModel,
        tokenizer: EndTokens,
        config: EngineConfig | None = None,
        *,
        model_name: str | None = None,
        block_order: Seq[int] | None = None,
        pressure: PressureSources | None = THIS_MACHINE,
    ) -> None:
        """model_name: the `model_name` label of the metrics. block_order: hand out fresh blocks in it.
        pressure: where to see that others need the memory of cold blocks; None: nowhere."""
        self.config = config = config if config is not None else EngineConfig()
        context = model.config.context_length
        if config.max_model_len is not None and config.max_model_len > context:
            raise ValueError(
                f"max_model_len {config.max_model_len:,} is more than the model's context, {context:,} tokens"
            )
        layout = model.kv_layout(config.block_size, config.kv_cache_dtype)
        self.memory: MemoryPlan = plan_memory(
            layout,
            weight_bytes=model.weight_bytes,
            buffer_bytes=model.buffer_bytes,
            model_context=context,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            kv_cache_memory=config.kv_cache_memory,
            num_blocks=config.num_blocks_override,
            available=available_memory(),
        )
        self._vocab_size = model.config.vocab_size
        self._eos_token_ids = tokenizer.eos_token_ids
        self._cache = cache = KVCache(
            self.memory.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            block_order=block_order,
        )
        self._scheduler = Scheduler(
            cache,
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=min(context, config.max_model_len or context),
                policy=SchedulingPolicy(config.scheduling_policy),
                target_itl=config.target_itl_ms / 1000 if config.target_itl_ms is not None else None,
            ),
        )
        self._arena = _reserve(layout.extent_bytes, self.memory.num_blocks)
        self._kv_memory = KVMemory(
            cache, self._arena, block_bytes=layout.block_bytes, budget_bytes=self.memory.budget_bytes
        )
        self.metrics = EngineMetrics()
        self.collector = EngineCollector(
            self.metrics,
            self._scheduler,
            cache,
            self._kv_memory,
            model_name if model_name is not None else model.config.name,
            kv_cache_dtype=config.kv_cache_dtype,
        )
        self._open_requests = OpenRequests(config.max_num_queued_reqs, self._scheduler, cache)
        self._loop = StepLoop(
            model,
            self._scheduler,
            cache,
            self.metrics,
            self._kv_memory,
            self._open_requests,
            copy_block=self._arena.copy,
            audits_every_step=os.environ.get("OCTAVO_AUDIT") == "1",
            log_content=config.log_content,
        )
        self._watcher: PressureWatcher | None = None
        self._pressure = pressure
        self._ids = itertools.count(1)
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMailbox] = WeakKeyDictionary()
        self._lock = (
            threading.Lock()
        )  # submit against close and fault: nothing is queued that nobody will run
        self._accepting = True
        self._thread: threading.Thread | None = None
        self._num_submitted = 0
        # Tokens of the longest request, for each resize that is on its way: none longer is let in meanwhile.
        self._limits_to_come: list[int] = []

        try:
            model.bind(layout, self._arena)
            model.shared_prefix_attention = config.shared_prefix_attention
        except BaseException:
            self._arena.close()
            raise

    @property
    def longest_request(self) -> int:
        """Tokens, prompt and answer together: what the model, the settings and the pool beside what is pinned
        allow, the least of them.
        """
        return self._scheduler.limit

    @property
    def num_running(self) -> int:
        """Requests that are being computed."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that nothing was computed for yet."""
        return self._scheduler.num_waiting

    @property
    def num_preemptions(self) -> int:
        """Times a request was paused for lack of blocks."""
        return self._scheduler.num_preemptions

    @property
    def num_lost_tokens(self) -> int:
        """Computed tokens that those pauses took."""
        return self._scheduler.num_lost_tokens

    @property
    def num_open(self) -> int:
        """Requests submitted and not ended, whatever their state."""
        return self._num_submitted - self._loop.num_finished

    def start(self) -> None:
        """Start the engine thread; what was submitted before has waited for it.

        Raises: RuntimeError if it was started or closed before.
        """
        with self._lock:
            if self._thread is not None or not self._accepting:
                raise RuntimeError("an engine is started once")
            sys.setswitchinterval(min(SWITCH_INTERVAL, sys.getswitchinterval()))
            self._loop.last_progress = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
            self._thread.start()
            if self._pressure is not None:
                self._watcher = PressureWatcher(
                    self._pressure,
                    cold_bytes=lambda: self._kv_memory.num_cold * self._arena.extent_bytes,
                    relieve=self._relieve,
                )
                self._watcher.start()

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        group: str = "",
        cache_salt: str = "",
        share: Share = NOBODYS,
        priority: int = 0,
        choice_index: int = 0,
        bounded: bool = True,
    ) -> Generation:
        """Queue one choice. Choices of one prompt are submitted one by one and share its blocks.

        request_id: for the log; need not be unique. group, cache_salt: prompts share blocks only where both
        are equal.
        share: whose the request is, for fairness and when cached content must be forgotten (`EvictionOrder`).
        priority: the lower, the sooner; others pause for it where the pool is full.
        choice_index: the choice's own random stream under an equal seed.
        bounded: the bound of the queue applies. Not to the further choices of a request whose first was
        taken, nor to work whose owner hands in all of it at once.

        Raises: RequestRefused, before any work, if the prompt is empty, holds ids outside the vocabulary,
        or can never fit; if too many wait (`OpenRequests.check`); or if the engine is closing or has failed.
        InvalidParameter for token ids in
        `params` that are outside the vocabulary.
        """
        num_prompt = len(prompt_token_ids)
        self._check_length(num_prompt, params.max_tokens, self._limit())
        self._check_vocabulary(prompt_token_ids)
        sampler = params.make_sampler(
            self._vocab_size, choice_index=choice_index, eos_token_ids=self._eos_token_ids
        )
        if params.repetition_penalty != 1.0:
            sampler.observe_prompt(np.array(prompt_token_ids, dtype=np.int32))
        stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self._eos_token_ids
        sequence_id = str(next(self._ids))
        sequence = Sequence(
            sequence_id,
            prompt_token_ids,
            namespace=Namespace(group, cache_salt),
            share=share,
            priority=priority,
        )
        with self._lock:
            self._check_open()
            # Once more: from here on no resize can come before this request.
            limit = self._limit()
            self._check_length(num_prompt, params.max_tokens, limit)
            if bounded:
                self._open_requests.check(num_prompt)
            request = Request(
                request_id if request_id is not None else sequence_id,
                sequence,
                sampler,
                max_output_tokens=params.max_tokens if params.max_tokens is not None else limit - num_prompt,
                min_tokens=params.min_tokens,
                stop_token_ids=stop_token_ids,
                wants_logprobs=params.logprobs is not None,
                arrived_at=time.monotonic(),
            )
            self._num_submitted += 1
            self._open_requests.add(request)
            self._loop.commands.put(partial(self._loop.add, request))
        return Generation(request, self)

    def pin_prefix(self, token_ids: list[int], *, group: str = "", cache_salt: str = "") -> int:
        """Compute a beginning of prompts now, and hold its whole blocks until the engine closes.

        Of a started engine; comes back when it is done.

        Returns: tokens that are held.
        Raises: ValueError without prefix caching, or for fewer tokens than a block; RequestRefused,
            RequestFailed.
        """
        from octavo.engine.sampling_params import SamplingParams

        if not self.config.enable_prefix_caching:
            raise ValueError("prefix caching is off")
        if len(token_ids) < self.config.block_size:
            raise ValueError(
                f"it has {len(token_ids):,} tokens, and whole blocks of {self.config.block_size} are held"
            )
        once = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        computed = self.submit(
            token_ids,
            once,
            request_id="pinned-prefix",
            group=group,
            cache_salt=cache_salt,
            bounded=False,
        )
        for _ in computed:
            pass
        held: SimpleQueue[int] = SimpleQueue()
        self._loop.commands.put(lambda: held.put(self._cache.pin(token_ids, Namespace(group, cache_salt))))
        return held.get()

    def cancel(self, request: Request) -> None:
        """`Generation.cancel`: applies between two steps."""
        self._loop.commands.put(partial(self._loop.cancel, request))

    def resume(self, request: Request) -> None:
        """`Generation.take` of a held stream: its reader has caught up."""
        self._loop.commands.put(partial(self._loop.resume, request))

    def standing(self, request: Request) -> Standing | None:
        """`Generation.standing`."""
        return self._open_requests.standing(request)

    def estimated_wait(self) -> float | None:
        """Seconds until what is ahead of a request that comes now is computed; None where nobody can tell
        yet."""
        return self._open_requests.estimated_wait()

    def kv_cache_status(self) -> KVCacheStatus:
        """The pool between two steps. Blocks until the running step has returned.

        Raises: RequestRefused if the engine is closing or has failed; RuntimeError before `start`.
        """
        return self._ask(lambda done: done.set_result(self._kv_memory.status()))

    def release_kv_cache(self) -> KVCacheStatus:
        """Give the memory of all blocks that nobody refers to back to the system, and forget what is cached.

        Blocks, and raises, as `kv_cache_status`.
        """
        return self._ask(lambda done: self._kv_memory.release("admin", done=done))

    def resize_kv_cache(self, budget_bytes: int) -> KVCacheStatus:
        """Give the pool another budget: as many blocks as fit in it.

        Returns when all that can leave a smaller pool at once has left; blocks in use follow as their
        requests return them.
        Raises: KVCacheRefused, and changes nothing, for a budget below a block or below what an open request
        may need, and for one beyond the memory that is available or the address space that was reserved at
        start. Blocks, and raises besides, as `kv_cache_status`.
        """
        num_blocks, limit = self._kv_memory.check(budget_bytes)

        def resize(done: Future[KVCacheStatus]) -> None:
            try:
                self._kv_memory.resize(budget_bytes, self._loop.longest_open, done)
                self.memory = replace(self.memory, num_blocks=num_blocks, budget_bytes=budget_bytes)
            finally:
                self._limits_to_come.remove(limit)

        return self._ask(resize, before=lambda: self._limits_to_come.append(limit))

    def set_kv_quotas(self, quotas: Mapping[str, int]) -> None:
        """Other quotas of the KV cache from the next step on: bytes by account (`Share.account`).

        Soft: an account may have more cached while nobody else needs the blocks. Padding counts, as it does
        for the budget; what is left of a block counts for nothing.
        """
        extent = self._arena.extent_bytes
        blocks = {account: nbytes // extent for account, nbytes in quotas.items()}
        self._loop.commands.put(partial(self._cache.set_quotas, blocks))

    def _relieve(self, nbytes: int) -> None:
        """`PressureWatcher`: give so many bytes of cold blocks back between two steps."""
        num_blocks = -(-nbytes // self._arena.extent_bytes)
        self._loop.commands.put(partial(self._kv_memory.release, "pressure", num_blocks))

    def _ask(
        self, work: Callable[[Future[KVCacheStatus]], None], *, before: Callable[[], object] = lambda: None
    ) -> KVCacheStatus:
        """Let the engine thread do `work` between two steps and wait until it has set its future.

        before: called under the lock, before anything that is submitted later can pass its checks.
        """
        done: Future[KVCacheStatus] = Future()

        def command() -> None:
            try:
                if self._loop.fault is not None:
                    raise RequestRefused(ENGINE_STOPPED, code="engine_failed")
                work(done)
            except (KVCacheRefused, RequestRefused) as refusal:
                done.set_exception(refusal)

        with self._lock:
            self._check_open()
            if self._thread is None:
                raise RuntimeError("the engine has not been started")
            before()
            self._loop.commands.put(command)
        while True:
            try:
                status = done.result(timeout=1.0)
            except TimeoutError:
                if not self.healthy():
                    raise RequestRefused(ENGINE_STOPPED, code="engine_failed") from None
            else:
                return replace(status, resident_bytes=self._kv_memory.resident_bytes())

    def mailbox_of(self, loop: asyncio.AbstractEventLoop) -> LoopMailbox:
        """The one mailbox of `loop`, the running one: a single post a step wakes all its streams."""
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes[loop] = LoopMailbox(loop)
        return mailbox

    def healthy(self) -> bool:
        """Whether work progresses or there is none.

        False once the engine has failed, and while some request could be computed and no step has completed
        for `stall_timeout` seconds.
        """
        if self._loop.fault is not None:
            return False
        if self.num_open == 0 or self._loop.resting:
            return True
        return time.monotonic() - self._loop.last_progress < self.config.stall_timeout

    def close(self, timeout: float = 10.0) -> None:
        """Refuse new requests, let open ones finish for up to `timeout` seconds, fail the rest, free the
        pool.

        Raises: BlocksLeaked if a block is still in use afterwards; the fault the engine had stopped for, if
        it had; RuntimeError if a step does not return. Closing again does nothing.
        """
        with self._lock:
            if not self._accepting:
                return
            self._accepting = False
        if self._watcher is not None:
            self._watcher.stop()
        deadline = time.monotonic() + (timeout if self._thread is not None else 0.0)
        self._loop.commands.put(partial(self._loop.close_at, deadline))
        if self._thread is None:
            self._run()
        else:
            self._thread.join(timeout + STOP_GRACE)
            if self._thread.is_alive():
                stuck = time.monotonic() - self._loop.last_progress
                raise RuntimeError(f"the engine's step has not returned for {stuck:.1f} s")
        for mailbox in list(self._mailboxes.values()):
            mailbox.detach()
        self._arena.close()
        if self._loop.fault is not None:
            raise self._loop.fault

    def _run(self) -> None:
        self._loop.run()
        with self._lock:  # a submission that saw no fault is in the queue by now
            if self._loop.fault is not None:
                self._loop.abandon_all()

    def _limit(self) -> int:
        """Tokens of the longest request that may be submitted now."""
        return min([self.longest_request, *self._limits_to_come])

    def _check_open(self) -> None:
        if self._loop.fault is not None:
            raise RequestRefused(ENGINE_STOPPED, code="engine_failed")
        if not self._accepting:
            raise RequestRefused("the server is shutting down", code="shutting_down")

    def _check_length(self, num_prompt: int, max_tokens: int | None, limit: int) -> None:
        if num_prompt == 0:
            raise RequestRefused(
                "the prompt is empty: there is no token to continue from", code="empty_prompt"
            )
        if max_tokens is not None and num_prompt + max_tokens > limit:
            raise RequestRefused(
                f"{num_prompt + max_tokens:,} tokens are needed ({num_prompt:,} of the prompt and max_tokens "
                f"{max_tokens:,}), and the longest request is {limit:,} tokens",
                code="context_length_exceeded",
            )
        if num_prompt >= limit:
            raise RequestRefused(
                f"the prompt has {num_prompt:,} tokens, and the longest request is {limit:,} tokens, "
                "prompt and answer together",
                code="context_length_exceeded",
            )

    def _check_vocabulary(self, token_ids: list[int]) -> None:
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                raise RequestRefused(
                    f"token id {token_id} is outside the vocabulary of {self._vocab_size:,} tokens",
                    code="invalid_token",
                )


def _reserve(extent_bytes: int, num_blocks: int) -> Arena:
    """Address space for the pool, and for it to grow to all of the machine's memory.

    A system that counts address space (overcommit off, a limit on it) may refuse; then the pool can only
    shrink.
    """
    most = min(max(num_blocks, machine_memory() // extent_bytes), MAX_BLOCKS)
    try:
        return Arena(extent_bytes, most)
    except OSError:
        return Arena(extent_bytes, num_blocks)
