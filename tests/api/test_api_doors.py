"""The API key, status endpoints, token endpoints, and clients that leave."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from api.conftest import of_api_key
from api.scripted_engine import ScriptedEngine, deltas
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer

Scripted = Callable[..., tuple[httpx.Client, ScriptedEngine]]

CHAT = {"messages": [{"role": "user", "content": "the user"}]}


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer wrong", "Basic c2VjcmV0", "secret", "Bearer secret2", "Bearer sécret"],
)
def test_without_the_key_nothing_is_answered_but_health(scripted: Scripted, given: str | None) -> None:
    client, engine = scripted([30.0], keyring=of_api_key("secret"))
    headers = {} if given is None else {b"Authorization": given.encode()}
    for method, path in [
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/x"),
    ]:
        answer = client.request(method, path, headers=headers, json=CHAT)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert client.get("/health", headers=headers).status_code == 200
    assert engine.generations == []


@pytest.mark.parametrize("key", ["secret", "schlüssel-鍵", "voilà", "å-Å"])
def test_with_the_key_it_is(scripted: Scripted, tokenizer: Tokenizer, key: str) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), keyring=of_api_key(key))
    headers = {b"Authorization": f"bearer {key}".encode()}
    assert client.post("/v1/chat/completions", headers=headers, json=CHAT).status_code == 200


def test_health_is_503_when_the_engine_is_stuck(scripted: Scripted) -> None:
    client, engine = scripted([])
    assert client.get("/health").status_code == 200
    engine.is_healthy = False
    answer = client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "unhealthy"


def test_tokenize_and_detokenize_undo_each_other(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted([])
    text = "the user 😀 <|im_start|> and"
    counted = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert counted["tokens"] == tokenizer.encode(text, parse_special=True)
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
    assert counted["max_model_len"] == 256
    assert client.post("/detokenize", json={"tokens": counted["tokens"]}).json() == {"prompt": text}
    assert client.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


def test_tokenize_counts_messages_as_a_chat_would(
    scripted: Scripted, tokenizer: Tokenizer, chat_template: ChatTemplate
) -> None:
    client, engine = scripted(deltas(tokenizer.encode("the")))
    client.post("/v1/chat/completions", json=CHAT)
    counted = client.post("/tokenize", json=CHAT).json()
    assert counted["tokens"] == engine.generations[0].prompt_token_ids
    bare = client.post("/tokenize", json=CHAT | {"add_generation_prompt": False}).json()
    rendered = chat_template.render(CHAT["messages"], add_generation_prompt=False)
    assert bare["tokens"] == tokenizer.encode(rendered, add_special=False, parse_special=True)


def test_counting_a_long_text_holds_nobody_up(
    scripted: Scripted, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = scripted([])
    counting, others_are_served = threading.Event(), threading.Event()
    encode = tokenizer.encode

    def encode_when_told(*arguments: Any, **options: Any) -> list[int]:
        counting.set()
        assert others_are_served.wait(10)
        return encode(*arguments, **options)

    monkeypatch.setattr(tokenizer, "encode", encode_when_told)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/tokenize", json={"prompt": "the user and the other " * 1000})
        assert counting.wait(10)
        assert client.get("/health").status_code == 200
        others_are_served.set()
        assert answer.result().status_code == 200


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": CHAT["messages"]}])
def test_tokenize_wants_one_of_two(scripted: Scripted, body: dict[str, Any]) -> None:
    answer = scripted([])[0].post("/tokenize", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("tokens", [[-1], [10**6], [5, 10**9]])
def test_detokenize_refuses_ids_the_model_does_not_have(scripted: Scripted, tokens: list[int]) -> None:
    answer = scripted([])[0].post("/detokenize", json={"tokens": tokens})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tokens"


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("abruptly", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_ends_its_generations_at_once(
    scripted: Scripted, tokenizer: Tokenizer, streaming: bool, abruptly: bool, n: int
) -> None:
    client, engine = scripted([*(deltas(tokenizer.encode("the user"))[:1]), 60.0])
    connection = socket.create_connection((client.base_url.host, client.base_url.port))
    body = json.dumps(CHAT | {"n": n, "stream": streaming})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    if streaming:
        assert b"200 OK" in connection.recv(4096)
    _wait_until(lambda: len(engine.generations) == n)
    if abruptly:  # a reset instead of a farewell, as when a machine is switched off
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
    _wait_until(lambda: all(generation.cancelled == ["abort"] for generation in engine.generations))
    assert client.get("/health").status_code == 200


def test_a_client_that_leaves_while_sending_is_no_fault(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    client, engine = scripted([])
    connection = socket.create_connection((client.base_url.host, client.base_url.port or 80))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    time.sleep(0.1)
    connection.close()
    time.sleep(0.2)
    assert client.get("/health").status_code == 200
    assert engine.generations == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("log_content", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_log_holds_what_was_said_only_if_asked_to(
    scripted: Scripted,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    log_content: bool,
    streaming: bool,
) -> None:
    caplog.set_level(logging.DEBUG)
    client, _ = scripted(deltas(tokenizer.encode("the other")), log_content=log_content)
    answer = client.post("/v1/chat/completions", json=CHAT | {"stream": streaming})
    assert answer.status_code == 200
    assert ("the user" in caplog.text) == log_content
    assert ("the other" in caplog.text) == log_content


def _wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
