"""The bound of the queue over HTTP, with a real engine whose steps the test lets pass one by one (T17)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import httpx
import openai
import pytest

from api.conftest import serving
from engine.fake_model import FakeModel, running_engine
from engine.reading import wait_until
from octavo.api.app import create_app
from octavo.engine.engine import Engine
from octavo.text.tokenizer import Tokenizer


@contextmanager
def served(tokenizer: Tokenizer, model: FakeModel, **config: Any) -> Iterator[tuple[httpx.Client, Engine]]:
    model.tokens = lambda _, token_id: 3 + token_id % 250  # those the small vocabulary can write
    with (
        running_engine(model, **config) as engine,
        serving(create_app(engine, cast(Any, tokenizer), None, "fake")) as client,
    ):
        yield client, engine


def body(number: int, length: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    prompt = [3 + (number * 37 + 11 * i) % 250 for i in range(length)]
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}


@pytest.fixture
def solo(tokenizer: Tokenizer) -> Any:
    """The text of a request that is alone."""

    def ask(asked: dict[str, Any]) -> str:
        with served(tokenizer, FakeModel()) as (client, _):
            alone = {name: value for name, value in asked.items() if name != "stream"}
            text: str = client.post("/v1/completions", json=alone).json()["choices"][0]["text"]
            return text

    return ask


def post(client: httpx.Client, asked: dict[str, Any]) -> httpx.Response:
    with httpx.Client(base_url=client.base_url, timeout=60) as own:
        return own.post("/v1/completions", json=asked)


@pytest.mark.parametrize("streaming", [False, True])
def test_t17_what_never_fits_is_a_400_and_the_surplus_is_a_503_at_once(
    tokenizer: Tokenizer, solo: Any, streaming: bool
) -> None:
    model = FakeModel()
    config = {"num_blocks_override": 32, "max_num_queued_reqs": 4}
    with served(tokenizer, model, **config) as (client, _), ThreadPoolExecutor(10) as pool:
        hopeless = client.post("/v1/completions", json=body(0, 600, 10, stream=streaming))
        assert hopeless.status_code == 400
        error = hopeless.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "600 tokens" in error["message"]
        assert "512 tokens" in error["message"]
        assert model.steps == []

        model.gate()
        bodies = [body(number, 100, 60, stream=streaming) for number in range(10)]
        first = pool.submit(post, client, bodies[0])
        model.arrive()  # it has its seven blocks: three more fit, four wait, two are too many
        others = [pool.submit(post, client, one) for one in bodies[1:]]
        wait_until(lambda: sum(map(Future.done, others)) == 2)
        assert model.steps == [], "they were told before anything was computed"
        refused = [one.result() for one in others if one.done()]
        for answer in refused:
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
            assert "4 requests wait and at most 4 may" in answer.json()["error"]["message"]
        model.open()
        for asked, answered in zip(bodies, [first, *others], strict=True):
            answer = answered.result(60)
            if answer in refused:
                continue
            assert answer.status_code == 200
            assert _text(answer, streaming=streaming) == solo(asked)
        assert len(model.steps) > 0
        wait_until(lambda: client.get("/v1/requests").json()["data"][0]["status"] == "finished")
        assert len(client.get("/v1/requests").json()["data"]) == 8


def _text(answer: httpx.Response, *, streaming: bool) -> str:
    if not streaming:
        text: str = answer.json()["choices"][0]["text"]
        return text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(httpx.Response(200, text=line).json()["choices"][0]["text"] for line in lines[:-1])


def test_a_request_of_many_choices_is_taken_whole_or_not_at_all(tokenizer: Tokenizer) -> None:
    model = FakeModel()
    model.gate()
    config = {"max_num_seqs": 1, "max_num_queued_reqs": 2}
    with served(tokenizer, model, **config) as (client, engine), ThreadPoolExecutor(4) as pool:
        first = pool.submit(post, client, body(1, 20, 5, n=6))
        wait_until(lambda: engine.num_open == 6)
        refused = client.post("/v1/completions", json=body(2, 20, 5, n=2))
        assert refused.status_code == 503
        assert "5 requests wait and at most 2 may" in refused.json()["error"]["message"]
        assert engine.num_open == 6
        model.open()
        choices = first.result(60).json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        assert len({choice["text"] for choice in choices}) == 1


def test_an_idle_server_where_nobody_may_wait_serves(tokenizer: Tokenizer, solo: Any) -> None:
    model = FakeModel()
    config = {"max_num_seqs": 1, "max_num_queued_reqs": 0}
    with served(tokenizer, model, **config) as (client, engine), ThreadPoolExecutor(4) as pool:
        asked = body(1, 20, 5)
        assert client.post("/v1/completions", json=asked).json()["choices"][0]["text"] == solo(asked)
        model.gate()
        running = pool.submit(post, client, asked)
        wait_until(lambda: engine.num_open == 1)
        assert client.post("/v1/completions", json=body(2, 20, 5)).status_code == 503
        model.open()
        assert running.result(60).status_code == 200


def test_a_deadline_ends_who_waits_while_a_step_is_under_way(tokenizer: Tokenizer, solo: Any) -> None:
    """The engine stands before a step: it cannot say anything, and the client hears all the same."""
    model = FakeModel()
    model.gate()
    with served(tokenizer, model, max_num_seqs=1) as (client, engine), ThreadPoolExecutor(4) as pool:
        running = pool.submit(post, client, body(1, 20, 5))
        model.arrive()
        answer = client.post("/v1/completions", json=body(2, 20, 5, deadline=0.05))
        assert answer.status_code == 503
        assert "at position 1 of those that wait (seats)" in answer.json()["error"]["message"]
        assert model.steps == []
        model.let()
        model.arrive()
        assert engine.num_open == 1, "what it had comes back between two steps"
        model.open()
        assert running.result(60).json()["choices"][0]["text"] == solo(body(1, 20, 5))


def test_what_was_superseded_comes_back_within_a_step_and_is_found_again(tokenizer: Tokenizer) -> None:
    """Autocomplete: each request is the one before and a few tokens more, and nobody may wait."""
    model = FakeModel()
    model.gate()
    config = {"max_num_seqs": 1, "max_num_queued_reqs": 0}
    with served(tokenizer, model, **config) as (client, engine), ThreadPoolExecutor(8) as pool:
        typed = body(1, 200, 50)["prompt"]
        answers: list[Future[httpx.Response]] = []
        for length in (150, 170, 190):
            asked = body(1, 200, 20, latest_only="editor") | {"prompt": typed[:length]}
            answers.append(pool.submit(post, client, asked))
            wait_until(lambda: engine.num_open >= 1)
            if length > 150:
                superseded = answers[-2].result(60)
                assert superseded.status_code == 409
                assert superseded.json()["error"]["code"] == "superseded"
            model.let()
            model.arrive()
            assert engine.num_open == 1
        model.open()
        whole = answers[-1].result(60).json()
        assert whole["usage"]["completion_tokens"] == 20
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] >= 144
    # 150 tokens once, and what was typed since, and what was generated.
    assert sum(step.num_tokens for step in model.steps) <= 190 + 20 + 3 * 16


def test_the_openai_client_comes_back_when_it_was_told_to(tokenizer: Tokenizer, solo: Any) -> None:
    model = FakeModel()
    model.gate()
    config = {"max_num_seqs": 1, "max_num_queued_reqs": 0}
    with served(tokenizer, model, **config) as (http, engine), ThreadPoolExecutor(4) as pool:
        running = pool.submit(post, http, body(1, 20, 5))
        wait_until(lambda: engine.num_open == 1)
        asked = body(2, 20, 5)
        impatient = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="unused", max_retries=0)
        with pytest.raises(openai.InternalServerError) as caught:
            impatient.completions.create(model="fake", prompt=asked["prompt"])
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "queue_full"
        patient = impatient.with_options(max_retries=3)
        waiting = pool.submit(
            lambda: patient.completions.create(
                model="fake", prompt=asked["prompt"], max_tokens=5, extra_body={"ignore_eos": True}
            )
        )
        model.open()
        assert waiting.result(60).choices[0].text == solo(asked)
        assert running.result(60).status_code == 200
