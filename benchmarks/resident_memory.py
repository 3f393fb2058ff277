"""What the KV cache takes of the machine's memory, at start, under load, and after it was given back.

    python benchmarks/resident_memory.py [--model M] [--kv-cache-memory SIZE] [--prompts N] [--json]

Starts `octavo serve` with a key, sends prompts that have nothing in common, eight at a time, gives cold
blocks back through /admin/kv-cache, fills the cache again and makes it smaller. Resident memory is VmRSS of
the process; of it, pages of KV blocks as mincore(2) counts them.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench.machine import Machine
from octavo.bench.prompts import seeded_prompts
from octavo.bench.server_process import ServerProcess
from octavo.engine.memory import parse_bytes
from octavo.kernels import available_instruction_sets
from octavo.kernels.threads import default_num_threads
from octavo.model.catalog import DEFAULT_MODEL, resolve_model
from octavo.model.gguf import GGUFFile
from octavo.text.tokenizer import Tokenizer

TOGETHER = 8
PROMPT_TOKENS = 1000
OUTPUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Moment:
    """What the system and the server said at one moment; bytes and blocks."""

    when: str
    resident: int
    kv_resident: int
    kv_budget: int
    used: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True)
class Report:
    benchmark: str
    machine: Machine
    model: str
    extent_bytes: int
    moments: list[Moment]


class Owner:
    """Somebody with the key of a running server."""

    def __init__(self, server: ServerProcess, key: str) -> None:
        self._server = server
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Raises: RuntimeError with the server's words, where it answers with an error."""
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=600)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {text.decode(errors='replace')}")
        return json.loads(text)

    def complete(self, prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
        self.call("POST", "/v1/completions", body)

    def now(self, when: str) -> Moment:
        status = self.call("GET", "/admin/kv-cache")
        blocks = status["blocks"]
        return Moment(
            when,
            self._server.resident_bytes(),
            status["resident_bytes"],
            status["budget_bytes"],
            blocks["used"],
            blocks["cached"],
            blocks["free"],
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Resident memory of octavo serve, with its KV cache.")
    flag = parser.add_argument
    flag("--model", default=DEFAULT_MODEL, help="a GGUF file, or a name 'octavo pull' knows")
    flag("--kv-cache-memory", default="1GiB", metavar="SIZE", help="of the server (default: %(default)s)")
    flag("--prompts", type=int, default=24, help="of 1,000 tokens, eight at a time (default: %(default)s)")
    flag("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    report = measure(resolve_model(args.model), args.kv_cache_memory, args.prompts)
    if args.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print_report(report)
    return 0


def measure(model: Path, budget: str, num_prompts: int) -> Report:
    """Raises: ServerFailed, RuntimeError."""
    key = secrets.token_hex()
    command = [sys.executable, "-m", "octavo.cli.main", "serve", str(model), "--port", "{port}"]
    command += ["--kv-cache-memory", budget, "--api-key", key]
    with GGUFFile(model) as file:
        prompts = seeded_prompts(Tokenizer.from_gguf(file.metadata), num_prompts, PROMPT_TOKENS)
    with ServerProcess(command) as server, ThreadPoolExecutor(TOGETHER) as people:
        owner = Owner(server, key)
        moments = [owner.now("at start")]
        moments.append(_fill(owner, people, prompts))
        moments.append(owner.now("idle, all of it cached"))
        owner.call("POST", "/admin/kv-cache", {"release": True})
        moments.append(owner.now('after {"release": true}'))
        _fill(owner, people, prompts)
        smaller = parse_bytes(budget) // 8
        status = owner.call("POST", "/admin/kv-cache", {"kv_cache_memory": smaller})
        moments.append(owner.now("filled again, then budget / 8"))
    return Report(
        benchmark="resident_memory",
        machine=Machine.now(default_num_threads(), available_instruction_sets()[0]),
        model=model.name,
        extent_bytes=status["extent_bytes"],
        moments=moments,
    )


def _fill(owner: Owner, people: ThreadPoolExecutor, prompts: list[list[int]]) -> Moment:
    """Ask everything. Returns: the moment at which most blocks were in use."""
    asked = [people.submit(owner.complete, prompt) for prompt in prompts]
    most = owner.now("under load")
    while not all(one.done() for one in asked):
        time.sleep(0.1)
        seen = owner.now("under load")
        if seen.used >= most.used:
            most = seen
    for one in asked:
        one.result()
    return most


def print_report(report: Report) -> None:
    print(report.machine.describe())
    print(f"{report.model}, blocks of {report.extent_bytes:,} bytes")
    print()
    print("| | resident (VmRSS) | of it KV blocks | KV budget | blocks used | cached | free |")
    print("|---|---|---|---|---|---|---|")
    for one in report.moments:
        sizes = " | ".join(
            f"{count / 1e6:.0f} MB" for count in (one.resident, one.kv_resident, one.kv_budget)
        )
        print(f"| {one.when} | {sizes} | {one.used:,} | {one.cached:,} | {one.free:,} |")


if __name__ == "__main__":
    sys.exit(main())
