"""How a generation ends by itself, and which requests never begin."""

from __future__ import annotations

import pytest

from engine.fake_model import VOCAB_SIZE, FakeModel, answer, running_engine
from engine.reading import params, read
from octavo.engine.request import RequestRefused

PROMPT = [11, 12, 13, 14, 15]


def test_an_end_of_sequence_token_ends_it_and_is_not_part_of_the_text() -> None:
    expected = answer(PROMPT, 20)
    eos = expected[6]
    place = expected.index(eos)
    with running_engine(eos=frozenset({eos})) as engine:
        deltas = list(engine.submit(PROMPT, params(20)))
    assert [token for delta in deltas for token in delta.token_ids] == expected[: place + 1]
    assert [token for delta in deltas for token in delta.text_token_ids] == expected[:place]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_token_id == eos


def test_ignore_eos_goes_on() -> None:
    expected = answer(PROMPT, 20)
    with running_engine(eos=frozenset({expected[6]})) as engine:
        assert read(engine.submit(PROMPT, params(20, ignore_eos=True))) == (expected, "length")


def test_ignore_eos_still_obeys_stop_token_ids() -> None:
    expected = answer(PROMPT, 20)
    with running_engine(eos=frozenset({expected[3]})) as engine:
        asked = params(20, ignore_eos=True, stop_token_ids=(expected[6],))
        assert read(engine.submit(PROMPT, asked)) == (expected[: expected.index(expected[6]) + 1], "stop")


def test_a_stop_token_within_min_tokens_does_not_end_it() -> None:
    expected = answer(PROMPT, 20)
    asked = params(20, stop_token_ids=(expected[2], expected[9]), min_tokens=5)
    with running_engine() as engine:
        assert read(engine.submit(PROMPT, asked)) == (expected[:10], "stop")


def test_max_tokens_one_gives_one_token() -> None:
    with running_engine() as engine:
        assert read(engine.submit(PROMPT, params(1))) == (answer(PROMPT, 1), "length")


def test_what_has_ended_keeps_no_sampler() -> None:
    """A sampler holds several copies of the vocabulary, and a client may keep what has ended for long."""
    with running_engine(start=False) as engine:
        generation = engine.submit(PROMPT, params(1))
        assert generation._request.sampler is not None
        engine.start()
        read(generation)
        assert generation._request.sampler is None


@pytest.mark.parametrize("max_model_len", [64, 100, 257])
def test_without_max_tokens_it_ends_at_the_context_limit_with_length(max_model_len: int) -> None:
    with running_engine(max_model_len=max_model_len) as engine:
        token_ids, reason = read(engine.submit(PROMPT, params(None)))
    assert (token_ids, reason) == (answer(PROMPT, max_model_len - len(PROMPT)), "length")


def test_the_pool_is_a_limit_too() -> None:
    with running_engine(num_blocks_override=4) as engine:
        assert engine.memory.longest_request == 64
        token_ids, reason = read(engine.submit(PROMPT, params(None)))
    assert (token_ids, reason) == (answer(PROMPT, 64 - len(PROMPT)), "length")


@pytest.mark.parametrize("num_prompt", [255, 256, 257, 5000])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(num_prompt: int) -> None:
    model = FakeModel()
    prompt = [1] * num_prompt
    with running_engine(model, max_model_len=256) as engine:
        if num_prompt < 256:
            assert read(engine.submit(prompt, params(None))) == (answer(prompt, 1), "length")
            return
        with pytest.raises(RequestRefused) as refused:
            engine.submit(prompt, params(None))
    assert refused.value.code == "context_length_exceeded"
    assert f"{num_prompt:,}" in refused.value.message
    assert "256" in refused.value.message
    assert not model.steps


def test_max_tokens_beyond_the_limit_is_refused_with_what_is_needed_and_what_there_is() -> None:
    with running_engine(max_model_len=256) as engine:
        read(engine.submit([1] * 56, params(200)))
        with pytest.raises(RequestRefused, match=r"257 tokens are needed .*56 .*201.* 256 tokens") as refused:
            engine.submit([1] * 56, params(201))
        assert engine.num_open == 0
    assert refused.value.code == "context_length_exceeded"


def test_an_empty_prompt_is_refused() -> None:
    with running_engine() as engine, pytest.raises(RequestRefused) as refused:
        engine.submit([], params(1))
    assert refused.value.code == "empty_prompt"


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**40])
def test_a_token_outside_the_vocabulary_never_reaches_the_model(token_id: int) -> None:
    model = FakeModel()
    with running_engine(model) as engine, pytest.raises(RequestRefused, match=str(token_id)) as refused:
        engine.submit([1, token_id, 2], params(1))
    assert refused.value.code == "invalid_token"
    assert not model.steps
