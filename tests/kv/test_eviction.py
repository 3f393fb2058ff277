"""Whose content is forgotten when a block is needed, and which of it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from counted_lines import count_lines
from octavo.kv.eviction import MAX_OWNERS, MAX_SHARES, EvictionOrder
from octavo.kv.kv_cache import KVCache
from octavo.kv.prefix_index import PrefixNode
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.share import Share

SIZE = 4


class Home:
    """A cache that requests come to one after the other: each computes its prompt and goes."""

    def __init__(self, num_blocks: int, quotas: dict[str, int] | None = None) -> None:
        self.cache = KVCache(num_blocks, SIZE, quotas=quotas)
        self._fresh = itertools.count(1_000_000)

    def ask(self, prompt: list[int], owner: str = "", *, background: bool = False) -> int:
        """Returns: tokens that were found."""
        sequence = Sequence("", prompt, share=Share(owner, background=background))
        self.cache.adopt(sequence)
        self.cache.allocate(sequence, len(prompt))
        self.cache.register(sequence, len(prompt))
        self.cache.commit()
        sequence.num_computed_tokens = len(prompt)
        self.cache.free(sequence)
        self.cache.audit([])
        return sequence.num_cached_tokens

    def text(self, num_blocks: int) -> list[int]:
        """Nobody has seen it."""
        return [next(self._fresh) for _ in range(num_blocks * SIZE)]

    def known(self, prompt: list[int]) -> int:
        """Tokens that would be found, one more asked for. Changes nothing."""
        return self.cache.find(Sequence("", [*prompt, 0])).end


def test_a_prefix_is_forgotten_from_its_end() -> None:
    home = Home(10)
    prompt = home.text(8)
    home.ask(prompt)
    for num_forgotten in range(1, 6):
        home.ask(home.text(3 if num_forgotten == 1 else 1))
        assert home.known(prompt) == (8 - num_forgotten) * SIZE


def test_the_least_recently_used_conversation_goes_first() -> None:
    home = Home(12)
    first, second, third = home.text(4), home.text(4), home.text(4)
    for prompt in (first, second, third, first):
        home.ask(prompt)
    home.ask(home.text(4))
    assert [home.known(prompt) for prompt in (first, second, third)] == [16, 0, 16]


def test_a_conversation_that_goes_on_is_as_warm_as_its_last_turn() -> None:
    home = Home(20)
    chat = home.text(2)
    for _ in range(4):
        home.ask(chat)
        home.ask(home.text(3))
        chat += home.text(1)
    home.ask(chat)
    home.ask(home.text(6))
    assert home.known(chat) == len(chat)


def test_where_ways_part_is_kept_longer_than_what_nobody_came_back_to() -> None:
    """Two questions about one document; their ends are gone first, and then younger texts before it."""
    home = Home(16)
    document = home.text(4)
    home.ask(document + home.text(1))
    home.ask(document + home.text(1))
    assert home.cache.num_cached == 6
    # Prompts that were cut off: nothing that a turn ended with.
    for _ in range(4):
        home.ask(home.text(3))
    assert home.known(document) == len(document)


def test_the_end_of_a_turn_outlives_younger_blocks_that_are_none() -> None:
    home = Home(10)
    chat = home.text(2)
    home.ask(chat)
    abandoned = home.text(6)
    paused = Sequence("", abandoned)
    home.cache.allocate(paused, len(abandoned))
    home.cache.register(paused, len(abandoned))
    home.cache.commit()
    paused.num_computed_tokens = len(abandoned)
    home.cache.free_tail(paused, 0)
    home.ask(home.text(4))
    assert home.known(chat) == len(chat)
    assert home.known(abandoned) == 4 * SIZE


def test_one_who_scans_flushes_its_own_past_and_nobody_elses() -> None:
    home = Home(100)
    chats = [home.text(8) for _ in range(5)]
    for chat in chats:
        home.ask(chat, "family")
    for _ in range(200):
        home.ask(home.text(10), "agent")
    assert all(home.known(chat) == len(chat) for chat in chats)
    # It has what the family leaves.
    assert home.cache.num_cached == 100


def test_shares_are_soft() -> None:
    """One who is alone may fill the pool; another takes back what is its share, and no more."""
    home = Home(100)
    mine = [home.text(10) for _ in range(10)]
    for prompt in mine:
        home.ask(prompt, "mine")
    assert all(home.known(prompt) == len(prompt) for prompt in mine)
    for _ in range(40):
        home.ask(home.text(5), "yours")
    left = sum(home.known(prompt) for prompt in mine) // SIZE
    assert 50 - 5 <= left <= 50  # what a request holds while it runs is in no share
    assert home.known(mine[-1]) == len(mine[-1])


def test_a_quota_is_a_share() -> None:
    home = Home(100, quotas={"small": 10})
    mine = home.text(40)
    home.ask(mine, "small")
    for _ in range(20):
        home.ask(home.text(5), "other")
    assert 10 - 5 <= home.known(mine) // SIZE <= 10


def test_the_pool_is_shared_by_those_who_came_last() -> None:
    """However much they compute, one is not displaced by one other; by eight others it is."""
    home = Home(90)
    old = home.text(5)
    home.ask(old, "old")
    for _ in range(200):
        home.ask(home.text(5), "here")
    assert home.known(old) == len(old)
    for number in range(MAX_SHARES + 1):
        for _ in range(3):
            home.ask(home.text(5), f"{number}")
    assert home.known(old) == 0


def test_background_content_goes_before_anybody_elses() -> None:
    home = Home(20)
    chat, job = home.text(8), home.text(8)
    home.ask(chat, "mine")
    home.ask(job, "mine", background=True)
    home.ask(home.text(6), "yours", background=True)
    assert home.known(chat) == len(chat)
    assert home.known(job) == 6 * SIZE
    for _ in range(10):
        home.ask(home.text(4), "yours", background=True)
    assert home.known(chat) == len(chat)


def test_what_a_person_uses_is_no_background_content_any_more() -> None:
    home = Home(20)
    document = home.text(8)
    home.ask(document, "mine", background=True)
    home.ask([*document, 1], "mine")
    home.ask(home.text(8), "mine", background=True)
    home.ask(home.text(8), "mine", background=True)
    assert home.known(document) == len(document)


def test_more_owners_than_are_told_apart_share_an_account() -> None:
    home = Home(4 * MAX_OWNERS)
    for number in range(3 * MAX_OWNERS):
        home.ask(home.text(1), f"{number}")
    assert home.cache.num_cached == 3 * MAX_OWNERS
    home.ask(home.text(2 * MAX_OWNERS), "one more")
    assert home.cache.num_cached == 4 * MAX_OWNERS


def furthest_above_share(order: EvictionOrder) -> str | None:
    """Whose block goes, by the rule itself: of the interactive owners, whether or not they share."""
    accounts = [each for each in order._accounts.values() if not each.background]
    left = order.num_blocks - sum(order.quotas.get(each.owner, 0) for each in accounts)
    equal = [each for each in accounts if each.owner not in order.quotas]
    latest = sorted(equal, key=lambda each: each.last_used, reverse=True)[:MAX_SHARES]
    share = max(left, 0) // max(len(latest), 1)
    best, best_excess = None, 1.0
    for each in accounts:
        own = order.quotas.get(each.owner, share if each in latest else 0)
        excess = each.num_blocks / max(own, 1)
        if each.num_leaves and excess > best_excess:
            best, best_excess = each.owner, excess
    return best


@pytest.mark.parametrize("num_owners", [3, MAX_SHARES, MAX_SHARES + 1, 20, MAX_OWNERS + 5])
@pytest.mark.parametrize("seed", range(3))
def test_of_many_owners_the_furthest_above_its_share_loses_a_block(num_owners: int, seed: int) -> None:
    """Shares are dealt out anew only when they may have changed; they are always those of the rule."""
    rng = random.Random(seed)
    home = Home(120, quotas={"0": 10, "1": 0})
    pool = home.cache._pool
    told = set()
    for _ in range(150):
        home.ask(home.text(rng.randrange(1, 9)), f"{rng.randrange(num_owners)}")
        if rng.random() < 0.1:
            home.cache.set_quotas({f"{rng.randrange(num_owners)}": rng.randrange(30)})
        if rng.random() < 0.1:
            pool.put_back(pool.withdraw(0, min(pool.num_cached, 5)))
        if rng.random() < 0.1:
            home.cache.pages.resize(rng.randrange(90, 150))
            home.cache.pages.retire(home.cache.num_blocks)
        for _ in range(rng.randrange(6)):
            if pool.num_cached:
                expected, chosen = furthest_above_share(pool.eviction), pool.eviction.coldest()
                account = pool.eviction._account_of[chosen]
                assert expected is None or account.owner == expected
                told.add(expected)
                held = pool.take(pool.num_free + 1)
                assert chosen.block is None
                pool.release(held)
    assert len(told) > 2


def test_a_block_costs_a_few_lines_an_owner_to_take() -> None:
    """Shares of 64 owners are not dealt out again for every block that is taken."""
    home = Home(20 * MAX_OWNERS)
    for number in range(MAX_OWNERS):
        home.ask(home.text(20), f"{number}")
    pool = home.cache._pool
    pool.take(50)
    assert not pool.num_free

    def take() -> None:
        pool.take(50)

    assert count_lines(take) < 50 * 8 * MAX_OWNERS


class CountsOrder(int):
    """A clock that says how often it was compared."""

    count = 0

    def __lt__(self, other: int) -> bool:
        CountsOrder.count += 1
        return int(self) < int(other)

    def __add__(self, other: int) -> CountsOrder:
        return CountsOrder(int(self) + int(other))


def test_a_hundred_thousand_blocks_cost_the_logarithm() -> None:
    """Comparisons of a taken block, by the clocks in the heaps."""
    home = Home(100_000)
    home.cache._pool.eviction.clock = CountsOrder(0)
    for _ in range(100_000 // 20):
        home_prompt = home.text(20)
        sequence = Sequence("", home_prompt)
        home.cache.allocate(sequence, len(home_prompt))
        home.cache.register(sequence, len(home_prompt))
        home.cache.commit()
        sequence.num_computed_tokens = len(home_prompt)
        home.cache.free(sequence)
    assert home.cache.num_cached == 100_000
    CountsOrder.count = 0
    home.cache._pool.release(home.cache._pool.take(2_000))
    assert CountsOrder.count < 2_000 * 3 * 17


class EvictionMachine(RuleBasedStateMachine):
    """Against the rule itself, applied to a plain list of everything that is cached."""

    @initialize(num_blocks=st.integers(2, 12), quota=st.one_of(st.none(), st.integers(0, 4)))
    def make(self, num_blocks: int, quota: int | None) -> None:
        self.home = Home(num_blocks, None if quota is None else {"a": quota})
        self.asked: list[list[int]] = []

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3),
        owner=st.sampled_from(["a", "b", "c"]),
        background=st.booleans(),
    )
    def ask(self, tokens: list[int], owner: str, background: bool) -> None:
        """Blocks of four equal tokens, so that chains part and meet often."""
        prompt = [token for token in tokens for _ in range(SIZE)][: self.home.cache.num_blocks * SIZE]
        self.home.ask(prompt, owner, background=background)

    @precondition(lambda self: self.home.cache.num_cached > 0)
    @rule()
    def forget(self) -> None:
        pool = self.home.cache._pool
        expected = self._next()
        held = pool.take(pool.num_free + 1)
        assert expected.block is None, "another one was forgotten"
        pool.release(held)

    def _next(self) -> PrefixNode:
        order = self.home.cache._pool.eviction
        nodes = list(order.nodes())
        leaves = [node for node in nodes if not node.children]
        worth = {
            node: (node.last_used + order.num_blocks * (node.ends_turn or node.is_fork), node.ticket)
            for node in leaves
        }
        background = [node for node in leaves if node.background]
        if background:
            return min(background, key=worth.__getitem__)
        owners = {node.owner for node in leaves}
        everybody = {node.owner for node in nodes if not node.background}
        left = order.num_blocks - sum(order.quotas.get(owner, 0) for owner in everybody)
        equal = max(left, 0) // max(sum(owner not in order.quotas for owner in everybody), 1)
        excess = {}
        for owner in owners:
            held = sum(node.owner == owner and not node.background for node in nodes)
            excess[owner] = held / max(order.quotas.get(owner, equal), 1)
        most = max(excess.values())
        if most > 1:
            over = [owner for owner in owners if excess[owner] == most]
            if len(over) > 1:  # either is right
                order_says = order.coldest()
                assert order_says.owner in over
                over = [order_says.owner]
            leaves = [node for node in leaves if node.owner == over[0]]
        return min(leaves, key=worth.__getitem__)

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "home"):
            self.home.cache.audit([])


TestEviction = EvictionMachine.TestCase
TestEviction.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_heaps_do_not_grow_with_what_is_used_again_and_again() -> None:
    home = Home(50)
    prompts = [home.text(4) for _ in range(8)]
    for _ in range(1_000):
        home.ask(random.choice(prompts))
    heaps = [account.heap for account in home.cache._pool.eviction._accounts.values()]
    assert sum(map(len, heaps)) < 50 * 2 + 64 + 1
