"""Serve a GGUF file with llama.cpp, through the `xllamacpp` package: a peer of versus_peers.py.

    python llamacpp_server.py MODEL --port P --threads N --slots N --context TOKENS

Runs in an environment of its own that has xllamacpp and nothing of Octavo.
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens of KV for all slots together")
    args = parser.parse_args()

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.n_parallel = args.slots
    params.n_ctx = args.context
    # Nothing is reused on either side, so nothing is kept for reuse.
    params.cache_prompt = False
    params.cache_idle_slots = False
    params.cache_ram_mib = 0
    params.ui = False
    # Everything else as it comes: f16 KV, flash attention where llama.cpp thinks it helps, warm-up.
    server = xllamacpp.Server(params)

    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pause()
    del server


if __name__ == "__main__":
    main()
