"""A real server whose seats are taken: what OpenAI's client and a reader of raw bytes hear of it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from clients.server_process import ServerProcess, together, wait_until

WAITING = re.compile(
    rb": octavo waiting position=(\d+) reason=(kv|seats|fair_share) progress=0/(\d+) estimate=([\d.]+)s"
)


@pytest.fixture(scope="module")
def server(smollm2_path: object) -> Iterator[ServerProcess]:
    """One is computed at a time, and one may wait."""
    arguments = ("--served-model-name", "smollm2", "--kv-cache-memory", "128MiB")
    limits = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    with ServerProcess(str(smollm2_path), *arguments, *limits) as server:
        yield server


@contextmanager
def occupied(server: ServerProcess) -> Iterator[threading.Event]:
    """Somebody generates beside the body, until the event is set or it is left."""
    begun, leave = threading.Event(), threading.Event()

    def generate() -> None:
        body = {"prompt": "The sea", "max_tokens": 4000, "ignore_eos": True, "stream": True, "user": "busy"}
        while not leave.is_set():  # the context ends sooner than a slow machine's patience
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
                assert answer.status_code == 200, answer.read()
                for _ in answer.iter_lines():
                    begun.set()
                    if leave.is_set():
                        break

    with together(generate):
        try:
            assert begun.wait(30)
            yield leave
        finally:
            leave.set()
    wait_until(lambda: server.metric("num_requests_running") == 0)


def ask(**more: Any) -> dict[str, Any]:
    return {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, **more}


def test_a_stream_that_waits_says_why_and_every_client_reads_over_it(server: ServerProcess) -> None:
    alone = httpx.post(f"{server.url}/v1/completions", json=ask(), timeout=60).json()
    record: list[dict[str, Any]] = []
    lines: list[bytes] = []
    with occupied(server) as leave:
        asked_at = time.monotonic()
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=ask(stream=True), timeout=60
        ) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                lines.append(line.encode())
                if line.startswith(":") and not leave.is_set():
                    assert time.monotonic() - asked_at > 1.9
                    listed = httpx.get(f"{server.url}/v1/requests").json()["data"]
                    record = [one for one in listed if one["status"] != "finished"]
                    leave.set()
    comments = [line for line in lines if line.startswith(b":")]
    assert comments
    said = WAITING.fullmatch(comments[0])
    assert said is not None, comments[0]
    assert (said[1], said[2]) == (b"1", b"seats")
    num_prompt = alone["usage"]["prompt_tokens"]
    assert int(said[3]) == num_prompt
    (mine,) = record
    told = mine["choices"][0]["waiting"]
    assert (mine["status"], told["position"], told["reason"]) == ("waiting", 1, "seats")
    assert told["progress"] == {"computed": 0, "known": num_prompt}
    assert told["estimate"] > 0
    text = "".join(
        httpx.Response(200, content=line.removeprefix(b"data: ")).json()["choices"][0]["text"]
        for line in lines
        if line.startswith(b"data: {")
    )
    assert text == alone["choices"][0]["text"]


@pytest.mark.parametrize("n", [1, 2])
def test_the_openai_client_streams_through_the_waiting(server: ServerProcess, n: int) -> None:
    client = server.openai()
    messages: Any = [{"role": "user", "content": "Say something."}]
    heard = [""] * n
    finished = []
    with occupied(server) as leave:
        timer = threading.Timer(3.0, leave.set)
        timer.start()
        began = time.monotonic()
        for chunk in client.chat.completions.create(
            model="smollm2", messages=messages, stream=True, n=n, max_tokens=8, temperature=0
        ):
            for choice in chunk.choices:
                heard[choice.index] += choice.delta.content or ""
                finished += [choice.index] if choice.finish_reason else []
        assert time.monotonic() - began > 2.5, "it should have waited for long enough to be told"
        timer.join()
    assert sorted(finished) == list(range(n))
    whole = client.chat.completions.create(
        model="smollm2", messages=messages, n=n, max_tokens=8, temperature=0
    )
    assert heard == [choice.message.content for choice in whole.choices]


def test_beyond_the_bound_there_is_a_503_and_a_deadline_ends_the_waiting(server: ServerProcess) -> None:
    client = server.openai()
    with occupied(server) as leave:
        heard: list[str] = []

        def wait() -> None:
            heard.append(
                client.completions.create(model="smollm2", prompt="The", max_tokens=4).choices[0].text
            )

        with together(wait):
            wait_until(lambda: server.metric("num_requests_waiting") == 1)
            with pytest.raises(openai.InternalServerError) as full:
                client.completions.create(model="smollm2", prompt="And", stream=True)
            assert full.value.status_code == 503
            assert full.value.code == "queue_full"
            assert "1 requests wait and at most 1 may" in full.value.message
            assert int(full.value.response.headers["retry-after"]) >= 1
            leave.set()
        assert len(heard) == 1
    with occupied(server):
        patient = client.with_options(max_retries=2)
        aborts = server.metric("request_success_total", finished_reason="abort")
        with pytest.raises(openai.InternalServerError) as late:
            patient.completions.create(model="smollm2", prompt="And", extra_body={"deadline": 0.5})
        wait_until(lambda: server.metric("request_success_total", finished_reason="abort") > aborts)
        ended = server.metric("request_success_total", finished_reason="abort") - aborts
        assert ended == 1, "the client has asked again, which the server told it not to"
        assert late.value.code == "deadline_exceeded"
        assert "at position 1 of those that wait (seats)" in late.value.message
        with pytest.raises(openai.APIError) as streamed:
            list(
                client.completions.create(
                    model="smollm2", prompt="And", stream=True, extra_body={"deadline": 0.2}
                )
            )
        assert streamed.value.code == "deadline_exceeded"


def test_of_an_editors_requests_the_last_is_answered(server: ServerProcess) -> None:
    client = server.openai().with_options(max_retries=2)
    texts: dict[int, str] = {}
    superseded: list[int] = []
    codes: set[tuple[int, str | None]] = set()

    def complete(number: int) -> None:
        try:
            answer = client.completions.create(
                model="smollm2",
                prompt="def main" * (number + 1),
                max_tokens=8,
                extra_body={"latest_only": "a.py"},
            )
            texts[number] = answer.choices[0].text
        except openai.APIStatusError as error:
            superseded.append(number)
            codes.add((error.status_code, error.code))

    with occupied(server) as leave, together(lambda: complete(0)):
        wait_until(lambda: server.metric("num_requests_waiting") == 1)
        with together(lambda: complete(1)):
            wait_until(lambda: superseded == [0])
            with together(lambda: complete(2)):
                wait_until(lambda: superseded == [0, 1])
                leave.set()
    assert (superseded, codes) == ([0, 1], {(409, "superseded")})
    assert set(texts) == {2}


def test_a_long_prompt_says_how_far_it_has_come(server: ServerProcess) -> None:
    """Under way for more than two seconds, or this model reads it too fast to be asked."""
    prompt = [1000 + number % 40_000 for number in range(3000)]
    seen: list[dict[str, Any]] = []
    done = threading.Event()

    def read() -> None:
        try:
            body = {"prompt": prompt, "max_tokens": 2, "cache_salt": "unseen"}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        finally:
            done.set()

    with together(read):
        while not done.is_set():
            listed = httpx.get(f"{server.url}/v1/requests").json()["data"]
            told = [one["choices"][0]["waiting"] for one in listed if one["status"] == "running"]
            seen += [one for one in told if one is not None]
            time.sleep(0.02)
    assert seen
    assert all((one["position"], one["reason"]) == (0, None) for one in seen)
    progress = [one["progress"]["computed"] for one in seen]
    assert progress == sorted(progress)
    assert {one["progress"]["known"] for one in seen} == {3000}
    assert len(set(progress)) > 2
