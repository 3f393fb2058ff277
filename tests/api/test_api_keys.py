"""What a key means in a request, and how its limits are told, through real sockets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from api.keys_of_a_house import Source, key
from api.scripted_engine import ScriptedEngine, deltas
from octavo.api.keys import PRIVATE, Key, Keyring, digest_of
from octavo.api.rate_limit import TokenBucket
from octavo.engine.request import RequestRefused, Share
from octavo.text.tokenizer import Tokenizer

Scripted = Callable[..., tuple[httpx.Client, ScriptedEngine]]

CHAT = {"messages": [{"role": "user", "content": "the user"}]}
PATHS = (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": [5, 6, 7]}))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key of {name}"}


def error_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "code", "param"}
    assert error["code"] == code
    return dict(error)


@pytest.fixture
def household(
    scripted: Scripted, tokenizer: Tokenizer
) -> Callable[..., tuple[httpx.Client, ScriptedEngine, Source, Clock]]:
    """`household(*keys)`: a client without a key, the engine, the file, and the clock of the buckets."""

    def make(*keys: Key, longest_request: int = 256) -> tuple[httpx.Client, ScriptedEngine, Source, Clock]:
        file, clock = Source(*keys), Clock()
        keyring = Keyring(file, new_bucket=lambda limit: TokenBucket(limit, clock))
        script = deltas(tokenizer.encode("the user"))
        client, engine = scripted(script, keyring=keyring, longest_request=longest_request)
        return client, engine, file, clock

    return make


Household = Callable[..., tuple[httpx.Client, ScriptedEngine, Source, Clock]]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "key of anna"}, 200),
        ({"X-API-KEY": "key of anna"}, 200),
        ({"Authorization": "Bearer key of anna"}, 200),
        ({"Authorization": "Basic dTpw", "x-api-key": "key of anna"}, 200),
        ({"Authorization": "Bearer", "x-api-key": "key of anna"}, 200),
        ({"Authorization": "Bearer wrong", "x-api-key": "key of anna"}, 401),
        ({"x-api-key": "key of ann"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "Bearer key of anna"}, 401),
        ({}, 401),
    ],
)
def test_a_key_comes_as_bearer_or_as_x_api_key(
    household: Household, headers: dict[str, str], status: int
) -> None:
    client, _, _, _ = household(key("anna"))
    assert client.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_a_key_decides_whose_share_and_which_group_a_request_has(
    household: Household, path: str, body: dict[str, Any]
) -> None:
    client, engine, _, _ = household(
        key("anna", weight=2.5),
        key("batch", background=True, group="machines"),
        key("ben", group=PRIVATE),
    )
    for name, more in (("anna", {}), ("anna", {"user": "her"}), ("batch", {}), ("ben", {})):
        assert client.post(path, headers=bearer(name), json={**body, **more}).status_code == 200
    anna, hers, batch, ben = engine.generations
    assert anna.share == Share("key:anna", weight=2.5)
    assert hers.share.user
    assert replace(hers.share, user="") == anna.share
    assert batch.share == Share("key:batch", background=True)
    assert (anna.group, hers.group, batch.group) == ("", "", "group:machines")
    assert ben.group not in ("", "group:machines")


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_a_request_can_lower_its_class_and_never_raise_it(
    household: Household, path: str, body: dict[str, Any]
) -> None:
    client, engine, _, _ = household(key("anna"), key("batch", background=True))
    for name in ("anna", "batch"):
        for asked in ({"background": True}, {"background": False}, {"background": None}, {}):
            assert client.post(path, headers=bearer(name), json={**body, **asked}).status_code == 200
    assert [one.share.background for one in engine.generations] == [True, False, False, False, *[True] * 4]
    wrong = client.post(path, headers=bearer("anna"), json={**body, "background": "yes"})
    assert error_of(wrong, 400, "invalid_type")["param"] == "background"


def test_without_keys_a_request_may_ask_for_the_background_too(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    client, engine = scripted(deltas(tokenizer.encode("the")))
    for asked in ({}, {"background": True}):
        assert client.post("/v1/completions", json={"prompt": [5], **asked}).status_code == 200
    usual, lowered = engine.generations
    assert lowered.share == replace(usual.share, background=True)
    assert usual.share.account.startswith("address:")


def test_a_revoked_key_is_refused_from_the_next_request_on_and_a_new_one_let_in(household: Household) -> None:
    client, _, file, _ = household(key("anna"), key("ben"))
    assert client.get("/v1/models", headers=bearer("anna")).status_code == 200
    file.keys = (key("ben"), key("cleo"))
    error_of(client.get("/v1/models", headers=bearer("anna")), 401, "invalid_api_key")
    assert client.get("/v1/models", headers=bearer("cleo")).status_code == 200
    file.keys = None
    for headers in (bearer("cleo"), {}):
        error_of(client.get("/v1/models", headers=headers), 401, "invalid_api_key")


def test_records_belong_to_the_key_itself(household: Household) -> None:
    client, _, file, _ = household(key("anna"), key("ben"))
    mine = client.post("/v1/completions", headers=bearer("anna"), json={"prompt": [5]}).json()["id"]
    assert client.get(f"/v1/requests/{mine}", headers=bearer("anna")).status_code == 200
    assert client.get(f"/v1/requests/{mine}", headers=bearer("ben")).status_code == 404
    # Somebody else who is called the same later.
    file.keys = (Key("anna", digest_of(b"key of another")),)
    headers = {"x-api-key": "key of another"}
    assert client.get(f"/v1/requests/{mine}", headers=headers).status_code == 404
    assert client.get("/v1/requests", headers=headers).json()["data"] == []


def test_the_engine_is_told_the_quotas_at_the_start_and_when_they_change(household: Household) -> None:
    client, engine, file, _ = household(key("anna"))
    assert engine.kv_quotas == []
    file.keys = (key("anna", kv_quota=4096), key("ben"))
    client.get("/v1/models")
    assert engine.kv_quotas == [{"key:anna": 4096}]


# The longest request of a key.


@pytest.mark.parametrize(
    ("path", "body", "param", "numbers"),
    [
        ("/v1/completions", {"prompt": [5] * 30, "max_tokens": 11}, "max_tokens", ("41", "30", "11", "40")),
        ("/v1/completions", {"prompt": [5] * 40}, "prompt", ("40",)),
        ("/v1/completions", {"prompt": [[5], [5] * 41], "max_tokens": 1}, "prompt", ("41", "40")),
        ("/v1/completions", {"prompt": [5] * 30, "min_tokens": 11}, "min_tokens", ("41", "11", "40")),
        (
            "/v1/chat/completions",
            CHAT | {"max_completion_tokens": 100},
            "max_completion_tokens",
            ("100", "40"),
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "the user " * 30}]},
            "messages",
            ("40",),
        ),
    ],
)
def test_more_than_a_keys_longest_request_is_a_403_with_both_numbers(
    household: Household, path: str, body: dict[str, Any], param: str, numbers: tuple[str, ...]
) -> None:
    client, engine, _, _ = household(key("anna", max_model_len=40), key("ben"))
    error = error_of(client.post(path, headers=bearer("anna"), json=body), 403, "context_length_exceeded")
    assert error["param"] == param
    assert "'anna'" in error["message"]
    assert all(number in error["message"] for number in numbers), error["message"]
    assert engine.generations == []
    assert client.post(path, headers=bearer("ben"), json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "limits"),
    [
        ("/v1/completions", {"prompt": [5] * 30}, [10]),
        ("/v1/completions", {"prompt": [[5] * 30, [5] * 3]}, [10, 16]),
        ("/v1/completions", {"prompt": [5] * 30, "max_tokens": 10}, [10]),
        ("/v1/completions", {"prompt": [5] * 30, "min_tokens": 10}, [10]),
        ("/v1/chat/completions", CHAT | {"max_tokens": 3}, [3]),
    ],
)
def test_without_a_limit_of_its_own_a_request_ends_where_the_keys_does(
    household: Household, path: str, body: dict[str, Any], limits: list[int]
) -> None:
    client, engine, _, _ = household(key("anna", max_model_len=40))
    assert client.post(path, headers=bearer("anna"), json=body).status_code == 200
    assert [one.params.max_tokens for one in engine.generations] == limits


def test_a_chat_ends_at_the_keys_limit_and_at_none_where_the_server_has_less(household: Household) -> None:
    client, engine, _, _ = household(key("anna", max_model_len=40), key("ben", max_model_len=300))
    for name in ("anna", "ben"):
        assert client.post("/v1/chat/completions", headers=bearer(name), json=CHAT).status_code == 200
    annas, bens = engine.generations
    assert annas.params.max_tokens == 40 - len(annas.prompt_token_ids)
    assert bens.params.max_tokens is None, "the engine knows its own end"


def test_the_models_card_and_tokenize_say_how_long_a_request_of_this_key_may_be(household: Household) -> None:
    client, _, _, _ = household(key("anna", max_model_len=40), key("ben"), key("cleo", max_model_len=9999))
    for name, longest in (("anna", 40), ("ben", 256), ("cleo", 256)):
        (card,) = client.get("/v1/models", headers=bearer(name)).json()["data"]
        assert card["max_model_len"] == longest
        counted = client.post("/tokenize", headers=bearer(name), json={"prompt": "the"}).json()
        assert counted["max_model_len"] == longest


# Tokens a minute.


def completion(client: httpx.Client, name: str, length: int, **fields: Any) -> httpx.Response:
    body = {"prompt": [5] * length, "max_tokens": 8, **fields}
    return client.post("/v1/completions", headers=bearer(name), json=body)


def left(answer: httpx.Response) -> tuple[str, str, str]:
    names = ("limit", "remaining", "reset")
    limit, remaining, reset = (answer.headers[f"x-ratelimit-{name}-tokens"] for name in names)
    return limit, remaining, reset


def test_every_answer_to_a_limited_key_says_how_many_tokens_are_left(household: Household) -> None:
    client, engine, _, clock = household(key("anna", tokens_per_minute=600), key("ben"))
    assert left(client.get("/v1/models", headers=bearer("anna"))) == ("600", "600", "0s")
    answer = completion(client, "anna", 100)
    computed = 100 + answer.json()["usage"]["completion_tokens"]
    assert left(answer) == ("600", str(600 - computed), f"{computed / 10:g}s")
    clock.now += 1
    assert left(client.get("/nowhere", headers=bearer("anna")))[1] == str(610 - computed)
    clock.now += 1000
    engine.cached_tokens = iter([90])
    assert left(completion(client, "anna", 100))[1] == str(600 - computed + 90)
    for other in (client.get("/v1/models", headers=bearer("ben")), completion(client, "ben", 100)):
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]


def test_a_stream_says_what_is_left_when_it_begins_and_is_charged_when_it_ends(household: Household) -> None:
    client, _, _, _ = household(key("anna", tokens_per_minute=600))
    body = {"prompt": [5] * 100, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/completions", headers=bearer("anna"), json=body) as answer:
        assert left(answer) == ("600", "500", "10s")
        answer.read()
    output = answer.text.count('"text":"') - 1  # the last one has the finish_reason
    assert output > 0
    now = left(client.get("/v1/models", headers=bearer("anna")))
    assert 600 - 100 - 8 <= int(now[1]) < 500


def test_a_prompt_that_is_not_there_is_a_429_with_numbers_and_the_seconds_until_it_is(
    household: Household,
) -> None:
    client, engine, _, clock = household(key("anna", tokens_per_minute=150), key("ben"))
    first = completion(client, "anna", 100)
    rest = int(left(first)[1])
    answer = completion(client, "anna", 99)
    error = error_of(answer, 429, "rate_limit_exceeded")
    wait = (99 - rest) / 150 * 60
    for said in ("'anna'", "150 tokens a minute", f"{rest} are left", "needs 99", f"{wait:.1f} seconds"):
        assert said in error["message"], error["message"]
    assert (error["type"], error["param"]) == ("tokens", None)
    retry_after = int(answer.headers["retry-after"])
    assert wait <= retry_after < wait + 1
    assert left(answer)[:2] == ("150", str(rest))
    assert len(engine.generations) == 1
    assert completion(client, "ben", 99).status_code == 200, "nobody else waits for it"
    clock.now += retry_after - 1
    assert completion(client, "anna", 99).status_code == 429
    clock.now += 1
    assert completion(client, "anna", 99).status_code == 200


def test_all_prompts_and_choices_of_a_request_count(household: Household) -> None:
    client, _, _, _ = household(key("anna", tokens_per_minute=10_000))
    body = {"prompt": [[5] * 100, [5] * 50], "n": 3, "max_tokens": 8}
    answer = client.post("/v1/completions", headers=bearer("anna"), json=body)
    # The script finds nothing in a cache: each choice has computed its prompt.
    computed = 3 * 150 + answer.json()["usage"]["completion_tokens"]
    assert left(answer)[1] == str(10_000 - computed)


def test_a_debt_is_waited_for(household: Household) -> None:
    client, _, _, clock = household(key("anna", tokens_per_minute=60))
    answer = completion(client, "anna", 100)
    assert answer.status_code == 200, "more than a minute's tokens need a whole minute, which is there"
    debt = 100 + answer.json()["usage"]["completion_tokens"] - 60
    assert left(answer)[1] == "0"
    refused = completion(client, "anna", 1)
    assert int(refused.headers["retry-after"]) == debt + 1
    assert "0 are left" in error_of(refused, 429, "rate_limit_exceeded")["message"]
    clock.now += debt + 1
    assert completion(client, "anna", 1).status_code == 200


def test_a_request_that_is_refused_or_fails_before_it_computes_costs_nothing(household: Household) -> None:
    client, engine, _, _ = household(key("anna", tokens_per_minute=600, max_model_len=40))
    assert completion(client, "anna", 30, max_tokens=11).status_code == 403
    assert completion(client, "anna", 3, temperature=-1).status_code == 400
    engine.refusal = RequestRefused("no", code="shutting_down")
    two = client.post("/v1/completions", headers=bearer("anna"), json={"prompt": [[5] * 9, [6] * 9]})
    assert two.status_code == 503
    assert left(two)[1] == "600"


# Who may see and change what is everybody's.


@pytest.mark.parametrize("path", ["/admin/keys", "/admin/kv-cache"])
def test_admin_is_for_admin_keys_alone(household: Household, path: str) -> None:
    client, engine, file, _ = household(key("anna"), key("boss", admin=True))
    error = error_of(client.get(path, headers=bearer("anna")), 403, "admin_required")
    assert "'anna'" in error["message"]
    assert "boss" not in error["message"]
    error_of(client.get(path), 401, "invalid_api_key")
    assert client.get(path, headers=bearer("boss")).status_code == 200
    calls = list(engine.kv_cache_calls)
    if path == "/admin/kv-cache":
        refused = client.post(path, headers=bearer("anna"), json={"release": True})
        error_of(refused, 403, "admin_required")
    file.keys = (key("boss"),)
    error_of(client.get(path, headers=bearer("boss")), 403, "admin_required")
    assert engine.kv_cache_calls == calls


def test_where_no_keys_are_asked_for_there_is_no_owner(scripted: Scripted) -> None:
    client, _ = scripted([])
    error_of(client.get("/admin/keys", headers=bearer("anna")), 403, "api_key_not_configured")


def test_the_admin_sees_the_keys_and_what_is_left_of_them_and_no_hash(household: Household) -> None:
    boss, anna = key("boss", admin=True), key("anna", tokens_per_minute=600, kv_quota=1 << 20)
    client, _, _, _ = household(boss, anna)
    computed = 100 + completion(client, "anna", 100).json()["usage"]["completion_tokens"]
    answer = client.get("/admin/keys", headers=bearer("boss"))
    assert answer.json() == {
        "object": "list",
        "data": [
            {"object": "key", **boss.described(), "tokens_left": None},
            {"object": "key", **anna.described(), "tokens_left": 600 - computed},
        ],
    }
    for one in (boss, anna):
        assert one.digest.hex() not in answer.text
    assert error_of(client.post("/admin/keys", headers=bearer("boss")), 405, "method_not_allowed")
