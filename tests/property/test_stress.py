"""Sixteen clients, a pool that is too small, cancels, failing steps: every answer is as it is alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from octavo.kv.prefix_index import Namespace
from octavo.scheduler.sequence import Sequence, SequenceStatus
from octavo.scheduler.share import Share
from paged_model import PagedServer, solo


@dataclass
class Asked:
    prompt: list[int]
    max_tokens: int
    salt: str


class Client:
    """One who asks, reads, and often goes on from what was answered."""

    def __init__(self, name: str, rng: random.Random, documents: list[list[int]]) -> None:
        self.name = name
        self.rng = rng
        self.documents = documents
        self.salt = rng.choice(["", "", "", "private"])
        self.history: list[int] = []
        self.open: dict[Sequence, Asked] = {}

    def ask(self, server: PagedServer, number: int) -> None:
        """A new question, a follow-up, or several choices of one; prompts count, so that an error shows."""
        rng = self.rng
        if not self.history or rng.random() < 0.4:
            document = rng.choice(self.documents)
            prompt = document[: rng.randrange(1, len(document))]
        else:
            prompt = list(self.history)
        begin = rng.randrange(0, 900)
        prompt = [*prompt, *range(begin, begin + rng.randrange(1, 12))]
        asked = Asked(prompt[: server.scheduler.limit - 40], rng.randrange(1, 40), self.salt)
        for choice in range(rng.choice([1, 1, 1, 3])):
            sequence = Sequence(
                f"{self.name}-{number}-{choice}",
                asked.prompt,
                namespace=Namespace(salt=asked.salt),
                share=Share(self.name, background=rng.random() < 0.2),
            )
            server.admit(sequence, asked.max_tokens)
            self.open[sequence] = asked


def run(seed: int, num_steps: int, block_size: int, num_blocks: int) -> tuple[PagedServer, int]:
    """Returns the server, everybody gone, and how many answers were compared."""
    rng = random.Random(seed)
    documents = [[rng.randrange(900) for _ in range(rng.randrange(20, 120))] for _ in range(4)]
    documents.append([*documents[0][:50], *documents[1]])
    server = PagedServer(
        num_blocks, block_size, max_num_seqs=12, max_num_batched_tokens=rng.choice([16, 48, 96])
    )
    clients = [Client(f"c{number}", rng, documents) for number in range(16)]
    number = compared = 0
    while number < num_steps or server.sequences:
        number += 1
        for client in clients:
            if not client.open and number < num_steps and rng.random() < 0.3:
                client.ask(server, number)
        for sequence in server.sequences:
            if sequence.status is not SequenceStatus.WAITING:
                sequence.held = rng.random() < 0.02
        plan = server.plan()
        if plan.chunks:
            if rng.random() < 0.05:
                server.fail(plan)
            else:
                server.end(plan)
        for client in clients:
            for sequence, asked in list(client.open.items()):
                if sequence.status is SequenceStatus.FINISHED:
                    assert sequence.token_ids == solo(asked.prompt, asked.max_tokens, salt=asked.salt)
                    client.history = sequence.token_ids
                    del client.open[sequence]
                    compared += 1
                elif rng.random() < 0.003:
                    server.finish(sequence)
                    del client.open[sequence]
        assert number < 20 * num_steps
    return server, compared


@pytest.mark.parametrize(("seed", "block_size", "num_blocks"), [(1, 4, 60), (2, 2, 90), (3, 16, 20)])
def test_nobody_gets_another_answer_in_a_crowd(seed: int, block_size: int, num_blocks: int) -> None:
    server, compared = run(seed, 400, block_size, num_blocks)
    assert compared > 50
    assert server.scheduler.num_preemptions > 2
    assert server.model.num_copies > 5
    assert server.cache.num_used == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 16))
def test_nobody_gets_another_answer_in_thousands_of_steps(seed: int) -> None:
    _, compared = run(seed, 3_000, random.Random(seed).choice([1, 2, 4, 16]), 80)
    assert compared > 150
