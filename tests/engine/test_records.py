"""What a request can be told about itself, and for how long."""

from __future__ import annotations

import asyncio
import gc
import weakref
from array import array
from collections.abc import Sequence

import pytest

from engine.fake_model import FakeModel, answer, running_engine
from engine.reading import params, read
from octavo.engine.conversations import Owner
from octavo.engine.engine import Engine
from octavo.engine.generation import Generation
from octavo.engine.records import (
    MAX_FINISHED,
    MAX_FINISHED_OF_ACCOUNT,
    SEARCHED_AT_ONCE,
    ChoiceNumbers,
    RequestRecords,
)

MINE, OTHERS = Owner(b"me", b""), Owner(b"other", b"")


def prompt(number: int, length: int) -> list[int]:
    return [(number * 271 + 31 * i) % 983 for i in range(length)]


def opened(
    records: RequestRecords,
    engine: Engine,
    request_id: str,
    *prompts: list[int],
    owner: Owner = MINE,
    salt: str = "",
    n: int = 1,
) -> list[Generation]:
    generations = [
        engine.submit(one, params(5), cache_salt=salt, choice_index=index)
        for one in prompts
        for index in range(n)
    ]
    records.open(request_id, owner, prompts, generations, account="", cache_salt=salt, created=12)
    return generations


def closed(records: RequestRecords, request_id: str, generations: Sequence[Generation]) -> None:
    seen = [len(read(generation)[0]) for generation in generations]
    answers = [generation.computed_output(count) for generation, count in zip(generations, seen, strict=True)]
    records.close(request_id, answers)


def choices(records: RequestRecords, owner: Owner, request_id: str) -> list[ChoiceNumbers]:
    record = records.find(owner, request_id)
    assert record is not None
    return asyncio.run(record.choices())


def test_a_request_is_known_to_its_owner_while_it_lives_and_afterwards() -> None:
    records, model = RequestRecords(), FakeModel()
    model.gate()
    with running_engine(model) as engine:
        generations = opened(records, engine, "a", prompt(1, 20))
        model.arrive()
        (live,) = choices(records, MINE, "a")
        assert (live.status, live.stats.num_output_tokens, live.stats.finish_reason) == ("running", 0, None)
        assert records.find(OTHERS, "a") is None
        assert records.find(Owner(b"me", b"ann"), "a") is None
        model.open()
        closed(records, "a", generations)
    (ended,) = choices(records, MINE, "a")
    assert (ended.status, ended.stats.num_output_tokens, ended.stats.finish_reason) == (
        "finished",
        5,
        "length",
    )
    assert records.find(OTHERS, "a") is None
    assert records.find(MINE, "b") is None


def test_a_request_that_nobody_reads_any_more_runs_until_the_engine_has_ended_it() -> None:
    records, model = RequestRecords(), FakeModel()
    model.gate()
    with running_engine(model) as engine:
        generations = opened(records, engine, "a", prompt(1, 20))
        model.arrive()
        generations[0].cancel()
        records.close("a", [[]])
        del generations
        assert choices(records, MINE, "a")[0].status == "running"
        model.open()
    (ended,) = choices(records, MINE, "a")
    assert (ended.status, ended.stats.finish_reason) == ("finished", "abort")


def test_a_record_keeps_no_generation_and_no_tokens() -> None:
    records = RequestRecords()
    with running_engine() as engine:
        generations = opened(records, engine, "a", prompt(1, 100))
        closed(records, "a", generations)
        generation = weakref.ref(generations[0])
        del generations
        gc.collect()
        assert generation() is None
    record = records.find(MINE, "a")
    assert record is not None
    held: list[object] = [record]
    seen: set[int] = set()
    while held:
        one = held.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        assert not isinstance(one, array)
        assert not (isinstance(one, list) and len(one) > 50)
        held += gc.get_referents(one)
    assert len(seen) > 20


def test_the_latest_are_kept_of_one_account_and_of_all() -> None:
    records = RequestRecords()
    with running_engine() as engine:

        def ask(request_id: str, owner: Owner) -> None:
            closed(records, request_id, opened(records, engine, request_id, [1, 2], owner=owner))

        ask("other", OTHERS)
        for number in range(MAX_FINISHED_OF_ACCOUNT + 3):
            ask(f"{number}", Owner(b"me", b"%d" % (number % 2)))
        # Users of an account share its places.
        names = [record.request_id for user in (b"0", b"1") for record in records.of(Owner(b"me", user))]
        assert sorted(map(int, names)) == list(range(3, MAX_FINISHED_OF_ACCOUNT + 3))
        assert records.find(Owner(b"me", b"0"), "2") is None
        assert records.find(OTHERS, "other") is not None
        live = opened(records, engine, "live", [1, 2], owner=OTHERS)
        for number in range(MAX_FINISHED):
            ask(f"many {number}", Owner(b"%d" % number, b""))
        assert records.find(OTHERS, "other") is None
        assert len(records._finished) == MAX_FINISHED == sum(records._num_finished_of.values())
        # Who lives is always known.
        assert [record.request_id for record in records.of(OTHERS)] == ["live"]
        closed(records, "live", live)
        assert [record.request_id for record in records.of(OTHERS)] == ["live"]
        records.close("live", [[1]])  # again
        assert len(records._finished) == MAX_FINISHED


