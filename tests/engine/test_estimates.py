"""The two numbers that estimates of waiting are made of."""

from __future__ import annotations

import pytest

from octavo.engine.estimates import HALF_LIFE, MEAN_OVER, OUTPUT_TOKENS, Estimates


def test_before_anything_was_computed_nobody_can_tell() -> None:
    estimates = Estimates()
    assert estimates.tokens_per_second is None
    assert estimates.seconds_for(100) is None
    assert estimates.output_tokens == OUTPUT_TOKENS


def test_the_rate_is_that_of_all_recent_tokens_and_seconds() -> None:
    estimates = Estimates()
    for _ in range(10):
        estimates.step(256, 0.16)
        estimates.step(8, 0.01)
    assert estimates.tokens_per_second == pytest.approx(264 / 0.17, rel=0.02)
    assert estimates.seconds_for(1000) == pytest.approx(1000 * 0.17 / 264, rel=0.02)


def test_what_was_computed_a_half_life_ago_counts_half() -> None:
    estimates = Estimates()
    estimates.step(1000, 1.0)
    for _ in range(100):
        estimates.step(10, HALF_LIFE / 100)
    # 1,000 tokens in a second count as 500 in half a second beside 100 steps that decay as they go.
    kept = [0.5 ** (number / 100) for number in range(100)]
    tokens, seconds = 500 + 10 * sum(kept), 0.5 + HALF_LIFE / 100 * sum(kept)
    assert estimates.tokens_per_second == pytest.approx(tokens / seconds)


def test_the_length_of_answers_is_their_mean_and_follows_the_latest() -> None:
    estimates = Estimates()
    for length in (10, 20, 60):
        estimates.answered(length)
    assert estimates.output_tokens == pytest.approx(30)
    for _ in range(10 * MEAN_OVER):
        estimates.answered(500)
    assert estimates.output_tokens == pytest.approx(500, rel=0.01)
