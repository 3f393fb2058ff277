"""T29 and T23 at the door: every mistake is a 400 that names the field, and nobody else notices."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import httpx
import pytest

from api.conftest import serving
from api.scripted_engine import ScriptedEngine, deltas
from api.sse import events, text_of
from octavo.api.app import create_app
from octavo.api.body import MAX_BODY_BYTES
from octavo.api.served_model import ServedModel
from octavo.api.tokens import MAX_TEXT_CHARS
from octavo.engine.sampling_params import InvalidParameter, SamplingParams
from octavo.text.byte_alphabet import CHARACTER_OF_BYTE
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer

Scripted = Callable[..., tuple[httpx.Client, ScriptedEngine]]

CHAT = {"messages": [{"role": "user", "content": "the user"}]}
COMPLETION = {"prompt": "the user"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/tokenize": COMPLETION,
    "/detokenize": {"tokens": [5]},
}
GENERATING = ("/v1/chat/completions", "/v1/completions")
DIGITS = "1" + "0" * 5000


def refused(answer: httpx.Response, *, status: int = 400) -> dict[str, Any]:
    """The error of an answer in the one shape; fails where it is another."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["message"]
    return error


def raw(path: str, field: str, value: str) -> bytes:
    """The body of `path` with one more field, written as it stands."""
    fields = {**{name: json.dumps(item) for name, item in BODIES[path].items()}, field: value}
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}").encode()


