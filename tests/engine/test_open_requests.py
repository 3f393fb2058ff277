"""The bound of the queue, and where each of those who wait stands."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.fake_model import FakeModel, answer, running_engine
from engine.reading import params, read, read_all, wait_until
from octavo import LLM, SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.generation import Generation
from octavo.engine.open_requests import OpenRequests
from octavo.engine.request import RequestRefused, Standing
from octavo.scheduler.plan import WaitReason


def prompt(number: int, length: int) -> list[int]:
    return [(number * 389 + 29 * i) % 977 for i in range(length)]


def refusal(submit: Callable[[], object]) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        submit()
    assert caught.value.code == "queue_full"
    return caught.value


# --- who waits ------------------------------------------------------------------------------------


def test_where_nobody_may_wait_one_who_need_not_is_served() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, max_num_seqs=1, max_num_queued_reqs=0) as engine:
        first = engine.submit(prompt(1, 50), params(5))
        said = refusal(lambda: engine.submit(prompt(2, 50), params(5)))
        assert "0 requests wait and at most 0 may" in said.message
        model.open()
        assert read(first) == (answer(prompt(1, 50), 5), "length")
        assert read(engine.submit(prompt(2, 50), params(5))) == (answer(prompt(2, 50), 5), "length")
    assert sum(step.num_tokens for step in model.steps) == 2 * 54, "something of the refused one was computed"


@pytest.mark.parametrize("started", [True, False])
def test_who_has_a_seat_to_come_does_not_wait(started: bool) -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, max_num_seqs=4, max_num_queued_reqs=2, start=started) as engine:
        generations = [engine.submit(prompt(i, 20), params(5)) for i in range(6)]
        said = refusal(lambda: engine.submit(prompt(7, 20), params(5)))
        assert "2 requests wait and at most 2 may" in said.message
        if not started:
            engine.start()
        model.open()
        assert read_all(generations) == [answer(prompt(i, 20), 5) for i in range(6)]


def test_the_pool_is_counted_in_blocks_and_those_who_came_before_come_first() -> None:
    """Eight blocks: 100 tokens take seven of them, and 16 fit beside that, and 17 do not."""
    model = FakeModel()
    model.gate()
    with running_engine(model, num_blocks_override=8, max_num_queued_reqs=0) as engine:
        first = engine.submit(prompt(1, 100), params(5))
        refusal(lambda: engine.submit(prompt(2, 17), params(5)))
        model.arrive()  # now it has its blocks: the same answer
        refusal(lambda: engine.submit(prompt(2, 17), params(5)))
        second = engine.submit(prompt(3, 16), params(5))
        refusal(lambda: engine.submit(prompt(4, 1), params(1)))
        model.open()
        assert read_all([first, second]) == [answer(prompt(1, 100), 5), answer(prompt(3, 16), 5)]


def test_behind_one_that_waits_everybody_waits() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, num_blocks_override=8, max_num_queued_reqs=1) as engine:
        generations = [engine.submit(prompt(1, 80), params(5)), engine.submit(prompt(2, 60), params(5))]
        refusal(lambda: engine.submit(prompt(3, 1), params(1)))
        model.open()
        assert read_all(generations) == [answer(prompt(1, 80), 5), answer(prompt(2, 60), 5)]


def test_what_a_long_prompt_still_needs_is_not_there_for_others() -> None:
    """A step is 32 tokens: two of its ten blocks are taken, eight are to come."""
    model = FakeModel()
    model.gate()
    with running_engine(
        model, num_blocks_override=12, max_num_batched_tokens=64, max_num_queued_reqs=0
    ) as engine:
        long = engine.submit(prompt(1, 160), params(5))
        model.arrive()
        refusal(lambda: engine.submit(prompt(2, 33), params(5)))
        short = engine.submit(prompt(3, 32), params(5))
        model.open()
        assert read_all([long, short]) == [answer(prompt(1, 160), 5), answer(prompt(3, 32), 5)]


def test_one_that_was_cancelled_makes_room_at_once() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, num_blocks_override=8, max_num_queued_reqs=1) as engine:
        runs, waits = engine.submit(prompt(1, 100), params(5)), engine.submit(prompt(2, 40), params(5))
        model.arrive()
        refusal(lambda: engine.submit(prompt(3, 40), params(5)))
        waits.cancel()
        instead = engine.submit(prompt(3, 40), params(5))
        refusal(lambda: engine.submit(prompt(4, 40), params(5)))
        runs.cancel()
        # All blocks come back, so two of them fit, the third one waits, and then nobody else may.
        others = [engine.submit(prompt(number, 40), params(5)) for number in (5, 6)]
        refusal(lambda: engine.submit(prompt(7, 40), params(5)))
        model.open()
        assert read_all([instead, *others]) == [answer(prompt(number, 40), 5) for number in (3, 5, 6)]


@pytest.mark.parametrize("bound", [0, 1, 7])
def test_of_requests_that_arrive_together_exactly_as_many_are_taken_as_may_be(bound: int) -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, max_num_seqs=3, max_num_queued_reqs=bound, start=False) as engine:
        barrier = threading.Barrier(24)
        codes: set[str] = set()

        def submit(number: int) -> Generation | None:
            barrier.wait(20)
            try:
                return engine.submit(prompt(number, 20), params(4))
            except RequestRefused as refused:
                codes.add(refused.code)
                return None

        with ThreadPoolExecutor(24) as pool:
            results = list(pool.map(submit, range(24)))
        taken = {number: result for number, result in enumerate(results) if result is not None}
        assert len(taken) == 3 + bound
        assert codes == {"queue_full"}
        engine.start()
        model.open()
        for number, generation in taken.items():
            assert read(generation) == (answer(prompt(number, 20), 4), "length")
        # All of them are forgotten: as many may come again.
        model.gate()
        again = [engine.submit(prompt(number, 20), params(4)) for number in range(3 + bound)]
        refusal(lambda: engine.submit(prompt(99, 20), params(4)))
        model.open()
        read_all(again)


def test_a_further_choice_is_not_refused_and_counts_for_the_next() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, max_num_seqs=1, max_num_queued_reqs=1) as engine:
        choices = [engine.submit(prompt(1, 20), params(4), choice_index=i, bounded=i == 0) for i in range(4)]
        assert (
            "3 requests wait and at most 1 may"
            in refusal(lambda: engine.submit(prompt(2, 20), params(4))).message
        )
        model.open()
        assert read_all(choices) == [answer(prompt(1, 20), 4)] * 4


def test_llm_hands_in_as_many_prompts_as_it_likes(tiny_model_path: Path) -> None:
    with LLM(tiny_model_path, num_blocks_override=64, max_num_seqs=2, max_num_queued_reqs=0) as llm:
        results = llm.generate([[5 + i] for i in range(12)], SamplingParams(max_tokens=2, ignore_eos=True))
        assert [len(result.outputs[0].token_ids) for result in results] == [2] * 12


@pytest.mark.parametrize("bound", [-1, -256])
def test_a_bound_is_not_negative(bound: int) -> None:
    with (
        pytest.raises(ValueError, match=rf"max_num_queued_reqs must be at least 0, not {bound}"),
        running_engine(max_num_queued_reqs=bound),
    ):
        pass


# --- for how long ---------------------------------------------------------------------------------


def test_who_is_refused_hears_when_what_is_ahead_will_be_done() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, max_num_seqs=1, max_num_queued_reqs=1) as engine:
        assert engine.estimated_wait() is None
        engine._open_requests.computed(100, 1.0)
        assert engine.estimated_wait() == 0
        generations = [engine.submit(prompt(1, 200), params(40)), engine.submit(prompt(2, 300), params(500))]
        # 200 + 40 tokens, and 300 + 128: so long is an answer before there was one.
        assert engine.estimated_wait() == pytest.approx(6.68)
        said = refusal(lambda: engine.submit(prompt(3, 10), params(5)))
        assert said.retry_after == pytest.approx(6.68)
        model.open()
        generations[1].cancel()
        read_all(generations[:1])
        wait_until(lambda: engine.num_open == 0)
        assert engine.estimated_wait() == 0
        model.gate()
        third = engine.submit(prompt(4, 100), params(500))
        rate = engine._open_requests._estimates.tokens_per_second
        assert rate is not None
        # The one answer there was had 40 tokens; one that was cancelled says nothing of answers.
        assert engine.estimated_wait() == pytest.approx((100 + 40) / rate)
        third.cancel()
        model.open()


def test_the_time_to_come_back_is_never_below_a_second() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, max_num_seqs=1, max_num_queued_reqs=0) as engine:
        first = engine.submit(prompt(1, 20), params(4))
        assert refusal(lambda: engine.submit(prompt(2, 20), params(4))).retry_after == 1.0
        engine._open_requests.computed(1_000_000, 1.0)
        assert refusal(lambda: engine.submit(prompt(2, 20), params(4))).retry_after == 1.0
        model.open()
        read(first)


# --- where somebody stands ------------------------------------------------------------------------


def stood(generation: Generation) -> tuple[int, WaitReason | None, int, int]:
    standing = generation.standing()
    assert standing is not None
    return standing.position, standing.reason, standing.num_computed_tokens, standing.num_tokens


def test_those_without_a_seat_stand_in_the_order_in_which_they_will_be_served() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, max_num_seqs=1, max_num_batched_tokens=64) as engine:
        first = engine.submit(prompt(1, 150), params(3), priority=-2)
        model.arrive()
        assert stood(first) == (0, None, 0, 150)
        others = [engine.submit(prompt(2, 20), params(3)), engine.submit(prompt(3, 30), params(3))]
        model.let()
        model.arrive()
        assert stood(first) == (0, None, 64, 150)
        assert [stood(other) for other in others] == [
            (1, WaitReason.SEATS, 0, 20),
            (2, WaitReason.SEATS, 0, 30),
        ]
        urgent = engine.submit(prompt(4, 10), params(3), priority=-1)
        model.let()
        model.arrive()
        assert [stood(other)[0] for other in (urgent, *others)] == [1, 2, 3]
        model.let()
        model.arrive()
        assert first.standing() is None, "it has its first token"
        others[0].cancel()
        assert others[0].standing() is None
        assert stood(others[1])[0] == 2
        model.open()
        read_all([first, urgent, others[1]])
        assert [one.standing() for one in (first, urgent, *others)] == [None] * 4


def test_one_that_the_pool_has_no_room_for_waits_for_kv() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, num_blocks_override=8) as engine:
        first = engine.submit(prompt(1, 100), params(3))
        model.arrive()
        second = engine.submit(prompt(2, 60), params(3))
        model.let()
        model.arrive()
        assert stood(second) == (1, WaitReason.KV, 0, 60)
        model.open()
        read_all([first, second])


def test_one_behind_a_long_prompt_with_seat_and_room_waits_for_its_share() -> None:
    model = FakeModel()
    model.gate()
    with running_engine(model, max_num_batched_tokens=64) as engine:
        first = engine.submit(prompt(1, 500), params(3))
        model.arrive()
        second = engine.submit(prompt(2, 60), params(3), priority=1)
        model.let()
        model.arrive()
        assert stood(second) == (1, WaitReason.FAIR_SHARE, 0, 60)
        engine._open_requests._estimates.__init__()  # type: ignore[misc]
        engine._open_requests.computed(100, 1.0)
        standing = second.standing()
        assert standing is not None
        # 64 of 500 are done; the other one's answer need not be waited for.
        assert standing.estimate == pytest.approx((500 - 64 + 60) / 100)
        model.open()
        read_all([first, second])


def test_one_that_is_paused_stands_before_those_that_wait_and_knows_what_it_has_lost() -> None:
    model = FakeModel()
    with running_engine(model, num_blocks_override=16, max_num_seqs=3, start=False) as engine:
        generations = [engine.submit(prompt(i, 60), params(120)) for i in range(4)]
        seen: dict[int, Standing] = {}
        generating = []

        def look(_: object) -> None:
            standings = [generation.standing() for generation in generations]
            statuses = [generation.status for generation in generations]
            for index, (standing, status) in enumerate(zip(standings, statuses, strict=True)):
                if status == "paused":
                    assert standing is not None
                    seen[index] = standing
                    assert standing.reason is WaitReason.KV
                    assert 0 < standing.position <= statuses.count("paused")
                    assert 0 <= standing.num_computed_tokens < standing.num_tokens
                elif status == "waiting":
                    assert standing is not None
                    assert standing.position > statuses.count("paused")
                elif status == "running" and standing is None:
                    generating.append(index)

        model.before_step = look
        engine.start()
        assert read_all(generations) == [answer(prompt(i, 60), 120) for i in range(4)]
        assert seen, "nobody was paused, so this shows nothing"
        assert 0 in generating


def test_standings_may_be_asked_for_while_the_engine_works() -> None:
    """What another thread reads changes under its hands; it must neither fail nor make no sense."""
    with running_engine(num_blocks_override=48, max_num_seqs=4, max_num_batched_tokens=32) as engine:
        done = threading.Event()
        failures: list[BaseException] = []

        def ask(generations: list[Generation]) -> None:
            try:
                while not done.is_set():
                    for generation in generations:
                        standing = generation.standing()
                        assert standing is None or (
                            0 <= standing.position <= len(generations)
                            and 0 <= standing.num_computed_tokens <= standing.num_tokens
                        )
                    engine.estimated_wait()
                    engine._open_requests._queue(17)
            except BaseException as error:
                failures.append(error)

        generations = [engine.submit(prompt(i, 40 + i), params(60)) for i in range(24)]
        asking = threading.Thread(target=ask, args=(generations,))
        asking.start()
        try:
            answers = read_all(generations)
        finally:
            done.set()
            asking.join(20)
        assert not failures
        assert answers == [answer(prompt(i, 40 + i), 60) for i in range(24)]


def test_two_engines_count_their_own() -> None:
    model = FakeModel()
    model.gate()
    with (
        running_engine(model, max_num_seqs=1, max_num_queued_reqs=0) as full,
        running_engine(max_num_seqs=1, max_num_queued_reqs=0) as idle,
    ):
        first = full.submit(prompt(1, 20), params(3))
        refusal(lambda: full.submit(prompt(2, 20), params(3)))
        assert read(idle.submit(prompt(2, 20), params(3)))[0] == answer(prompt(2, 20), 3)
        model.open()
        read(first)


def test_nobody_is_kept_in_mind_after_their_end() -> None:
    def open_requests(engine: Engine) -> OpenRequests:
        return engine._open_requests

    def fail(_: object) -> None:
        raise RuntimeError("boom")

    model = FakeModel()
    with running_engine(model) as engine:
        read(engine.submit(prompt(1, 20), params(3)))
        engine.submit(prompt(2, 20), params(3000)).cancel()
        model.before_step = fail
        with pytest.raises(Exception, match=re.escape("RuntimeError") + "|step"):
            read(engine.submit(prompt(3, 20), params(3)))
        wait_until(lambda: engine.num_open == 0)
        assert not open_requests(engine)._open
