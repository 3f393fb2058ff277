"""Reads a stream of server-sent events the way a strict client would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx


def events(response: httpx.Response) -> Iterator[Any]:
    """Each event decoded; "[DONE]" as that string. Fails on anything that is not a `data:` line and a blank
    one.
    """
    assert response.status_code == 200, response.read()
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.iter_lines()
    for line in lines:
        assert line.startswith("data: "), line
        assert next(lines) == ""
        data = line.removeprefix("data: ")
        yield data if data == "[DONE]" else json.loads(data)


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """Every event of one streamed request."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        return list(events(response))


def text_of(chunks: list[Any], index: int = 0) -> str:
    """What a client that appends contents would show for one choice, chat or completion."""
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    parts = [
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for choice in choices
        if choice["index"] == index
    ]
    return "".join(parts)
