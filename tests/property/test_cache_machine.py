"""Pool and index under any order of operations, with the books proved after every one."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from octavo.kv.audit import audit
from octavo.kv.block import Block
from octavo.kv.kv_cache import KVCache
from octavo.kv.pool import BlockPool, PoolExhausted
from octavo.kv.prefix_index import Namespace, PrefixIndex, PrefixNode
from octavo.scheduler.sequence import Sequence

SIZE = 2
TOKENS = st.integers(0, 1)
SALTS = st.sampled_from(["", "mine", "yours"])


class PoolAndIndexMachine(RuleBasedStateMachine):
    """Chains of blocks, taken, registered, shared and returned; a plain dictionary says what must be found.

    A chain is what a sequence would hold: each of its blocks is registered after the one before it.
    """

    chains: Bundle[list[Block]] = Bundle("chains")

    @initialize(num_blocks=st.integers(1, 8), data=st.data())
    def make(self, num_blocks: int, data: st.DataObject) -> None:
        self.index = PrefixIndex()
        order = data.draw(st.permutations(range(num_blocks)))
        self.pool = BlockPool(num_blocks, forget=self.index.forget, block_order=order)
        self.held: list[list[Block]] = []
        # Everything ever registered and not rolled back; eviction may forget any of it, but invent nothing.
        self.known: dict[tuple[str, tuple[int, ...]], Block] = {}
        self.pending: list[tuple[str, tuple[int, ...]]] = []

    @rule(target=chains, salt=SALTS, tokens=st.lists(TOKENS, min_size=SIZE, max_size=3 * SIZE))
    def begin(self, salt: str, tokens: list[int]) -> list[Block]:
        """Share what is known of some tokens and compute the rest, as far as there are blocks."""
        chain: list[Block] = []
        node: PrefixNode | None = self.index.root(Namespace(salt=salt))
        words = [tuple(tokens[i : i + SIZE]) for i in range(0, len(tokens) - SIZE + 1, SIZE)]
        for depth, word in enumerate(words):
            path = (salt, tuple(tokens[: (depth + 1) * SIZE]))
            found = node and node.child(word)
            if found is not None:
                assert found.block is not None
                assert self.known[path] is found.block
                self.pool.share(found.block)
                chain.append(found.block)
                node = found
                continue
            available = self.pool.num_available
            try:
                (block,) = self.pool.take(1)
            except PoolExhausted:
                assert available == 0
                break
            # Its old content is gone, whatever it was.
            self.known = {path: other for path, other in self.known.items() if other is not block}
            chain.append(block)
            node = self.index.insert(node, word, Namespace(salt=salt), block)
            self.known[path] = block
            self.pending.append(path)
        self.held.append(chain)
        return chain

    @rule(target=chains, count=st.integers(1, 3))
    def take(self, count: int) -> list[Block]:
        """Take blocks without telling anybody what is in them."""
        available = self.pool.num_available
        try:
            taken = self.pool.take(count)
        except PoolExhausted:
            assert available < count
            taken = []
        for block in taken:
            self.known = {path: other for path, other in self.known.items() if other is not block}
        self.held.append(taken)
        return taken

    @rule(target=chains, chain=chains)
    def share(self, chain: list[Block]) -> list[Block]:
        """Hold the same blocks once more."""
        again = list(chain)
        for block in again:
            self.pool.share(block)
        self.held.append(again)
        return again

    @rule(chain=consumes(chains))
    def release(self, chain: list[Block]) -> None:
        """Return a chain, last block first."""
        self._end_the_step_of(chain)
        for position, other in enumerate(self.held):
            if other is chain:
                del self.held[position]
                break
        self.pool.release(reversed(chain))

    @rule(target=chains, chain=consumes(chains), keep=st.integers(0, 2))
    def release_tail(self, chain: list[Block], keep: int) -> list[Block]:
        """Return only the end of a chain."""
        self._end_the_step_of(chain)
        self.pool.release(reversed(chain[keep:]))
        del chain[keep:]
        return chain

    @rule()
    def commit(self) -> None:
        self.index.commit()
        self.pending.clear()

    @rule()
    def rollback(self) -> None:
        self.index.rollback()
        for path in self.pending:
            self.known.pop(path, None)
        self.pending.clear()

    def _end_the_step_of(self, chain: list[Block]) -> None:
        if any(block.node is not None and block.node.pending for block in chain):
            self.commit()

    @invariant()
    def books_add_up(self) -> None:
        held = [block for chain in self.held for block in chain]
        audit(pool=self.pool, index=self.index, block_size=SIZE, chained=True, sequences=[], pinned=held)
        assert self.pool.num_used == len(set(held))
        assert self.pool.num_shared == sum(count > 1 for count in Counter(held).values())

    @invariant()
    def known_content_is_found_and_nothing_else(self) -> None:
        found = {}
        for namespace, root in self.index.roots():
            stack: list[tuple[PrefixNode, tuple[int, ...]]] = [(root, ())]
            while stack:
                node, path = stack.pop()
                for alike in node.children.values():
                    for child in alike:
                        found[namespace.salt, path + child.tokens] = child.block
                        stack.append((child, path + child.tokens))
        assert found == self.known


class CacheMachine(RuleBasedStateMachine):
    """Sequences that grow and shrink in any order, within a step and between steps."""

    sequences: Bundle[Sequence] = Bundle("sequences")

    @initialize(num_blocks=st.integers(1, 10), caching=st.booleans())
    def make(self, num_blocks: int, caching: bool) -> None:
        self.cache = KVCache(num_blocks, SIZE, enable_prefix_caching=caching)
        self.here: list[Sequence] = []
        self.step: dict[Sequence, int] = {}
        self.before: dict[Sequence, int] = {}
        # Blocks that somebody has held since their pages were last given back.
        self.with_pages: set[int] = set()

    @rule(target=sequences, salt=SALTS, prompt=st.lists(TOKENS, min_size=1, max_size=9))
    def arrive(self, salt: str, prompt: list[int]) -> Sequence:
        sequence = Sequence(f"{len(self.here)}", prompt, namespace=Namespace(salt=salt))
        self.here.append(sequence)
        return sequence

    @rule(sequence=sequences, chunk=st.integers(1, 6))
    def compute(self, sequence: Sequence, chunk: int) -> None:
        """Adopt what is there and hold blocks for a chunk after it, once a step for each sequence."""
        if sequence in self.step:
            return
        self.before.setdefault(sequence, sequence.num_computed_tokens)
        adopted = self.cache.adopt(sequence)
        assert sequence.num_computed_tokens == self.before[sequence] + adopted
        assert sequence.num_computed_tokens < sequence.num_tokens or adopted == 0
        end = min(sequence.num_tokens, sequence.num_computed_tokens + chunk)
        state = (len(sequence.block_table), self.cache.num_available)
        try:
            self.cache.allocate(sequence, end)
        except PoolExhausted:
            assert state == (len(sequence.block_table), self.cache.num_available)
            del self.before[sequence]
            return
        self.cache.register(sequence, end)
        self.step[sequence] = end

    @rule()
    def commit(self) -> None:
        self.cache.commit()
        for sequence, end in self.step.items():
            sequence.num_computed_tokens = end
        self.step.clear()
        self.before.clear()

    @rule()
    def rollback(self) -> None:
        self.cache.rollback()
        for sequence in self.step:
            # Adopted committed blocks may stay; a half block that was given up for a pending one does not.
            assert sequence.num_computed_tokens >= self.before[sequence] // SIZE * SIZE
            self.cache.free_tail(sequence, self.cache.blocks_for(sequence.num_computed_tokens))
        self.step.clear()
        self.before.clear()

    @rule(sequence=sequences, token_id=TOKENS)
    def generate(self, sequence: Sequence, token_id: int) -> None:
        if sequence not in self.step and sequence.num_computed_tokens == sequence.num_tokens:
            sequence.append(token_id)

    @rule(sequence=sequences, keep=st.integers(0, 3))
    def preempt(self, sequence: Sequence, keep: int) -> None:
        # Within a step, only who has no part in it may lose blocks; a plain guess at that is no open step.
        if not self.step:
            self.cache.commit()
            self.cache.free_tail(sequence, keep)
            assert len(sequence.block_table) <= keep

    @rule(sequence=consumes(sequences))
    def leave(self, sequence: Sequence) -> None:
        self.commit()
        self.cache.free(sequence)
        self.here.remove(sequence)

    @rule(unused=st.integers(0, 4), cached=st.integers(0, 4))
    def give_back(self, unused: int, cached: int) -> None:
        """Between steps, some cold blocks lose their pages: as many as there are."""
        self.commit()
        pages = self.cache.pages
        num_unused, num_cached, num_used = pages.num_unused, self.cache.num_cached, self.cache.num_used
        given = pages.give_back_unused(unused)
        assert len(given) == min(unused, num_unused)
        given += pages.give_back_cached(cached)
        assert len(given) == min(unused, num_unused) + min(cached, num_cached)
        assert self.cache.num_used == num_used
        self._release(given)

    @rule(size=st.integers(1, 14), most=st.integers(0, 20))
    def resize(self, size: int, most: int) -> None:
        """Between steps, the pool gets another size; of what is to leave, some leaves now."""
        self.commit()
        before = self.cache.num_blocks
        self.cache.pages.resize(size)
        assert self.cache.num_blocks == max(before, size)
        self._release(self.cache.pages.retire(most))
        assert self.cache.num_blocks >= size
        if most >= before:
            assert self.cache.num_blocks == max(size, self.cache.num_used)

    def _release(self, given: list[int]) -> None:
        """The pages of these go back: they had some, and nobody needs them."""
        assert set(given) <= self.with_pages - self._in_use()
        assert len(set(given)) == len(given)
        self.with_pages -= set(given)

    def _in_use(self) -> set[int]:
        return {block_id for sequence in self.here for block_id in sequence.block_table.block_ids}

    @invariant()
    def books_add_up(self) -> None:
        self.cache.audit(self.here)
        assert self.cache.prefix_hits <= self.cache.prefix_queries
        for sequence in self.here:
            assert 0 <= sequence.num_cached_tokens <= sequence.num_prompt_tokens

    @invariant()
    def pages_are_where_somebody_was(self) -> None:
        self.with_pages |= self._in_use()
        assert self.with_pages == {block.block_id for block in self.cache._pool.blocks() if block.touched}

    @invariant()
    def between_steps_no_content_is_there_twice(self) -> None:
        if self.step or not self.cache.enable_prefix_caching:
            return
        where: dict[tuple[str, tuple[int, ...]], Block] = {}
        for sequence in self.here:
            for number in range(sequence.num_computed_tokens // SIZE):
                path = (sequence.namespace.salt, tuple(sequence.token_ids[: (number + 1) * SIZE]))
                block = sequence.block_table.blocks[number]
                assert where.setdefault(path, block) is block


TestPoolAndIndex = PoolAndIndexMachine.TestCase
TestPoolAndIndex.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
