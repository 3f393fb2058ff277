"""What a client is told while it waits; deadlines, newer requests and a full queue, which end the waiting."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from api.conftest import of_api_key
from api.scripted_engine import ScriptedEngine, ScriptedGeneration, deltas
from api.sse import events
from engine.reading import wait_until
from octavo.api import sse
from octavo.api.caller import caller_of
from octavo.api.openai.answer import Answer
from octavo.api.standing import comment_line
from octavo.engine.request import Delta, RequestRefused, Standing
from octavo.scheduler.plan import WaitReason
from octavo.text.tokenizer import Tokenizer

Scripted = Callable[..., tuple[httpx.Client, ScriptedEngine]]

CHAT = {"messages": [{"role": "user", "content": "the user"}]}
COMPLETION = {"prompt": "the user and the"}
PATHS: dict[str, dict[str, Any]] = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}

QUEUED = Standing(3, WaitReason.KV, 0, 3000, 4.2)
COMPUTING = Standing(0, None, 1024, 3000, 1.94)
PAUSED = Standing(1, WaitReason.KV, 16, 40, None)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments come a hundred times as often."""
    monkeypatch.setattr(sse, "FIRST_COMMENT_AFTER", 0.02)
    monkeypatch.setattr(sse, "COMMENT_EVERY", 0.05)


def lines_of(client: httpx.Client, path: str, body: dict[str, Any]) -> list[str]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        return list(response.iter_lines())


def without_comments(lines: list[str]) -> tuple[list[str], list[str]]:
    """Every comment and the lines of the events; fails where a comment is not one line and a blank one."""
    comments, others = [], []
    rest = iter(lines)
    for line in rest:
        if not line.startswith(":"):
            others.append(line)
            continue
        while line.startswith(":"):
            comments.append(line)
            line = next(rest)
        assert line == "", line
    return comments, others


# --- comments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("standing", "choice", "said"),
    [
        (QUEUED, None, b": octavo waiting position=3 reason=kv progress=0/3000 estimate=4.2s"),
        (COMPUTING, None, b": octavo computing progress=1024/3000 estimate=1.9s"),
        (PAUSED, 2, b": octavo waiting choice=2 position=1 reason=kv progress=16/40"),
        (
            Standing(12, WaitReason.FAIR_SHARE, 0, 7, 0.04),
            None,
            b": octavo waiting position=12 reason=fair_share progress=0/7 estimate=0.0s",
        ),
        (
            Standing(0, WaitReason.SEATS, 5, 7, None),
            None,
            b": octavo waiting position=0 reason=seats progress=5/7",
        ),
    ],
)
def test_a_standing_as_a_comment(standing: Standing, choice: int | None, said: bytes) -> None:
    assert comment_line(standing, choice=choice) == said


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("often")
def test_a_stream_says_where_it_stands_and_its_events_are_the_same(
    scripted: Scripted, tokenizer: Tokenizer, path: str
) -> None:
    script = [QUEUED, 0.15, COMPUTING, 0.15, *deltas(tokenizer.encode("the other and"))]
    client, _ = scripted(script)
    comments, others = without_comments(lines_of(client, path, PATHS[path]))
    client, _ = scripted(deltas(tokenizer.encode("the other and")))
    silent = lines_of(client, path, PATHS[path])
    assert _without_ids(others) == _without_ids(silent)

    queued, computing = (f"{comment_line(one).decode()}" for one in (QUEUED, COMPUTING))
    assert set(comments) == {queued, computing}
    assert comments == sorted(comments, reverse=True), "first it waits, then it is computed"
    # After 0.02 s, and then every 0.05 s of 0.3 s; a slow machine takes longer.
    assert 2 <= len(comments) <= 12


def _without_ids(lines: list[str]) -> list[Any]:
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line not in ("", "data: [DONE]")]
    return [{name: value for name, value in one.items() if name not in ("id", "created")} for one in chunks]


@pytest.mark.usefixtures("often")
def test_of_several_choices_each_that_waits_has_a_line(scripted: Scripted, tokenizer: Tokenizer) -> None:
    def script(choice_index: int) -> list[Any]:
        answer = deltas(tokenizer.encode("the"))
        if choice_index == 1:
            return [*answer[:-1], Delta([5]), 0.3, *answer[-1:]]
        return [QUEUED if choice_index == 0 else COMPUTING, 0.3, *answer]

    client, _ = scripted(script)
    lines = lines_of(client, "/v1/completions", COMPLETION | {"n": 3})
    comments, _ = without_comments(lines)
    pair = [comment_line(QUEUED, choice=0).decode(), comment_line(COMPUTING, choice=2).decode()]
    assert comments[:2] == pair
    assert set(comments) == set(pair)
    at = lines.index(pair[0])
    assert lines[at : at + 3] == [*pair, ""], "one comment of two lines"


