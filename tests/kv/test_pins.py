"""Prefixes that nothing takes."""

from __future__ import annotations

from octavo.kv.kv_cache import KVCache
from octavo.kv.prefix_index import Namespace
from octavo.scheduler.sequence import Sequence
from paged_model import PagedServer, solo

SYSTEM = list(range(40))


def server_with_pin(num_blocks: int) -> PagedServer:
    server = PagedServer(num_blocks, 4)
    server.add("first", SYSTEM, 1)
    server.run()
    assert server.cache.pin(SYSTEM) == 40
    server.audit()
    return server


def test_a_pinned_prefix_outlives_any_number_of_others() -> None:
    server = server_with_pin(30)
    for number in range(20):
        server.add(f"{number}", list(range(1000 * number + 100, 1000 * number + 160)), 4)
        server.run()
    again = server.add("again", [*SYSTEM, 7], 1)
    server.run()
    assert again.num_cached_tokens == 40


def test_a_full_pool_takes_everything_but_what_is_pinned() -> None:
    server = server_with_pin(30)
    assert (server.cache.num_pinned, server.cache.num_used) == (10, 10)
    assert server.scheduler.limit == 80
    prompts = [list(range(1000 * number, 1000 * number + 30)) for number in range(1, 5)]
    streams = [server.add(f"{number}", prompt, 45) for number, prompt in enumerate(prompts)]
    server.run()
    assert server.scheduler.num_preemptions > 0
    assert [stream.token_ids for stream in streams] == [solo(prompt, 45) for prompt in prompts]
    assert server.cache.num_used == 10


def test_only_whole_known_blocks_are_pinned_and_under_their_salt() -> None:
    cache = KVCache(20, 4)
    sequence = Sequence("", list(range(10)), namespace=Namespace(salt="mine"))
    cache.allocate(sequence, 10)
    cache.register(sequence, 10)
    cache.commit()
    sequence.num_computed_tokens = 10
    cache.free(sequence)
    assert cache.pin(list(range(10))) == 0
    assert cache.pin(list(range(30)), Namespace(salt="mine")) == 8
    assert cache.pin(list(range(4)), Namespace(salt="mine")) == 4
    cache.audit([])
    assert (cache.num_pinned, cache.num_used, cache.num_shared) == (2, 2, 1)
    cache.unpin_all()
    cache.audit([])
    assert (cache.num_pinned, cache.num_used, cache.num_cached) == (0, 0, 3)