@pytest.fixture
def client(scripted: Scripted, tokenizer: Tokenizer) -> httpx.Client:
    return scripted(deltas(tokenizer.encode("the other")))[0]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{]",
        b'{"model": tru}',
        b'{"model": "a"} {"model": "b"}',
        b"\xff\xfe{\x00}\x00",
        b'{"model": ' + b"[" * 100_000,
        b'{"model": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"model": ' + DIGITS.encode() + b"}",
        b"model=tiny&prompt=the",
    ],
    ids=lambda body: body[:24].decode("latin-1"),
)
def test_broken_bodies_are_400(client: httpx.Client, path: str, body: bytes) -> None:
    refused(client.post(path, content=body))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "The request body is empty; it must be a JSON object."),
        ('{"logit_bias": {"a": 1}}', "Every key of 'logit_bias' must be an integer, not a string."),
        ('{"logit_bias": {"1": "a"}}', "'logit_bias[]' must be a number, not a string."),
    ],
)
def test_the_message_says_what_is_wrong_with_what(client: httpx.Client, body: str, message: str) -> None:
    assert refused(client.post("/v1/completions", content=body))["message"] == message


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (name, value)
            for name in ("max_tokens", "n", "top_k", "seed", "min_tokens")
            for value in (
                '"7"',
                "1.5",
                "true",
                "[1]",
                "{}",
                "NaN",
                "1e400",
                DIGITS,
            )
        ),
        *(
            (name, value)
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
            for value in (
                '"hot"',
                "true",
                "[]",
                "NaN",
                "Infinity",
                "-Infinity",
                "1e400",
                "-5",
                DIGITS,
            )
        ),
        ("max_tokens", "0"),
        ("max_tokens", "-1"),
        ("max_tokens", "9223372036854775807"),
        ("n", "0"),
        ("n", "-1"),
        ("n", "1000000"),
        ("temperature", "-1"),
        ("top_p", "0"),
        ("top_p", "1.01"),
        ("min_p", "2"),
        ("top_k", "-2"),
        ("presence_penalty", "2.5"),
        ("frequency_penalty", "-2.5"),
        ("repetition_penalty", "0"),
        ("min_tokens", "-1"),
        ("seed", "9223372036854775808"),
        ("stop", "7"),
        ("stop", '["a", 7]'),
        ("stop", '""'),
        ("stop", '["a", ""]'),
        ("stop", json.dumps(["a"] * 1000)),
        ("stop", '"\\ud800"'),
        ("stop_token_ids", "[1.5]"),
        ("stop_token_ids", "[-1]"),
        ("stop_token_ids", "[1000000]"),
        ("stop_token_ids", f"[{DIGITS}]"),
        ("logit_bias", "[]"),
        ("logit_bias", '{"x": 1}'),
        ("logit_bias", '{"1000000": 1}'),
        ("logit_bias", '{"5": 1000}'),
        ("logit_bias", '{"5": NaN}'),
        ("logit_bias", f'{{"{DIGITS}": 1}}'),
        ("stream", '"yes"'),
        ("stream_options", '{"include_usage": true}'),
        ("user", "7"),
        ("user", '"\\udc00 half"'),
        ("cache_salt", "[]"),
        ("ignore_eos", "1"),
        ("best_of", "3"),
        ("model", "7"),
    ],
    ids=lambda value: value[:24],
)
def test_a_wrong_value_is_400_with_the_fields_name(
    client: httpx.Client, path: str, field: str, value: str
) -> None:
    error = refused(client.post(path, content=raw(path, field, value)))
    assert error["param"] is not None
    # A path into the value ("stop[1]") and an equal limit's other name still name the field.
    assert error["param"].split("[")[0].split(".")[0] == field
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("sent", "meant", "param", "message"),
    [
        (
            {"max_completion_tokens": 0},
            {"max_tokens": 0},
            "max_completion_tokens",
            "max_completion_tokens must be an integer from 1 to 2147483647, got 0",
        ),
        (
            {"max_completion_tokens": 4, "min_tokens": 5},
            {"max_tokens": 4, "min_tokens": 5},
            "min_tokens",
            "min_tokens must be at most max_completion_tokens of 4, got 5",
        ),
        (
            {"logprobs": True, "top_logprobs": 21},
            {"logprobs": 21},
            "top_logprobs",
            "top_logprobs must be an integer from 0 to 20, got 21",
        ),
        ({"n": 129}, {"n": 129}, "n", "n must be an integer from 1 to 128, got 129"),
        (
            {"stop_token_ids": [1_000_000]},
            {"stop_token_ids": [1_000_000]},
            "stop_token_ids",
            "stop_token_ids must hold token ids below the vocabulary's size of {vocab_size}, got 1000000",
        ),
    ],
)
def test_a_mistake_has_one_text_whoever_finds_it_with_the_names_the_client_used(
    client: httpx.Client,
    tokenizer: Tokenizer,
    sent: dict[str, Any],
    meant: dict[str, Any],
    param: str,
    message: str,
) -> None:
    error = refused(client.post("/v1/chat/completions", json=CHAT | sent))
    assert (error["param"], error["message"]) == (param, message.format(vocab_size=tokenizer.vocab_size))
    with pytest.raises(InvalidParameter) as ours:
        SamplingParams(**meant).check_vocabulary(tokenizer.vocab_size)
    names = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}
    assert ours.value.renamed(names).message == error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("[]", "messages"),
        ("null", "messages"),
        ('"hello"', "messages"),
        ("[7]", "messages[0]"),
        ('[{"content": "x"}]', "messages[0].role"),
        ('[{"role": "user"}]', "messages[0].content"),
        ('[{"role": "user", "content": null}]', "messages[0].content"),
        ('[{"role": "user", "content": 7}]', "messages[0].content"),
        ('[{"role": "user", "content": "a"}, {"role": "wizard", "content": "b"}]', "messages[1].role"),
        ('[{"role": "tool", "content": "a"}]', "messages[0].role"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "messages[0].content[0].type"),
        ('[{"role": "user", "content": [{"type": "text"}]}]', "messages[0].content[0].text"),
        ('[{"role": "user", "content": [7]}]', "messages[0].content[0]"),
        ('[{"role": "assistant", "content": "", "tool_calls": [{}]}]', "messages[0].tool_calls"),
        ('[{"role": "user", "content": "half \\ud83d of it"}]', "messages[0].content"),
        ('[{"role": "user", "content": "bytes \udcff"}]', "messages[0].content"),
        ('[{"role": "user", "content": NaN}]', "messages[0].content"),
    ],
)  # fmt: skip
def test_wrong_messages_name_the_message(client: httpx.Client, messages: str, param: str) -> None:
    body = f'{{"messages": {messages}}}'.encode("utf-8", "surrogateescape")
    assert refused(client.post("/v1/chat/completions", content=body))["param"] == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("[]", "prompt"),
        ("7", "prompt"),
        ("null", "prompt"),
        ('""', "prompt"),
        ("[[]]", "prompt"),
        ('["a", 7]', "prompt[1]"),
        ("[5, 1000000]", "prompt"),
        ("[-1]", "prompt"),
        ("[[5], [-1]]", "prompt[1]"),
        ("[1.5]", "prompt[0]"),
        ('"\\ud800"', "prompt"),
        (f"[{DIGITS}]", "prompt[0]"),
        (json.dumps(["a"] * 200), "prompt"),
    ],
    ids=lambda value: value[:24],
)
def test_wrong_prompts_name_the_prompt(client: httpx.Client, prompt: str, param: str) -> None:
    answer = client.post("/v1/completions", content=f'{{"prompt": {prompt}}}'.encode())
    assert refused(answer)["param"] == param


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    ("field", "value", "harmless"),
    [
        ("tools", [{"type": "function"}], []),
        ("functions", [{}], []),
        ("tool_choice", "required", "auto"),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}, None),
        ("audio", {"voice": "x"}, None),
        ("modalities", ["audio"], ["text"]),
        ("suffix", "end", ""),
        ("best_of", 2, 1),
        ("guided_regex", "a+", None),
        ("truncate_prompt_tokens", 5, None),
        ("skip_special_tokens", False, True),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_and_its_harmless_value_is_not(
    client: httpx.Client, path: str, field: str, value: object, harmless: object
) -> None:
    error = refused(client.post(path, json=BODIES[path] | {field: value}))
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert client.post(path, json=BODIES[path] | {field: harmless}).status_code == 200


