"""What the KV cache takes of the machine's memory, by the system's own accounting of the process."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from clients.server_process import ServerProcess, together, wait_until

MIB = 2**20
KEY = "sesame"
SMALL_NOISE = 24 * MIB
"""What a process of this kind differs by from run to run, and grows by while it serves."""


class Owner:
    """Somebody with the key."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        headers = {"Authorization": f"Bearer {KEY}"}
        self.http = httpx.Client(base_url=server.url, timeout=120, headers=headers)

    def status(self) -> dict[str, object]:
        return dict(self.http.get("/admin/kv-cache").raise_for_status().json())

    def change(self, **fields: object) -> dict[str, object]:
        return dict(self.http.post("/admin/kv-cache", json=fields).raise_for_status().json())

    def metric(self, name: str, labels: str = "") -> float:
        """The sum over all labels of a metric, or over those lines that have `labels` in them."""
        text = self.http.get("/metrics").raise_for_status().text
        found = re.findall(rf"^octavo:{name}{{.*{labels}.*}} (\S+)$", text, re.MULTILINE)
        assert found, f"there is no metric {name}"
        return sum(map(float, found))

    def fill(self, num_prompts: int, num_tokens: int = 1000) -> None:
        """Prompts with nothing in common, cached afterwards."""
        for number in range(num_prompts):
            prompt = [2000 + (number * 7919 + i * (number + 3)) % 40_000 for i in range(num_tokens)]
            self.ask(prompt)

    def ask(self, prompt: list[int], max_tokens: int = 1) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return str(
            self.http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
        )


def resident_bytes(server: ServerProcess) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) * 1024


@contextlib.contextmanager
def owned(path: Path, budget: str = "256MiB") -> Iterator[Owner]:
    with ServerProcess(path, "--kv-cache-memory", budget, "--api-key", KEY) as server:
        yield Owner(server)


def test_a_fresh_server_does_not_take_its_pools_memory(smollm2_path: Path) -> None:
    with owned(smollm2_path, "16MiB") as small, owned(smollm2_path, "1GiB") as large:
        assert abs(resident_bytes(large.server) - resident_bytes(small.server)) < SMALL_NOISE
        status = large.status()
        assert (status["budget_bytes"], status["resident_bytes"]) == (1024 * MIB, 0)


def test_memory_follows_what_is_cached_and_falls_when_it_is_released(smollm2_path: Path) -> None:
    with owned(smollm2_path) as owner:
        owner.ask([1, 2, 3])
        at_start = resident_bytes(owner.server)
        owner.fill(5)
        filled, status = resident_bytes(owner.server), owner.status()
        held = status["resident_bytes"]
        assert isinstance(held, int)
        assert held >= 5 * 1000 * 23_040
        assert abs(filled - at_start - held) < SMALL_NOISE
        after = owner.change(release=True)
        assert after["resident_bytes"] == 0
        assert filled - resident_bytes(owner.server) > held - SMALL_NOISE
        assert owner.metric("kv_cache_resident_bytes") == 0
        assert owner.metric("kv_cache_budget_bytes") == 256 * MIB
        assert owner.metric("kv_blocks_released_total") * 368_640 >= held


def test_a_pool_shrinks_and_grows_while_it_serves(smollm2_path: Path) -> None:
    prompt = list(range(3000, 3400))
    with owned(smollm2_path, "64MiB") as owner:
        alone = owner.ask(prompt, 60)
        owner.fill(1)
        texts: list[str] = []
        with together(*[lambda: texts.append(owner.ask(prompt, 60))] * 2):
            for budget in ("32MiB", "128MiB", "16MiB", "48MiB"):
                status = owner.change(kv_cache_memory=budget)
                assert status["budget_bytes"] == int(budget[:-3]) * MIB
        assert texts == [alone] * 2
        status = owner.change(kv_cache_memory="16MiB")
        blocks = status["blocks"]
        assert isinstance(blocks, dict)
        assert (blocks["total"], blocks["used"]) == (16 * MIB // 368_640, 0)
        assert isinstance(status["resident_bytes"], int)
        assert status["resident_bytes"] <= 16 * MIB
        answer = owner.http.post("/v1/completions", json={"prompt": [5] * 800, "max_tokens": 4})
        assert answer.status_code == 400
        assert "720 tokens" in answer.json()["error"]["message"]


def test_sizes_that_cannot_be_are_refused_with_both_numbers(smollm2_path: Path) -> None:
    with owned(smollm2_path, "64MiB") as owner:
        for budget, said in (
            ("1000", "1,000 bytes is smaller than one block of 368,640"),
            ("4000TiB", "address space"),
        ):
            answer = owner.http.post("/admin/kv-cache", json={"kv_cache_memory": budget})
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"]
        assert owner.status()["budget_bytes"] == 64 * MIB


def _memory_group() -> Path | None:
    """A fresh control group of memory with a limit, version 1 or 2, where this process may make one."""
    name = f"octavo-test-{uuid.uuid4().hex[:8]}"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            mount = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
            group = mount / path.lstrip("/") / name
            limit = "memory.limit_in_bytes" if controllers else "memory.max"
            try:
                group.mkdir()
                if (group / limit).exists():
                    (group / limit).write_text(str(LIMIT))
                    return group
                group.rmdir()
            except OSError:
                continue
    return None


LIMIT = 700 * MIB


@pytest.fixture
def memory_group() -> Iterator[Path]:
    group = _memory_group()
    if group is None:
        pytest.skip("this process may not make a control group with a limit on memory")
    yield group
    deadline = time.monotonic() + 10
    while True:
        try:
            return group.rmdir()
        except OSError:
            assert time.monotonic() < deadline, "somebody is left in the group"
            time.sleep(0.05)


def test_t27_cold_blocks_go_to_another_program_in_the_same_container(
    smollm2_path: Path, memory_group: Path
) -> None:
    join = f"import os; open({str(memory_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
    with owned(smollm2_path) as owner:
        (memory_group / "cgroup.procs").write_text(str(owner.server.process.pid))
        prompt = list(range(3000, 3400))
        alone = owner.ask(prompt, 200)
        owner.fill(6)
        held = owner.status()["resident_bytes"]
        assert isinstance(held, int)
        assert held > 6 * 1000 * 23_040
        texts: list[str] = []
        relieved = threading.Event()

        def go_on() -> None:
            while not relieved.is_set():
                texts.append(owner.ask(prompt, 200))

        # Memory of its own for all but 20 MiB of the group: less than the twentieth that others may count on.
        usage = memory_group / "memory.usage_in_bytes"
        usage = usage if usage.exists() else memory_group / "memory.current"
        take = LIMIT - int(usage.read_text()) - 20 * MIB
        code = join + f"x = bytearray(b'x') * {take}; print('taken', flush=True); input()"
        with together(go_on):
            other = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            try:
                assert other.stdout is not None
                assert other.stdout.readline() == "taken\n"
                wait_until(lambda: owner.metric("kv_blocks_released_total", 'reason="pressure"') > 0, 30)
            finally:
                relieved.set()
                other.kill()
                other.wait()
        assert set(texts) == {alone}
        after = owner.status()["resident_bytes"]
        assert isinstance(after, int)
        assert after < held
        assert owner.metric("num_preemptions_total") == 0
