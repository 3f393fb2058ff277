"""SamplingParams, field by field: what it takes, what it refuses and how, and the Sampler it makes."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest

from octavo.engine.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    InvalidParameter,
    SamplingParams,
)

VOCAB = 300


def refusal(**fields: Any) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**fields)
    return caught.value


def tokens(params: SamplingParams, count: int = 20, **more: Any) -> list[int]:
    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    sampler = params.make_sampler(VOCAB, **more)
    return [sampler.sample(logits).token_id for _ in range(count)]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"n": 128},
        {"temperature": 0},
        {"temperature": 5.0},
        {"temperature": 1e300},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"top_k": 1},
        {"top_k": 2**31 - 1},
        {"min_p": 0},
        {"min_p": 1},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
        {"presence_penalty": -2},
        {"frequency_penalty": 2},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": 1},
        {"max_tokens": 10**9},
        {"min_tokens": 5},
        {"min_tokens": 5, "max_tokens": 5},
        {"stop": "a" * MAX_STOP_STRING_LENGTH},
        {"stop": ["x"] * MAX_STOP_STRINGS},
        {"stop_token_ids": list(range(MAX_STOP_TOKEN_IDS))},
        {"logprobs": 0},
        {"logprobs": 20},
        {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES), -100)},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_the_ends_of_every_range_are_taken(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n must be an integer from 1 to 128, got 0"),
        ({"n": 129}, "n must be an integer from 1 to 128, got 129"),
        ({"temperature": -1}, "temperature must be a finite number of at least 0, got -1"),
        ({"temperature": math.nan}, "temperature must be a finite number of at least 0, got nan"),
        ({"temperature": math.inf}, "temperature must be a finite number of at least 0, got inf"),
        ({"temperature": "hot"}, "temperature must be a finite number of at least 0, got 'hot'"),
        ({"temperature": None}, "temperature must be a finite number of at least 0, got None"),
        ({"temperature": True}, "temperature must be a finite number of at least 0, got True"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, got 0"),
        ({"top_p": 1.01}, "top_p must be a number above 0 and at most 1, got 1.01"),
        ({"top_p": math.nan}, "top_p must be a number above 0 and at most 1, got nan"),
        ({"top_k": -2}, "top_k must be an integer of at least 1, or 0 or -1 (off), got -2"),
        ({"top_k": 2**31}, "top_k must be an integer of at least 1, or 0 or -1 (off), got 2147483648"),
        ({"top_k": 4.0}, "top_k must be an integer of at least 1, or 0 or -1 (off), got 4.0"),
        ({"min_p": -0.1}, "min_p must be a number from 0 to 1, got -0.1"),
        ({"min_p": 1.5}, "min_p must be a number from 0 to 1, got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 0.01 to 100, got 0"),
        ({"repetition_penalty": 101}, "repetition_penalty must be a number from 0.01 to 100, got 101"),
        ({"presence_penalty": 2.5}, "presence_penalty must be a number from -2 to 2, got 2.5"),
        ({"presence_penalty": -math.inf}, "presence_penalty must be a number from -2 to 2, got -inf"),
        ({"frequency_penalty": -3}, "frequency_penalty must be a number from -2 to 2, got -3"),
        ({"seed": 2**63}, "seed must be a signed 64-bit integer, got 9223372036854775808"),
        ({"seed": 1.5}, "seed must be a signed 64-bit integer, got 1.5"),
        ({"seed": True}, "seed must be a signed 64-bit integer, got True"),
        ({"max_tokens": 0}, "max_tokens must be an integer from 1 to 2147483647, got 0"),
        ({"max_tokens": -1}, "max_tokens must be an integer from 1 to 2147483647, got -1"),
        ({"max_tokens": 2**31}, "max_tokens must be an integer from 1 to 2147483647, got 2147483648"),
        ({"min_tokens": -1}, "min_tokens must be an integer from 0 to 2147483647, got -1"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens must be at most max_tokens of 5, got 6"),
        ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
        ({"stop": ["a", b"b"]}, "stop must be a string or a list of strings, got b'b'"),
        ({"stop": ["x"] * 17}, "stop must hold at most 16 strings, got 17"),
        ({"stop": ["a", ""]}, "stop must hold strings of 1 to 1024 characters, got one of 0"),
        ({"stop": "a" * 1025}, "stop must hold strings of 1 to 1024 characters, got one of 1025"),
        ({"stop": "\ud800"}, r"stop must hold valid Unicode without lone surrogates, got '\ud800'"),
        ({"stop_token_ids": 7}, "stop_token_ids must be a list of token ids, got 7"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids must hold token ids of at least 0, got -1"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids must hold token ids of at least 0, got '1'"),
        ({"stop_token_ids": [0] * 129}, "stop_token_ids must hold at most 128 token ids, got 129"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
        ({"logprobs": 21}, "logprobs must be an integer from 0 to 20, got 21"),
        ({"logprobs": -1}, "logprobs must be an integer from 0 to 20, got -1"),
        ({"logprobs": True}, "logprobs must be an integer from 0 to 20, got True"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping from token ids to numbers, got [1]"),
        ({"logit_bias": {-1: 1}}, "logit_bias must hold token ids of at least 0, got -1"),
        ({"logit_bias": {"1": 1}}, "logit_bias must hold token ids of at least 0, got '1'"),
        ({"logit_bias": {1: 101}}, "logit_bias must hold token ids with numbers from -100 to 100, got 101"),
        (
            {"logit_bias": {1: math.nan}},
            "logit_bias must hold token ids with numbers from -100 to 100, got nan",
        ),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1)},
            "logit_bias must hold at most 1024 tokens, got 1025",
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_what_is_out_of_range_is_named_with_the_range_and_the_value(
    fields: dict[str, Any], message: str
) -> None:
    error = refusal(**fields)
    assert error.param == next(iter(fields))
    assert error.message == str(error) == message


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "top_k", "seed", "n"])
def test_absurd_values_make_short_messages(field: str) -> None:
    for value in (10**400, 10**5000, "x" * 10_000_000, [[1] * 1000] * 1000, b"y" * 100_000):
        error = refusal(**{field: value})
        assert error.param == field
        assert len(error.message) < 300


def test_every_field_is_checked() -> None:
    for field in dataclasses.fields(SamplingParams):
        assert refusal(**{field.name: object()}).param == field.name


def test_off_has_one_spelling_inside() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) == SamplingParams()


def test_numbers_and_lists_are_stored_in_one_form() -> None:
    numpys: dict[str, Any] = {"seed": np.int64(7), "top_p": np.float32(0.5)}
    params = SamplingParams(temperature=1, stop="END", stop_token_ids=[3], logit_bias={4: 1}, **numpys)
    assert type(params.temperature) is float
    assert type(params.seed) is int
    assert type(params.top_p) is float
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {4: 1.0}


def test_params_keep_their_own_copy_and_travel() -> None:
    bias, stop = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop, seed=1)
    bias[9], stop[0] = 5.0, "changed"
    assert params.logit_bias == {1: 2.0}
    assert params.stop == ("a",)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert hash(params) == hash(copy.copy(params))
    assert dataclasses.replace(params, seed=2).seed == 2
    with pytest.raises(InvalidParameter):
        dataclasses.replace(params, top_p=2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"stop_token_ids": [3, VOCAB]},
            "stop_token_ids must hold token ids below the vocabulary's size of 300, got 300",
        ),
        (
            {"logit_bias": {2**31 - 1: 1.0}},
            "logit_bias must hold token ids below the vocabulary's size of 300, got 2147483647",
        ),
    ],
    ids=["stop_token_ids", "logit_bias"],
)
def test_a_token_beyond_the_vocabulary_is_named(fields: dict[str, Any], message: str) -> None:
    params = SamplingParams(**fields)
    with pytest.raises(InvalidParameter) as caught:
        params.make_sampler(VOCAB)
    assert caught.value.param == next(iter(fields))
    assert caught.value.message == message


def test_a_seed_gives_the_same_tokens_and_each_choice_its_own() -> None:
    params = SamplingParams(seed=42)
    assert tokens(params) == tokens(params)
    assert tokens(params) != tokens(params, choice_index=1)


def test_without_a_seed_each_sampler_draws_its_own() -> None:
    params = SamplingParams()
    assert tokens(params, 50) != tokens(params, 50)


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"repetition_penalty": 50.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {5: 100.0}},
        {"stop_token_ids": (278,), "min_tokens": 20},
    ],
    ids=lambda field: next(iter(field)),
)
def test_every_parameter_reaches_the_sampler(field: dict[str, Any]) -> None:
    plain = tokens(SamplingParams(seed=1), 200)
    assert tokens(SamplingParams(seed=1, **field), 200) != plain


def test_min_tokens_holds_back_end_of_text_unless_it_is_ignored() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[7, 8]] = [50.0, 40.0]

    def greedy(**fields: Any) -> list[int]:
        sampler = SamplingParams(temperature=0.0, **fields).make_sampler(VOCAB, eos_token_ids={7})
        return [sampler.sample(logits).token_id for _ in range(3)]

    assert greedy() == [7, 7, 7]
    assert greedy(min_tokens=2) == [8, 8, 7]
    assert greedy(min_tokens=2, stop_token_ids=[8]) == [0, 0, 7]
    assert greedy(min_tokens=2, ignore_eos=True) == [7, 7, 7]


def test_logprobs_are_no_more_than_the_vocabulary_has() -> None:
    logits = np.zeros(4, dtype=np.float32)
    assert len(SamplingParams(logprobs=20).make_sampler(4).sample(logits).top_logprobs) == 4
    assert len(SamplingParams(logprobs=2).make_sampler(4).sample(logits).top_logprobs) == 2
    assert SamplingParams().make_sampler(4).sample(logits).top_logprobs == []
