from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counted_lines import count_lines
from octavo.text.stop_strings import StopStrings

few_letters = st.text(alphabet="ab\n", max_size=40)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By str.find on the whole text: the match that ends first; of those that end there, the longest."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


@given(few_letters, stop_lists, st.lists(st.integers(0, 40)))
def test_however_the_text_is_cut_the_answer_ends_where_find_says(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    places = [0, *sorted(cuts), len(text)]
    watcher, shown = StopStrings(stops), ""
    for start, end in pairwise(places):
        shown += watcher.push(text[start:end])
    shown += watcher.finish()
    assert (shown, watcher.matched) == expected(text, stops)


@given(few_letters, stop_lists)
def test_exactly_what_may_begin_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    watcher, shown = StopStrings(stops), ""
    for place, character in enumerate(text):
        shown += watcher.push(character)
        if watcher.matched is not None:
            break
        so_far = text[: place + 1]
        heads = (stop[:n] for stop in stops for n in range(1, len(stop)))
        held = max((len(head) for head in heads if so_far.endswith(head)), default=0)
        assert shown == so_far[: len(so_far) - held]


def test_nothing_is_shown_after_a_match() -> None:
    watcher = StopStrings(["END"])
    assert watcher.push("ok EN") == "ok "
    assert watcher.push("D and more") == ""
    assert watcher.matched == "END"
    assert watcher.push("END again") == ""
    assert watcher.finish() == ""


def test_a_stop_over_many_pieces_matches() -> None:
    stop = "<|user|>\n\nQuestion: "
    watcher = StopStrings([stop])
    assert "".join(watcher.push(character) for character in f"Answer.{stop}") == "Answer."
    assert watcher.matched == stop


def test_without_stops_everything_passes() -> None:
    watcher = StopStrings([])
    assert watcher.push("anything") == "anything"
    assert watcher.finish() == ""
    assert watcher.matched is None


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])


def test_the_cost_does_not_grow_with_what_is_held_back() -> None:
    """Looking through the 1,999 held characters at every push would be 40 million steps."""
    watcher = StopStrings(["a" * 2000 + "b"])
    shown = 0

    def push() -> None:
        nonlocal shown
        for _ in range(20_000):
            shown += len(watcher.push("a"))
        shown += len(watcher.finish())

    assert count_lines(push) < 50 * 20_000
    assert shown == 20_000