def test_unknown_fields_are_ignored_and_named_once(
    scripted: Scripted, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), fresh=True)
    caplog.set_level(logging.WARNING, "octavo.api")
    for _ in range(3):
        for path in BODIES:
            assert (
                client.post(path, json=BODIES[path] | {"temprature": 0.1, "metadata": {}}).status_code == 200
            )
    named = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert named == ["ignoring unknown request field 'temprature'"]


def test_a_client_that_invents_names_cannot_flood_the_log(
    scripted: Scripted, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), fresh=True)
    caplog.set_level(logging.WARNING, "octavo.api")
    fields = {f"field\n{number}" + "x" * 1000: 1 for number in range(1000)}
    assert client.post("/v1/completions", json=COMPLETION | fields).status_code == 200
    named = [record.getMessage() for record in caplog.records]
    assert len(named) <= 256
    assert all(len(line) < 120 and "\n" not in line for line in named)


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("streaming", [True, False])
def test_ten_megabytes_of_text_are_refused_with_both_numbers(
    client: httpx.Client, path: str, streaming: bool
) -> None:
    text = "the user and " * (10 * 2**20 // 13)
    body = (
        {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    )
    error = refused(client.post(path, json=body | {"stream": streaming}))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] in ("prompt", "messages")
    assert "256 tokens" in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "count"),
    [
        ({"prompt": ["a"] * 200_000}, "prompt", "200,000 prompts"),
        ({"prompt": ["a"] * 129}, "prompt", "129 prompts"),
        ({"prompt": ["a"] * 65, "n": 2}, "n", "130 choices"),
        ({"prompt": [[5]] * 129}, "prompt", "129 prompts"),
    ],
)
def test_too_many_prompts_are_refused_before_any_is_tokenised(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], param: str, count: str
) -> None:
    looked_at: list[object] = []
    monkeypatch.setattr(ServedModel, "_prompt", lambda *given, **_: looked_at.append(given))
    error = refused(client.post("/v1/completions", json=body))
    assert error["param"] == param
    assert count in error["message"]
    assert "the limit is 128" in error["message"]
    assert looked_at == []


@pytest.mark.parametrize(
    ("path", "small", "large", "method"),
    [
        ("/v1/completions", {"prompt": ["a"]}, {"prompt": ["a" * 200] * 100}, "encode"),
        ("/v1/completions", {"prompt": [5]}, {"prompt": [[5] * 200] * 100}, "_prompt"),
        (
            "/v1/completions",
            {"prompt": [5], "echo": True},
            {"prompt": [[5] * 200] * 100, "echo": True},
            "text_of",
        ),
        ("/v1/chat/completions", CHAT, {"messages": [{"role": "user", "content": ""}] * 2000}, "render"),
        ("/v1/chat/completions", CHAT, {"messages": [{"role": "user", "content": ""}] * 2000}, "encode"),
        ("/v1/chat/completions", CHAT, CHAT | {"stop_token_ids": [5] * 20_000}, "check_name"),
    ],
)
def test_the_work_on_a_large_body_is_not_done_where_streams_are_served(
    client: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    small: dict[str, Any],
    large: dict[str, Any],
    method: str,
) -> None:
    """However its bytes are spread: over many small prompts, or messages with no content at all."""
    threads: set[int] = set()
    worker = getattr(ServedModel, method)

    def remember(*given: Any, **named: Any) -> Any:
        threads.add(threading.get_ident())
        return worker(*given, **named)

    monkeypatch.setattr(ServedModel, method, remember)
    client.post(path, json=small)
    (loop,) = threads
    threads.clear()
    client.post(path, json=large)
    assert threads
    assert loop not in threads


