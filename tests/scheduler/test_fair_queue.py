"""Virtual token counters between users, a rank within each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.scheduler.fair_queue import MAX_ABSENT, STARVED_AFTER, FairQueue
from octavo.scheduler.flow import QUANTUM, Flow
from octavo.scheduler.limits import SchedulingPolicy
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.share import Share


class Queue:
    """A fair queue whose sequences are named, and in which the test says who was served."""

    def __init__(self, policy: SchedulingPolicy = SchedulingPolicy.FAIR) -> None:
        self.queue = FairQueue(policy)
        self.num_arrived = 0
        self.now = 0.0

    def add(
        self, name: str, account: str, length: int = 10, *, priority: int = 0, **share: object
    ) -> Sequence:
        sequence = Sequence(name, [1] * length, share=Share(account, **share), priority=priority)  # type: ignore[arg-type]
        self.num_arrived += 1
        sequence.arrival = self.num_arrived
        self.queue.add(sequence, length, self.now)
        return sequence

    def serve(self, *served: tuple[Sequence, int], lacking: tuple[Sequence, ...] = ()) -> None:
        tokens: dict[Flow | None, int] = {}
        for sequence, num_tokens in served:
            tokens[sequence.flow] = tokens.get(sequence.flow, 0) + num_tokens
        self.queue.settle(tokens, {one.flow for one in lacking if one.flow is not None}, self.now)

    @property
    def order(self) -> list[str]:
        names = [one.sequence_id for one in self.queue.in_order(self.now)]
        if not self.queue._starved(self.now):
            assert names == [one.sequence_id for one in self.queue.copied()]
        return names


def counter(sequence: Sequence) -> float:
    assert sequence.flow is not None
    return sequence.flow.counter


def test_a_tenth_request_comes_after_the_first_of_another() -> None:
    queue = Queue()
    for number in range(10):
        queue.add(f"a{number}", "anna")
    queue.add("b", "ben")
    assert queue.order[:2] == ["a0", "b"]


def test_who_was_given_less_comes_first() -> None:
    queue = Queue()
    a, b = queue.add("a", "anna"), queue.add("b", "ben")
    queue.serve((a, 5))
    assert queue.order == ["b", "a"]
    queue.serve((b, 9))
    assert queue.order == ["a", "b"]
    assert (counter(a), counter(b)) == (5, 9)


def test_twice_the_weight_is_charged_half_and_stands_half_as_far_apart() -> None:
    queue = Queue()
    a = [queue.add(f"a{number}", "anna", weight=2.0) for number in range(3)]
    b = [queue.add(f"b{number}", "ben") for number in range(2)]
    assert queue.order == ["a0", "b0", "a1", "a2", "b1"]
    queue.serve((a[0], 100), (b[0], 100))
    assert (counter(a[0]), counter(b[0])) == (50, 100)


def test_users_of_an_account_divide_its_part_and_add_nothing_to_it() -> None:
    queue = Queue()
    mine = [queue.add(f"a{user}", "anna", user=user) for user in "xyz"]
    other = queue.add("b", "ben")
    queue.serve(*((one, 10) for one in mine), (other, 10))
    assert [counter(one) for one in (*mine, other)] == [30, 30, 30, 10]
    # A name that nobody has used yet begins where the account stands.
    assert counter(queue.add("new", "anna", user="new")) == 30


def test_idling_earns_nothing() -> None:
    queue = Queue()
    a, b = queue.add("a", "anna"), queue.add("b", "ben")
    queue.serve((a, 1000), (b, 1000), lacking=(a, b))
    assert counter(queue.add("c", "cleo")) == 1000


def test_one_that_is_served_without_asking_for_more_earns_nothing_either() -> None:
    queue = Queue()
    stream = queue.add("stream", "cleo")
    queue.queue.begin(stream)
    a, b = queue.add("a", "anna"), queue.add("b", "ben")
    queue.serve((stream, 1), (a, 1000), (b, 1000))
    assert counter(stream) == 1
    queue.add("more", "cleo")
    assert counter(stream) == 1000


def test_what_nobody_else_goes_short_of_is_charged_to_nobody() -> None:
    queue = Queue()
    a, b = queue.add("a", "anna"), queue.add("b", "ben")
    for one in (a, b):
        queue.queue.begin(one)
    queue.serve((a, 500), (b, 1))
    assert (counter(a), counter(b)) == (0, 0)
    queue.serve((a, 500), (b, 1), lacking=(a,))
    assert (counter(a), counter(b)) == (0, 0)
    queue.serve((a, 500), (b, 1), lacking=(a, b))
    assert (counter(a), counter(b)) == (500, 1)


def test_a_step_in_which_nobody_goes_short_settles_all_debts() -> None:
    queue = Queue()
    a, b = queue.add("a", "anna"), queue.add("b", "ben")
    queue.serve((a, 500), (b, 1))
    for one in (a, b):
        queue.queue.begin(one)
    queue.serve((a, 1), (b, 1))
    assert counter(a) == counter(b) == 500
    assert counter(queue.add("c", "cleo")) == 500


def test_background_work_neither_counts_as_somebody_else_nor_is_counted_with() -> None:
    queue = Queue()
    chat = queue.add("chat", "anna")
    night = queue.add("night", "ben", background=True)
    queue.serve((chat, 500), (night, 5), lacking=(chat, night))
    assert (counter(chat), counter(night)) == (0, 0)
    assert queue.order == ["chat", "night"]


def test_debts_are_kept_while_somebody_is_away_and_others_go_short() -> None:
    queue = Queue()
    a, b, c = (queue.add(name, name) for name in "abc")
    queue.serve((a, 900), (b, 10), (c, 10))
    queue.queue.remove(a)
    assert counter(queue.add("again", "a")) == 900


def test_short_ones_of_a_user_come_first_and_about_equal_ones_as_they_came() -> None:
    queue = Queue()
    for name, length in (("document", 3000), ("other", 3010), ("short", 20), ("also short", 10)):
        queue.add(name, "anna", length)
    assert queue.order == ["short", "also short", "document", "other"]


def test_a_long_one_is_overtaken_no_longer_than_computing_it_takes() -> None:
    queue = Queue()
    document = queue.add("document", "anna", 1000)
    overtook = 0
    while queue.order[0] != "document":
        overtook += 1
        short = queue.queue.in_order(0.0).__next__()
        queue.serve((short, 100))
        queue.queue.remove(short)
        queue.add(f"short {overtook}", "anna", 100)
        assert overtook < 20
    for number in range(20):
        short = queue.add(f"more {number}", "anna", 100)
        if queue.order[0] == "document":
            break
        queue.serve((short, 100))
        queue.queue.remove(short)
    assert queue.order[0] == "document"
    assert document.flow is not None
    assert document.flow.clock <= 1000 + 2 * QUANTUM


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_priorities(policy: SchedulingPolicy) -> None:
    queue = Queue(policy)
    queue.add("a late", "anna", priority=3)
    queue.add("a", "anna")
    queue.add("b urgent", "ben", priority=-1)
    queue.add("night", "ben", priority=-9, background=True)
    assert (
        queue.order
        == {
            SchedulingPolicy.FAIR: ["a", "b urgent", "a late", "night"],
            SchedulingPolicy.PRIORITY: ["b urgent", "a", "a late", "night"],
            SchedulingPolicy.FCFS: ["a late", "a", "b urgent", "night"],
        }[policy]
    )


def test_seniority_is_where_one_stood_when_it_began() -> None:
    queue = Queue()
    a, b = queue.add("a", "anna"), queue.add("b", "anna")
    for one in (a, b):
        queue.queue.begin(one)
    assert (a.seniority[1], b.seniority[1]) == (0, QUANTUM)
    queue.add("waits", "cleo")
    queue.serve((a, 700), lacking=(a,))
    assert (a.seniority[1], b.seniority[1]) == (0, QUANTUM)
    late = queue.add("late", "ben")
    queue.queue.begin(late)
    assert a.seniority < late.seniority < b.seniority


def test_one_that_outranks_others_of_its_user_is_senior_to_them() -> None:
    queue = Queue()
    low = [queue.add(f"low {number}", "anna", priority=1) for number in range(2)]
    for one in low:
        queue.queue.begin(one)
    urgent = queue.add("urgent", "anna", priority=0)
    queue.queue.begin(urgent)
    assert urgent.seniority < min(one.seniority for one in low)


@given(
    arrivals=st.lists(
        st.tuples(st.integers(-2, 2), st.integers(1, 2000), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    policy=st.sampled_from([SchedulingPolicy.FCFS, SchedulingPolicy.PRIORITY]),
)
@settings(max_examples=200, deadline=None)
def test_without_fairness_seniority_goes_by_rank_whenever_one_begins(
    arrivals: list[tuple[int, int, int, bool]], policy: SchedulingPolicy
) -> None:
    queue = Queue(policy)
    begun: list[Sequence] = []
    for number, (priority, length, account, background) in enumerate(arrivals):
        one = queue.add(f"{number}", f"{account}", length, priority=priority, background=background)
        if number % 2:
            queue.queue.begin(one)
            begun.append(one)
        elif begun and number % 3 == 0:
            gone = begun.pop(0)
            queue.serve((gone, 300))
            queue.queue.remove(gone)
    by_rank = sorted(begun, key=lambda one: (one.background, one.rank))
    assert sorted(begun, key=lambda one: one.seniority) == by_rank


def test_newcomers_may_take_from_those_who_began_a_quantum_ahead_of_them() -> None:
    queue = Queue()
    many = [queue.add(f"a{number}", "anna") for number in range(4)]
    night = queue.add("night", "dora", background=True)
    for one in (*many, night):
        queue.queue.begin(one)
    ben = queue.add("b", "ben")
    assert queue.queue.due_victims(ben, [*many, night]) == [*many[1:], night]
    assert queue.queue.due_victims(queue.add("a4", "anna"), [*many, night]) == [night]
    urgent = queue.add("urgent", "anna", priority=-1)
    assert queue.queue.due_victims(urgent, [*many, night]) == [*many, night]


def test_background_work_without_service_for_long_is_first_once() -> None:
    queue = Queue()
    chat = queue.add("chat", "anna")
    night = queue.add("night", "ben", background=True)
    queue.now = STARVED_AFTER - 1
    assert queue.order == ["chat", "night"]
    queue.now = STARVED_AFTER
    assert queue.order == ["night", "chat"]
    night.held = True
    assert queue.order == ["chat", "night"]
    queue.now += STARVED_AFTER
    other = queue.add("other", "cleo", background=True)
    queue.now += STARVED_AFTER
    assert queue.order[0] == "other", "one that nobody reads does not keep the next one waiting"
    queue.queue.remove(other)
    night.held = False
    queue.serve((night, 8), (chat, 1))
    assert queue.order == ["chat", "night"]


def test_accounts_that_are_away_are_forgotten_but_for_those_who_owe_most() -> None:
    queue = Queue()
    waits, other = queue.add("waits", "waits"), queue.add("other", "other")
    for number in range(3 * MAX_ABSENT):
        one = queue.add(f"{number}", f"user {number}")
        queue.serve((one, number), lacking=(waits, other))
        queue.queue.remove(one)
    accounts = queue.queue._accounts
    assert len(accounts) <= MAX_ABSENT + 2
    assert (False, f"user {3 * MAX_ABSENT - 1}") in accounts
    assert queue.queue._num_absent == len(accounts) - 2


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from("abc"), st.sampled_from("xy"), st.booleans()),
            st.tuples(st.just("begin"), st.integers(0, 30)),
            st.tuples(st.just("serve"), st.integers(0, 30), st.integers(1, 300), st.booleans()),
            st.tuples(st.just("remove"), st.integers(0, 30)),
        ),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_counters_never_fall_and_what_is_counted_beside_them_is_true(
    events: list[tuple[object, ...]],
) -> None:
    queue = Queue()
    here: list[Sequence] = []
    levels: dict[Flow, float] = {}
    for event in events:
        if event[0] == "add":
            _, account, user, background = event
            here.append(queue.add(f"{len(here)}", str(account), user=user, background=background))
        elif here:
            assert isinstance(event[1], int)
            one = here[event[1] % len(here)]
            if event[0] == "begin" and not one.has_begun:
                queue.queue.begin(one)
            elif event[0] == "serve":
                assert isinstance(event[2], int)
                queue.serve((one, event[2]), lacking=(one,) if event[3] else ())
            elif event[0] == "remove":
                queue.queue.remove(one)
                queue.queue.remove(one)
                here.remove(one)
        flows = {one.flow for one in here if one.flow is not None}
        assert {flow for _, flow in queue.queue._flows} == flows
        assert [place for place, _ in queue.queue._flows] == sorted(flow.place for flow in flows)
        for flow in flows:
            assert flow.counter >= levels.get(flow, 0.0)
            levels[flow] = flow.counter
            assert flow.num_waiting == sum(not one.has_begun for _, one in flow.ranked)
        for background in (False, True):
            waiting = sum(flow.num_waiting > 0 for flow in flows if flow.background is background)
            assert queue.queue._num_waiting_flows[background] == waiting
        assert sorted(queue.order) == sorted(one.sequence_id for one in here)
