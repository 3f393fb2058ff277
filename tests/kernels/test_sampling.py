"""The native Sampler against an independent float64 pipeline, and the promises it makes beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling_reference import (
    Rules,
    best_first,
    chi_square,
    chi_square_bound,
    edited_logits,
    log_softmax,
    philox4x32,
    random_number,
    survivors,
)
from octavo.kernels import Sampler
from octavo.kernels._native import exp_negative, log_positive

Logits = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]

BLOCK = 64  # logits the native code looks at together: sizes around its multiples are the interesting ones


def normal_logits(size: int, *, seed: int = 0, spread: float = 2.0) -> Logits:
    return (np.random.default_rng(seed).normal(size=size) * spread).astype(np.float32)


def native(vocab_size: int, rules: Rules | None = None, **more: Any) -> Sampler:
    return Sampler(vocab_size, **asdict(rules or Rules()), **more)


def draw(sampler: Sampler, logits: Logits, count: int) -> list[int]:
    return [sampler.sample(logits).token_id for _ in range(count)]


def support(sampler: Sampler, logits: Logits) -> list[int]:
    return [int(token_id) for token_id in sampler.distribution(logits)[0]]


# What may be drawn, and how likely it is.


@st.composite
def rules_and_logits(draw_from: st.DrawFn) -> tuple[Rules, Logits, list[int], list[int]]:
    """Logits on a grid of 1/16, penalties that are sums of powers of two: edits are exact, ties are many."""
    size = draw_from(st.sampled_from([1, 2, 63, 64, 65, 130, 1000, 4099]))
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32)))
    logits = (np.round(rng.normal(size=size) * draw_from(st.sampled_from([0, 1, 16, 64]))) / 16).astype(
        np.float32
    )
    logits[rng.random(size) < draw_from(st.sampled_from([0.0, 0.1]))] = -np.inf
    logits[rng.integers(size)] = 0.0
    ids = st.integers(0, size - 1)
    rules = Rules(
        temperature=draw_from(st.sampled_from([0.25, 0.7, 1.0, 1.5])),
        top_k=draw_from(st.sampled_from([0, 1, 2, 17, 64, 500, size, 5000])),
        top_p=draw_from(st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])),
        min_p=draw_from(st.sampled_from([0.0, 1e-20, 1e-4, 0.05, 1.0])),
        repetition_penalty=draw_from(st.sampled_from([0.5, 1.0, 2.0])),
        presence_penalty=draw_from(st.sampled_from([-0.5, 0.0, 1.5])),
        frequency_penalty=draw_from(st.sampled_from([-0.25, 0.0, 0.5])),
        logit_bias=draw_from(st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 0.25, 3.0]), max_size=4)),
    )
    prompt = draw_from(st.lists(ids, max_size=8))
    output = draw_from(st.lists(ids, max_size=8))
    return rules, logits, prompt, output


@settings(max_examples=300)
@given(rules_and_logits())
def test_distribution_is_the_float64_pipelines(case: tuple[Rules, Logits, list[int], list[int]]) -> None:
    rules, logits, prompt, output = case
    sampler = native(len(logits), rules)
    sampler.observe_prompt(np.array(prompt, dtype=np.int32))
    for token_id in output:  # the only token that may be drawn, whatever the penalties
        forced = np.full(len(logits), -np.inf, dtype=np.float32)
        forced[token_id] = 0.0
        assert sampler.sample(forced).token_id == token_id

    edited = edited_logits(logits, rules, prompt, output)
    token_ids, probabilities = sampler.distribution(logits)
    got = np.zeros(len(logits))
    got[token_ids] = probabilities
    kept, expected = survivors(edited, rules)

    # The same prefix of the same order. Where it is a matter of the seventh digit whether the last token
    # belongs (by its share of top_p, its min_p, or its being negligible), either answer is right.
    order = best_first(edited)
    assert sorted(token_ids) == sorted(order[: len(token_ids)])
    if len(token_ids) != len(kept):
        assert abs(len(token_ids) - len(kept)) == 1
        assert len(kept) != rules.top_k
        loosened, tightened = (
            survivors(
                edited,
                Rules(
                    temperature=rules.temperature,
                    top_k=rules.top_k,
                    top_p=min(1.0, rules.top_p * (1 + slack)),
                    min_p=rules.min_p * (1 - slack),
                ),
            )[0]
            for slack in (1e-6, -1e-6)
        )
        assert len(token_ids) in (len(loosened), len(tightened))
        return
    want = np.zeros(len(logits))
    want[kept] = expected
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-11)
    assert sampler.sample(logits).token_id in set(kept.tolist())


@pytest.mark.parametrize(
    "rules",
    [
        Rules(),
        Rules(temperature=0.7),
        Rules(temperature=1.3, top_k=40),
        Rules(top_p=0.8),
        Rules(min_p=0.05),
        Rules(temperature=0.9, top_k=100, top_p=0.95, min_p=0.01),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_their_probability_says(rules: Rules) -> None:
    logits = normal_logits(300, spread=1.5)
    kept, probabilities = survivors(edited_logits(logits, rules), rules)
    drawn = np.bincount(draw(native(300, rules, seed=11), logits, 40_000), minlength=300)

    assert drawn[kept].sum() == 40_000
    statistic, degrees = chi_square(drawn[kept], probabilities)
    assert statistic < chi_square_bound(degrees)


def test_every_token_of_a_large_vocabulary_can_be_drawn_where_it_lies() -> None:
    size = 262_144
    for token_id in (0, 1, BLOCK - 1, BLOCK, 131_071, size - BLOCK, size - 1):
        logits = np.zeros(size, dtype=np.float32)
        logits[token_id] = 60.0
        for rules in (Rules(), Rules(top_k=20), Rules(top_p=0.9), Rules(min_p=0.1), Rules(temperature=0.0)):
            assert native(size, rules).sample(logits).token_id == token_id


@pytest.mark.parametrize(
    "rules", [Rules(top_k=40), Rules(top_p=0.6), Rules(min_p=0.2), Rules(top_k=700)], ids=str
)
def test_a_cut_draws_exactly_as_if_the_others_were_not_there(rules: Rules) -> None:
    logits = normal_logits(5000)
    alone = np.full_like(logits, -np.inf)
    kept = support(native(5000, rules), logits)
    alone[kept] = logits[kept]
    assert 1 < len(kept) < 5000
    assert draw(native(5000, rules, seed=3), logits, 200) == draw(native(5000, seed=3), alone, 200)


def test_extreme_temperatures_end_in_ties_and_in_uniformity() -> None:
    logits = np.array([2.0, 3.0, -np.inf, 3.0, 2.999], dtype=np.float32)
    cold_ids, cold = native(5, Rules(temperature=1e-300)).distribution(logits)
    assert (list(cold_ids), list(cold)) == ([1, 3], [0.5, 0.5])
    hot_ids, hot = native(5, Rules(temperature=1e300)).distribution(logits)
    assert (list(hot_ids), list(hot)) == ([0, 1, 3, 4], [0.25] * 4)


def test_the_largest_finite_logits_are_only_logits() -> None:
    largest = np.finfo(np.float32).max
    logits = np.array([-largest, largest, 0.0, largest], dtype=np.float32)
    assert support(native(4), logits) == [1, 3]
    assert native(4, Rules(temperature=0.0)).sample(logits).token_id == 1


# Random numbers.


def test_philox_agrees_with_its_published_answers() -> None:
    ones = 0xFFFFFFFF
    assert philox4x32([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
@pytest.mark.parametrize("choice_index", [0, 1, 2**31 - 1])
def test_draws_are_philox_of_seed_choice_and_position(seed: int, choice_index: int) -> None:
    # Equal logits: each of 4,096 tokens owns the same share of the 64-bit range, in id order.
    sampler = native(4096, seed=seed, choice_index=choice_index)
    expected = [random_number(seed, choice_index, position) >> 52 for position in range(50)]
    assert draw(sampler, np.zeros(4096, dtype=np.float32), 50) == expected


def test_a_draw_does_not_depend_on_what_was_drawn_before() -> None:
    logits = normal_logits(1000)
    history = native(1000, Rules(top_k=50), seed=7)
    draw(history, normal_logits(1000, seed=9), 20)
    plain = native(1000, Rules(top_k=50), seed=7)
    assert draw(plain, logits, 40)[20:] == draw(history, logits, 20)


def test_looking_at_the_distribution_changes_no_draw() -> None:
    logits = normal_logits(1000)
    rules = Rules(repetition_penalty=1.2, top_p=0.9)
    watched, plain = native(1000, rules, seed=5), native(1000, rules, seed=5)
    for _ in range(30):
        watched.distribution(normal_logits(1000, seed=1))
        assert watched.sample(logits).token_id == plain.sample(logits).token_id


@pytest.mark.parametrize(
    ("first", "second", "shift"),
    [
        ({"seed": 4}, {"seed": 4}, 1),
        ({"seed": 4}, {"seed": 4, "choice_index": 1}, 0),
        ({"seed": 4}, {"seed": 5}, 0),
        ({"seed": 4}, {"seed": 4 + 2**32}, 0),
    ],
    ids=["next position", "next choice", "next seed", "seed's upper half"],
)
def test_neighbouring_draws_are_independent(
    first: dict[str, Any], second: dict[str, Any], shift: int
) -> None:
    equal = np.zeros(8, dtype=np.float32)
    a = draw(native(8, **first), equal, 20_000)
    b = draw(native(8, **second), equal, 20_000 + shift)[shift:]
    pairs = np.bincount(np.array(a) * 8 + np.array(b), minlength=64)
    statistic, degrees = chi_square(pairs, np.full(64, 1 / 64))
    assert statistic < chi_square_bound(degrees)


def test_seeded_tokens_are_the_same_on_every_machine() -> None:
    # Logits without a rounding: any change of weights, order or random numbers changes this list.
    logits = ((np.arange(3000) * 7919 % 3001) / 512).astype(np.float32)
    rules = Rules(temperature=0.75, top_k=900, top_p=0.97, min_p=0.001, repetition_penalty=1.5)
    assert draw(native(3000, rules, seed=2024, choice_index=3), logits, 12) == [
        706,
        2320,
        2395,
        413,
        2160,
        277,
        2907,
        1346,
        1412,
        1628,
        443,
        2431,
    ]


def test_samplers_in_parallel_threads_do_not_disturb_each_other() -> None:
    logits = normal_logits(50_000)
    rules = Rules(top_p=0.9, repetition_penalty=1.1)

    def stream(seed: int) -> list[int]:
        return draw(native(50_000, rules, seed=seed), logits, 40)

    alone = [stream(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(stream, range(4))) == alone


# Ties.


@pytest.mark.parametrize("equals", [[0], [63, 64], [64, 127, 128], [5, 700], [299, 999], [999]])
def test_greedy_takes_the_lowest_of_equals(equals: list[int]) -> None:
    logits = normal_logits(1000)
    logits[equals] = 100.0
    assert native(1000, Rules(temperature=0.0)).sample(logits).token_id == equals[0]


def test_zero_and_minus_zero_are_equals() -> None:
    logits = np.full(100, -1.0, dtype=np.float32)
    logits[[7, 80]] = -0.0
    logits[[8, 81]] = 0.0
    assert native(100, Rules(temperature=0.0)).sample(logits).token_id == 7
    assert support(native(100, Rules(top_k=3)), logits) == [7, 8, 80]


@pytest.mark.parametrize("count", [1, 5, 63, 64, 65, 128, 200, 299])
def test_cuts_among_equals_keep_the_lowest_ids(count: int) -> None:
    # 0 is the value at which a compare that flushes denormals would go wrong.
    for value in (0.0, -3.5, 8.0):
        equal = np.full(300, value, dtype=np.float32)
        assert support(native(300, Rules(top_k=count)), equal) == list(range(count))
        nucleus = native(300, Rules(top_p=(count - 0.5) / 300))
        assert support(nucleus, equal) == list(range(count))


def test_top_p_of_what_top_k_leaves() -> None:
    equal = np.zeros(300, dtype=np.float32)
    assert support(native(300, Rules(top_k=100, top_p=0.495)), equal) == list(range(50))


# Penalties, bias and bans.


def test_penalties_kept_from_step_to_step_equal_penalties_from_scratch() -> None:
    rules = Rules(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 500, size=60).tolist()
    sampler = native(500, rules, seed=1)
    sampler.observe_prompt(np.array(prompt[:40], dtype=np.int32))
    sampler.observe_prompt(np.array(prompt[40:], dtype=np.int32))
    output: list[int] = []
    for step in range(120):
        logits = normal_logits(500, seed=step, spread=1.0)
        logits[:20] += 3.0  # some tokens come back again and again
        kept, expected = survivors(edited_logits(logits, rules, prompt, output), rules)
        token_ids, probabilities = sampler.distribution(logits)
        want = dict(zip(kept.tolist(), expected, strict=True))
        np.testing.assert_allclose(probabilities, [want[int(i)] for i in token_ids], rtol=1e-5, atol=1e-11)
        output.append(sampler.sample(logits).token_id)
    assert len(set(output)) < len(output)


def test_the_prompt_counts_for_the_repetition_penalty_only() -> None:
    logits = np.array([1.0, 2.0, -1.0, 0.5], dtype=np.float32)
    prompt = np.array([1, 1, 2], dtype=np.int32)
    untouched = native(4, Rules(presence_penalty=2.0, frequency_penalty=2.0))
    untouched.observe_prompt(prompt)
    np.testing.assert_array_equal(untouched.distribution(logits)[1], native(4).distribution(logits)[1])
    penalised = native(4, Rules(repetition_penalty=2.0))
    penalised.observe_prompt(prompt)
    halved = np.array([1.0, 1.0, -2.0, 0.5], dtype=np.float32)
    np.testing.assert_array_equal(penalised.distribution(logits)[1], native(4).distribution(halved)[1])


def test_stop_tokens_are_banned_for_exactly_min_tokens_positions() -> None:
    logits = np.array([0.0, 50.0, 1.0, 49.0], dtype=np.float32)
    greedy = native(4, Rules(temperature=0.0, min_tokens=3, stop_token_ids=[1, 3]))
    assert draw(greedy, logits, 5) == [2, 2, 2, 1, 1]


def test_bias_outweighs_and_bans_hold_against_bias() -> None:
    logits = np.array([5.0, 0.0, 0.0], dtype=np.float32)
    assert native(3, Rules(temperature=0.0, logit_bias={2: 5.5})).sample(logits).token_id == 2
    banned = Rules(temperature=0.0, logit_bias={2: 100.0}, min_tokens=1, stop_token_ids=[2])
    assert native(3, banned).sample(logits).token_id == 0


def test_logits_of_the_caller_are_never_written() -> None:
    logits = normal_logits(200)
    before = logits.copy()
    rules = Rules(repetition_penalty=2.0, logit_bias={3: 9.0}, min_tokens=5, stop_token_ids=[4], top_k=20)
    draw(native(200, rules, num_logprobs=5), logits, 10)
    np.testing.assert_array_equal(logits, before)


# Rows that cannot be used.


@pytest.mark.parametrize(
    "rules", [Rules(temperature=0.0), Rules(), Rules(top_k=5), Rules(top_p=0.5)], ids=str
)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 3, 17, 63, 64, 191, 192, 199])
def test_a_non_finite_logit_fails_the_row_and_not_the_stream(rules: Rules, bad: float, where: int) -> None:
    logits = normal_logits(200)
    broken = logits.copy()
    broken[where] = bad
    sampler = native(200, rules, num_logprobs=2)
    failed = sampler.sample(broken)
    assert (failed.token_id, failed.top_logprobs) == (-1, [])
    assert len(sampler.distribution(broken)[0]) == 0
    assert 0 <= sampler.sample(logits).token_id < 200


def test_a_ban_does_not_hide_a_broken_logit() -> None:
    for bad in (np.nan, np.inf):
        logits = np.array([0.0, bad, 1.0], dtype=np.float32)
        assert native(3, Rules(min_tokens=1, stop_token_ids=[1])).sample(logits).token_id == -1


def test_nothing_left_to_draw_is_said() -> None:
    nothing = np.full(70, -np.inf, dtype=np.float32)
    all_banned = Rules(min_tokens=1, stop_token_ids=range(70))
    for temperature in (0.0, 1.0):
        assert native(70, Rules(temperature=temperature)).sample(nothing).token_id == -1
    sampler = native(70, all_banned)
    assert sampler.sample(normal_logits(70)).token_id == -1
    assert sampler.sample(normal_logits(70)).token_id >= 0  # the ban ended with its position


def test_minus_infinity_is_a_ban() -> None:
    logits = np.full(500, -np.inf, dtype=np.float32)
    logits[[77, 401]] = [1.0, 1.5]
    for rules in (Rules(), Rules(top_k=10), Rules(top_p=0.99), Rules(temperature=100.0)):
        assert support(native(500, rules), logits) == [77, 401]


# Log-probabilities.


@pytest.mark.parametrize("size", [1, 50, 64, 1000, 49_152])
@pytest.mark.parametrize(
    "rules", [Rules(), Rules(temperature=0.0), Rules(top_k=3, repetition_penalty=1.7)], ids=str
)
def test_logprobs_are_those_of_the_raw_logits(size: int, rules: Rules) -> None:
    logits = normal_logits(size, spread=4.0)
    expected = log_softmax(logits)
    sampler = native(size, rules, num_logprobs=min(20, size))
    sampler.observe_prompt(np.array([0, size - 1], dtype=np.int32))
    for _ in range(3):
        sampled = sampler.sample(logits)
        assert sampled.logprob == pytest.approx(expected[sampled.token_id], abs=3e-6)
        assert [i for i, _ in sampled.top_logprobs] == best_first(logits.astype(np.float64))[:20].tolist()
        for token_id, logprob in sampled.top_logprobs:
            assert logprob == pytest.approx(expected[token_id], abs=3e-6)


def test_logprobs_hold_where_bias_turns_the_row_upside_down() -> None:
    logits = np.array([20.0, 0.0, 19.0, -20.0], dtype=np.float32)
    expected = log_softmax(logits)
    rules = Rules(temperature=0.0, logit_bias={0: -100.0, 2: -100.0, 3: 100.0})
    sampled = native(4, rules, num_logprobs=4).sample(logits)
    assert sampled.token_id == 3
    assert sampled.logprob == pytest.approx(expected[3], abs=1e-5)
    assert [token_id for token_id, _ in sampled.top_logprobs] == [0, 2, 1, 3]
    assert [logprob for _, logprob in sampled.top_logprobs] == pytest.approx(expected[[0, 2, 1, 3]], abs=1e-5)


def test_logprobs_of_equals_list_the_lowest_ids_and_never_minus_infinity() -> None:
    logits = np.full(200, -np.inf, dtype=np.float32)
    logits[[190, 5, 70]] = 1.0
    top = native(200, num_logprobs=2).sample(logits).top_logprobs
    assert [token_id for token_id, _ in top] == [5, 70]
    assert [logprob for _, logprob in top] == pytest.approx([-np.log(3)] * 2)
    assert [i for i, _ in native(200, num_logprobs=20).sample(logits).top_logprobs] == [5, 70, 190]


def test_logprobs_come_only_when_asked_for() -> None:
    logits = normal_logits(100)
    none = native(100, seed=1).sample(logits)
    own = native(100, seed=1, num_logprobs=0).sample(logits)
    assert (none.logprob, none.top_logprobs) == (0.0, [])
    assert own.logprob < 0.0
    assert own.top_logprobs == []
    assert none.token_id == own.token_id


# The polynomials.


def test_exp_stays_within_its_bound_of_float64() -> None:
    x = np.concatenate([np.linspace(-87, 0, 400_001), -np.logspace(-30, 1, 2_000)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(exp_negative(x) - exact) / exact) < 2e-7
    assert exp_negative(np.array([0.0, -0.0], dtype=np.float32)).tolist() == [1.0, 1.0]
    assert exp_negative(np.array([-1e30, -np.inf], dtype=np.float32)).max() < 2e-38


def test_log_stays_within_its_bound_of_float64() -> None:
    x = np.concatenate([np.logspace(-300, 300, 5_001), np.linspace(0.4, 3.0, 5_001), [1.0, 2.0, 0.5]])
    exact = np.log(x)
    got = np.array([log_positive(float(value)) for value in x])
    assert np.max(np.abs(got - exact) / np.maximum(1.0, np.abs(exact))) < 1e-15
    assert log_positive(1.0) == 0.0


# Mistakes.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be between 1 and 4194304, got 0"),
        ({"vocab_size": 2**23}, "vocab_size must be between 1 and 4194304, got 8388608"),
        ({"temperature": -1.0}, "temperature must be finite and at least 0, got -1"),
        ({"temperature": np.nan}, "temperature must be finite and at least 0, got nan"),
        ({"temperature": np.inf}, "temperature must be finite and at least 0, got inf"),
        ({"top_k": -1}, r"top_k must be at least 0 \(0: off\), got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"min_p": -0.25}, "min_p must be between 0 and 1, got -0.25"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be between 0.01 and 100, got 0"),
        ({"presence_penalty": np.nan}, "presence_penalty must be between -100 and 100, got nan"),
        ({"frequency_penalty": 1e9}, r"frequency_penalty must be between -100 and 100, got 1e\+09"),
        ({"choice_index": -1}, "choice_index must be between 0 and 2147483647, got -1"),
        (
            {"num_logprobs": 101},
            r"num_logprobs must be between -1 \(none\) and the vocabulary's size of 100, got 101",
        ),
        ({"min_tokens": -5}, "min_tokens must be at least 0, got -5"),
        (
            {"logit_bias": {100: 1.0}},
            "logit_bias keys must be token ids below the vocabulary's size of 100, got 100",
        ),
        ({"logit_bias": {1: np.inf}}, "logit_bias values must be between -1000 and 1000, got inf"),
        (
            {"stop_token_ids": [-1]},
            "stop_token_ids must be token ids below the vocabulary's size of 100, got -1",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_out_of_range_is_refused_with_its_number(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Sampler(**{"vocab_size": 100, **options})


def test_logits_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="logits must have the vocabulary's size of 100, got 99"):
        native(100).sample(normal_logits(99))


def test_a_prompt_with_a_foreign_token_is_refused_whole() -> None:
    logits = normal_logits(100)
    sampler = native(100, Rules(repetition_penalty=2.0))
    with pytest.raises(
        ValueError, match="prompt token_ids must be token ids below the vocabulary's size of 100, got 100"
    ):
        sampler.observe_prompt(np.array([1, 2, 100], dtype=np.int32))
    np.testing.assert_array_equal(sampler.distribution(logits)[1], native(100).distribution(logits)[1])
