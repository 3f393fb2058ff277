"""What /metrics of a server says while it works, and which part of it was decoding only."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from comparison import NothingMeasured
from octavo.bench.client import AnswerFailed

SCRAPE_SECONDS = 0.1

_SAMPLE = re.compile(r"^octavo:(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Counts:
    """What /metrics said at one moment.

    first_tokens: requests that have begun to generate; ended: requests that are over, both since the server
    started. bytes_read, bytes_attended: of keys and values, by attention. cached: prompt tokens that were not
    computed. blocks_used: KV blocks that requests refer to, now.
    """

    first_tokens: int
    ended: int
    bytes_read: int
    bytes_attended: int
    generated: int
    cached: int
    pauses: int
    blocks_used: int

    @classmethod
    def parse(cls, exposition: str) -> Counts:
        """Of Prometheus' text format; samples that differ in labels only are added.

        Raises: ValueError that names a metric the text does not have.
        """
        found: dict[str, float] = {}
        for name, value in _SAMPLE.findall(exposition):
            found[name] = found.get(name, 0.0) + float(value)

        def count(name: str) -> int:
            if name not in found:
                raise ValueError(f"/metrics has no octavo:{name}")
            return int(found[name])

        return cls(
            first_tokens=count("time_to_first_token_seconds_count"),
            ended=count("request_success_total"),
            bytes_read=count("attention_kv_bytes_read_total"),
            bytes_attended=count("attention_kv_bytes_attended_total"),
            generated=count("generation_tokens_total"),
            cached=count("prefix_cache_hits_total"),
            pauses=count("num_preemptions_total"),
            blocks_used=count("kv_blocks_used"),
        )


class MetricsWatch:
    """Scrapes /metrics of a server on 127.0.0.1 when it is entered, every `seconds` inside it, and when it is
    left; in a thread, over one connection.

    scrapes: what they said, in order. Leaving it raises AnswerFailed where a scrape failed.
    """

    def __init__(self, port: int, seconds: float = SCRAPE_SECONDS) -> None:
        self.scrapes: list[Counts] = []
        self._seconds = seconds
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._over = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._watch, name="metrics-watch", daemon=True)

    def __enter__(self) -> Self:
        """Raises AnswerFailed."""
        try:
            self._scrape()
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._connection.close()
            raise AnswerFailed(f"/metrics: {error}") from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._connection.close()
        if self._failure and error is None:
            raise AnswerFailed(f"/metrics: {self._failure}") from self._failure

    def _watch(self) -> None:
        try:
            while not self._over.wait(self._seconds):
                self._scrape()
            self._scrape()
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._failure = error

    def _scrape(self) -> None:
        self._connection.request("GET", "/metrics")
        response = self._connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {text[:200]}")
        self.scrapes.append(Counts.parse(text))


def decode_phase(scrapes: Sequence[Counts], users: int) -> tuple[Counts, Counts]:
    """The first and the last of `scrapes` between which all `users` decoded and nobody did anything else:
    all have begun, none has ended. The first scrape was made before any of them was sent.

    Raises: NothingMeasured if there were no two such scrapes, or no token between them.
    """
    before = scrapes[0]
    decoding = [
        scrape
        for scrape in scrapes
        if scrape.first_tokens - before.first_tokens == users and scrape.ended == before.ended
    ]
    if not decoding or decoding[-1].generated == decoding[0].generated:
        raise NothingMeasured(
            f"{len(decoding)} of {len(scrapes)} scrapes of /metrics fell into the time in which all {users} "
            "users decode, two are needed; more --tokens make it longer"
        )
    return decoding[0], decoding[-1]
