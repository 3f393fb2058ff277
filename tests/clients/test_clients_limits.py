"""T23 and T29 against a real server: limits answer with both numbers, and mistakes disturb nobody."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from clients.server_process import ServerProcess, together

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}]},
    "/v1/completions": {"prompt": "the"},
    "/tokenize": {"prompt": "the"},
    "/detokenize": {"tokens": [5]},
}
MISTAKES = (
    "",
    "{",
    "[]",
    '{"model": NaN}',
    '{"model": "\\ud800"}',
    '{"model": 7}',
    '{"model": "x"}',
    '{"model": null, "model": ' + "[" * 100_000,
)
GENERATING_MISTAKES = (
    '"max_tokens": -1',
    '"max_tokens": 0',
    '"max_tokens": 1000000000',
    '"max_tokens": 1' + "0" * 5000,
    '"temperature": -1',
    '"temperature": NaN',
    '"temperature": 1e999',
    '"top_p": "most"',
    '"stop": "\\udfff"',
    '"n": 1000000',
    '"logit_bias": {"5": Infinity}',
)


@pytest.fixture
def client(tiny: ServerProcess) -> Iterator[httpx.Client]:
    with tiny.http() as client:
        yield client


def _error(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "code", "param"}
    return error


@pytest.mark.parametrize("length", [255, 256, 257, 5000])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_is_served_up_to_the_limit_and_refused_with_both_numbers_beyond(
    client: httpx.Client, path: str, length: int, streaming: bool
) -> None:
    if path == "/v1/completions":
        body: dict[str, Any] = {"prompt": [5] * length}
    else:
        around = client.post("/tokenize", json={"messages": [{"role": "user", "content": ""}]}).json()[
            "count"
        ]
        content = "x" * (length - around)
        body = {"messages": [{"role": "user", "content": content}]}
        assert client.post("/tokenize", json=body).json()["count"] == length
    answer = client.post(path, json=body | {"stream": streaming, "temperature": 0})
    if length == 255:
        assert answer.status_code == 200
        assert "length" in answer.text or "stop" in answer.text
        return
    assert answer.status_code == 400
    error = _error(answer)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("prompt" if path == "/v1/completions" else "messages")
    assert f"{length:,}" in error["message"]
    assert "256" in error["message"]


def test_an_answer_that_reaches_the_context_limit_ends_with_length(client: httpx.Client) -> None:
    body = {"prompt": [5] * 250, "ignore_eos": True, "temperature": 0}
    answer = client.post("/v1/completions", json=body | {"max_tokens": 6}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 256
    refused = client.post("/v1/completions", json=body | {"max_tokens": 7})
    assert refused.status_code == 400
    assert _error(refused)["param"] == "max_tokens"
    assert "257" in _error(refused)["message"]
    chat = {"messages": [{"role": "user", "content": "the"}], "ignore_eos": True, "temperature": 0}
    whole = client.post("/v1/chat/completions", json=chat).json()
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["total_tokens"] == 256


def test_mistakes_on_every_endpoint_disturb_no_stream(client: httpx.Client, tiny: ServerProcess) -> None:
    body = {"prompt": "the user and", "max_tokens": 200, "temperature": 1, "seed": 1, "ignore_eos": True}
    alone = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    made = threading.Event()
    rounds = 0

    def keep_streaming() -> None:
        nonlocal rounds
        with tiny.http() as mine:
            while not made.is_set():
                text = ""
                with mine.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                    for line in response.iter_lines():
                        if line.startswith("data: {"):
                            text += json.loads(line[6:])["choices"][0]["text"]
                assert text == alone
                rounds += 1

    with together(keep_streaming, keep_streaming):
        try:
            for path, fine in PATHS.items():
                for mistake in MISTAKES:
                    answer = client.post(path, content=mistake.encode())
                    assert answer.status_code in (400, 404), (path, mistake[:40], answer.text)
                    _error(answer)
                if "completions" in path:
                    for mistake in GENERATING_MISTAKES:
                        answer = client.post(path, content=f"{json.dumps(fine)[:-1]}, {mistake}}}".encode())
                        assert answer.status_code == 400, (path, mistake[:40])
                        assert _error(answer)["param"].split(".")[0] in mistake
                many = "the user and " * (10 * 2**20 // 13)
                huge = json.dumps(dict.fromkeys(fine, many) if path != "/v1/chat/completions" else {
                    "messages": [{"role": "user", "content": many}]
                })  # fmt: skip
                answer = client.post(path, content=huge.encode())
                assert answer.status_code == 400
                assert _error(answer)["param"] in ("messages", "prompt", "tokens")
        finally:
            made.set()
    assert rounds > 0
    assert client.get("/health").status_code == 200
