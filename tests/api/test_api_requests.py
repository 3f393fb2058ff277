"""GET /v1/requests over a scripted engine: whose requests they are, how many are kept, what is refused."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from api.conftest import of_api_key
from api.scripted_engine import ScriptedEngine, deltas, failure
from octavo.engine.records import MAX_FINISHED, MAX_FINISHED_OF_ACCOUNT
from octavo.engine.request import Delta
from octavo.text.tokenizer import Tokenizer

Scripted = Callable[..., tuple[httpx.Client, ScriptedEngine]]

COMPLETION = {"prompt": "the user and the"}
WORDS = [f"word{number}" for number in range(60)]


@contextmanager
def from_address(client: httpx.Client, address: str, **options: Any) -> Iterator[httpx.Client]:
    """A client of the same server at another address of this machine."""
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(base_url=client.base_url, transport=transport, timeout=20, **options) as other:
        yield other


def ask(client: httpx.Client, **fields: Any) -> str:
    answer = client.post("/v1/completions", json={**COMPLETION, **fields})
    assert answer.status_code == 200, answer.text
    request_id: str = answer.json()["id"]
    return request_id


def ids(client: httpx.Client, **query: str) -> list[str]:
    answer = client.get("/v1/requests", params=query).json()
    assert answer["object"] == "list"
    return [one["id"] for one in answer["data"]]


def test_a_finished_request_and_its_choices(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, engine = scripted(deltas(tokenizer.encode("the in")), fresh=True)
    engine.cached_tokens = iter([3, 4, 0, 1])
    answer = client.post("/v1/completions", json={"prompt": ["the", "the user and"], "n": 2}).json()
    told = client.get(f"/v1/requests/{answer['id']}").json()
    assert {name: told[name] for name in ("id", "object", "status", "model", "created")} == {
        "id": answer["id"],
        "object": "request",
        "status": "finished",
        "model": "tiny",
        "created": answer["created"],
    }
    prompts = [len(tokenizer.encode(prompt)) for prompt in ("the", "the", "the user and", "the user and")]
    for index, choice in enumerate(told["choices"]):
        cached = [3, 4, 0, 1][index]
        assert choice["prefix"] == {
            "cached_tokens": cached,
            "broke_at": None,
            "tokens_lost": 0,
            "with": None,
        }
        assert (choice["index"], choice["prompt_tokens"], choice["cached_tokens"]) == (
            index,
            prompts[index],
            cached,
        )
        assert (choice["status"], choice["finish_reason"]) == ("finished", "length")
        assert choice["output_tokens"] == len(tokenizer.encode("the in"))
        assert (choice["num_preemptions"], choice["tokens_lost"], choice["preemptions"]) == (0, 0, [])
    with_text = client.get(f"/v1/requests/{answer['id']}", params={"text": "true"}).json()
    assert [choice["prefix"]["differing"] for choice in with_text["choices"]] == [None] * 4


def test_a_live_request_is_listed_before_it_has_an_answer(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted([Delta(tokenizer.encode("the")), 1.0, *deltas([5])], fresh=True)
    first = threading.Event()
    seen: list[str] = []

    def stream() -> None:
        with client.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as answer:
            for line in answer.iter_lines():
                seen.append(line)
                first.set()

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        assert first.wait(10)
        with from_address(client, "127.0.0.1") as other:
            (request_id,) = ids(other)
            assert other.get(f"/v1/requests/{request_id}").json()["status"] == "running"
    finally:
        thread.join(20)
    assert f'"id":"{request_id}"' in seen[0]
    assert client.get(f"/v1/requests/{request_id}").json()["status"] == "finished"


def test_a_request_of_somebody_else_is_as_unknown_as_none(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), fresh=True)
    mine, anns = ask(client), ask(client, user="ann")
    assert (ids(client), ids(client, user="ann"), ids(client, user="bob")) == ([mine], [anns], [])
    with from_address(client, "127.0.0.2") as stranger:
        unknown = stranger.get("/v1/requests/cmpl-0123456789")
        assert unknown.status_code == 404
        error = unknown.json()["error"]
        assert error["code"] == "request_not_found"
        assert f"last {MAX_FINISHED_OF_ACCOUNT} of a key or address" in error["message"]
        assert f"last {MAX_FINISHED} of all" in error["message"]
        for request_id, query in ((mine, {}), (anns, {"user": "ann"}), (mine, {"text": "true"})):
            answer = stranger.get(f"/v1/requests/{request_id}", params=query)
            assert (answer.status_code, answer.content) == (404, unknown.content)
        assert ids(stranger) == ids(stranger, user="ann") == []
    for request_id, query in ((anns, {}), (mine, {"user": "ann"})):
        answer = client.get(f"/v1/requests/{request_id}", params=query)
        assert (answer.status_code, answer.content) == (404, unknown.content)
    assert client.get(f"/v1/requests/{anns}", params={"user": "ann"}).status_code == 200
    assert client.get(f"/v1/requests/{mine}", params={"user": ""}).status_code == 200


def test_the_key_owns_a_request_wherever_it_was_asked_from(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), keyring=of_api_key("secret"))
    headers = {"Authorization": "Bearer secret"}
    with from_address(client, "127.0.0.2", headers=headers) as here:
        request_id = ask(here)
    with from_address(client, "127.0.0.3", headers=headers) as there:
        assert ids(there) == [request_id]
        assert there.get(f"/v1/requests/{request_id}").status_code == 200
    assert client.get(f"/v1/requests/{request_id}").status_code == 401
    assert client.get("/v1/requests").status_code == 401


def test_a_key_that_nobody_asked_for_owns_nothing(scripted: Scripted, tokenizer: Tokenizer) -> None:
    """Libraries send one all the same, and two people may send the same."""
    client, _ = scripted(deltas(tokenizer.encode("the")), fresh=True)
    headers = {"Authorization": "Bearer unused"}
    with from_address(client, "127.0.0.2", headers=headers) as one:
        request_id = ask(one)
    with from_address(client, "127.0.0.3", headers=headers) as other:
        assert ids(other) == []
    with from_address(client, "127.0.0.2") as same:
        assert ids(same) == [request_id]


def test_only_a_proxy_on_this_machine_may_name_another_address(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), fresh=True)
    with from_address(client, "127.0.0.2") as victim:
        request_id = ask(victim)
    named = {"X-Forwarded-For": "127.0.0.2"}
    with from_address(client, "127.0.0.3", headers=named) as liar:
        assert ids(liar) == []
    with from_address(client, "127.0.0.1", headers=named) as proxy:
        assert ids(proxy) == [request_id]
    with from_address(client, "127.0.0.1", headers={"X-Forwarded-For": "127.0.0.2, 127.0.0.3"}) as proxy:
        assert ids(proxy) == []


def test_the_last_finished_ones_are_kept(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), fresh=True)
    asked = [ask(client, user=f"{number % 2}") for number in range(MAX_FINISHED_OF_ACCOUNT + 2)]
    assert ids(client, user="0") == asked[:0:-2] if len(asked) % 2 else asked[-2:1:-2]
    assert client.get(f"/v1/requests/{asked[0]}", params={"user": "0"}).status_code == 404
    assert client.get(f"/v1/requests/{asked[2]}", params={"user": "0"}).status_code == 200


def test_requests_that_failed_or_were_left_are_recorded_too(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, engine = scripted([failure()], fresh=True)
    assert client.post("/v1/completions", json=COMPLETION).status_code == 500
    (failed,) = ids(client)
    told = client.get(f"/v1/requests/{failed}").json()
    assert (told["status"], told["choices"][0]["finish_reason"]) == ("finished", "error")
    engine.reset(lambda _: [Delta(tokenizer.encode("the")), 30.0])
    with client.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as answer:
        next(answer.iter_lines())
    with from_address(client, "127.0.0.1") as other:
        deadline = time.monotonic() + 10
        while not engine.generations[0].cancelled:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(ids(other)) == 2


def test_a_request_that_was_refused_has_no_record(scripted: Scripted) -> None:
    client, _ = scripted([], fresh=True)
    assert client.post("/v1/completions", json={"prompt": "the", "temperature": -1}).status_code == 400
    assert ids(client) == []


@pytest.mark.parametrize("given", ["maybe", "", "TRUE", "yes"])
def test_what_text_may_be(scripted: Scripted, given: str) -> None:
    client, _ = scripted([])
    answer = client.get("/v1/requests/x", params={"text": given})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "text"


def test_requests_are_only_read(scripted: Scripted) -> None:
    client, _ = scripted([])
    for path in ("/v1/requests", "/v1/requests/x"):
        answer = client.post(path, json={})
        assert answer.status_code == 405
        assert "GET" in answer.json()["error"]["message"]


def test_names_of_users_may_be_of_any_kind(scripted: Scripted, tokenizer: Tokenizer) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), fresh=True)
    for user in ("ä 鍵", "x" * 4000, "a&b=c", "\u0000"):
        request_id = ask(client, user=user)
        assert ids(client, user=user) == [request_id]


@pytest.mark.parametrize("ahead", ["", "z"])
def test_what_differs_shows_no_parts_of_characters(
    scripted: Scripted, tokenizer: Tokenizer, ahead: str
) -> None:
    client, _ = scripted(deltas(tokenizer.encode("the")), fresh=True)
    ask(client, prompt="é" * 60 + ahead + "x" + "é" * 30)
    request_id = ask(client, prompt="é" * 60 + ahead + "y" + "é" * 30)
    told = client.get(f"/v1/requests/{request_id}", params={"text": "true"}).json()
    differing = told["choices"][0]["prefix"]["differing"]
    # Eight bytes ahead and 24 behind, of two each: what is cut in half is left out.
    common = "éééé" if not ahead else "ééé" + ahead
    assert differing == {"before": common + "x" + "é" * 11, "now": common + "y" + "é" * 11}


@pytest.mark.parametrize("in_one", [True, False])
@pytest.mark.parametrize("stop", ["ef", "efg", "efgh"])
def test_what_a_stop_string_cut_off_is_no_part_of_the_conversation(
    scripted: Scripted, tokenizer: Tokenizer, stop: str, in_one: bool
) -> None:
    said = tokenizer.encode("abcdefgh")
    prompt = tokenizer.encode("x" * 100)
    script = [Delta(said, [], "length")] if in_one else deltas(said)
    broke_at = []
    for answer in ("abcd", "abcX", "abcdX"):
        client, _ = scripted(script, fresh=True)
        ask(client, prompt=prompt, stop=stop)
        goes_on = ask(client, prompt=[*prompt, *tokenizer.encode(answer), *tokenizer.encode("stu")])
        told = client.get(f"/v1/requests/{goes_on}").json()
        broke_at.append(told["choices"][0]["prefix"]["broke_at"])
    assert broke_at == [None, len(prompt) + 3, None]


def test_without_a_stop_string_every_token_but_the_last_is_part_of_it(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("x" * 100)
    for answer, position in (("abcdefgX", None), ("abcdefXh", len(prompt) + 6)):
        client, _ = scripted(deltas(tokenizer.encode("abcdefgh")), fresh=True)
        ask(client, prompt=prompt)
        goes_on = ask(client, prompt=[*prompt, *tokenizer.encode(answer)])
        told = client.get(f"/v1/requests/{goes_on}").json()
        assert told["choices"][0]["prefix"]["broke_at"] == position


def test_neither_log_nor_list_holds_what_differs(
    scripted: Scripted, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "zebra quartz"
    client, _ = scripted(deltas(tokenizer.encode("the")), fresh=True)
    with caplog.at_level(logging.DEBUG):
        before = ask(client, prompt=" ".join(WORDS))
        now = ask(client, prompt=" ".join([*WORDS[:20], secret, *WORDS[21:]]))
        prefix = client.get(f"/v1/requests/{now}", params={"text": "1"}).json()["choices"][0]["prefix"]
        listed = client.get("/v1/requests", params={"text": "true"}).text
        plain = client.get(f"/v1/requests/{now}").text
    assert prefix["with"] == before
    assert "zebra" in prefix["differing"]["now"]
    assert "word20" in prefix["differing"]["before"]
    for text in (listed, plain):
        assert f'"broke_at":{prefix["broke_at"]}' in text
        assert "zebra" not in text
        assert "word20" not in text
        assert "differing" not in text
    said = [str(vars(record)) + record.getMessage() for record in caplog.records if "octavo" in record.name]
    assert not [line for line in said if "zebra" in line or "word2" in line]