def test_the_latest_come_first() -> None:
    records = RequestRecords()
    with running_engine() as engine:
        generations = {name: opened(records, engine, name, [1, 2]) for name in "abcd"}
        for name in "ca":
            closed(records, name, generations[name])
        assert [record.request_id for record in records.of(MINE)] == ["d", "c", "b", "a"]
        for name in "bd":
            closed(records, name, generations[name])


def test_each_prompt_of_a_request_has_its_own_break_and_its_choices_share_it() -> None:
    records = RequestRecords()
    first, second = prompt(1, 100), prompt(2, 100)
    with running_engine() as engine:
        closed(records, "a", opened(records, engine, "a", first, second, n=2))
        changed = [*second[:30], 990, *second[31:]]
        closed(records, "b", opened(records, engine, "b", prompt(3, 100), changed, n=2))
    assert [one.prefix_break for one in choices(records, MINE, "a")] == [None] * 4
    found = [one.prefix_break for one in choices(records, MINE, "b")]
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert found[2] is found[3]
    assert (found[2].position, found[2].tokens_lost, found[2].request_id) == (30, 69, "a")


def test_a_follow_up_has_not_broken_whatever_the_last_token_of_the_answer_becomes() -> None:
    asked = prompt(1, 100)
    said = answer(asked, 5)
    with running_engine() as engine:
        for follow_up, position in (
            ([*asked, *said, *prompt(2, 20)], None),
            ([*asked, *said[:-1], 990, *prompt(2, 20)], None),
            ([*asked, *said[:-2], 990, *prompt(2, 20)], 103),
        ):
            records = RequestRecords()
            closed(records, "a", opened(records, engine, "a", asked))
            closed(records, "b", opened(records, engine, "b", follow_up))
            found = choices(records, MINE, "b")[0].prefix_break
            assert (found.position if found is not None else None) == position


def test_other_owners_and_other_salts_are_never_compared() -> None:
    records = RequestRecords()
    asked = prompt(1, 100)
    changed = [*asked[:30], 990, *asked[31:]]
    with running_engine() as engine:
        closed(records, "a", opened(records, engine, "a", asked))
        for name, owner, salt, num_cached in (
            ("other", OTHERS, "", 30),
            ("user", Owner(b"me", b"ann"), "", 99),
            ("salt", MINE, "s", 0),
        ):
            closed(records, name, opened(records, engine, name, changed, owner=owner, salt=salt))
            (numbers,) = choices(records, owner, name)
            assert numbers.prefix_break is None
            # Blocks are shared under one salt.
            assert numbers.stats.num_cached_tokens == num_cached


@pytest.mark.parametrize("length", [SEARCHED_AT_ONCE // 4, SEARCHED_AT_ONCE])
def test_long_prompts_are_searched_beside_the_event_loop_with_the_same_result(length: int) -> None:
    records = RequestRecords()
    asked = [i % 997 for i in range(length)]
    changed = [*asked[:30], 998, *asked[31:]]

    async def ask() -> list[ChoiceNumbers]:
        closed(records, "a", opened(records, engine, "a", asked))
        generations = opened(records, engine, "b", changed)
        record = records.find(MINE, "b")
        assert record is not None
        assert (record._search is not None) == (length == SEARCHED_AT_ONCE)
        numbers = await record.choices()
        generations[0].cancel()
        return numbers

    with running_engine(FakeModel(context_length=20_000), num_blocks_override=1200) as engine:
        (numbers,) = asyncio.run(ask())
    assert numbers.prefix_break is not None
    assert (numbers.prefix_break.position, numbers.prefix_break.tokens_lost) == (30, length - 31)


def test_without_prefix_caching_no_token_is_remembered() -> None:
    records = RequestRecords(remembers_conversations=False)
    asked = prompt(1, 100)
    with running_engine(enable_prefix_caching=False) as engine:
        closed(records, "a", opened(records, engine, "a", asked))
        opened(records, engine, "b", [*asked[:30], 990, *asked[31:]])
        assert choices(records, MINE, "b")[0].prefix_break is None
    assert records.conversations.num_all == 0
