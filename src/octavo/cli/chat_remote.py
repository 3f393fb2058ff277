"""Answers from a running server, over OpenAI's chat completions with server-sent events.

Only the standard library: whoever talks to a server elsewhere need not load an engine, nor an HTTP package.
Source of the event format: the HTML standard, section 9.2 (server-sent events).
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

from octavo.cli.chat_answers import ChatError, Message, Numbers, Stopwatch

SILENCE_SECONDS = 600.0
"""A server that says nothing for so long is given up: queues may be long, connections die silently."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class RemoteSource:
    """A server at `url`, for example http://127.0.0.1:8000/v1."""

    def __init__(
        self, url: str, *, model: str | None, api_key: str | None, options: dict[str, Any] | None = None
    ) -> None:
        """model: its id there, None takes the first one served. options: further fields of the request.

        Raises: ChatError if the address is none, or nobody answers there.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"{url!r} is not an address such as http://127.0.0.1:8000/v1")
        self._url = url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"
        self._api_key = api_key
        self._options = options or {}
        # A proxy of the surroundings is for the world outside, not for this machine.
        proxies: dict[str, str] | None = {} if parts.hostname in _LOOPBACK else None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
        self._model = model if model is not None else self._first_model()

    @property
    def name(self) -> str:
        return f"{self._model or 'the model'} at {self._url}"

    def ask(self, messages: Sequence[Message]) -> RemoteAnswer:
        """Raises ChatError with the server's own sentence."""
        body: dict[str, Any] = {
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        if self._model is not None:
            body["model"] = self._model
        return RemoteAnswer(self._open("/chat/completions", json.dumps(body).encode()))

    def close(self) -> None:
        """Nothing is held between two answers."""

    def _first_model(self) -> str | None:
        with self._open("/models") as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                return None  # some servers list nothing; the field may be left out there

    def _open(self, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        request = urllib.request.Request(self._url + path, data=body)
        request.add_header("Content-Type", "application/json")
        if self._api_key is not None:
            request.add_header("Authorization", f"Bearer {self._api_key}")
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=SILENCE_SECONDS)
            return response
        except urllib.error.HTTPError as error:
            with error:
                raise ChatError(_server_sentence(error.read(), error.code)) from error
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)  # urllib wraps what the system says
            why = getattr(cause, "strerror", None) or cause
            raise ChatError(f"cannot reach {self._url}: {why}") from error


class RemoteAnswer:
    """One streamed response. Closing it closes the connection, which ends the work at the server."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.finish_reason: str | None = None
        self._response = response
        self._usage: dict[str, Any] = {}
        self._watch = Stopwatch()

    def __iter__(self) -> Iterator[str]:
        try:
            for event in server_sent_events(self._response):
                if event == "[DONE]":
                    return
                yield from self._pieces(json.loads(event))
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:
            raise ChatError(f"the stream broke off: {error}") from error
        if self.finish_reason is None:
            raise ChatError("the stream broke off: the connection ended before the answer did")

    def _pieces(self, chunk: dict[str, Any]) -> Iterator[str]:
        if "error" in chunk:
            raise ChatError(str(chunk["error"].get("message", chunk["error"])))
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices", ()):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if piece := choice.get("delta", {}).get("content"):
                self._watch.piece()
                yield piece

    def numbers(self) -> Numbers:
        output_tokens = self._usage.get("completion_tokens")
        return Numbers(
            prompt_tokens=self._usage.get("prompt_tokens"),
            cached_tokens=(self._usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            output_tokens=output_tokens,
            tokens_per_second=self._watch.tokens_per_second(output_tokens),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._response.close()


def server_sent_events(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of each event in a stream of lines; comments and other fields are passed over."""
    data: list[str] = []
    for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))


def _server_sentence(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {status}"
