"""T25: clients that vanish while running, prefilling or waiting give back only what is theirs."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from clients.server_process import ServerProcess, together, wait_until

PROMPT = "Tell me about the sea and its people."


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[ServerProcess]:
    """At most three are computed at once, so that a fourth waits."""
    arguments = ("--served-model-name", "smollm2", "--kv-cache-memory", "128MiB", "--max-num-seqs", "3")
    with ServerProcess(smollm2_path, *arguments) as server:
        yield server


class RawClient:
    """A request on a bare socket, so that the test decides how it ends."""

    def __init__(self, server: ServerProcess, body: dict[str, object]) -> None:
        address = urlsplit(server.url)
        assert address.hostname is not None
        self.socket = socket.create_connection((address.hostname, address.port or 80))
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        self.socket.sendall(head.encode() + content)

    def read_some(self) -> None:
        """Wait for the first text."""
        self.socket.settimeout(60)
        seen = b""
        while b'"text"' not in seen:
            seen += self.socket.recv(4096)

    def read_to_the_end(self) -> bytes:
        """All the rest of a stream."""
        pieces: list[bytes] = []
        while not pieces or b"[DONE]" not in b"".join(pieces[-2:]):
            pieces.append(self.socket.recv(1 << 20))
            assert pieces[-1], "the server closed the connection"
        self.socket.close()
        return b"".join(pieces)

    def vanish(self, *, abruptly: bool) -> None:
        if abruptly:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.socket.close()


@pytest.mark.parametrize(("streaming", "abruptly"), [(True, True), (False, False)])
def test_clients_that_vanish_give_back_their_own_and_nothing_else(
    server: ServerProcess, streaming: bool, abruptly: bool
) -> None:
    staying = {"prompt": PROMPT, "max_tokens": 64, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    solo = httpx.post(f"{server.url}/v1/completions", json=staying, timeout=60).json()["choices"][0]["text"]
    heard: list[str] = []
    done = threading.Event()

    def stay() -> None:
        # The same prompt as the one that vanishes: what they share must survive.
        answer = httpx.post(f"{server.url}/v1/completions", json=staying, timeout=60).json()
        heard.append(answer["choices"][0]["text"])
        done.set()

    endless = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": streaming}
    document = {
        "prompt": [1000 + number % 40_000 for number in range(2500)],
        "max_tokens": 5,
        "stream": streaming,
    }
    aborts = server.metric("request_success_total")
    with together(stay):
        wait_until(lambda: server.metric("num_requests_running") == 1 or done.is_set())
        running = RawClient(server, endless)
        if streaming:
            running.read_some()
        prefilling = RawClient(server, document)
        wait_until(lambda: server.metric("num_requests_running") == 3)
        waiting = RawClient(server, endless | {"priority": 1})  # or it would take the seat of the long prompt
        wait_until(lambda: server.metric("num_requests_waiting") == 1)
        for client in (waiting, prefilling, running):
            client.vanish(abruptly=abruptly)
        wait_until(lambda: server.metric("num_requests_running") <= 1)
        assert server.metric("num_requests_waiting") == 0
        assert not done.is_set(), "the one who stays should still be at it, or this shows nothing"
    assert heard == [solo]
    assert server.metric("kv_blocks_used") == 0
    assert server.metric("request_success_total") - aborts == 4


@pytest.mark.parametrize("gone", ["running", "prefilling", "waiting"])
def test_whoever_leaves_the_others_hear_what_they_hear_alone(server: ServerProcess, gone: str) -> None:
    document = [1000 + number % 40_000 for number in range(2500)]
    bodies: dict[str, dict[str, object]] = {
        "staying": {"prompt": PROMPT, "max_tokens": 48},
        "running": {"prompt": PROMPT + " Begin with the tides.", "max_tokens": 400},
        "prefilling": {"prompt": document, "max_tokens": 8},
        "waiting": {"prompt": document[:40], "max_tokens": 24, "priority": 1},
    }
    for number, body in enumerate(bodies.values()):
        body |= {"temperature": 0.8, "seed": number, "ignore_eos": True}
    solo = {who: _whole(server, body) for who, body in bodies.items() if who != gone}
    heard: dict[str, str] = {}
    aborts = server.metric("request_success_total", finished_reason="abort")
    with ExitStack() as everybody:
        leaver: RawClient | None = None
        for number, (who, body) in enumerate(bodies.items(), 1):
            # Nothing is found in the cache of what the solo run has left there.
            body |= {"cache_salt": gone}
            if who == gone:
                leaver = RawClient(server, body | {"stream": True})
                if who == "running":
                    leaver.read_some()
            else:
                everybody.enter_context(together(partial(_hear, server, body, heard, who)))
            running = min(number, 3)
            wait_until(lambda running=running: server.metric("num_requests_running") == running)  # type: ignore[misc]
        wait_until(lambda: server.metric("num_requests_waiting") == 1)
        assert leaver is not None
        leaver.vanish(abruptly=True)
        wait_until(lambda: server.metric("request_success_total", finished_reason="abort") == aborts + 1)
        assert "prefilling" not in heard, "the long prompt should still be computed, or this shows little"
    assert heard == solo
    assert server.metric("kv_blocks_used") == 0


def _whole(server: ServerProcess, body: dict[str, object]) -> str:
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    text: str = answer.json()["choices"][0]["text"]
    return text


def _hear(server: ServerProcess, body: dict[str, object], heard: dict[str, str], who: str) -> None:
    heard[who] = _whole(server, body)


def test_a_client_that_does_not_read_is_held_and_loses_nothing(tiny_model_path: Path) -> None:
    with ServerProcess(tiny_model_path, "--kv-cache-memory", "8MiB") as server:
        # Log-probabilities make the stream some 30 MB: more than the sockets between the two can hold.
        body = {"prompt": [5], "n": 8, "max_tokens": 1900, "ignore_eos": True, "logprobs": 20, "seed": 1}
        lazy = RawClient(server, body | {"stream": True})
        lazy.read_some()

        def stands_still() -> bool:
            before = server.metric("generation_tokens_total")
            time.sleep(0.5)
            return server.metric("generation_tokens_total") == before

        wait_until(stands_still, seconds=60)
        assert server.metric("generation_tokens_total") < 8 * 1900
        assert server.metric("kv_blocks_used") > 0
        assert httpx.get(f"{server.url}/health").status_code == 200
        quick = httpx.post(f"{server.url}/v1/completions", json={"prompt": [6], "max_tokens": 10}, timeout=60)
        assert quick.status_code == 200

        seen = lazy.read_to_the_end()
        assert seen.count(b'"finish_reason":"length"') == 8
        assert seen.count(b'"token_logprobs":[-') > 8
        assert server.metric("generation_tokens_total") >= 8 * 1900
        assert server.metric("kv_blocks_used") == 0
