"""The bucket of tokens a minute, with a clock that tests move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.api.key_limits import _duration, computed_tokens
from octavo.api.rate_limit import MINUTE, Reservation, TokenBucket
from octavo.engine.request import RequestStats


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def emptied(limit: int, by: int) -> tuple[TokenBucket, Clock]:
    """A bucket out of which so many tokens were computed just now."""
    clock = Clock()
    bucket = TokenBucket(limit, clock)
    bucket.charge(by)
    return bucket, clock


def test_it_is_full_at_first_and_refills_all_the_time() -> None:
    bucket, clock = emptied(600, by=0)
    assert (bucket.remaining, bucket.seconds_to_full) == (600, 0.0)
    bucket.charge(600)
    assert (bucket.remaining, bucket.seconds_to_full) == (0, 60.0)
    clock.now += 0.15
    assert bucket.remaining == 1
    clock.now += 30
    assert bucket.remaining == 301
    clock.now += 10_000
    assert bucket.remaining == 600


def test_a_request_that_is_refused_takes_nothing_and_is_let_in_after_the_seconds_it_was_told() -> None:
    bucket, clock = emptied(600, by=500)
    assert bucket.reserve(200) is None
    assert bucket.remaining == 100
    assert bucket.seconds_until(200) == pytest.approx(10)
    clock.now += bucket.seconds_until(200) - 0.01
    assert bucket.reserve(200) is None
    clock.now += 0.01
    assert bucket.reserve(200) is not None
    assert bucket.remaining == 0


def test_a_prompt_longer_than_a_minute_needs_a_whole_one_and_leaves_the_rest_as_a_debt() -> None:
    bucket, clock = emptied(600, by=0)
    reservation = bucket.reserve(1500)
    assert reservation is not None
    reservation.settle(1500)
    assert bucket.remaining == 0
    assert bucket.seconds_until(1) == pytest.approx(90.1)
    clock.now += 90
    assert bucket.reserve(1) is None
    clock.now += 1
    assert bucket.reserve(10) is not None


def test_what_the_cache_had_is_given_back_once() -> None:
    bucket, _ = emptied(600, by=0)
    reservation = bucket.reserve(500)
    assert reservation is not None
    assert bucket.reserve(200) is None, "what an open request may compute is not promised twice"
    for _ in range(2):
        reservation.settle(20)
    assert bucket.remaining == 580


def test_another_limit_keeps_the_debt_and_no_more_than_itself() -> None:
    bucket, _ = emptied(600, by=700)
    bucket.limit_to(6000)
    assert bucket.seconds_until(1) == pytest.approx(101 * 60 / 6000)
    rich, _ = emptied(600, by=0)
    rich.limit_to(10)
    assert rich.remaining == 10


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_nothing_is_a_mistake(limit: int) -> None:
    with pytest.raises(ValueError, match=str(limit)):
        TokenBucket(limit)


@given(
    limit=st.integers(1, 10_000),
    requests=st.lists(
        st.tuples(
            st.floats(0, 90, allow_nan=False),  # seconds before it comes
            st.integers(1, 20_000),  # its prompt
            st.floats(0, 1),  # of which so much is cached
            st.integers(0, 5_000),  # its output
        ),
        max_size=60,
    ),
)
def test_one_after_another_never_computes_more_than_the_bucket_the_time_and_one_debt(
    limit: int, requests: list[tuple[float, int, float, int]]
) -> None:
    """And refuses only who would have to wait, by as much as it says."""
    clock = Clock()
    bucket = TokenBucket(limit, clock)
    start, computed, largest_debt = clock.now, 0, 0
    for pause, prompt, cached, output in requests:
        clock.now += pause
        wait = bucket.seconds_until(prompt)
        reservation = bucket.reserve(prompt)
        if reservation is None:
            assert 0 < wait <= (limit + largest_debt) * MINUTE / limit + 1e-6
            continue
        assert wait <= 1e-3
        now = prompt - int(prompt * cached) + output
        reservation.settle(now)
        computed += now
        largest_debt = max(largest_debt, now - min(prompt, limit))
        assert computed <= limit + limit * (clock.now - start) / MINUTE + largest_debt + 1e-3
        assert 0 <= bucket.remaining <= limit


@given(
    limit=st.integers(1, 1000),
    events=st.lists(st.tuples(st.booleans(), st.floats(0, 30), st.integers(1, 400)), max_size=80),
)
def test_open_requests_together_are_never_promised_more_than_there_is(
    limit: int, events: list[tuple[bool, float, int]]
) -> None:
    clock = Clock()
    bucket = TokenBucket(limit, clock)
    start, given_back, promised = clock.now, 0, 0
    open_ones: list[Reservation] = []
    for ends, pause, tokens in events:
        clock.now += pause
        if ends and open_ones:
            # Ends with half of it computed.
            ended = open_ones.pop(0)
            ended.settle(ended.tokens // 2)
            given_back += ended.tokens - ended.tokens // 2
        elif (reservation := bucket.reserve(tokens)) is not None:
            open_ones.append(reservation)
            promised += reservation.tokens
        assert promised - given_back <= limit + limit * (clock.now - start) / MINUTE + 1e-3


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "0s"), (0.0001, "0.001s"), (1.25, "1.25s"), (59.9999, "1m0s"), (360.0, "6m0s"), (61.5, "1m1.5s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, said: str) -> None:
    assert _duration(seconds) == said


def test_what_was_computed_is_counted_and_not_what_was_found() -> None:
    finished = RequestStats(100, num_cached_tokens=60, num_computed_tokens=49, num_output_tokens=10)
    paused = RequestStats(100, num_cached_tokens=0, num_computed_tokens=250, num_output_tokens=10)
    left = RequestStats(100, num_cached_tokens=20, num_computed_tokens=30)
    refused = RequestStats(100)
    assert computed_tokens([finished]) == 50
    assert computed_tokens([paused]) == 110, "a pause is not the client's"
    assert computed_tokens([left]) == 30
    assert computed_tokens([refused]) == 0
    assert computed_tokens([finished, paused, left]) == 190
