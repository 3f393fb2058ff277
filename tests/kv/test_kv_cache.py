from __future__ import annotations

import random

import pytest

from octavo.kv.kv_cache import KVCache
from octavo.kv.pool import PoolExhausted
from octavo.kv.prefix_index import Namespace
from octavo.scheduler.sequence import Sequence

SIZE = 4


def compute(cache: KVCache, sequence: Sequence, num_tokens: int | None = None) -> int:
    """One step of one sequence, without the end. Returns how many tokens it adopted."""
    adopted = cache.adopt(sequence)
    end = sequence.num_tokens if num_tokens is None else num_tokens
    cache.allocate(sequence, end)
    cache.register(sequence, end)
    return adopted


def commit(cache: KVCache, **ends: tuple[Sequence, int]) -> None:
    cache.commit()
    for sequence, end in ends.values():
        sequence.num_computed_tokens = end


def computed(cache: KVCache, name: str, prompt: list[int], salt: str = "") -> Sequence:
    sequence = Sequence(name, prompt, namespace=Namespace(salt=salt))
    compute(cache, sequence)
    commit(cache, it=(sequence, len(prompt)))
    cache.audit([sequence])
    return sequence


def ids(sequence: Sequence) -> list[int]:
    return list(sequence.block_table.block_ids)


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_t10_a_prefix_is_found_to_the_token(length: int, gone: bool) -> None:
    cache = KVCache(100, 16)
    first = computed(cache, "first", list(range(length)))
    held = ids(first)
    if gone:
        cache.free(first)
    second = Sequence("second", [*range(length), 900, 901])
    assert compute(cache, second) == length
    assert second.num_cached_tokens == length
    assert ids(second)[: length // 16] == held[: length // 16]
    cache.audit([second] if gone else [first, second])


def test_one_token_is_always_left_to_compute() -> None:
    cache = KVCache(100, SIZE)
    first = computed(cache, "first", list(range(12)))
    second = Sequence("second", list(range(12)))
    assert cache.adopt(second) == 11
    cache.audit([first, second])


def test_another_salt_finds_nothing() -> None:
    cache = KVCache(100, SIZE)
    computed(cache, "mine", list(range(12)), salt="mine")
    assert cache.adopt(Sequence("yours", list(range(12)), namespace=Namespace(salt="yours"))) == 0
    assert cache.adopt(Sequence("mine too", list(range(12)), namespace=Namespace(salt="mine"))) == 11


def test_content_is_found_after_its_sequence_has_gone() -> None:
    cache = KVCache(100, SIZE)
    first = computed(cache, "first", list(range(12)))
    cache.free(first)
    assert (cache.num_used, cache.num_cached, cache.num_free) == (0, 3, 97)
    second = Sequence("second", list(range(20)))
    assert cache.adopt(second) == 12
    assert (cache.num_used, cache.num_cached) == (3, 0)
    cache.audit([second])


def test_generated_tokens_are_found_too() -> None:
    cache = KVCache(100, SIZE)
    first = computed(cache, "first", [1, 2, 3])
    for token_id in (4, 5, 6, 7, 8):
        first.append(token_id)
        compute(cache, first)
        commit(cache, it=(first, first.num_tokens))
    cache.audit([first])
    follow_up = Sequence("follow-up", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.adopt(follow_up) == 8


def test_a_prefix_is_forgotten_from_its_end() -> None:
    cache = KVCache(6, SIZE)
    first = computed(cache, "first", list(range(16)))
    cache.free(first)
    other = computed(cache, "other", list(range(100, 116)))
    again = Sequence("again", list(range(16)))
    assert cache.adopt(again) == 8
    cache.audit([other, again])


def test_allocating_too_much_takes_nothing() -> None:
    cache = KVCache(3, SIZE)
    sequence = Sequence("it", list(range(16)))
    with pytest.raises(PoolExhausted) as failure:
        cache.allocate(sequence, 16)
    assert (failure.value.needed, failure.value.available) == (4, 3)
    assert len(sequence.block_table) == 0
    cache.audit([sequence])


def test_a_block_of_this_very_step_is_adopted() -> None:
    cache = KVCache(100, SIZE)
    first, second = Sequence("first", list(range(12))), Sequence("second", [*range(12), 99])
    compute(cache, first)
    assert compute(cache, second) == 12
    assert ids(second)[:3] == ids(first)
    cache.audit([first, second])
    commit(cache, a=(first, 12), b=(second, 13))
    cache.audit([first, second])
    assert second.num_cached_tokens == 12
    assert cache.prefix_hits == 12


def test_rollback_takes_pending_blocks_from_those_who_adopted_them() -> None:
    cache = KVCache(100, SIZE)
    first = Sequence("first", list(range(12)))
    compute(cache, first, 4)
    commit(cache, it=(first, 4))
    compute(cache, first)
    second = Sequence("second", [*range(12), 99])
    third = Sequence("third", [*range(12), 77])
    assert compute(cache, second) == 12
    assert compute(cache, third) == 12
    cache.rollback()
    cache.audit([first, second, third])
    # The block that was committed before stays.
    for adopter in (second, third):
        assert adopter.num_computed_tokens == adopter.num_cached_tokens == 4
        assert ids(adopter) == ids(first)[:1]
    assert first.num_computed_tokens == 4
    assert cache.prefix_hits == 8
    assert cache.adopt(Sequence("fourth", list(range(20)))) == 4


def test_a_chain_of_adopters_is_undone_link_by_link() -> None:
    cache = KVCache(100, SIZE)
    chain = [Sequence(f"{length}", list(range(length))) for length in (9, 17, 25, 33)]
    for sequence in chain:
        compute(cache, sequence)
    assert [sequence.num_cached_tokens for sequence in chain] == [0, 8, 16, 24]
    cache.rollback()
    cache.audit(chain)
    assert [sequence.num_computed_tokens for sequence in chain] == [0, 0, 0, 0]
    for sequence in chain:
        cache.free(sequence)
    assert cache.num_free == 100


def test_a_block_completed_twice_in_one_step_becomes_one() -> None:
    cache = KVCache(100, SIZE)
    one, other = Sequence("one", [1, 2]), Sequence("other", [1, 2])
    for sequence in (one, other):
        compute(cache, sequence)
    commit(cache, a=(one, 2), b=(other, 2))
    for sequence in (one, other):
        sequence.token_ids.extend([3, 4])
    for sequence in (one, other):
        cache.allocate(sequence, 4)
        cache.register(sequence, 4)
    assert ids(one) != ids(other)
    cache.audit([one, other])
    commit(cache, a=(one, 4), b=(other, 4))
    cache.audit([one, other])
    assert ids(one) == ids(other)
    assert (cache.num_used, cache.num_shared) == (1, 1)


def test_a_block_that_was_known_before_is_not_kept_twice() -> None:
    cache = KVCache(100, SIZE)
    cache.free(computed(cache, "first", list(range(8))))
    # Eight tokens: one of them must be computed again, in a copy of the block that has it.
    second = computed(cache, "second", list(range(8)))
    assert second.num_cached_tokens == 7
    assert (cache.num_used, cache.num_cached) == (2, 0)


def test_a_twin_survives_until_the_step_ends_though_nobody_else_needs_it() -> None:
    cache = KVCache(4, SIZE)
    cache.free(computed(cache, "first", list(range(8))))
    second = Sequence("second", list(range(8)))
    compute(cache, second)
    hungry = Sequence("hungry", list(range(100, 108)))
    with pytest.raises(PoolExhausted):
        cache.allocate(hungry, 8)
    cache.allocate(hungry, 4)
    cache.audit([second, hungry])
    commit(cache, it=(second, 8))
    cache.audit([second, hungry])
    cache.allocate(hungry, 8)
    cache.audit([second, hungry])


def test_rollback_lets_go_of_twins() -> None:
    cache = KVCache(100, SIZE)
    cache.free(computed(cache, "first", list(range(8))))
    second = Sequence("second", list(range(8)))
    compute(cache, second)
    cache.rollback()
    cache.audit([second])
    cache.free(second)
    assert (cache.num_used, cache.num_cached, cache.num_free) == (0, 2, 98)


def test_an_own_half_block_gives_way_to_the_known_whole_one() -> None:
    cache = KVCache(100, SIZE)
    slow = Sequence("slow", [*range(10)])
    compute(cache, slow, 6)
    commit(cache, it=(slow, 6))
    fast = computed_beside(cache, slow, Sequence("fast", [*range(10), 50, 51]))
    assert cache.adopt(slow) == 3
    assert slow.num_computed_tokens == 9
    assert ids(slow)[:2] == ids(fast)[:2]
    # Four tokens of it came from nobody, six it had computed, two are new, and one of the next block.
    assert slow.num_cached_tokens == 3
    cache.audit([slow, fast])


def computed_beside(cache: KVCache, beside: Sequence, sequence: Sequence) -> Sequence:
    compute(cache, sequence)
    commit(cache, it=(sequence, sequence.num_tokens))
    cache.audit([beside, sequence])
    return sequence


def test_rollback_after_giving_up_a_half_block_leaves_the_sequence_at_the_border() -> None:
    cache = KVCache(100, SIZE)
    slow = Sequence("slow", [*range(10)])
    compute(cache, slow, 6)
    commit(cache, it=(slow, 6))
    fast = Sequence("fast", [*range(10), 50, 51])
    compute(cache, fast)
    assert cache.adopt(slow) == 2
    cache.rollback()
    cache.audit([slow, fast])
    assert slow.num_computed_tokens == 4
    assert slow.num_cached_tokens == 0


def test_a_prompt_token_is_counted_as_cached_once_whatever_happens_to_it() -> None:
    cache = KVCache(100, SIZE)
    first = computed(cache, "first", list(range(8)))
    second = Sequence("second", list(range(18)))
    assert compute(cache, second) == 8
    commit(cache, it=(second, 18))
    for _ in range(3):
        cache.free(second)
        assert cache.adopt(second) == 17
        assert second.num_cached_tokens == 8
        cache.commit()
    assert cache.prefix_queries == 8 + 18
    assert cache.prefix_hits == 8
    cache.audit([first, second])


def test_tokens_that_were_generated_do_not_count_as_cached_prompt() -> None:
    cache = KVCache(100, SIZE)
    first = computed(cache, "first", list(range(16)))
    second = Sequence("second", list(range(6)))
    second.token_ids.extend(range(6, 20))
    assert cache.adopt(second) == 16
    assert second.num_cached_tokens == 6
    cache.audit([first, second])


def test_without_prefix_caching_nothing_is_shared_counted_or_kept() -> None:
    cache = KVCache(100, SIZE, enable_prefix_caching=False)
    first = computed(cache, "first", list(range(12)))
    second = computed_beside(cache, first, Sequence("second", list(range(12))))
    assert not set(ids(first)) & set(ids(second))
    cache.free(first)
    cache.free(second)
    assert (cache.num_cached, cache.num_free) == (0, 100)
    assert (cache.prefix_queries, cache.prefix_hits) == (0, 0)


def test_what_is_missing_counts_found_blocks_only_if_they_must_leave_the_free_list() -> None:
    cache = KVCache(100, SIZE)
    held = computed(cache, "held", list(range(8)))
    gone = Sequence("gone", list(range(16)))
    compute(cache, gone)
    commit(cache, it=(gone, 16))
    cache.free(gone)
    new = Sequence("new", list(range(17)))
    found = cache.find(new)
    assert len(found.nodes) == 4
    assert cache.blocks_missing(new, found) == 3
    before = cache.num_available
    cache.adopt(new, found)
    cache.allocate(new, 17)
    assert before - cache.num_available == 3
    cache.audit([held, new])


def test_searching_changes_nothing() -> None:
    cache = KVCache(4, SIZE)
    first = computed(cache, "first", list(range(8)))
    cache.free(first)
    state = (cache.num_used, cache.num_cached, cache.num_free, cache.prefix_queries, cache.prefix_hits)
    sequence = Sequence("second", list(range(9)))
    assert len(cache.find(sequence).nodes) == 2
    assert state == (
        cache.num_used,
        cache.num_cached,
        cache.num_free,
        cache.prefix_queries,
        cache.prefix_hits,
    )
    assert sequence.num_computed_tokens == 0


def test_blocks_come_in_the_order_that_was_asked_for() -> None:
    order = list(range(50))
    random.Random(1).shuffle(order)
    cache = KVCache(50, SIZE, block_order=order)
    assert ids(computed(cache, "first", list(range(40)))) == order[:10]


def test_two_caches_know_nothing_of_each_other() -> None:
    one, other = KVCache(10, SIZE), KVCache(10, SIZE)
    computed(one, "first", list(range(8)))
    assert other.adopt(Sequence("second", list(range(9)))) == 0
    assert other.num_free == 10
