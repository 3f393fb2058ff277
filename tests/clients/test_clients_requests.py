"""T07, T14 and T25 as the people concerned see them: GET /v1/requests of a real server."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionMessageParam

from clients.server_process import ServerProcess, together, wait_until


@pytest.fixture(scope="module")
def server(tiny_model_path: Path) -> Iterator[ServerProcess]:
    """With room for several prompts of 600 tokens."""
    arguments = ("--served-model-name", "tiny", "--kv-cache-memory", "8MiB")
    with ServerProcess(tiny_model_path, *arguments) as server:
        yield server


def at_address(server: ServerProcess, address: str) -> httpx.Client:
    """Somebody else on this machine."""
    transport = httpx.HTTPTransport(local_address=address)
    return httpx.Client(base_url=server.url, transport=transport, timeout=120)


def letters(number: int, length: int) -> list[int]:
    """Tokens of printable text that nobody else writes."""
    return random.Random(number).choices(range(3 + 33, 3 + 94), k=length)


def ask(client: httpx.Client, prompt: list[int], **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def told(client: httpx.Client, request_id: str, **query: str) -> Any:
    """The one choice of a request, once the engine has ended it."""

    def ended() -> bool:
        return bool(client.get(f"/v1/requests/{request_id}", params=query).json()["status"] == "finished")

    wait_until(ended)
    (choice,) = client.get(f"/v1/requests/{request_id}", params=query).json()["choices"]
    return choice


def decoded(client: httpx.Client, token_ids: list[int]) -> str:
    text: str = client.post("/detokenize", json={"tokens": token_ids}).json()["prompt"]
    return text


@pytest.mark.parametrize(("changed", "lost"), [(20, 579), (580, 19)])
def test_t07_the_server_says_where_the_prefix_broke(server: ServerProcess, changed: int, lost: int) -> None:
    user = f"t07-{changed}"
    base = letters(changed, 600)
    prompts = [[*base[:changed], token, *base[changed + 1 :]] for token in (120, 121, 122)]
    texts: list[str] = []
    with server.http() as client:
        asked: list[str] = []
        for number, prompt in enumerate(prompts):
            answer = ask(client, prompt, user=user)
            asked.append(answer["id"])
            cached = changed if number else 0
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            choice = told(client, answer["id"], user=user, text="true")
            prefix = choice["prefix"]
            assert choice["cached_tokens"] == prefix["cached_tokens"] == cached
            assert choice["computed_tokens"] == 600 - cached + 4 - 1
            if not number:
                assert (prefix["broke_at"], prefix["tokens_lost"], prefix["with"]) == (None, 0, None)
                assert prefix["differing"] is None
                continue
            assert (prefix["broke_at"], prefix["tokens_lost"]) == (changed, lost)
            # Both earlier ones begin alike: the latest counts.
            assert prefix["with"] == asked[number - 1]
            shown = slice(changed - 8, changed + 24)
            # Behind the prompt of the earlier request its answer follows.
            before, now = prefix["differing"]["before"], prefix["differing"]["now"]
            assert before.startswith(decoded(client, prompts[number - 1][shown]))
            assert now == decoded(client, prompt[shown])
            assert before != now
            texts += [before, now]
        whole = client.get("/v1/requests", params={"user": user, "text": "true"})
        assert [one["id"] for one in whole.json()["data"]] == asked[::-1]
        assert "differing" not in whole.text
        metrics = client.get("/metrics").text
    # Somebody else is told nothing, also where the blocks are the same.
    with at_address(server, "127.0.0.2") as stranger:
        unknown = stranger.get("/v1/requests/cmpl-unknown")
        for request_id in asked:
            for query in ({"user": user}, {}):
                answer = stranger.get(f"/v1/requests/{request_id}", params={**query, "text": "true"})
                assert (answer.status_code, answer.content) == (404, unknown.content)
        theirs = ask(stranger, [*base[:changed], 123, *base[changed + 1 :]], user=user)
        prefix = told(stranger, theirs["id"], user=user, text="true")["prefix"]
        assert (prefix["cached_tokens"], prefix["broke_at"], prefix["with"]) == (changed, None, None)
        assert prefix["differing"] is None
        # Nor under another user's name at the same address.
    with server.http() as client:
        other = ask(client, [*base[:changed], 124, *base[changed + 1 :]], user="another")
        assert told(client, other["id"], user="another")["prefix"]["broke_at"] is None
    for line in (*server.log, *server.output, metrics):
        for text in texts:
            assert text not in line
            assert text[4:12] not in line


def test_a_chat_that_goes_on_has_not_broken_and_one_that_was_edited_has(smollm2: ServerProcess) -> None:
    """With the official SDK, whose own methods know nothing of this."""
    with smollm2.openai() as client:
        messages: list[ChatCompletionMessageParam] = [
            {"role": "user", "content": f"Number {number}: tell me something about the sea and its fish."}
            for number in range(5)
        ]
        first = client.chat.completions.create(
            model="smollm2", messages=messages, max_tokens=20, temperature=0, user="sdk"
        )
        said = first.choices[0].message.content
        follow_up: list[ChatCompletionMessageParam] = [
            *messages,
            {"role": "assistant", "content": said},
            {"role": "user", "content": "and?"},
        ]
        second = client.chat.completions.create(
            model="smollm2", messages=follow_up, max_tokens=20, temperature=0, user="sdk"
        )
        edited: list[ChatCompletionMessageParam] = [
            {"role": "user", "content": "Nummer 0: tell me something about the sea and its fish."},
            *follow_up[1:],
        ]
        third = client.chat.completions.create(
            model="smollm2", messages=edited, max_tokens=20, temperature=0, user="sdk"
        )
        prefixes = []
        for answer in (first, second, third):
            raw = client.get(
                f"/requests/{answer.id}",
                cast_to=httpx.Response,
                options={"params": {"user": "sdk", "text": "true"}},
            )
            prefixes.append(raw.json()["choices"][0]["prefix"])
        assert second.usage is not None
        assert third.usage is not None
    assert [prefix["broke_at"] is None for prefix in prefixes] == [True, True, False]
    # All but the last token of the first answer was there for the follow-up, and nothing of it for the edit.
    broken = prefixes[2]
    assert prefixes[1]["cached_tokens"] > broken["cached_tokens"] == broken["broke_at"]
    assert broken["with"] == second.id
    assert "Number 0: tell" in broken["differing"]["before"]
    assert "ummer 0: tell" in broken["differing"]["now"]
    # What stands behind the changed word is the same to the end of the prompt, word for word.
    changed = third.usage.prompt_tokens - broken["broke_at"] - broken["tokens_lost"]
    assert 1 <= changed <= 4


def test_t14_everybody_is_told_of_the_pauses_and_the_metrics_have_their_sum(tiny_model_path: Path) -> None:
    small = ("--served-model-name", "tiny", "--kv-cache-memory", "524288", "--max-num-seqs", "4")
    with ServerProcess(tiny_model_path, *small) as server, server.http() as client:
        num_blocks = int(server.metric("kv_blocks_total"))
        length = num_blocks * 16 // 8
        answers: list[Any] = []

        def one(number: int) -> None:
            with server.http() as own:
                answers.append(ask(own, letters(number, length), max_tokens=2 * length))

        with together(*[lambda number=number: one(number) for number in range(4)]):
            pass
        assert all(answer["usage"]["completion_tokens"] == 2 * length for answer in answers)
        choices = [told(client, answer["id"]) for answer in answers]
        assert sum(choice["num_preemptions"] for choice in choices) == server.metric("num_preemptions_total")
        lost = sum(choice["tokens_lost"] for choice in choices)
        assert lost == server.metric("preempted_tokens_total") > 0
        for choice in choices:
            pauses = choice["preemptions"]
            assert len(pauses) == choice["num_preemptions"]
            assert sum(pause["tokens_lost"] for pause in pauses) == choice["tokens_lost"]
            for pause in pauses:
                assert pause["reason"] == ("kv" if pause["tokens_lost"] else "kv_full")
                assert 0 < pause["at"] < choice["total_time"]
            assert 0 <= choice["queue_time"] <= choice["first_token_time"] <= choice["total_time"]


def test_t25_a_request_is_known_while_it_runs_and_after_its_client_has_left(smollm2: ServerProcess) -> None:
    body = {"prompt": letters(9, 40), "max_tokens": 1900, "ignore_eos": True, "stream": True, "user": "t25"}
    query = {"user": "t25"}
    with smollm2.http() as client:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # the stream is closed with it
            found = re.search(r'"id":"(cmpl-\w+)"', next(lines))
            assert found is not None
            request_id = found[1]
            with httpx.Client(base_url=client.base_url) as other:
                live = other.get(f"/v1/requests/{request_id}", params=query).json()
                listed = other.get("/v1/requests", params=query).json()["data"]
        assert live["status"] == "running"
        assert live["choices"][0]["finish_reason"] is None
        assert live["choices"][0]["output_tokens"] >= 1
        assert [one["id"] for one in listed] == [request_id]
        choice = told(client, request_id, user="t25")
        assert choice["finish_reason"] == "abort"
        assert live["choices"][0]["output_tokens"] <= choice["output_tokens"] < 1900
        # What came after the client had left is no part of the conversation.
        again = ask(client, letters(9, 40), user="t25")
        assert told(client, again["id"], user="t25")["prefix"]["broke_at"] is None


def test_another_address_cannot_flush_what_one_has_asked(tiny_model_path: Path) -> None:
    """Whose content goes is decided by whose it is: the API key's, else the client's address's."""
    with ServerProcess(tiny_model_path, "--kv-cache-memory", "1MiB") as server:
        chat = letters(1, 96)
        with at_address(server, "127.0.0.2") as home, at_address(server, "127.0.0.3") as agent:
            ask(home, chat)
            for number in range(60):
                ask(agent, letters(number + 2, 150))
            found = ask(home, chat)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found == 95
        assert server.metric("kv_blocks_free") < server.metric("kv_blocks_total") / 10
