"""A small server that streams scripted answers, for the tests of `octavo chat --url`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer(ThreadingHTTPServer):
    """`answers`: bodies of streams, one a request, the last one again and again; "slow" has no end."""

    daemon_threads = True

    def __init__(self, answers: list[bytes | str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = answers
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.hung_up = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


@contextmanager
def chat_server(*answers: bytes | str) -> Iterator[ChatServer]:
    with ChatServer(list(answers)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def stream(*pieces: str, finish_reason: str = "stop", usage: dict[str, Any] | None = None) -> bytes:
    """The events of one answer, as OpenAI's servers write them."""
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant"}}]}]
    chunks += [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    chunks += [{"choices": [{"delta": {}, "finish_reason": finish_reason}]}]
    chunks += [{"choices": [], "usage": usage}] if usage else []
    return b"".join(event(chunk) for chunk in chunks) + b"data: [DONE]\n\n"


def event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "scripted"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        server = self.server
        server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        server.keys.append(self.headers["Authorization"])
        answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        if isinstance(answer, bytes) and answer.startswith(b"{"):
            self.send_response(400)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if isinstance(answer, bytes):
            self._chunk(answer)
            self._chunk(b"")
            return
        try:
            for number in range(3000):
                self._chunk(event({"choices": [{"delta": {"content": f"w{number} "}}]}))
                time.sleep(0.01)
        except OSError:
            server.hung_up.set()
        self.close_connection = True

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, *_: Any) -> None:
        """Tests have nobody to tell."""
