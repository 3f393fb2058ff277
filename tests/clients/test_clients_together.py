"""Eight people at once through the real `openai` client: all finish, with the words they would get alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clients.server_process import ServerProcess, together

QUESTIONS = (
    "Write a haiku about the sea.",
    "What is paging in an operating system?",
    "Name five fruits and a colour for each.",
    "Explain to a child why the sky is blue.",
    "Say something in French about cheese.",
    "Count from one to twenty in words.",
    "Write the first lines of a detective story.",
    "List three uses for an old newspaper. Use emoji.",
)
MAX_TOKENS = 40


def _stream(client: Any, number: int, **options: Any) -> tuple[str, str | None]:
    """The text and finish reason of one question: greedy if even, sampled with a seed if odd."""
    text, reason = "", None
    sampling = (
        {"temperature": 0.0} if number % 2 == 0 else {"temperature": 0.9, "top_p": 0.95, "seed": number}
    )
    chunks = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": QUESTIONS[number]}],
        stream=True,
        max_tokens=MAX_TOKENS,
        **sampling,
        **options,
    )
    for chunk in chunks:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
    return text, reason


def _all_at_once(server: ServerProcess) -> list[tuple[str, str | None]]:
    answers: list[tuple[str, str | None]] = [("", None)] * len(QUESTIONS)
    client = server.openai()

    def ask(number: int) -> None:
        answers[number] = _stream(client, number)

    with together(*(partial(ask, number) for number in range(len(QUESTIONS)))):
        pass
    return answers


@pytest.fixture(scope="module")
def solo(smollm2: ServerProcess) -> list[tuple[str, str | None]]:
    """Each question alone; a salt of its own keeps even the common system prompt from being shared."""
    client = smollm2.openai()
    answers = [
        _stream(client, number, extra_body={"cache_salt": f"alone {number}"})
        for number in range(len(QUESTIONS))
    ]
    assert len({text for text, _ in answers}) == len(QUESTIONS)
    return answers


def test_eight_streams_at_once_are_each_as_if_alone(
    smollm2: ServerProcess, solo: list[tuple[str, str | None]]
) -> None:
    assert _all_at_once(smollm2) == solo


def test_eight_streams_on_a_pool_too_small_for_them_pause_and_finish_the_same(
    smollm2_path: Path, solo: list[tuple[str, str | None]]
) -> None:
    blocks = 16  # each of the eight grows to five or six
    arguments = ("--served-model-name", "smollm2", "--kv-cache-memory", str(blocks * 368_640))
    with ServerProcess(smollm2_path, *arguments) as server:
        assert server.metric("kv_blocks_total") == blocks
        assert _all_at_once(server) == solo
        assert server.metric("num_preemptions_total") > 0
        assert server.metric("kv_blocks_used") == 0
