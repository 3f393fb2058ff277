"""A client of /v1/completions that takes as little processor time as it can.

On a machine where server and client share the cores, parsing while tokens arrive would be measured as the
server's time. So pieces are only stamped as they come, and read afterwards.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_END = b"data: [DONE]"


class AnswerFailed(Exception):
    """The server answered with an error, or not to the end."""


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """One streamed completion; times in seconds of `time.perf_counter`.

    arrivals: of each event that brought text. prompt_tokens, completion_tokens: as the server counts them.
    text: what all events brought.
    """

    sent_at: float
    arrivals: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    text: str

    @property
    def first_token_at(self) -> float:
        return self.arrivals[0]

    @property
    def last_token_at(self) -> float:
        return self.arrivals[-1]

    @property
    def seconds(self) -> float:
        """From the sending of the request to its last token."""
        return self.last_token_at - self.sent_at

    @property
    def first_token_seconds(self) -> float:
        return self.first_token_at - self.sent_at

    def tokens_between(self, begin: float, end: float) -> float:
        """Tokens that arrived after `begin` and not after `end`; an event counts as the mean of all events,
        because some bring several tokens and a token of half a character brings none."""
        events = sum(begin < at <= end for at in self.arrivals)
        return events * self.completion_tokens / len(self.arrivals)


def stream_completions(
    port: int, bodies: Sequence[Mapping[str, Any]], *, timeout: float = 900.0
) -> list[StreamedAnswer]:
    """Send all requests at once to 127.0.0.1 and read every stream to its end.

    bodies: of /v1/completions; `stream` and `stream_options` are set here. timeout: seconds for all.

    Raises: AnswerFailed, after all of them have ended, or because they have not.
    """

    async def together() -> list[_Recording]:
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.gather(*(_record(port, body) for body in bodies))
        except TimeoutError:
            raise AnswerFailed(f"{len(bodies)} answers were not complete after {timeout:g} s") from None

    return [recording.answer() for recording in asyncio.run(together())]


async def _record(port: int, body: Mapping[str, Any]) -> _Recording:
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    transport, recording = await loop.create_connection(_Recording, "127.0.0.1", port)
    recording.sent_at = time.perf_counter()
    transport.write(head.encode() + payload)
    try:
        await recording.ended
    finally:
        transport.close()
    return recording


class _Recording(asyncio.Protocol):
    """Every piece of a response, with the time it came."""

    def __init__(self) -> None:
        self.sent_at = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pieces: list[tuple[float, bytes]] = []

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        if _END in data:
            self._end()

    def connection_lost(self, _: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def answer(self) -> StreamedAnswer:
        """Raises AnswerFailed."""
        head, _, _ = b"".join(piece for _, piece in self._pieces).partition(b"\r\n\r\n")
        status = head.split(b"\r\n", 1)[0].decode("latin-1")
        chunked = b"transfer-encoding: chunked" in head.lower()
        text, written_at = self._body(len(head) + 4, chunked)
        if b" 200 " not in head[:20]:
            raise AnswerFailed(f"{status}: {text.decode(errors='replace').strip()[:500]}")
        arrivals: list[float] = []
        pieces: list[str] = []
        usage: dict[str, int] = {}
        position = 0
        for event in text.split(b"\n\n"):
            position += len(event) + 2
            if not event.startswith(b"data: ") or event == _END:
                continue
            said = json.loads(event[6:])
            if "error" in said:
                raise AnswerFailed(str(said["error"]))
            usage = said.get("usage") or usage
            if piece := "".join(choice.get("text") or "" for choice in said.get("choices", ())):
                pieces.append(piece)
                arrivals.append(written_at(position))
        if _END not in text or not usage or not arrivals:
            raise AnswerFailed(f"{status}, but the stream ended after {len(text)} bytes")
        return StreamedAnswer(
            self.sent_at,
            tuple(arrivals),
            usage["prompt_tokens"],
            usage["completion_tokens"],
            "".join(pieces),
        )

    def _body(self, start: int, chunked: bool) -> tuple[bytes, Any]:
        """The response's body, and a function from a position in it to the time it had arrived."""
        raw = b"".join(piece for _, piece in self._pieces)
        ends, total = [], 0
        for _, piece in self._pieces:
            total += len(piece)
            ends.append(total)

        def came_at(offset: int) -> float:
            return self._pieces[min(bisect_left(ends, offset), len(ends) - 1)][0]

        parts: list[bytes] = []
        part_ends: list[int] = []
        part_times: list[float] = []
        length = 0
        for begin, end in _chunks(raw, start) if chunked else [(start, len(raw))]:
            parts.append(raw[begin:end])
            length += end - begin
            part_ends.append(length)
            part_times.append(came_at(end))

        def written_at(position: int) -> float:
            if not chunked:
                return came_at(start + position)
            return part_times[min(bisect_left(part_ends, position), len(part_ends) - 1)]

        return b"".join(parts), written_at


def _chunks(raw: bytes, at: int) -> list[tuple[int, int]]:
    """Where the chunks of a chunked body lie (RFC 9112, section 7.1); a last one that is cut short is left
    out."""
    spans = []
    while (line_end := raw.find(b"\r\n", at)) >= 0:
        size = int(raw[at:line_end].split(b";")[0] or b"0", 16)
        begin = line_end + 2
        if size == 0 or begin + size > len(raw):
            break
        spans.append((begin, begin + size))
        at = begin + size + 2
    return spans
