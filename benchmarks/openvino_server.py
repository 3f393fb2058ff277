"""Serve a GGUF file with OpenVINO GenAI's ContinuousBatchingPipeline: a peer of versus_peers.py.

    python openvino_server.py MODEL --port P --threads N --kv-tokens T [--precision f32]

Runs in an environment of its own that has openvino-genai and nothing of Octavo. The package has no HTTP
server that could be asked as the others are, so this is the thinnest that the measuring client can read:
prompts are token ids, and an event says that a token came, not which. Text is never made, which is in
OpenVINO's favour.

One thread, the main one, takes new requests, calls `step` and writes an event to every stream that got a
token; another accepts connections. What is sent together is read together: the step loop starts when the
first request is there, as every server does.
"""

from __future__ import annotations

import argparse
import json
import queue
import socket
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino
import openvino_genai

_BLOCK_TOKENS = 32
"""Of the CPU plugin's KV blocks."""
_EVENT_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


@dataclass(slots=True)
class Request:
    """A completion that was asked for, and its connection."""

    connection: socket.socket
    prompt: list[int]
    max_tokens: int
    sent: int = 0
    handle: Any = None

    def write(self, said: dict[str, Any]) -> None:
        self._send(b"data: " + json.dumps(said).encode() + b"\n\n")

    def end(self) -> None:
        self._send(b"data: [DONE]\n\n")
        self.connection.close()

    def begin(self) -> None:
        self._send(_EVENT_STREAM)

    def _send(self, data: bytes) -> None:
        try:
            self.connection.sendall(data)
        except OSError:
            # The client has gone: what is left of its request is not worth computing.
            self.handle.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-tokens", type=int, required=True, help="of all requests together")
    parser.add_argument("--precision", help="of the computation; without it OpenVINO chooses")
    args = parser.parse_args()

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = -(-args.kv_tokens // _BLOCK_TOKENS)
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": args.threads, "KV_CACHE_PRECISION": "f16"}
    if args.precision:
        properties["INFERENCE_PRECISION_HINT"] = args.precision
    # Everything else as it comes: 256 tokens a step, prompts split between steps, dynamic quantisation.
    pipeline = openvino_genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)

    waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
    listening = socket.create_server(("127.0.0.1", args.port), backlog=64)
    threading.Thread(target=_accept, args=(listening, waiting), daemon=True).start()
    _step_loop(pipeline, waiting)


def _accept(listening: socket.socket, waiting: queue.SimpleQueue[Request]) -> None:
    while True:
        connection, _ = listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        path, body = _read(connection)
        if path == "/health":
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            connection.close()
        elif path == "/v1/completions":
            asked = json.loads(body)
            waiting.put(Request(connection, asked["prompt"], asked["max_tokens"]))
        else:
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            connection.close()


def _read(connection: socket.socket) -> tuple[str, bytes]:
    """Path and body of one request; an empty path where the client went away."""
    with connection.makefile("rb") as stream:
        words = stream.readline().split()
        length = 0
        while (line := stream.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return (words[1].decode() if len(words) > 1 else ""), stream.read(length)


def _step_loop(pipeline: Any, waiting: queue.SimpleQueue[Request]) -> None:
    streams: dict[int, Request] = {}
    number = 0
    while True:
        while not streams or not waiting.empty():
            request = waiting.get()
            config = openvino_genai.GenerationConfig(
                max_new_tokens=request.max_tokens, ignore_eos=True, do_sample=False
            )
            ids = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
            request.handle = pipeline.add_request(number, ids, config)
            request.begin()
            streams[number] = request
            number += 1
        pipeline.step()
        for key, request in list(streams.items()):
            if request.handle.can_read():
                tokens = sum(len(output.generated_ids) for output in request.handle.read().values())
                request.sent += tokens
                request.write({"choices": [{"index": 0, "text": "." * tokens}]})
            status = request.handle.get_status()
            if status != openvino_genai.GenerationStatus.RUNNING:
                if status != openvino_genai.GenerationStatus.FINISHED:
                    request.write({"error": {"message": f"OpenVINO ended the request: {status}"}})
                usage = {"prompt_tokens": len(request.prompt), "completion_tokens": request.sent}
                request.write({"choices": [], "usage": usage})
                request.end()
                del streams[key]


if __name__ == "__main__":
    main()
