"""T20 through sockets: two keys, and one of them asks for ten times as much."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from clients.server_process import ServerProcess, together, wait_until
from clients.test_clients_keys import Household


@pytest.fixture(scope="module")
def house(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Household]:
    house = Household(tmp_path_factory.mktemp("house") / "octavo.toml")
    house.add("anna")
    house.add("ben")
    options = ("--kv-cache-memory", "128MiB", "--max-num-seqs", "2", "--config", str(house.file))
    with ServerProcess(smollm2_path, "--served-model-name", "smollm2", *options) as server:
        house.server = server
        yield house


def num_waiting(house: Household) -> float:
    with house.http("ben") as client:
        metrics = client.get("/metrics").text
    (line,) = (line for line in metrics.splitlines() if line.startswith("octavo:num_requests_waiting{"))
    return float(line.split()[-1])


def test_t20_one_question_does_not_wait_behind_ten_of_somebody_else(house: Household) -> None:
    ended: list[str] = []
    lock = threading.Lock()

    def ask(who: str, number: int) -> None:
        prompt = [1000 + (number * 977 + 31 * i) % 40_000 for i in range(300)]
        with house.http(who) as client:
            body = {"prompt": prompt, "max_tokens": 32, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200
        with lock:
            ended.append(who)

    with ExitStack() as everybody:
        for number in range(10):
            everybody.enter_context(together(partial(ask, "anna", number)))
        wait_until(lambda: num_waiting(house) >= 7)
        ask("ben", 10)
        before = ended.index("ben")
    assert len(ended) == 11
    # Two had seats when ben came, and one of these may have ended just before and left its seat to a third.
    assert before <= 3
