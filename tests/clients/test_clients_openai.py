"""What the real `openai` client sees: usage, log-probabilities, stop, n, seed, errors."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from clients.server_process import ServerProcess

QUESTION = [{"role": "user", "content": "Write one sentence about the sea."}]
HARD_TEXTS = (
    "Reply with emoji: 😀 🎉 👩‍👩‍👧",
    "日本語で書いてください。",
    "اكتب بالعربية",
    "e\u0301a\u0308 ﬁ 🇩🇪",
)


@pytest.fixture
def client(smollm2: ServerProcess) -> openai.OpenAI:
    return smollm2.openai()


def _ask(client: openai.OpenAI, **options: Any) -> Any:
    fields: dict[str, Any] = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**{**fields, **options})


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").owned_by == "octavo"


def test_usage_counts_and_tells_what_was_cached(client: openai.OpenAI) -> None:
    salt = {"extra_body": {"cache_salt": "usage"}}
    first, second = _ask(client, **salt), _ask(client, **salt)
    usage = first.usage
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens <= 24
    # All of the prompt but its last token, which is always computed.
    assert second.usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert second.choices[0].message.content == first.choices[0].message.content
    *_, last = _ask(client, stream=True, stream_options={"include_usage": True}, **salt)
    assert last.choices == []
    assert last.usage.completion_tokens == usage.completion_tokens


def test_another_salt_shares_nothing(client: openai.OpenAI) -> None:
    for salt in ("red", "blue"):
        answer = _ask(client, extra_body={"cache_salt": salt})
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_logprobs_add_up_and_belong_to_the_text(client: openai.OpenAI) -> None:
    answer = _ask(client, logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == choice.message.content
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        # Greedy takes the likeliest.
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == entry.top_logprobs[0].logprob
    streamed = [
        entry
        for chunk in _ask(client, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == entries


def test_a_stop_string_ends_the_answer_before_itself(client: openai.OpenAI) -> None:
    whole = _ask(client).choices[0].message.content
    words = whole.split(" ")
    stop = f"{words[4]} {words[5][:2]}"
    answer = _ask(client, stop=["never said", stop]).choices[0]
    assert answer.message.content == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    streamed = [chunk.choices[0] for chunk in _ask(client, stop=stop, stream=True)]
    assert "".join(choice.delta.content or "" for choice in streamed) == answer.message.content
    assert streamed[-1].finish_reason == "stop"


def test_n_choices_differ_and_share_the_prompt(client: openai.OpenAI, smollm2: ServerProcess) -> None:
    before = smollm2.metric("prefix_cache_hits_total")
    answer = _ask(client, n=4, temperature=1.2, seed=7, extra_body={"cache_salt": "n"})
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 4
    full_blocks = (answer.usage.prompt_tokens - 1) // 16 * 16
    assert smollm2.metric("prefix_cache_hits_total") - before == 3 * full_blocks
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    # A choice's words depend on the seed and its index, not on how many there are.
    assert _ask(client, temperature=1.2, seed=7).choices[0].message.content == texts[0]


def test_a_seed_repeats_and_no_seed_does_not(client: openai.OpenAI) -> None:
    seeded = {_ask(client, temperature=1.5, seed=11).choices[0].message.content for _ in range(3)}
    assert len(seeded) == 1
    free = {_ask(client, temperature=1.5).choices[0].message.content for _ in range(3)}
    assert len(free) > 1


def test_logit_bias_forbids_and_forces(client: openai.OpenAI, smollm2: ServerProcess) -> None:
    with smollm2.http() as http:
        (sea,) = http.post("/tokenize", json={"prompt": " sea"}).json()["tokens"]
    assert _ask(client, logit_bias={str(sea): 100}, max_tokens=3).choices[0].message.content == " sea sea sea"
    assert " sea" not in _ask(client, logit_bias={str(sea): -100}).choices[0].message.content


def test_completions_take_text_ids_and_lists(client: openai.OpenAI, smollm2: ServerProcess) -> None:
    text = "The quick brown fox"
    with smollm2.http() as http:
        token_ids = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    options: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 8}
    alone = client.completions.create(prompt=text, **options).choices[0].text
    many = client.completions.create(prompt=[text, "Once upon a time", text], **options)
    assert [many.choices[0].text, many.choices[2].text] == [alone, alone]
    assert client.completions.create(prompt=token_ids, **options).choices[0].text == alone
    assert client.completions.create(prompt=[token_ids], echo=True, **options).choices[0].text == text + alone
    chunks = client.completions.create(prompt=text, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == alone


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_streamed_characters_are_those_of_the_whole_answer(client: openai.OpenAI, text: str) -> None:
    options: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 1.3,
        "seed": 3,
        "max_tokens": 48,
    }
    whole = _ask(client, **options).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in _ask(client, stream=True, **options)]
    assert "".join(pieces) == whole


def test_mistakes_are_the_clients_own_exceptions(client: openai.OpenAI, smollm2: ServerProcess) -> None:
    with pytest.raises(openai.NotFoundError, match="'smollm2'"):
        _ask(client, model="gpt-7")
    with pytest.raises(openai.BadRequestError) as refused:
        _ask(client, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        _ask(client, max_tokens=10**9)
    assert (refused.value.param, refused.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as refused:
        _ask(client, response_format={"type": "json_object"})
    assert refused.value.param == "response_format"
    with pytest.raises(openai.NotFoundError):
        smollm2.openai().embeddings.create(model="smollm2", input="x")
