"""A model made of words: it checks every position it reads, so that a paging error cannot hide."""

from __future__ import annotations

from hashlib import blake2b

from octavo.kv.kv_cache import KVCache
from octavo.kv.prefix_index import Namespace
from octavo.scheduler.limits import SchedulerConfig, SchedulingPolicy
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence, SequenceStatus
from octavo.scheduler.share import NOBODYS, Share

Content = bytes
SECONDS_A_STEP = 0.05
NOTHING: Content = b""


def content_after(before: Content, token_id: int) -> Content:
    """What stands in a token's slot: the token and, through `before`, everything ahead of it."""
    return blake2b(before + token_id.to_bytes(8, "little"), digest_size=8).digest()


def contents(sequence: Sequence) -> list[Content]:
    """What must stand in the slots of a sequence's known tokens. Salts differ in everything."""
    chain = [sequence.namespace.salt.encode()]
    for token_id in sequence.token_ids:
        chain.append(content_after(chain[-1], token_id))
    return chain[1:]


class PagedModel:
    """Slots like those of the arena, filled and read as the native step does it.

    Chunk by chunk: all slots of the chunk are written, then every position up to its end is read through the
    block table and compared. A block that was handed out twice, forgotten too early, adopted too soon or left
    in a wrong order is therefore found in the step that reads it.
    """

    def __init__(self, block_size: int, vocab_size: int = 1000) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.num_computed = 0
        self.num_copies = 0
        self._slots: dict[tuple[int, int], Content] = {}

    def run(self, plan: StepPlan) -> list[int | None]:
        """Compute a plan. Returns: for each chunk the token after it, None where it does not sample.

        Raises: AssertionError, if a slot does not hold what its sequence needs, or one is written that is
            committed content or that this step has written before.
        """
        assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks)
        self._copy(plan)
        sampled: list[int | None] = []
        written: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
            wanted = contents(sequence)
            for position in range(chunk.start, end):
                block = sequence.block_table.blocks[position // self.block_size]
                slot = self._slot(sequence, position)
                assert block.node is None or block.node.pending, f"{sequence} writes {block}, known before"
                assert slot not in written, f"{sequence} writes {block} at {position}, as another did before"
                written.add(slot)
                self._slots[slot] = wanted[position]
            for position in range(end):
                found = self._slots.get(self._slot(sequence, position), NOTHING)
                assert found == wanted[position], f"{sequence} reads something else at position {position}"
            self.num_computed += chunk.num_tokens
            assert chunk.samples == (end == sequence.num_tokens)
            sampled.append(self._sample(wanted[-1]) if chunk.samples else None)
        return sampled

    def release(self, block_ids: list[int]) -> None:
        """Give the pages of these blocks back: what stood in them is gone."""
        gone = set(block_ids)
        self._slots = {slot: content for slot, content in self._slots.items() if slot[0] not in gone}

    def _copy(self, plan: StepPlan) -> None:
        destinations = {copy.destination for copy in plan.copies}
        assert len(destinations) == len(plan.copies), "a block is copied to twice"
        assert not destinations & {copy.source for copy in plan.copies}, "a copy is copied from"
        for copy in plan.copies:
            for offset in range(self.block_size):
                content = self._slots.get((copy.source, offset), NOTHING)
                self._slots[copy.destination, offset] = content
        self.num_copies += len(plan.copies)

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table.block_ids[position // self.block_size], position % self.block_size

    def _sample(self, content: Content) -> int:
        return int.from_bytes(content, "little") % self.vocab_size


class PagedServer:
    """Scheduler, cache and `PagedModel` in a loop, with the books proved after every half-step."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        max_model_len: int = 100_000,
        enable_prefix_caching: bool = True,
        block_order: list[int] | None = None,
        vocab_size: int = 1000,
        policy: SchedulingPolicy = SchedulingPolicy.FAIR,
    ) -> None:
        self.cache = KVCache(
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            block_order=block_order,
        )
        config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, policy)
        self.scheduler = Scheduler(self.cache, config)
        self.model = PagedModel(block_size, vocab_size)
        self.num_steps = 0
        self._max_tokens: dict[Sequence, int] = {}

    def add(
        self,
        sequence_id: str,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        salt: str = "",
        share: Share = NOBODYS,
        priority: int = 0,
    ) -> Sequence:
        """Let a request arrive."""
        namespace = Namespace(salt=salt)
        sequence = Sequence(sequence_id, prompt, namespace=namespace, share=share, priority=priority)
        self.admit(sequence, max_tokens)
        return sequence

    def admit(self, sequence: Sequence, max_tokens: int) -> None:
        """Let a request arrive that was made elsewhere."""
        self.scheduler.add(sequence, self.clock)
        self._max_tokens[sequence] = max_tokens

    def plan(self) -> StepPlan:
        """Plan a step; `end` or `fail` must follow if it has chunks."""
        self.model.release(self.cache.pages.retire(self.cache.num_blocks))
        self.audit()
        plan = self.scheduler.step(self.clock)
        planned = [chunk.sequence for chunk in plan.chunks]
        assert len(set(planned)) == len(planned)
        assert not set(planned) & set(plan.preempted), "a planned sequence is a victim in the same step"
        assert not any(sequence.held for sequence in planned)
        assert len(planned) <= self.scheduler.config.max_num_seqs
        assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
        self.audit()
        return plan

    def end(self, plan: StepPlan) -> None:
        """Compute and commit a plan; whoever has all its tokens leaves."""
        sampled = self.model.run(plan)
        self.scheduler.commit(plan)
        self.audit()
        self.num_steps += 1
        for chunk, token_id in zip(plan.chunks, sampled, strict=True):
            if token_id is not None:
                chunk.sequence.append(token_id)
                if self.num_generated(chunk.sequence) >= self._max_tokens[chunk.sequence]:
                    self.finish(chunk.sequence)

    def fail(self, plan: StepPlan) -> None:
        """Compute a plan, but fail before it returns."""
        self.model.run(plan)
        self.scheduler.rollback(plan)
        self.audit()

    def step(self) -> StepPlan:
        """Plan, compute and commit."""
        plan = self.plan()
        if plan.chunks:
            self.end(plan)
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nobody has work."""
        for _ in range(max_steps):
            if not self.has_work:
                return
            assert self.step().chunks, "there is work, and nothing is planned"
        raise AssertionError(f"not finished after {max_steps} steps")

    @property
    def clock(self) -> float:
        """Seconds, were each step one of twenty."""
        return self.num_steps * SECONDS_A_STEP

    @property
    def least_blocks(self) -> int:
        """Blocks that the longest request here may come to need: the pool must not be made smaller."""
        return max(
            (
                self.cache.blocks_for(sequence.num_prompt_tokens + max_tokens)
                for sequence, max_tokens in self._max_tokens.items()
            ),
            default=1,
        )

    def resize(self, num_blocks: int) -> None:
        """Between steps, give the pool another size; what is in use leaves when it is returned."""
        self.cache.pages.resize(num_blocks)
        self.audit()

    def give_back(self, num_unused: int, num_cached: int) -> None:
        """Between steps, give the pages of cold blocks back."""
        pages = self.cache.pages
        self.model.release(pages.give_back_unused(num_unused) + pages.give_back_cached(num_cached))
        self.audit()

    def finish(self, sequence: Sequence) -> None:
        """Let a request go, as the engine does when it is complete or its client has gone."""
        self.scheduler.finish(sequence)
        self._max_tokens.pop(sequence, None)
        assert sequence.status is SequenceStatus.FINISHED
        assert len(sequence.block_table) == 0
        self.audit()

    def audit(self) -> None:
        """Prove the books."""
        self.cache.audit(self.sequences)

    @property
    def has_work(self) -> bool:
        """Whether a step must plan something: somebody is here whose tokens are read."""
        return not all(sequence.held for sequence in self.sequences)

    @property
    def sequences(self) -> list[Sequence]:
        """Everybody who is here."""
        return [*self.scheduler.running, *self.scheduler.waiting]

    @staticmethod
    def num_generated(sequence: Sequence) -> int:
        """Tokens that were sampled."""
        return sequence.num_tokens - sequence.num_prompt_tokens


def solo(prompt: list[int], max_tokens: int, *, salt: str = "", vocab_size: int = 1000) -> list[int]:
    """Prompt and output of the same request alone on a fresh server."""
    server = PagedServer(
        len(prompt) + max_tokens + 1, 1, max_num_batched_tokens=len(prompt) + 8, vocab_size=vocab_size
    )
    sequence = server.add("solo", prompt, max_tokens, salt=salt)
    server.run()
    return sequence.token_ids