@pytest.mark.usefixtures("often")
def test_nothing_is_said_while_it_generates(scripted: Scripted, tokenizer: Tokenizer) -> None:
    one = deltas(tokenizer.encode("the"))
    client, _ = scripted([Delta([5]), 0.2, *one])
    comments, _ = without_comments(lines_of(client, "/v1/completions", COMPLETION))
    assert comments == []


@pytest.mark.usefixtures("often")
def test_a_stream_that_pauses_says_so(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted([Delta([5]), 0.1, PAUSED, 0.2, *deltas(tokenizer.encode("the"))])
    lines = lines_of(client, "/v1/completions", COMPLETION)
    comments, others = without_comments(lines)
    assert set(comments) == {comment_line(PAUSED).decode()}
    assert lines.index(comments[0]) > lines.index(others[0])


@pytest.mark.usefixtures("often")
def test_the_headers_come_before_anything_else(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted([QUEUED, 0.5, *deltas(tokenizer.encode("the"))])
    with client.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as response:
        assert response.status_code == 200
        assert next(response.iter_lines()).startswith(": octavo waiting")


@pytest.mark.usefixtures("often")
def test_a_whole_answer_has_no_comments(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted([QUEUED, 0.2, *deltas(tokenizer.encode("the"))])
    answer = client.post("/v1/completions", json=COMPLETION)
    assert answer.json()["choices"][0]["text"] == "the"
    assert b"octavo waiting" not in answer.content


@pytest.mark.usefixtures("often")
def test_a_fault_of_ours_while_commenting_ends_no_stream(
    scripted: Scripted,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = "zebra"

    def broken(_: ScriptedGeneration) -> None:
        raise ZeroDivisionError(secret)

    monkeypatch.setattr(ScriptedGeneration, "standing", broken)
    client, _ = scripted([QUEUED, 0.2, *deltas(tokenizer.encode("the"))])
    comments, others = without_comments(lines_of(client, "/v1/completions", COMPLETION))
    assert comments == []
    assert others[-2] == "data: [DONE]"
    assert "a comment in a stream failed" in caplog.text
    assert secret not in caplog.text


def test_the_first_comes_after_two_seconds_and_then_one_every_five() -> None:
    assert (sse.FIRST_COMMENT_AFTER, sse.COMMENT_EVERY) == (2.0, 5.0)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.usefixtures("often")
def test_the_openai_client_reads_over_comments(
    scripted: Scripted, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    said = ["the other and", "in the user"]

    def script(choice_index: int) -> list[Any]:
        answer = deltas(tokenizer.encode(said[choice_index]))
        return [QUEUED, 0.1, *answer[:1], 0.1, PAUSED, 0.1, *answer[1:]]

    http, _ = scripted(script)
    comments: list[bytes] = []

    def line(*of: Any, **more: Any) -> bytes:
        comments.append(comment_line(*of, **more))
        return comments[-1]

    monkeypatch.setattr("octavo.api.openai.answer.comment_line", line)
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="unused", max_retries=0)
    messages: Any = [{"role": "user", "content": "the"}]
    heard = [""] * n
    for chunk in client.chat.completions.create(model="tiny", messages=messages, stream=True, n=n):
        for choice in chunk.choices:
            heard[choice.index] += choice.delta.content or ""
    assert heard == said[:n]
    assert len(comments) >= 2 * n
    comments.clear()
    heard = [""] * n
    for part in client.completions.create(model="tiny", prompt="the", stream=True, n=n):
        for one in part.choices:
            heard[one.index] += one.text
    assert heard == said[:n]
    assert len(comments) >= 2 * n


# --- records --------------------------------------------------------------------------------------


@contextmanager
def asking(client: httpx.Client, **fields: Any) -> Iterator[list[httpx.Response]]:
    """A request under way beside the body; afterwards its answer, whole."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        # Its own connection: the client of the test has others to ask.
        with httpx.Client(base_url=client.base_url, timeout=20) as own:
            answers.append(own.post("/v1/completions", json={**COMPLETION, **fields}))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        thread.join(20)


def told(client: httpx.Client, **query: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = client.get("/v1/requests", params=query).json()["data"]
    return listed


def test_a_record_says_why_each_choice_waits(scripted: Scripted, tokenizer: Tokenizer) -> None:
    def script(choice_index: int) -> list[Any]:
        standings: list[Standing | float] = [QUEUED, COMPUTING, 0.0]
        return [standings[choice_index], 60.0, *deltas(tokenizer.encode("the"))]

    client, engine = scripted(script, fresh=True)
    with asking(client, n=3) as answers:
        wait_until(lambda: len(engine.generations) == 3 and engine.generations[1].stands is not None)
        (one,) = told(client)
        expected = [
            {
                "position": 3,
                "reason": "kv",
                "progress": {"computed": 0, "known": 3000},
                "estimate": 4.2,
            },
            {
                "position": 0,
                "reason": None,
                "progress": {"computed": 1024, "known": 3000},
                "estimate": 1.94,
            },
            None,
        ]
        assert [choice["waiting"] for choice in one["choices"]] == expected
        alone = client.get(f"/v1/requests/{one['id']}").json()
        assert [choice["waiting"] for choice in alone["choices"]] == expected
        for generation in engine.generations:
            generation.woken.set()
    assert answers[0].status_code == 200
    (one,) = told(client)
    assert [choice["waiting"] for choice in one["choices"]] == [None] * 3
    assert "account" not in one


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends X-Admin is one."""

    def asked(request: Any, user: str | None) -> SimpleNamespace:
        return SimpleNamespace(owner=caller_of(request, user).owner, admin="x-admin" in request.headers)

    monkeypatch.setattr("octavo.api.request_records.caller_of", asked)


@pytest.mark.usefixtures("admin")
def test_an_admin_sees_the_numbers_of_all_and_the_texts_of_none(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), fresh=True)
    prompt = " ".join(f"word{number}" for number in range(30))
    ids = [
        client.post("/v1/completions", json={"prompt": text, "user": user}).json()["id"]
        for user, text in (("ann", prompt), ("ann", prompt.replace("word20", "zebra")), ("", "the"))
    ]
    headers = {"X-Admin": "1"}
    listed = client.get("/v1/requests", params={"all": "true"}, headers=headers)
    assert [one["id"] for one in listed.json()["data"]] == ids[::-1]
    assert {one["account"] for one in listed.json()["data"]} == {"127.0.0.1"}
    assert [one["id"] for one in told(client, user="ann")] == ids[1::-1]
    anns = client.get(f"/v1/requests/{ids[1]}", params={"all": "true"}, headers=headers)
    assert anns.json()["account"] == "127.0.0.1"
    assert anns.json()["choices"][0]["prefix"]["with"] == ids[0]
    for answer in (listed, anns):
        assert "zebra" not in answer.text
        assert "word" not in answer.text
    text = {"text": "true", "all": "true"}
    refused = client.get(f"/v1/requests/{ids[1]}", params=text, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "owner_required")
    mine = client.get(f"/v1/requests/{ids[1]}", params={**text, "user": "ann"}, headers=headers)
    assert "zebra" in mine.json()["choices"][0]["prefix"]["differing"]["now"]
    # Without `all` an admin is somebody like others.
    assert client.get(f"/v1/requests/{ids[1]}", headers=headers).status_code == 404


@pytest.mark.usefixtures("admin")
def test_others_may_not_ask_for_everybodys(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), fresh=True)
    request_id = client.post("/v1/completions", json=COMPLETION).json()["id"]
    for path in ("/v1/requests", f"/v1/requests/{request_id}", "/v1/requests/nobodys"):
        answer = client.get(path, params={"all": "true"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_required")
        assert client.get(path, params={"all": "perhaps"}).status_code == 400
    assert len(told(client, all="false")) == 1


def test_the_one_key_of_a_server_has_a_name(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), keyring=of_api_key("secret"))
    headers = {"Authorization": "Bearer secret"}
    assert client.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200
    listed = client.get("/v1/requests", params={"all": "true"}, headers=headers).json()["data"]
    assert [one["account"] for one in listed] == ["api-key"]


# --- a full queue ---------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("seconds", "header"), [(None, "1"), (0.2, "1"), (1.0, "1"), (3.01, "4"), (60, "60")]
)
def test_a_full_queue_is_a_503_that_says_when_to_come_back(
    scripted: Scripted, seconds: float | None, header: str, streaming: bool
) -> None:
    client, engine = scripted([], fresh=True)
    engine.generations.append(None)  # type: ignore[arg-type]
    engine.refusal = RequestRefused("4 requests wait, 4 may", code="queue_full", retry_after=seconds)
    answer = client.post("/v1/completions", json={**COMPLETION, "stream": streaming})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == header
    assert answer.json()["error"] == {
        "message": "4 requests wait, 4 may",
        "type": "server_error",
        "code": "queue_full",
        "param": None,
    }
    assert told(client) == []


def test_the_bound_is_asked_for_once_a_request(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, engine = scripted(deltas(tokenizer.encode("the")))
    client.post("/v1/completions", json={"prompt": ["the", "and"], "n": 2})
    client.post("/v1/completions", json=COMPLETION)
    assert engine.bounded == [True, False, False, False, True]


# --- a deadline -----------------------------------------------------------------------------------


def test_who_has_no_token_by_the_deadline_is_told_and_gives_up(scripted: Scripted) -> None:
    client, engine = scripted(lambda _: [QUEUED, 30.0], fresh=True)
    began = time.monotonic()
    answer = client.post("/v1/completions", json={**COMPLETION, "deadline": 0.3, "n": 2})
    assert 0.3 <= time.monotonic() - began < 10
    assert answer.status_code == 503
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("deadline_exceeded", "deadline")
    assert re.search(r"'deadline' of 0.3 s: the request has waited \d\.\d s", error["message"])
    assert "position 3 of those that wait (kv)" in error["message"]
    assert [generation.cancelled for generation in engine.generations] == [["abort"]] * 2


def test_in_a_stream_the_deadline_is_its_last_event(scripted: Scripted) -> None:
    client, engine = scripted([COMPUTING, 30.0], fresh=True)
    body = {**COMPLETION, "deadline": 0.05, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        (event,) = events(response)
    assert event["error"]["code"] == "deadline_exceeded"
    assert "1,024 of its 3,000 tokens were computed" in event["error"]["message"]
    assert engine.generations[0].cancelled == ["abort"]


@pytest.mark.parametrize("deadline", [0.5, 5, 1e300])
def test_who_has_a_token_in_time_may_take_as_long_as_it_takes(
    scripted: Scripted, tokenizer: Tokenizer, deadline: float
) -> None:
    answer = deltas(tokenizer.encode("the and"))
    client, _ = scripted([*answer[:1], 0.8, *answer[1:]], fresh=True)
    got = client.post("/v1/completions", json={**COMPLETION, "deadline": deadline})
    assert got.json()["choices"][0]["text"] == "the and"


def test_one_choice_with_a_token_is_enough(scripted: Scripted, tokenizer: Tokenizer) -> None:
    answer = deltas(tokenizer.encode("the and"))

    def script(choice_index: int) -> list[Any]:
        return [QUEUED, 0.8, *answer] if choice_index else [*answer[:1], 0.8, *answer[1:]]

    client, _ = scripted(script, fresh=True)
    got = client.post("/v1/completions", json={**COMPLETION, "deadline": 0.5, "n": 2})
    assert [choice["text"] for choice in got.json()["choices"]] == ["the and"] * 2


@pytest.mark.parametrize("deadline", [0, -1, -0.0, "5", True, [1]])
@pytest.mark.parametrize("path", PATHS)
def test_a_deadline_is_a_number_of_seconds_above_zero(
    scripted: Scripted, path: str, deadline: object
) -> None:
    client, engine = scripted([])
    answer = client.post(path, json={**PATHS[path], "deadline": deadline})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "deadline"
    assert not engine.generations


@pytest.mark.parametrize("fields", [{"deadline": 1e300}, {"latest_only": "x"}])
@pytest.mark.parametrize("streaming", [True, False])
def test_nothing_of_a_request_is_kept_for_its_deadline_or_its_tag(
    scripted: Scripted, tokenizer: Tokenizer, fields: dict[str, Any], streaming: bool
) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), fresh=True)
    body = {**COMPLETION, **fields, "stream": streaming}
    assert client.post("/v1/completions", json=body).status_code == 200

    def kept() -> list[Answer]:
        gc.collect()
        return [one for one in gc.get_objects() if isinstance(one, Answer)]

    wait_until(lambda: not kept())


# --- latest only ----------------------------------------------------------------------------------


def test_a_newer_request_with_the_tag_ends_the_one_before(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, engine = scripted(lambda _: [QUEUED, 30.0], fresh=True)
    with asking(client, latest_only="line 7", n=2) as answers:
        wait_until(lambda: len(engine.generations) == 2 and engine.generations[1].stands is not None)
        engine.script = lambda _: deltas(tokenizer.encode("the"))
        began = time.monotonic()
        newer = client.post("/v1/completions", json={**COMPLETION, "latest_only": "line 7"})
        assert newer.json()["choices"][0]["text"] == "the"
    assert time.monotonic() - began < 10
    (earlier,) = answers
    assert earlier.status_code == 409
    assert earlier.headers["x-should-retry"] == "false"
    error = earlier.json()["error"]
    assert (error["code"], error["param"]) == ("superseded", "latest_only")
    assert "'line 7'" in error["message"]
    assert [one.cancelled for one in engine.generations] == [["abort"], ["abort"], []]
    # Who has ended is not there to be ended.
    again = client.post("/v1/completions", json={**COMPLETION, "latest_only": "line 7"})
    assert again.status_code == 200
    assert [one.cancelled for one in engine.generations[2:]] == [[], []]


def test_in_a_stream_it_is_an_event(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, engine = scripted([Delta(tokenizer.encode("the")), 30.0], fresh=True)
    body = {**CHAT, "latest_only": "x", "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        chunks = events(response)
        assert next(chunks)["choices"][0]["delta"]["role"] == "assistant"
        assert next(chunks)["choices"][0]["delta"]["content"] == "the"
        engine.script = lambda _: deltas(tokenizer.encode("and"))
        with asking(client, latest_only="x") as answers:
            rest = list(chunks)
    assert answers[0].status_code == 200
    assert [one["error"]["code"] for one in rest] == ["superseded"]
    assert engine.generations[0].cancelled == ["abort"]


@pytest.mark.parametrize(
    "other", [{"latest_only": "y"}, {"latest_only": "x", "user": "ann"}, {}, {"latest_only": None}]
)
def test_other_tags_and_other_peoples_are_left_alone(
    scripted: Scripted, tokenizer: Tokenizer, other: dict[str, Any]
) -> None:
    client, engine = scripted([QUEUED, 60.0, *deltas(tokenizer.encode("the"))], fresh=True)
    with asking(client, latest_only="x") as answers:
        wait_until(lambda: bool(engine.generations) and engine.generations[0].stands is not None)
        engine.script = lambda _: deltas(tokenizer.encode("and"))
        assert client.post("/v1/completions", json={**COMPLETION, **other}).status_code == 200
        assert engine.generations[0].cancelled == []
        engine.generations[0].woken.set()
    assert answers[0].status_code == 200


def test_the_same_tag_of_another_address_is_another(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, engine = scripted([QUEUED, 60.0, *deltas(tokenizer.encode("the"))], fresh=True)
    with asking(client, latest_only="x") as answers:
        wait_until(lambda: bool(engine.generations) and engine.generations[0].stands is not None)
        engine.script = lambda _: deltas(tokenizer.encode("and"))
        transport = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(base_url=client.base_url, transport=transport) as stranger:
            body = {**COMPLETION, "latest_only": "x"}
            assert stranger.post("/v1/completions", json=body).status_code == 200
        engine.generations[0].woken.set()
    assert answers[0].status_code == 200


def test_the_openai_client_does_not_ask_again_for_what_was_superseded(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    """It asks again after a 409 by itself, and that would end the newer one."""
    http, engine = scripted([QUEUED, 30.0], fresh=True)
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="unused", max_retries=3)

    def ask() -> str:
        extra = {"latest_only": "x"}
        return client.completions.create(model="tiny", prompt="the", extra_body=extra).choices[0].text

    failures: list[openai.APIStatusError] = []

    def superseded() -> None:
        try:
            ask()
        except openai.APIStatusError as error:
            failures.append(error)

    thread = threading.Thread(target=superseded)
    thread.start()
    wait_until(lambda: bool(engine.generations) and engine.generations[0].stands is not None)
    engine.script = lambda _: deltas(tokenizer.encode("and"))
    assert ask() == "and"
    thread.join(20)
    assert [failure.status_code for failure in failures] == [409]
    assert len(engine.generations) == 2


@pytest.mark.parametrize(("tag", "says"), [("", "not 0"), ("x" * 129, "not 129"), (7, "string"), (["x"], "")])
@pytest.mark.parametrize("path", PATHS)
def test_a_tag_has_a_length(scripted: Scripted, path: str, tag: object, says: str) -> None:
    client, _ = scripted([])
    answer = client.post(path, json={**PATHS[path], "latest_only": tag})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "latest_only"
    assert says in answer.json()["error"]["message"]


def test_a_tag_may_be_of_any_characters(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")))
    for tag in ("ä 鍵", "é" * 128, "\u0000", "a\nb"):
        answer = client.post("/v1/completions", json={**COMPLETION, "latest_only": tag})
        assert answer.status_code == 200
