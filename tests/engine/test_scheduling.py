"""Policies, shares and the target of a step, from the engine's settings to its metrics."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from engine.fake_model import FakeModel, running_engine
from engine.reading import params, read_all
from engine.test_metrics import scrape
from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.generation import Generation
from octavo.engine.request import Share
from octavo.scheduler.plan import WaitReason

ANNA, BEN = Share("anna"), Share("ben")


def prompt(number: int, length: int) -> list[int]:
    return [(number * 101 + 17 * i) % 991 for i in range(length)]


def ended_in_order(generations: dict[str, Generation]) -> list[str]:
    read_all(list(generations.values()))
    ended = {name: one.stats.total_time for name, one in generations.items()}
    arrived = {name: one._request.arrived_at for name, one in generations.items()}
    return sorted(generations, key=lambda name: arrived[name] + (ended[name] or 0.0))


def ten_and_one(engine: Engine) -> dict[str, Generation]:
    """Ten requests of Anna, then one of Ben, all there before the first step."""
    asked = {
        f"anna {number}": engine.submit(prompt(number, 30), params(20), share=ANNA) for number in range(10)
    }
    asked["ben"] = engine.submit(prompt(50, 30), params(20), share=BEN)
    engine.start()
    return asked


def test_one_request_of_a_user_does_not_wait_behind_ten_of_another() -> None:
    with running_engine(max_num_seqs=2, start=False) as engine:
        order = ended_in_order(ten_and_one(engine))
    assert order.index("ben") <= 1


def test_first_come_first_served_is_what_it_says() -> None:
    with running_engine(max_num_seqs=2, scheduling_policy="fcfs", start=False) as engine:
        order = ended_in_order(ten_and_one(engine))
    assert order[-1] == "ben"


@pytest.mark.parametrize("policy", ["priority", "fair", "fcfs"])
def test_priorities_count_among_everybody_or_among_ones_own_or_not(policy: str) -> None:
    with running_engine(max_num_seqs=1, scheduling_policy=policy, start=False) as engine:
        asked = {
            "anna": engine.submit(prompt(1, 30), params(5), share=ANNA, priority=1),
            "anna, sooner": engine.submit(prompt(2, 30), params(5), share=ANNA, priority=0),
            "ben, soonest": engine.submit(prompt(3, 30), params(5), share=BEN, priority=-1),
        }
        engine.start()
        order = ended_in_order(asked)
    by_policy = {
        "priority": ["ben, soonest", "anna, sooner", "anna"],
        "fair": ["anna, sooner", "ben, soonest", "anna"],
        "fcfs": ["anna", "anna, sooner", "ben, soonest"],
    }
    assert order == by_policy[policy]


def test_a_stream_that_has_to_leave_its_seat_says_so_and_goes_on() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, max_num_seqs=2, start=False) as engine:
        annas = [engine.submit(prompt(number, 30), params(30), share=ANNA) for number in range(2)]
        engine.start()
        model.let(3)
        model.arrive()
        assert [one.standing() for one in annas] == [None, None]
        ben = engine.submit(prompt(5, 30), params(30), share=BEN)
        model.let(2)
        model.arrive()
        unseated = annas[1].standing()
        assert unseated is not None
        assert (unseated.position, unseated.reason) == (1, WaitReason.SEATS)
        assert annas[0].standing() is None
        assert ben._request.sequence.num_computed_tokens > 0
        model.open()
        read_all([*annas, ben])
        assert [one.stats.num_output_tokens for one in (*annas, ben)] == [30] * 3
        assert engine.num_preemptions == 0


def test_what_a_step_was_expected_to_take_is_in_the_metrics() -> None:
    with running_engine() as engine:
        read_all([engine.submit(prompt(1, 40), params(20))])
        numbers = scrape(engine)
    num_steps = numbers["octavo:engine_steps_total"]
    assert num_steps >= 20
    # Before the first step nothing is known.
    assert numbers["octavo:engine_step_predicted_seconds_count"] == num_steps - 1
    assert numbers["octavo:engine_step_prediction_error_ratio_count"] == num_steps - 1
    assert numbers["octavo:engine_step_predicted_seconds_sum"] > 0
    assert numbers["octavo:engine_steps_over_target_total"] == 0


def test_a_target_that_streams_exceed_by_themselves_is_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = FakeModel()
    model.before_step = lambda _: time.sleep(0.005)
    with caplog.at_level(logging.WARNING, "octavo.engine"), running_engine(model, target_itl_ms=1) as engine:
        read_all([engine.submit(prompt(1, 40), params(20))])
        assert scrape(engine)["octavo:engine_steps_over_target_total"] >= 10
    said = [record.getMessage() for record in caplog.records if "--target-itl-ms" in record.getMessage()]
    assert len(said) == 1
    assert "longer than the 1 ms" in said[0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"scheduling_policy": "best"}, "scheduling_policy must be fair, fcfs, priority, not 'best'"),
        ({"target_itl_ms": 0.5}, "target_itl_ms must be from 1 to 60,000, not 0.5"),
        ({"target_itl_ms": 0}, "not 0"),
        ({"target_itl_ms": 1e9}, "not 1e[+]09"),
        ({"target_itl_ms": float("nan")}, "not nan"),
    ],
)
def test_what_cannot_be_is_refused_with_what_may_be(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EngineConfig(**settings)
