"""The measuring client reads streams as servers cut them, and stamps each event when its last byte came."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from octavo.bench.client import AnswerFailed, StreamedAnswer, stream_completions

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
PAUSE = 0.05


def event(text: str | None = None, usage: dict[str, int] | None = None) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


USAGE = event(usage={"prompt_tokens": 7, "completion_tokens": 4})
DONE = b"data: [DONE]\n\n"


@contextmanager
def server(pieces: Sequence[bytes], *, close: bool = True) -> Iterator[int]:
    """Answers every request with the pieces, a pause before each but the first. Yields its port."""
    loop = asyncio.new_event_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for number, piece in enumerate(pieces):
            await asyncio.sleep(PAUSE if number else 0)
            writer.write(piece)
            await writer.drain()
        if close:
            writer.close()

    listening = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listening.close()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def ask(port: int, count: int = 1) -> list[StreamedAnswer]:
    return stream_completions(port, [{"prompt": [1, 2], "max_tokens": 4}] * count)


def test_an_answer_in_chunks() -> None:
    pieces = [
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(event("a")),
        chunk(event("b")) + chunk(event("")),
        chunk(event("cd")) + chunk(USAGE) + chunk(DONE) + b"0\r\n\r\n",
    ]
    with server(pieces) as port:
        [answer] = ask(port)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.text) == (7, 4, "abcd")
    first, second, third = answer.arrivals  # the event without text is none
    assert second - first >= PAUSE / 2
    assert third - second >= PAUSE / 2
    assert answer.sent_at < first


def test_an_answer_that_ends_with_the_connection() -> None:
    with server([HEAD + b"\r\n" + event("a"), event("b") + USAGE + DONE]) as port:
        [answer] = ask(port)
    assert len(answer.arrivals) == 2
    assert answer.arrivals[1] - answer.arrivals[0] >= PAUSE / 2


def test_an_event_counts_from_its_last_byte() -> None:
    whole = chunk(event("late"))
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(event("a"))
    with server([head + whole[:9], whole[9:20], whole[20:] + chunk(USAGE + DONE)]) as port:
        [answer] = ask(port)
    assert answer.arrivals[1] - answer.arrivals[0] >= 1.5 * PAUSE


def test_the_stream_ends_with_its_last_event_even_where_the_server_keeps_the_connection() -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    with server([head + chunk(event("a")) + chunk(USAGE + DONE)], close=False) as port:
        assert len(ask(port, 3)) == 3


def test_a_stream_that_stalls_is_given_up() -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(event("a"))
    with server([head], close=False) as port, pytest.raises(AnswerFailed, match=r"1 answers .* 0\.2 s"):
        stream_completions(port, [{"prompt": [1], "max_tokens": 4}], timeout=0.2)


def test_tokens_are_spread_over_the_events() -> None:
    answer = StreamedAnswer(0.0, (1.0, 2.0, 3.0, 4.0), prompt_tokens=7, completion_tokens=8, text="abcdefgh")
    assert answer.tokens_between(1.0, 3.0) == 4
    assert answer.seconds == 4.0
    assert answer.first_token_seconds == 1.0


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": "too long"}'], "400 Bad Request.*too long"),
        ([HEAD + b"\r\n" + event("a")], "the stream ended after"),
        ([HEAD + b"\r\n" + event("a") + b'data: {"error": {"message": "broke"}}\n\n' + DONE], "broke"),
    ],
)
def test_an_answer_that_is_none_is_an_error(pieces: list[bytes], words: str) -> None:
    with server(pieces) as port, pytest.raises(AnswerFailed, match=words):
        ask(port)