def test_bytes_the_vocabulary_has_no_token_for_are_refused_and_named(
    tiny_metadata: dict[str, Any], chat_template: ChatTemplate
) -> None:
    key = "tokenizer.ggml.tokens"
    spelled = CHARACTER_OF_BYTE[0x04]
    tokens = ["something else" if token == spelled else token for token in tiny_metadata[key]]
    poor = Tokenizer.from_gguf(tiny_metadata | {key: tokens})
    engine = ScriptedEngine()
    engine.reset(lambda _: deltas(poor.encode("the")))
    with serving(create_app(cast(Any, engine), poor, chat_template, "poor")) as client:
        for path, field in (
            ("/v1/chat/completions", "messages"),
            ("/v1/completions", "prompt"),
            ("/tokenize", "prompt"),
            ("/tokenize", "messages"),
        ):
            for text, status in (("the\x04 user\x04", 400), ("the user", 200)):
                given = text if field == "prompt" else [{"role": "user", "content": text}]
                answer = client.post(path, json={field: given})
                assert answer.status_code == status
                if status == 400:
                    error = refused(answer)
                    assert (error["param"], error["code"]) == (field, "unsupported_text")
                    assert "no token for 2 of the text's bytes (0x04 in UTF-8)" in error["message"]
    assert len(engine.generations) == 2


def test_ten_megabytes_are_too_much_to_count(client: httpx.Client) -> None:
    error = refused(client.post("/tokenize", json={"prompt": "x" * (10 * 2**20)}))
    assert error["param"] == "prompt"
    assert f"{MAX_TEXT_CHARS:,}" in error["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_over_the_limit_is_413_with_the_limit(client: httpx.Client, path: str, chunked: bool) -> None:
    piece = b" " * 2**20
    pieces = [piece] * (MAX_BODY_BYTES // len(piece) + 1)
    answer = client.post(path, content=iter(pieces) if chunked else b"".join(pieces))
    assert f"{MAX_BODY_BYTES:,}" in refused(answer, status=413)["message"]


def test_a_wrong_model_is_404_that_says_what_there_is(client: httpx.Client) -> None:
    for path, body in BODIES.items():
        error = refused(client.post(path, json=body | {"model": "gpt-7"}), status=404)
        assert "'tiny'" in error["message"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert client.post(path, json=body | {"model": "tiny"}).status_code == 200
    refused(client.get("/v1/models/gpt-7"), status=404)
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/chat", "/health/", "/v1/embeddings", "/v1/chat/completions/x"]
)
def test_other_paths_are_404_in_the_one_shape(client: httpx.Client, path: str) -> None:
    assert path in refused(client.get(path), status=404)["message"]


@pytest.mark.parametrize("path", BODIES)
def test_other_methods_are_405_in_the_one_shape(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert "POST" in refused(answer, status=405)["message"]
    assert "POST" in answer.headers["allow"]


def test_without_a_template_chat_is_refused_and_completions_are_not(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), with_template=False)
    assert refused(client.post("/v1/chat/completions", json=CHAT))["param"] == "messages"
    assert client.post("/v1/completions", json=COMPLETION).status_code == 200


@pytest.mark.parametrize("log_content", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_fault_of_ours_tells_the_client_nothing_and_the_log_where_it_was(
    scripted: Scripted, caplog: pytest.LogCaptureFixture, log_content: bool, streaming: bool
) -> None:
    client, _ = scripted([KeyError("my secret prompt")], log_content=log_content)
    body = CHAT | {"stream": streaming}
    if streaming:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            error = list(events(response))[-1]["error"]
    else:
        error = refused(client.post("/v1/chat/completions", json=body), status=500)
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]
    assert "Traceback" not in error["message"]
    assert "scripted_engine.py" in caplog.text
    assert "KeyError" in caplog.text
    assert ("secret" in caplog.text) == log_content


def test_everyones_streams_go_on_while_requests_are_refused(scripted: Scripted, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("the user and the other in the end " * 4)
    script = [event for delta in deltas(token_ids) for event in (0.01, delta)]
    client, _ = scripted(script)
    seen: list[list[Any]] = []

    def read() -> None:
        with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
            seen.append(list(events(response)))

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    while any(reader.is_alive() for reader in readers):
        for path in BODIES:
            refused(client.post(path, content=b"{"))
            refused(client.post(path, content=raw(path, "model", "NaN")))
    assert [text_of(chunks) for chunks in seen] == [tokenizer.decode(token_ids)] * 4
