"""/admin/kv-cache: for whoever has the key, and nobody where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from api.conftest import of_api_key
from api.scripted_engine import ScriptedEngine
from octavo.engine.kv_memory import KVCacheRefused
from octavo.engine.request import RequestRefused

Scripted = Callable[..., tuple[httpx.Client, ScriptedEngine]]

PATH = "/admin/kv-cache"
KEY = {"Authorization": "Bearer secret"}
STATUS = {
    "object": "kv_cache",
    "budget_bytes": 70_000,
    "resident_bytes": 53_248,
    "block_bytes": 4_000,
    "extent_bytes": 4_096,
    "blocks": {"target": 16, "total": 20, "used": 5, "cached": 8, "free": 7},
    "max_model_len": 256,
}


@pytest.fixture
def keyed(scripted: Scripted) -> tuple[httpx.Client, ScriptedEngine]:
    client, engine = scripted([], keyring=of_api_key("secret"))
    client.headers.update(KEY)
    return client, engine


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "code", "param"}
    return dict(error)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("headers", [{}, KEY])
def test_a_server_without_a_key_refuses_everybody_and_says_how_to_set_one(
    scripted: Scripted, method: str, headers: dict[str, str]
) -> None:
    client, engine = scripted([])
    error = error_of(client.request(method, PATH, headers=headers, json={"release": True}), 403)
    assert error["code"] == "api_key_not_configured"
    assert "--api-key" in error["message"]
    assert "OCTAVO_API_KEY" in error["message"]
    assert engine.kv_cache_calls == []


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_without_the_key_it_is_refused(scripted: Scripted, method: str) -> None:
    client, engine = scripted([], keyring=of_api_key("secret"))
    error = error_of(client.request(method, PATH, json={"release": True}), 401)
    assert error["code"] == "invalid_api_key"
    assert engine.kv_cache_calls == []


def test_it_says_what_may_be_taken_and_what_is(keyed: tuple[httpx.Client, ScriptedEngine]) -> None:
    client, engine = keyed
    answer = client.get(PATH)
    assert (answer.status_code, answer.json()) == (200, STATUS)
    assert engine.kv_cache_calls == ["status"]


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ({"kv_cache_memory": "2GiB"}, [2 << 30]),
        ({"kv_cache_memory": 123_456}, [123_456]),
        ({"kv_cache_memory": "1.5 MB", "release": False}, [1_500_000]),
        ({"release": True}, ["release"]),
        ({"kv_cache_memory": "4096", "release": True}, [4096, "release"]),
    ],
)
def test_a_budget_and_a_release_are_passed_on_in_this_order(
    keyed: tuple[httpx.Client, ScriptedEngine], body: dict[str, Any], calls: list[int | str]
) -> None:
    client, engine = keyed
    answer = client.post(PATH, json=body)
    assert (answer.status_code, answer.json()) == (200, STATUS)
    assert engine.kv_cache_calls == calls


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "kv_cache_memory", "is required"),
        ({"release": False}, "kv_cache_memory", "is required"),
        ({"kv_cache_memory": None}, "kv_cache_memory", "is required"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory", "'lots' is not a size such as 2GiB"),
        ({"kv_cache_memory": "-1GiB"}, "kv_cache_memory", "'-1GiB' is not a size"),
        ({"kv_cache_memory": "٣GiB"}, "kv_cache_memory", "is not a size"),
        ({"kv_cache_memory": ""}, "kv_cache_memory", "is not a size"),
        ({"kv_cache_memory": 0}, "kv_cache_memory", "must be from 1 to 9223372036854775807 bytes, not 0"),
        ({"kv_cache_memory": -5}, "kv_cache_memory", "not -5"),
        ({"kv_cache_memory": 1 << 63}, "kv_cache_memory", "9223372036854775807"),
        ({"kv_cache_memory": "9" * 300 + "TiB"}, "kv_cache_memory", "from 1 to 9223372036854775807 bytes"),
        ({"kv_cache_memory": 1.5}, "kv_cache_memory", "must be an integer or a string"),
        ({"kv_cache_memory": True}, "kv_cache_memory", "must be an integer or a string"),
        ({"kv_cache_memory": ["2GiB"]}, "kv_cache_memory", "must be an integer or a string"),
        ({"release": "yes"}, "release", "must be true or false"),
        ({"release": True, "kv_cache_memroy": "2GiB"}, "kv_cache_memroy", "not known here"),
        ([], None, "must be an object"),
    ],
)
def test_a_mistake_names_the_field_and_changes_nothing(
    keyed: tuple[httpx.Client, ScriptedEngine], body: Any, param: str | None, said: str
) -> None:
    client, engine = keyed
    error = error_of(client.post(PATH, json=body), 400)
    assert error["param"] == param
    assert said in error["message"]
    assert len(error["message"]) < 500
    assert engine.kv_cache_calls == []


def test_broken_and_endless_bodies_are_refused(keyed: tuple[httpx.Client, ScriptedEngine]) -> None:
    client, engine = keyed
    assert error_of(client.post(PATH, content=b"{"), 400)["code"] == "invalid_json"
    assert error_of(client.post(PATH, content=b""), 400)["code"] == "invalid_json"
    error = error_of(client.post(PATH, content=b'{"kv_cache_memory": "' + b"1" * 5000 + b'"}'), 413)
    assert "4,096" in error["message"]
    error = error_of(client.delete(PATH), 405)
    assert "GET" in error["message"]
    assert "POST" in error["message"]
    assert engine.kv_cache_calls == []


@pytest.mark.parametrize(
    ("refusal", "status", "code", "param"),
    [
        (KVCacheRefused("7 and 8", code="kv_cache_too_small"), 400, "kv_cache_too_small", "kv_cache_memory"),
        (KVCacheRefused("7 and 8", code="kv_cache_too_large"), 400, "kv_cache_too_large", "kv_cache_memory"),
        (KVCacheRefused("7 and 8", code="kv_cache_in_use"), 409, "kv_cache_in_use", "kv_cache_memory"),
        (RequestRefused("7 and 8", code="shutting_down"), 503, "shutting_down", None),
        (RequestRefused("7 and 8", code="engine_failed"), 503, "engine_failed", None),
    ],
)
def test_what_the_engine_refuses_is_told_with_its_numbers(
    keyed: tuple[httpx.Client, ScriptedEngine], refusal: Exception, status: int, code: str, param: str | None
) -> None:
    client, engine = keyed
    engine.kv_cache_refusal = refusal
    error = error_of(client.post(PATH, json={"kv_cache_memory": "1MiB", "release": True}), status)
    assert (error["code"], error["param"]) == (code, param)
    assert "7 and 8" in error["message"]
    assert engine.kv_cache_calls == [1 << 20], "after a refusal nothing is released either"
