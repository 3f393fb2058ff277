"""The arithmetic of service, backlog and difference, on cases made by hand."""

from __future__ import annotations

import random

import pytest

from octavo.bench.fairness import (
    NO_DIFFERENCE,
    Difference,
    Service,
    common_spans,
    jain_index,
    largest_difference,
    largest_of_all,
    vtc_bound,
)


def service(*served: tuple[float, int], weight: float = 1.0, backlogs: list[tuple[float, float]]) -> Service:
    one = Service(weight)
    for now, num_tokens in served:
        one.serve(now, num_tokens)
    one.backlogs = backlogs
    return one


def test_service_is_tokens_over_weight_summed_up() -> None:
    one = service((1.0, 10), (1.0, 20), (3.0, 6), weight=2.0, backlogs=[])
    assert list(one.times) == [1.0, 3.0]
    assert [one.upto(when) for when in (0.0, 1.0, 2.0, 3.0, 9.0)] == [0.0, 15.0, 15.0, 18.0, 18.0]
    assert Service().upto(1.0) == 0.0


def test_who_waits_is_backlogged_until_its_last_request_begins() -> None:
    one = Service()
    one.wait(1.0)
    one.wait(2.0)
    one.begin(3.0)
    one.begin(4.0)
    one.wait(4.0)  # at once: the same span
    one.begin(5.0)
    one.wait(7.0)
    one.begin(7.0)  # begins at once: no span
    one.wait(8.0)
    one.wait(8.5)
    one.end(9.0)
    assert one.backlogs == [(1.0, 5.0), (8.0, 9.0)]
    assert one.backlogged_seconds == 5.0
    with pytest.raises(AssertionError, match="nobody waits"):
        one.begin(10.0)


def test_what_comes_as_a_backlog_ends_is_served_while_backlogged() -> None:
    one = service((1.0, 10), (2.0, 10), (5.0, 10), (6.0, 10), backlogs=[(1.0, 5.0)])
    assert one.served_while_backlogged == 20.0


def test_spans_that_two_have_in_common() -> None:
    one = service(backlogs=[(0.0, 4.0), (5.0, 6.0), (8.0, 9.0)])
    other = service(backlogs=[(1.0, 2.0), (3.0, 5.5), (6.0, 8.0)])
    assert common_spans(one, other) == common_spans(other, one) == [(1.0, 2.0), (3.0, 4.0), (5.0, 5.5)]


def test_the_largest_difference_is_over_any_span_within_a_common_backlog() -> None:
    """One is ahead by 5, then the other catches up and is ahead: 12 tokens from the third second on."""
    one = service((1.0, 5), (4.0, 1), backlogs=[(0.0, 10.0)])
    other = service((2.0, 3), (3.0, 9), (11.0, 1_000), backlogs=[(0.0, 20.0)])
    assert largest_difference(one, other) == Difference(12.0, 1.0, 3.0)
    assert largest_difference(other, one) == Difference(12.0, 1.0, 3.0)
    assert largest_difference(one, service(backlogs=[])) == NO_DIFFERENCE


def test_what_is_served_at_the_beginning_of_a_span_is_not_in_it() -> None:
    one = service((1.0, 100), (2.0, 7), backlogs=[(1.0, 2.0)])
    other = service(backlogs=[(1.0, 2.0)])
    assert largest_difference(one, other) == Difference(7.0, 1.0, 2.0)


def test_weights_divide() -> None:
    """Twice the weight and twice the tokens is even."""
    one = service(*[(float(now), 2) for now in range(1, 9)], weight=2.0, backlogs=[(0.0, 9.0)])
    other = service(*[(float(now), 1) for now in range(1, 9)], backlogs=[(0.0, 9.0)])
    assert largest_difference(one, other) == NO_DIFFERENCE


def test_differences_are_those_of_every_span() -> None:
    """Against trying all of them."""
    rng = random.Random(3)
    for _ in range(20):
        two = []
        for _ in range(2):
            times = sorted(rng.sample(range(30), 10))
            spans = sorted(rng.sample(range(30), 4))
            backlogs = [(float(spans[0]), float(spans[1])), (float(spans[2]), float(spans[3]))]
            two.append(service(*[(float(now), rng.randrange(9)) for now in times], backlogs=backlogs))
        one, other = two
        expected = max(
            (
                abs(one.upto(end) - one.upto(begin) - other.upto(end) + other.upto(begin))
                for first, last in common_spans(one, other)
                for begin in range(int(first), int(last) + 1)
                for end in range(begin, int(last) + 1)
            ),
            default=0.0,
        )
        assert largest_difference(one, other).tokens == expected


def test_of_many_the_two_furthest_apart() -> None:
    many = [service((1.0, tokens), backlogs=[(0.0, 2.0)]) for tokens in (5, 9, 2, 7)]
    assert largest_of_all(many).tokens == 7.0
    assert largest_of_all(many[:1]) == NO_DIFFERENCE


def test_the_bound_of_virtual_token_counters() -> None:
    assert vtc_bound(longest_prompt=1_000, capacity_tokens=600) == 2_000
    assert vtc_bound(longest_prompt=1_000, capacity_tokens=6_000, smallest_weight=0.5) == 24_000


def test_jains_index() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain_index([1.0, 3.0]) == pytest.approx(16 / 20)
    assert jain_index([0.0, 0.0]) == 1.0
