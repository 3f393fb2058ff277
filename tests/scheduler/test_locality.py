"""Requests with a common prefix are kept together, within a quantum of service."""

from __future__ import annotations

import pytest

from octavo.scheduler.sequence import Sequence
from octavo.scheduler.share import Share
from paged_model import PagedServer

PREFIX = {name: [number * 1000 + i for i in range(160)] for number, name in enumerate("ab")}


def asks(server: PagedServer, user: str, prefix: str, number: int, *, background: bool = False) -> Sequence:
    prompt = [*PREFIX[prefix], 5000 + 10 * number]
    share = Share(user, background=background)
    return server.add(f"{user} {prefix}{number}", prompt, 2, share=share)


def order_of_first_chunks(server: PagedServer) -> list[str]:
    seen: dict[str, None] = {}
    while server.has_work:
        seen |= {chunk.sequence.sequence_id: None for chunk in server.step().chunks}
    return list(seen)


def test_of_users_with_about_equal_service_the_one_whose_prefix_is_cached_comes_first() -> None:
    server = PagedServer(12, 16, max_num_seqs=1)
    asks(server, "u0", "a", 0)
    asks(server, "u1", "b", 1)
    asks(server, "u2", "a", 2)
    asks(server, "u3", "b", 3)
    # One prefix fits beside an answer; in the order of arrival each would be computed twice.
    assert order_of_first_chunks(server) == ["u0 a0", "u2 a2", "u1 b1", "u3 b3"]
    assert server.model.num_computed < 2 * 160 + 4 * (1 + 2 + 16)


@pytest.mark.parametrize(("tokens", "preferred"), [(96, True), (400, False)])
def test_whoever_has_had_a_quantum_more_is_not_preferred_for_its_prefix(tokens: int, preferred: bool) -> None:
    server = PagedServer(60, 16, max_num_seqs=1)
    asks(server, "seeds", "a", 0)
    server.run()
    long = server.add("long", list(range(9000, 9000 + tokens)), 2, share=Share("much"))
    asks(server, "little", "b", 1)
    server.step()
    asks(server, "much", "a", 2)
    assert long.num_computed_tokens == min(tokens, 256)
    server.finish(long)
    order = ["little b1", "much a2"]
    assert order_of_first_chunks(server) == (order[::-1] if preferred else order)


def test_background_work_is_never_preferred_for_its_prefix() -> None:
    server = PagedServer(40, 16, max_num_seqs=1)
    asks(server, "seeds", "a", 0)
    server.run()
    asks(server, "night", "a", 1, background=True)
    asks(server, "day", "b", 2)
    assert order_of_first_chunks(server) == ["day b2", "night a1"]
