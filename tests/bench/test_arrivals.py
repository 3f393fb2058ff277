"""Who asks what and when: the same for the same seed, and as often as they are said to."""

from __future__ import annotations

import random
from statistics import mean, median

import pytest

from octavo.bench.arrivals import Bursts, Client, ClosedLoop, Habits, Pace, Poisson, User, made_up_tokens
from octavo.bench.simulated_workloads import WORKLOADS

SYSTEM = made_up_tokens(30, "a system prompt")


def client(habits: Habits, *, limit: int = 10_000, name: str = "somebody", seed: int = 0) -> Client:
    return Client(User(name), ClosedLoop(1.0), habits, limit, seed)


def rate(pace: Pace, count: int = 20_000) -> float:
    """Requests a second of an open pace."""
    rng = random.Random(1)
    gaps = [pace.after_asking(rng) for _ in range(count)]
    return count / sum(gap for gap in gaps if gap is not None)


@pytest.mark.parametrize("pace", [Poisson(0.2), Bursts(0.2, 1.0), Bursts(0.2, 8.0)])
def test_open_paces_ask_as_often_as_they_say(pace: Pace) -> None:
    assert rate(pace) == pytest.approx(0.2, rel=0.05)
    assert pace.after_answer(random.Random(1)) is None


def test_bursts_come_together() -> None:
    """Of bursts of eight, seven gaps of eight are short; a Poisson stream has a tenth of those."""
    rng = random.Random(1)
    for pace, share in ((Bursts(0.1, 8.0), 7 / 8), (Poisson(0.1), 0.1)):
        gaps = [pace.after_asking(rng) or 0.0 for _ in range(5_000)]
        assert mean(gap < 1.0 for gap in gaps) == pytest.approx(share, abs=0.03)


def test_who_waits_for_answers_thinks_before_the_next_question() -> None:
    rng = random.Random(1)
    pace = ClosedLoop(20.0, depth=3)
    assert len(pace.first(rng)) == 3
    assert pace.after_asking(rng) is None
    pauses = [pace.after_answer(rng) or 0.0 for _ in range(5_000)]
    assert mean(pauses) == pytest.approx(20.0, rel=0.05)
    assert ClosedLoop(0.0, depth=2).first(rng) == [0.0, 0.0]
    assert ClosedLoop(0.0).after_answer(rng) == 0.0


def test_a_seed_and_a_name_decide_what_is_asked() -> None:
    habits = Habits(question=50, answer=80, system_prompt=SYSTEM)

    def asks(name: str, seed: int) -> list[tuple[list[int], int]]:
        one = client(habits, name=name, seed=seed)
        return [(ask.prompt, ask.num_output) for ask in (one.ask() for _ in range(5))]

    assert asks("a", 1) == asks("a", 1)
    assert asks("a", 1) != asks("a", 2)
    assert asks("a", 1) != asks("b", 1)
    assert all(prompt[:30] == list(SYSTEM) for prompt, _ in asks("a", 1))


def test_lengths_are_spread_around_their_medians() -> None:
    one = client(Habits(question=100, answer=40, spread=0.5))
    asks = [one.ask() for _ in range(2_000)]
    assert median(len(ask.prompt) for ask in asks) == pytest.approx(100, rel=0.1)
    assert median(ask.num_output for ask in asks) == pytest.approx(40, rel=0.1)
    assert min(ask.num_output for ask in asks) < 20 < 80 < max(ask.num_output for ask in asks)


def test_a_conversation_goes_on_with_all_that_was_said() -> None:
    one = client(Habits(question=20, answer=20, turns=1e9, system_prompt=SYSTEM))
    said = list(SYSTEM)
    for turn in range(5):
        ask = one.ask()
        assert ask.prompt[: len(said)] == said
        assert len(ask.prompt) > len(said)
        said = [*ask.prompt, *[turn] * ask.num_output]
        one.answered(list(said))


def test_conversations_have_as_many_turns_as_they_say() -> None:
    one = client(Habits(question=1, answer=1, spread=0.0, turns=4.0))
    begun = 0
    for _ in range(4_000):
        ask = one.ask()
        begun += len(ask.prompt) == 1
        one.answered([*ask.prompt, 0])
    assert 4_000 / begun == pytest.approx(4.0, rel=0.1)


def test_no_request_is_longer_than_the_limit() -> None:
    one = client(Habits(question=60, answer=30, spread=1.5, turns=1e9, system_prompt=SYSTEM), limit=200)
    for _ in range(500):
        ask = one.ask()
        assert ask.num_output >= 1
        assert len(ask.prompt) > len(SYSTEM)
        assert len(ask.prompt) + ask.num_output <= 200
        one.answered([*ask.prompt, *[0] * ask.num_output])
    with pytest.raises(ValueError, match=r"system prompt of 30 tokens .* limit is 31"):
        client(Habits(question=1, answer=1, system_prompt=SYSTEM), limit=31)


def test_houses_have_whom_they_say() -> None:
    home = WORKLOADS["home"].clients(limit=8_000, num_users=6, weights=(1.0, 2.0))
    assert [one.user.name for one in home] == ["chat-0", "chat-1", "agent-2", "night-3", "chat-4", "chat-5"]
    assert [one.user.background for one in home] == [False, False, False, True, False, False]
    assert [one.user.weight for one in home] == [1.0, 2.0] * 3
    assert len(WORKLOADS["thousands"].clients(limit=8_000)) == 1_000


def test_houses_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="two-backlogged needs at least 2 users, not 1"):
        WORKLOADS["two-backlogged"].clients(limit=8_000, num_users=1)
    with pytest.raises(ValueError, match="asks at a rate"):
        WORKLOADS["two-backlogged"].clients(limit=8_000, rate=1.0)
    with pytest.raises(ValueError, match="the rate is -1"):
        WORKLOADS["home"].clients(limit=8_000, rate=-1.0)
    with pytest.raises(ValueError, match=r"the weight of chat-0 is 0\.0"):
        WORKLOADS["home"].clients(limit=8_000, weights=(0.0,))
