"""The scheduler under any order of arrivals, failures and departures. Every position read is checked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from octavo.scheduler.limits import RequestTooLong, SchedulingPolicy
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.sequence import Sequence, SequenceStatus
from octavo.scheduler.share import Share
from paged_model import PagedServer, contents

VOCAB_SIZE = 2  # so small that prompts share prefixes and streams meet
PROMPTS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=24)
SALTS = st.sampled_from(["", "mine"])
SHARES = st.builds(
    Share,
    account=st.sampled_from("abc"),
    user=st.sampled_from(["", "x"]),
    weight=st.sampled_from([0.1, 1.0, 3.0]),
    background=st.sampled_from([False, False, True]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """`PagedServer` audits after every half-step, and checks that no planned sequence is a victim."""

    sequences: Bundle[Sequence] = Bundle("sequences")

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.integers(0, 20),
        caching=st.booleans(),
        policy=st.sampled_from(SchedulingPolicy),
    )
    def make(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_tokens: int,
        caching: bool,
        policy: SchedulingPolicy,
    ) -> None:
        self.server = PagedServer(
            num_blocks,
            block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            enable_prefix_caching=caching,
            vocab_size=VOCAB_SIZE,
            policy=policy,
        )
        self.open: StepPlan | None = None
        self.asked: dict[Sequence, tuple[list[int], int]] = {}

    @rule(
        target=sequences,
        prompt=PROMPTS,
        max_tokens=st.integers(1, 20),
        salt=SALTS,
        share=SHARES,
        priority=st.integers(-1, 1),
    )
    def arrive(self, prompt: list[int], max_tokens: int, salt: str, share: Share, priority: int) -> Any:
        limit = self.server.scheduler.limit
        if limit < 2:  # a pool of one slot takes no prompt at all
            return multiple()
        if len(prompt) + 1 > limit:
            with pytest.raises(RequestTooLong) as refusal:
                self.server.add("too long", prompt, max_tokens, salt=salt)
            assert (refusal.value.num_tokens, refusal.value.limit) == (len(prompt) + 1, limit)
            prompt = prompt[: limit - 1]
        max_tokens = min(max_tokens, limit - len(prompt))
        sequence = self.server.add(
            f"{len(self.asked)}", prompt, max_tokens, salt=salt, share=share, priority=priority
        )
        self.asked[sequence] = (prompt, max_tokens)
        return sequence

    @rule()
    def plan(self) -> None:
        if self.open is None:
            had_work = self.server.has_work
            plan = self.server.plan()
            assert bool(plan.chunks) == had_work, "work, and nothing planned; or the other way round"
            self.open = plan if plan.chunks else None

    @rule()
    def end_step(self) -> None:
        if self.open is not None:
            self.server.end(self.open)
            self.open = None

    @rule()
    def fail_step(self) -> None:
        if self.open is not None:
            before = {chunk.sequence: chunk.sequence.num_tokens for chunk in self.open.chunks}
            self.server.fail(self.open)
            for sequence, known in before.items():
                assert sequence.num_tokens == known
            self.open = None

    @rule(count=st.integers(1, 10))
    def steps(self, count: int) -> None:
        self.end_step()
        for _ in range(count):
            self.plan()
            self.end_step()

    @rule(num_blocks=st.integers(1, 20))
    def resize(self, num_blocks: int) -> None:
        """The pool grows, or shrinks as far as those who are here allow."""
        self.end_step()
        self.server.resize(max(num_blocks, self.server.least_blocks))

    @rule(unused=st.integers(0, 20), cached=st.integers(0, 20))
    def give_back(self, unused: int, cached: int) -> None:
        self.end_step()
        self.server.give_back(unused, cached)

    @rule(sequence=sequences)
    def hold(self, sequence: Sequence) -> None:
        # Who has not begun has nothing that a client could fail to read.
        if self.open is None and sequence.status is not SequenceStatus.WAITING:
            sequence.held = True

    @rule(sequence=sequences)
    def let_go_on(self, sequence: Sequence) -> None:
        sequence.held = False

    @rule(sequence=consumes(sequences))
    def cancel(self, sequence: Sequence) -> None:
        if self.open is not None:
            self.server.end(self.open)
            self.open = None
        self.server.finish(sequence)
        self.server.finish(sequence)

    @invariant()
    def counts_are_those_of_the_sequences(self) -> None:
        scheduler = self.server.scheduler
        status = [sequence.status for sequence in self.server.sequences]
        assert scheduler.num_waiting == status.count(SequenceStatus.WAITING)
        assert scheduler.num_running == status.count(SequenceStatus.RUNNING)
        assert scheduler.num_paused == status.count(SequenceStatus.PAUSED)
        assert scheduler.num_preemptions == sum(sequence.num_preemptions for sequence in self.asked)
        assert scheduler.num_lost_tokens == sum(sequence.num_lost_tokens for sequence in self.asked)
        assert sorted(map(id, scheduler.in_order)) == sorted(map(id, self.server.sequences))

    @invariant()
    def hits_are_what_sequences_were_told(self) -> None:
        if self.open is None:
            told = sum(sequence.num_cached_tokens for sequence in self.asked)
            assert self.server.cache.prefix_hits == told

    def teardown(self) -> None:
        """Everybody goes on, and everybody finishes, with the tokens it would have had alone."""
        if not hasattr(self, "server"):
            return
        if self.open is not None:
            self.server.end(self.open)
        cancelled = {sequence for sequence in self.asked if sequence.status is SequenceStatus.FINISHED}
        for sequence in self.asked:
            sequence.held = False
        tokens = sum(sum((len(prompt), max_tokens)) for prompt, max_tokens in self.asked.values())
        # Alone, each would need a step a token at most; a pause may cost all of its tokens once more.
        self.server.run(max_steps=10 + 10 * tokens)
        assert self.server.cache.num_used == 0
        for sequence, (prompt, max_tokens) in self.asked.items():
            assert sequence.token_ids[: len(prompt)] == prompt
            if sequence not in cancelled:
                assert PagedServer.num_generated(sequence) == max_tokens
            # Each token is the one that everything before it asks for.
            chain = contents(sequence)
            for position in range(len(prompt), sequence.num_tokens):
                wanted = int.from_bytes(chain[position - 1], "little") % VOCAB_SIZE
                assert sequence.token_ids[position] == wanted


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
