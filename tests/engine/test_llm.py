"""Octavo without a server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import octavo
from engine.reading import wait_until
from octavo import LLM, SamplingParams
from octavo.engine.request import RequestRefused
from octavo.kv.layout import KV_DTYPES

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model_path: Path) -> Iterator[LLM]:
    with LLM(tiny_model_path, num_blocks_override=256) as made:
        yield made


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"and the {word}" for word in ("user", "song", "wind", "water", "stone")]
    together = llm.generate(prompts, GREEDY)
    assert [result.prompt for result in together] == prompts
    for prompt, result in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert result.prompt_token_ids == llm.tokenizer.encode(prompt)
        assert result.outputs == alone.outputs
        (choice,) = result.outputs
        assert len(choice.token_ids) == 24
        assert choice.text == llm.tokenizer.decode(choice.token_ids)
        assert (choice.finish_reason, choice.stop_reason, choice.logprobs) == ("length", None, None)


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    token_ids = llm.tokenizer.encode("and the user")
    (by_text,), (by_ids,) = llm.generate("and the user", GREEDY), llm.generate([token_ids], GREEDY)
    assert by_ids.prompt is None
    assert by_ids.outputs == by_text.outputs


def test_more_tokens_than_a_stream_may_hold_unread_still_run_together(llm: LLM) -> None:
    """Nobody waits for the first prompt's reader before the others may go on."""
    steps = llm.engine.metrics.step_times.num_steps
    long = SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)
    results = llm.generate(["a", "b", "c"], long)
    assert [len(result.outputs[0].token_ids) for result in results] == [600] * 3
    assert llm.engine.metrics.step_times.num_steps - steps < 700


def test_choices_differ_and_repeat_with_their_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=16, ignore_eos=True)
    (first,), (second,) = llm.generate("the", params), llm.generate("the", params)
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert first.outputs == second.outputs
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 3


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    results = llm.generate(["the", "the"], [GREEDY, short])
    assert results[1].outputs[0].token_ids == results[0].outputs[0].token_ids[:3]
    with pytest.raises(ValueError, match="1 sampling params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_a_stop_string_cuts_the_text_at_the_same_place_however_tokens_arrive(llm: LLM) -> None:
    (whole,) = llm.generate("the user", GREEDY)
    text = whole.outputs[0].text
    stop = text[9:12]
    place = text.index(stop)
    for _ in range(3):
        (cut,) = llm.generate("the user", SamplingParams(temperature=0.0, max_tokens=24, stop=(stop,)))
        choice = cut.outputs[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (text[:place], "stop", stop)
        assert choice.token_ids == whole.outputs[0].token_ids[: len(choice.token_ids)]
        assert stop in llm.tokenizer.decode(choice.token_ids)
        assert stop not in llm.tokenizer.decode(choice.token_ids[:-1])
    wait_until(lambda: llm.engine.num_open == 0)


def test_a_stop_string_within_min_tokens_is_ordinary_text(llm: LLM) -> None:
    (whole,) = llm.generate("the user", GREEDY)
    early = llm.tokenizer.decode(whole.outputs[0].token_ids[2:4])
    params = SamplingParams(temperature=0.0, max_tokens=6, min_tokens=6, ignore_eos=True, stop=(early,))
    (result,) = llm.generate("the user", params)
    assert result.outputs[0].token_ids == whole.outputs[0].token_ids[:6]
    assert result.outputs[0].text == llm.tokenizer.decode(whole.outputs[0].token_ids[:6])
    assert early in result.outputs[0].text


def test_a_stop_token_is_reported_and_not_shown(llm: LLM) -> None:
    (whole,) = llm.generate("the user", GREEDY)
    token_ids = whole.outputs[0].token_ids
    stop = token_ids[5]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop_token_ids=(stop,))
    (cut,) = llm.generate("the user", params)
    place = token_ids.index(stop)
    assert cut.outputs[0].token_ids == token_ids[: place + 1]
    assert cut.outputs[0].text == llm.tokenizer.decode(token_ids[:place])
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


def test_log_probabilities_name_the_sampled_token_first(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
    (result,) = llm.generate("the", params)
    choice = result.outputs[0]
    assert choice.logprobs is not None
    assert [next(iter(entry)) for entry in choice.logprobs] == choice.token_ids
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert len(entry) == 3, "greedy: the sampled token is the likeliest"
        assert entry[token_id].logprob == max(other.logprob for other in entry.values()) < 0
        assert entry[token_id].decoded_token == llm.tokenizer.token_text(token_id)
    total = sum(entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == pytest.approx(total)


def test_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    rude = [{"role": "system", "content": "Be rude."}, *hello]
    both = llm.chat([hello, rude], GREEDY)
    assert both[0].prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert llm.chat(hello, GREEDY)[0].outputs == both[0].outputs
    assert len(both) == 2


def test_one_refused_prompt_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(RequestRefused):
        llm.generate(["fits", "and the " * 5000], GREEDY)
    (after,) = llm.generate("fits", GREEDY)
    assert after.outputs[0].finish_reason == "length"
    wait_until(lambda: llm.engine.num_open == 0)


def test_it_works_inside_a_running_event_loop(llm: LLM) -> None:
    """As in a notebook."""

    async def cell() -> str:
        return llm.generate("the", GREEDY)[0].outputs[0].text

    assert asyncio.run(cell()) == llm.generate("the", GREEDY)[0].outputs[0].text


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_it_takes_every_field_of_the_engine(tiny_model_path: Path, dtype: str) -> None:
    given: dict[str, Any] = {
        "num_blocks_override": 8,
        "kv_cache_dtype": dtype,
        "shared_prefix_attention": False,
    }
    with LLM(tiny_model_path, **given) as llm:
        assert llm.engine.memory.kv_dtype == dtype
        assert not llm.model.shared_prefix_attention
        assert len(llm.generate("the", GREEDY)[0].outputs[0].token_ids) == 24
    with pytest.raises(ValueError, match="kv_cache_dtype must be f16 or q8, not 'f32'"):
        LLM(tiny_model_path, kv_cache_dtype="f32")


def test_closing_twice_is_harmless_and_frees_the_model(tiny_model_path: Path) -> None:
    llm = LLM(tiny_model_path, num_blocks_override=8)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        _ = llm.model.buffer_bytes


def test_the_package_loads_nothing_until_it_is_asked() -> None:
    code = "import sys, octavo; print(sorted({'numpy', 'octavo.engine', 'octavo.llm'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    assert octavo.__version__
    assert "LLM" in dir(octavo)
    with pytest.raises(AttributeError, match="nothing"):
        _ = octavo.nothing


def test_what_only_loading_reads_is_not_kept(llm: LLM) -> None:
    """Tokenizer and template have what they need; the merges of a large vocabulary are tens of megabytes."""
    assert llm.model.metadata == {}
    assert llm.tokenizer.decode(llm.tokenizer.encode("and the user")) == "and the user"
