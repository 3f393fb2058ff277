"""What a stream says and in which order, and that it says what the whole answer says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from api.scripted_engine import ScriptedEngine, deltas, failure
from api.sse import stream, text_of
from engine.reading import wait_until
from octavo.engine.request import Delta, RequestRefused, TokenLogprobs
from octavo.text.tokenizer import Tokenizer

Scripted = Callable[..., tuple[httpx.Client, ScriptedEngine]]

CHAT = {"messages": [{"role": "user", "content": "the user"}]}
HARD_TEXTS = [
    "smile 😀!",
    "日本語の文",
    "é e\u0301 ﬁ",
    "שלום עולם",
    "👩‍👩‍👧 flags 🇩🇪",
]


def test_chat_stream_is_role_then_content_then_reason_then_usage_then_done(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the other and")))
    chunks = stream(client, "/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})

    assert chunks[-1] == "[DONE]"
    *spoken, usage = chunks[:-1]
    assert spoken[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in spoken[1:-1])
    assert [chunk["choices"][0]["finish_reason"] for chunk in spoken] == [None] * (len(spoken) - 1) + [
        "length"
    ]
    assert spoken[-1]["choices"][0]["delta"] == {}
    assert [chunk["usage"] for chunk in spoken] == [None] * len(spoken)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(tokenizer.encode("the other and"))
    assert {chunk["object"] for chunk in chunks[:-1]} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1
    assert text_of(chunks) == "the other and"


def test_no_chunk_has_usage_unless_it_was_asked_for(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")))
    chunks = stream(client, "/v1/chat/completions", CHAT)
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert all(chunk["choices"] for chunk in chunks[:-1])


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("together", [1, 2, 5, 1000])
def test_characters_split_over_tokens_arrive_whole(
    scripted: Scripted, tokenizer: Tokenizer, text: str, together: int
) -> None:
    token_ids = tokenizer.encode(text)
    assert len(token_ids) > len(text) / 2
    script = [Delta(token_ids[at : at + together]) for at in range(0, len(token_ids), together)]
    script[-1].finish_reason = "length"
    client, _ = scripted(script)

    chunks = stream(client, "/v1/chat/completions", CHAT)
    whole = client.post("/v1/chat/completions", json=CHAT).json()
    assert text_of(chunks) == text
    assert whole["choices"][0]["message"]["content"] == text


def test_an_unfinished_character_at_the_end_is_shown_alike_streamed_and_whole(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    token_ids = tokenizer.encode("a😀")
    client, _ = scripted(deltas(token_ids[:-1]))
    whole = client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"]
    assert whole == tokenizer.decode(token_ids[:-1])
    assert text_of(stream(client, "/v1/chat/completions", CHAT)) == whole


@pytest.mark.parametrize("stop", ["and t", ["zzz", "and t"], [" and ", "and t"]])
def test_a_stop_string_over_several_tokens_is_never_shown(
    scripted: Scripted, tokenizer: Tokenizer, stop: str | list[str]
) -> None:
    text = "the user and the other and the"
    shown = text[: text.index("and t") if " and " not in stop else text.index(" and ")]
    client, engine = scripted(deltas(tokenizer.encode(text)))

    chunks = stream(client, "/v1/chat/completions", CHAT | {"stop": stop})
    assert text_of(chunks) == shown
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    whole = client.post("/v1/chat/completions", json=CHAT | {"stop": stop}).json()
    assert whole["choices"][0]["message"]["content"] == shown
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert [generation.cancelled for generation in engine.generations] == [["stop"], ["stop"]]


def test_text_held_back_for_a_stop_that_never_came_is_shown_at_the_end(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the user and")))
    chunks = stream(client, "/v1/chat/completions", CHAT | {"stop": "and then"})
    assert text_of(chunks) == "the user and"
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


def test_tokens_that_came_with_the_stop_string_count_only_up_to_it(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    token_ids = tokenizer.encode("the user and the other")
    client, _ = scripted([Delta(token_ids, [], "length")])
    answer = client.post("/v1/chat/completions", json=CHAT | {"stop": " and"}).json()
    assert answer["choices"][0]["message"]["content"] == "the user"
    assert answer["usage"]["completion_tokens"] == len(tokenizer.encode("the user and"))


def test_stop_strings_do_nothing_before_min_tokens(scripted: Scripted, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("the and the and the")
    client, _ = scripted(deltas(token_ids))
    body = CHAT | {"stop": "and", "min_tokens": 3, "max_tokens": 50}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "the and the "
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_the_token_that_ended_the_stream_is_counted_and_not_shown(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    token_ids = tokenizer.encode("the user and")
    script = [
        *(Delta([token_id]) for token_id in token_ids[:-1]),
        Delta(token_ids[-1:], [], "stop", token_ids[-1]),
    ]
    client, _ = scripted(script)
    answer = client.post("/v1/completions", json={"prompt": "the", "stop_token_ids": token_ids[-1:]}).json()
    assert answer["choices"][0]["text"] == tokenizer.decode(token_ids[:-1])
    assert answer["usage"]["completion_tokens"] == len(token_ids)


def test_choices_of_a_stream_interleave_and_each_ends_once(scripted: Scripted, tokenizer: Tokenizer) -> None:
    texts = ["the user", "and the other", "in"]

    def script(choice_index: int) -> list[Any]:
        return [0.01 * choice_index, *deltas(tokenizer.encode(texts[choice_index]), "stop")]

    client, engine = scripted(script)
    chunks = stream(client, "/v1/chat/completions", CHAT | {"n": 3})
    assert [text_of(chunks, index) for index in range(3)] == texts
    ended = [chunk["choices"][0]["index"] for chunk in chunks[:-1] if chunk["choices"][0]["finish_reason"]]
    assert sorted(ended) == [0, 1, 2]
    assert [generation.choice_index for generation in engine.generations] == [0, 1, 2]
    whole = client.post("/v1/chat/completions", json=CHAT | {"n": 3}).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == texts


def test_many_prompts_each_have_n_choices_in_order(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, engine = scripted(lambda choice_index: deltas(tokenizer.encode(["the", "and"][choice_index])))
    answer = client.post(
        "/v1/completions",
        json={
            "prompt": [
                "one",
                [5, 6],
            ],
            "n": 2,
        },
    )
    assert answer.status_code == 400
    answer = client.post("/v1/completions", json={"prompt": [[5, 6], [7]], "n": 2, "echo": True}).json()
    echoes = [tokenizer.decode([5, 6]), tokenizer.decode([7])]
    assert [choice["text"] for choice in answer["choices"]] == [
        echo + text for echo in echoes for text in ("the", "and")
    ]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 3
    assert [generation.prompt_token_ids for generation in engine.generations] == [[5, 6], [5, 6], [7], [7]]


def test_cached_tokens_are_those_that_no_choice_of_the_prompt_computed(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    client, engine = scripted(deltas(tokenizer.encode("the")))
    engine.cached_tokens = iter([16, 48, 48, 0, 32, 32])
    answer = client.post("/v1/completions", json={"prompt": ["the user", "and"], "n": 3}).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(
    scripted: Scripted, tokenizer: Tokenizer, n: int
) -> None:
    fine = deltas(tokenizer.encode("the user and"))

    def script(choice_index: int) -> list[Any]:
        return [*fine[:1], failure()] if choice_index == 0 else [*fine[:1], 30.0]

    client, engine = scripted(script)
    chunks = stream(client, "/v1/chat/completions", CHAT | {"n": n})
    assert chunks[-1]["error"]["code"] == "step_failed"
    assert set(chunks[-1]["error"]) == {"message", "type", "code", "param"}
    assert "[DONE]" not in chunks
    others = engine.generations[1:]
    wait_until(lambda: [generation.cancelled for generation in others] == [["abort"]] * (n - 1))


def test_the_openai_client_raises_what_broke_a_stream(scripted: Scripted, tokenizer: Tokenizer) -> None:
    http, _ = scripted([*deltas(tokenizer.encode("the user and"))[:2], failure("a step failed: boom")])
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="unused", max_retries=0)
    chunks = client.completions.create(model="tiny", prompt="the", stream=True)
    heard = "".join(next(chunks).choices[0].text for _ in range(2))
    with pytest.raises(openai.APIError, match="boom"):
        next(chunks)
    assert heard == tokenizer.decode(tokenizer.encode("the user and")[:2])


def test_a_failure_of_a_whole_answer_is_a_500_and_ends_the_other_choices(scripted: Scripted) -> None:
    client, engine = scripted(lambda index: [failure()] if index == 1 else [30.0])
    answer = client.post("/v1/chat/completions", json=CHAT | {"n": 2})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "step_failed"
    assert engine.generations[0].cancelled == ["abort"]


def test_a_refusal_half_through_the_choices_takes_back_the_first_ones(scripted: Scripted) -> None:
    client, engine = scripted([30.0])
    engine.refusal = RequestRefused("too long", code="context_length_exceeded")
    body = CHAT | {"n": 2, "stream": True, "max_completion_tokens": 300}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_completion_tokens"
    assert [generation.cancelled for generation in engine.generations] == [["abort"]]


def test_an_engine_that_shuts_down_answers_503_and_says_when_to_come_back(scripted: Scripted) -> None:
    client, engine = scripted([30.0])
    engine.refusal = RequestRefused("the server is shutting down", code="shutting_down")
    engine.generations.append(None)  # type: ignore[arg-type]
    answer = client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


def test_chat_logprobs_have_openais_shape_streamed_and_whole(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    token_ids = tokenizer.encode("the 😀")
    script = [
        Delta([token_id], [TokenLogprobs(token_id, -0.5, [(token_id, -0.5), (5, float("-inf"))])])
        for token_id in token_ids
    ]
    script[-1].finish_reason = "length"
    client, _ = scripted(script)
    body = CHAT | {"logprobs": True, "top_logprobs": 2}

    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in whole) == "the 😀".encode()
    assert whole[0]["token"] == tokenizer.token_text(token_ids[0])
    assert whole[-1]["token"] == "bytes:\\x80"
    assert whole[0]["top_logprobs"][1]["logprob"] == -9999.0
    chunks = stream(client, "/v1/chat/completions", body)
    streamed = [
        entry
        for chunk in chunks[:-1]
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole


def test_completion_logprobs_are_parallel_lists_with_offsets_into_the_text(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    token_ids = tokenizer.encode("the user and")
    script = [Delta([one], [TokenLogprobs(one, -0.25, [(5, -0.1)])]) for one in token_ids]
    script[-1].finish_reason = "length"
    client, _ = scripted(script)
    choice = client.post("/v1/completions", json={"prompt": "the", "logprobs": 1}).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == "the user and"
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert logprobs["token_logprobs"] == [-0.25] * len(token_ids)
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * len(token_ids)


def test_completion_stream_echoes_the_prompt_first(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted(deltas(tokenizer.encode("and")))
    chunks = stream(client, "/v1/completions", {"prompt": "the user ", "echo": True})
    assert chunks[0]["choices"][0]["text"] == "the user "
    assert text_of(chunks) == "the user and"
    assert chunks[-2]["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    assert chunks[-1] == "[DONE]"


def test_parameters_reach_the_engine(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, engine = scripted(deltas(tokenizer.encode("and")))
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "seed": -5,
        "min_tokens": 2,
        "ignore_eos": True,
        "logit_bias": {"7": -3.5},
        "stop_token_ids": [9],
        "max_completion_tokens": 11,
        "cache_salt": "pepper",
        "user": "somebody",
    }
    assert client.post("/v1/chat/completions", json=CHAT | body).status_code == 200
    params = engine.generations[0].params
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "seed",
        "min_tokens",
        "ignore_eos",
    ):
        assert getattr(params, name) == body[name]
    assert (params.presence_penalty, params.frequency_penalty) == (0.3, -0.4)
    assert params.logit_bias == {7: -3.5}
    assert tuple(params.stop_token_ids) == (9,)
    assert params.max_tokens == 11
    assert engine.generations[0].cache_salt == "pepper"


def test_max_tokens_left_out_means_the_context_for_chat_and_sixteen_for_completions(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    client, engine = scripted(deltas(tokenizer.encode("and")), longest_request=40)
    client.post("/v1/chat/completions", json=CHAT)
    client.post("/v1/completions", json={"prompt": [5] * 10})
    client.post("/v1/completions", json={"prompt": [5] * 35})
    assert [generation.params.max_tokens for generation in engine.generations] == [None, 16, 5]


def test_null_counts_as_left_out(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, engine = scripted(deltas(tokenizer.encode("and")))
    names = [
        "model",
        "stream",
        "n",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "max_tokens",
        "logit_bias",
        "logprobs",
    ]
    names += ["tools", "response_format", "user", "cache_salt", "top_k"]
    answer = client.post("/v1/chat/completions", json=CHAT | dict.fromkeys(names))
    assert answer.status_code == 200, answer.text
    assert engine.generations[0].params.temperature == 1.0


def test_developer_messages_reach_the_template_as_system_ones(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    client, engine = scripted(deltas(tokenizer.encode("and")))
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "user"}]
    for role in ("developer", "system"):
        messages = [{"role": role, "content": "in"}, {"role": "user", "content": parts}]
        assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    first, second = engine.generations
    assert first.prompt_token_ids == second.prompt_token_ids
    assert "the\nuser" in tokenizer.decode(first.prompt_token_ids)
