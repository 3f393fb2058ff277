"""Where a prompt left an earlier conversation, against definitions that go token by token."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine import conversations as module
from octavo.engine.conversations import (
    NEAR_TOKENS,
    RUN,
    Conversation,
    Conversations,
    Owner,
    Tokens,
    common_beginning,
    find_break,
    tokens_in_runs,
)

MINE, OTHERS = Owner(b"me", b""), Owner(b"other", b"")
FEW = st.integers(0, 2)


def tokens(ids: Iterable[int]) -> Tokens:
    return array("i", ids)


def text(number: int, length: int) -> list[int]:
    """Tokens that no other number shares."""
    return random.Random(number).sample(range(number * 100_000, (number + 1) * 100_000), length)


def conversation(
    name: str, prompt: Iterable[int], *answers: Iterable[int], owner: Owner = MINE, salt: bytes = b""
) -> Conversation:
    made = Conversation(name, owner, salt, tokens(prompt))
    made.answers += [tokens(answer) for answer in answers]
    return made


def naive_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def naive_in_runs(mine: list[int], known: list[int]) -> int:
    lost = 0
    for at in range(len(mine)):
        begins = range(max(at - RUN + 1, 0), min(at, len(mine) - RUN) + 1)
        runs = [mine[begin : begin + RUN] for begin in begins]
        lost += any(known[i : i + RUN] in runs for i in range(len(known) - RUN + 1))
    return min(lost, len(known))


@given(
    common=st.lists(st.integers(0, 2**31 - 1), max_size=400),
    one=st.lists(FEW, max_size=20),
    other=st.lists(FEW, max_size=20),
    ahead=st.lists(FEW, max_size=5),
)
def test_the_common_beginning_is_that_of_a_search_token_by_token(
    common: list[int], one: list[int], other: list[int], ahead: list[int]
) -> None:
    mine, theirs = [*common, *one], [*common, *other]
    expected = naive_beginning(mine, theirs)
    assert common_beginning(tokens(mine), tokens(theirs)) == expected
    assert common_beginning(tokens(mine), tokens([*ahead, *theirs]), offset=len(ahead)) == expected


@pytest.mark.parametrize("position", [0, 1, 2, 63, 64, 65, 127, 191, 192, 193, 4095, 65_535, 99_999])
def test_the_first_token_that_differs_is_found_exactly_in_long_texts(position: int) -> None:
    one = tokens(range(100_000))
    # In one byte of four, the lowest or the highest.
    for change in (1, 1 << 24):
        other = tokens(one)
        other[position] ^= change
        assert common_beginning(one, other) == common_beginning(other, one) == position
    assert common_beginning(one, one) == len(one)


@given(
    shared=st.lists(FEW, min_size=RUN - 2, max_size=20),
    mine=st.lists(FEW, max_size=20),
    known=st.lists(FEW, max_size=20),
    more=st.lists(FEW, max_size=20),
    start=st.integers(0, 12),
)
def test_tokens_in_runs_are_those_of_a_search_token_by_token(
    shared: list[int], mine: list[int], known: list[int], more: list[int], start: int
) -> None:
    one, other = [*mine, *shared, *more, *shared], [*known, *shared]
    expected = naive_in_runs(one[start:], other[start:])
    assert tokens_in_runs(tokens(one), tokens(other), start=start) == expected


def test_t07_one_changed_token_loses_all_that_stand_behind_it() -> None:
    earlier = text(1, 600)
    for changed, lost in ((0, 599), (20, 579), (580, 19)):
        now = list(earlier)
        now[changed] = 7
        found = find_break(tokens(now), [conversation("a", earlier, text(2, 50))])
        assert found is not None
        assert (found.position, found.tokens_lost, found.request_id) == (changed, lost, "a")
        first = max(changed - 8, 0)
        assert list(found.before) == [*earlier, *text(2, 50)][first : changed + 24]
        assert list(found.now) == now[first : changed + 24]


def test_lost_is_what_stood_there_also_where_a_line_came_in_or_went() -> None:
    earlier = text(1, 600)
    for now, lost in (
        ([*earlier[:20], *text(2, 30), *earlier[20:]], 580),  # a line came in
        ([*earlier[:20], *earlier[50:]], 550),  # one went
        ([*earlier[:20], *text(2, 30), *earlier[50:]], 550),  # one was replaced
        ([*earlier[:20], *earlier[300:], *earlier[20:300]], 580),  # two parts changed places
        ([*earlier[:400], *text(2, 100)], 0),  # another end
    ):
        found = find_break(tokens(now), [conversation("a", earlier)])
        assert found is not None
        assert found.tokens_lost == lost
        assert found.position == naive_beginning(now, earlier)


def test_a_prompt_that_goes_on_where_a_conversation_ends_has_not_broken() -> None:
    prompt, answer, question = text(1, 200), text(2, 100), text(3, 30)
    ended = conversation("a", prompt, answer)
    for now in (
        prompt,  # asked again
        prompt[:150],  # a part of it
        [*prompt, *answer],
        [*prompt, *answer, *question],
        [*prompt, *answer[:50]],
    ):
        assert find_break(tokens(now), [ended]) is None
    # Its answer is not known yet.
    assert find_break(tokens([*prompt, *answer]), [conversation("b", prompt)]) is None
    # Of several answers it goes on from any.
    branched = conversation("c", prompt, text(4, 100), answer)
    assert find_break(tokens([*prompt, *answer, *question]), [branched]) is None
    # An edited answer is a break.
    edited = [*prompt, *answer[:50], 7, *answer[51:], *question]
    found = find_break(tokens(edited), [branched])
    assert found is not None
    assert (found.position, found.tokens_lost) == (250, 49)


def test_it_goes_on_from_one_although_it_resembles_another() -> None:
    prompt, answer = text(1, 200), text(2, 100)
    same_prompt = conversation("later", prompt, text(3, 100))
    now = tokens([*prompt, *answer, *text(4, 20)])
    assert find_break(now, [conversation("mine", prompt, answer), same_prompt]) is None
    assert find_break(now, [same_prompt, conversation("mine", prompt, answer)]) is None


def test_a_templates_header_is_no_conversation() -> None:
    header, turn = text(1, NEAR_TOKENS - 1), text(2, RUN - 1)
    earlier = conversation("a", [*header, *text(3, 20), *turn, *text(4, 20)])
    assert find_break(tokens([*header, *text(5, 10), *turn]), [earlier]) is None
    # A header of any length is no half of a long prompt.
    long = conversation("b", [*text(6, 400), *text(7, 2000)])
    assert find_break(tokens([*text(6, 400), *text(8, 401)]), [long]) is None
    assert find_break(tokens([*text(6, 400), *text(8, 400)]), [long]) is not None


def test_the_longest_common_beginning_counts_of_those_that_are_near_and_then_the_latest() -> None:
    body = text(1, 500)
    changed_at = {"early": 10, "late": 300, "late too": 300}
    known = [conversation(name, [*body[:at], 7, *body[at + 1 :]]) for name, at in changed_at.items()]
    found = find_break(tokens(body), known)
    assert found is not None
    assert (found.request_id, found.position) == ("late too", 300)
    # A stranger that begins alike does not stand in the way of one that broke early.
    stranger = conversation("stranger", [*body[:30], *text(2, 500)])
    found = find_break(tokens(body), [known[0], stranger])
    assert found is not None
    assert (found.request_id, found.position, found.tokens_lost) == ("early", 10, 489)


def test_only_ones_own_conversations_under_the_same_salt_are_compared() -> None:
    all_of_them = Conversations()
    prompt = text(1, 100)
    all_of_them.remember(conversation("mine", prompt))
    all_of_them.remember(conversation("others", prompt, owner=OTHERS))
    all_of_them.remember(conversation("a user's", prompt, owner=Owner(b"me", b"ann")))
    all_of_them.remember(conversation("salted", prompt, salt=b"s"))
    assert [one.request_id for one in all_of_them.earlier(MINE, b"")] == ["mine"]
    assert [one.request_id for one in all_of_them.earlier(MINE, b"s")] == ["salted"]
    assert [one.request_id for one in all_of_them.earlier(Owner(b"me", b"ann"), b"")] == ["a user's"]
    assert all_of_them.earlier(Owner(b"nobody", b""), b"") == []


def test_a_turn_replaces_the_turn_before_it() -> None:
    known = Conversations()
    first = conversation("first", text(1, 50))
    known.remember(first)
    second = [*text(1, 50), *text(2, 50), *text(3, 10)]
    known.remember(conversation("while the first is answered", second))
    assert len(known.earlier(MINE, b"")) == 2
    known.answered(first, [tokens(text(2, 50))])
    known.remember(conversation("second", second))
    assert [one.request_id for one in known.earlier(MINE, b"")] == ["while the first is answered", "second"]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ACCOUNT_BYTES", 4 * 1000)
    monkeypatch.setattr(module, "MAX_BYTES", 4 * 3000)
    monkeypatch.setattr(module, "MAX_ALL_CONVERSATIONS", 40)
    known = Conversations()

    def names(owner: Owner) -> list[str]:
        return [one.request_id for one in known.earlier(owner, b"")]

    for number in range(20):
        known.remember(conversation(f"{number}", text(number, 10)))
    assert names(MINE) == [f"{number}" for number in range(4, 20)]
    # In bytes: the oldest go, and one that is too long is not remembered at all.
    known.remember(conversation("long", text(1, 950)))
    assert names(MINE) == ["15", "16", "17", "18", "19", "long"]
    known.remember(conversation("too long", text(2, 1001)))
    assert names(MINE) == []
    assert (known.num_all, known.nbytes) == (0, 0)
    # An answer counts like a prompt; one that comes when its conversation has been forgotten is forgotten.
    grows = conversation("grows", text(1, 500))
    known.remember(grows)
    known.remember(conversation("other", text(2, 400)))
    known.answered(grows, [tokens(text(3, 101))])
    assert names(MINE) == ["other"]
    known.answered(grows, [tokens(text(3, 101))])
    assert (known.num_all, known.nbytes) == (1, 1600)
    # Everybody together.
    for number in range(5):
        known.remember(conversation("full", text(1, 900), owner=Owner(b"%d" % number, b"")))
        assert known.nbytes <= 4 * 3000
    known_of = [bool(names(Owner(b"%d" % number, b""))) for number in range(5)]
    assert known_of == [False, False, True, True, True]
    for number in range(100):
        known.remember(conversation("one", [1], owner=Owner(b"%d" % (100 + number), b"")))
    assert known.num_all == 40
    assert known.nbytes == 4 * 40
    assert len(known._of) == 40


def test_users_of_an_account_share_its_bounds() -> None:
    known = Conversations()
    for number in range(40):
        known.remember(conversation(f"{number}", [number], owner=Owner(b"me", b"%d" % number)))
    assert known.num_all == module.MAX_CONVERSATIONS


def test_an_answer_behind_the_break_is_lost_too() -> None:
    prompt, answers = text(1, 100), [text(2, 50), text(3, 60)]
    earlier = conversation("a", prompt, *answers)
    for answer in answers:
        found = find_break(tokens([*prompt[:40], 7, *prompt[41:], *answer, *text(4, 10)]), [earlier])
        assert found is not None
        assert (found.position, found.tokens_lost) == (40, 59 + len(answer))
