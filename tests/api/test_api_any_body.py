"""Whatever JSON arrives, the answer is a success or an error in the one shape, and never a fault of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.scripted_engine import ScriptedEngine, deltas
from octavo.api.openai.requests import ChatCompletionRequest, CompletionRequest
from octavo.api.openai.unsupported import _HARMLESS_VALUES
from octavo.api.tokens import DetokenizeRequest, TokenizeRequest
from octavo.text.tokenizer import Tokenizer

Scripted = Callable[..., tuple[httpx.Client, ScriptedEngine]]

REQUESTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "the"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "the"}),
    "/tokenize": (TokenizeRequest, {"prompt": "the"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 10**4000])
    | st.floats()
    | st.text(st.characters(), max_size=8)  # lone surrogates included
    | st.sampled_from(["the", "user", "system", "text", "tiny", "<|im_end|>", "json_object", "\ud800"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "5", "x", "include_usage"]), inner
        )
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("path", REQUESTS)
def test_any_body_is_answered_or_refused_in_the_one_shape(
    scripted: Scripted, tokenizer: Tokenizer, path: str
) -> None:
    client, engine = scripted(deltas(tokenizer.encode("the")))
    request, fine = REQUESTS[path]
    names = st.sampled_from([*request.__struct_fields__, *_HARMLESS_VALUES, "nobody_knows"])

    @settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
    @given(st.dictionaries(names, VALUES, max_size=3), st.integers(0, 40))
    def check(fields: dict[str, Any], cut: int) -> None:
        body = json.dumps(fine | fields).encode()
        for content in (body, body[: len(body) - cut]):
            answer = client.post(path, content=content)
            if answer.status_code == 200:
                assert b"internal_error" not in answer.content
                continue
            assert answer.status_code in (400, 404) or "deadline_exceeded" in answer.text, answer.text
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "code", "param"}
            assert isinstance(error["message"], str)
        del engine.generations[:]

    check()
