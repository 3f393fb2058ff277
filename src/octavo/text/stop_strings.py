"""Ends an answer at the first stop string, without showing text that may turn out to be part of one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Watches a stream of text for any of several stop strings.

    The match that is complete first ends the answer (the model is not asked for more text to see whether a
    longer one would also fit); where two end at the same character, the longer. The result does not depend on
    how the text was cut.

        stops ["\\n\\nUser:"]
        push("Yes.\\n")  -> "Yes."        held: "\\n"     (may begin a stop)
        push("\\nThen")  -> "\\n\\nThen"    held: ""

    One state of an Aho-Corasick automaton (CACM 18(6), 1975) says how much is held: its depth. What is held
    is always the head of some stop string, so it is not stored. Cost: O(characters pushed), whatever the
    stops are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self.matched: str | None = None
        self._starts = frozenset(stop[0] for stop in stops)
        self._automaton = _Automaton(stops)
        self._state = 0

    def push(self, text: str) -> str:
        """Add `text`; returns what is now safe to show. After a match: nothing, ever."""
        if self.matched is not None:
            return ""
        automaton, state = self._automaton, self._state
        if state == 0 and self._starts.isdisjoint(text):
            return text
        before = automaton.path(state)
        for place, character in enumerate(text):
            state = automaton.step(state, character)
            if (stop := automaton.ended[state]) is not None:
                self.matched, self._state = stop, 0
                return _head(before, text, len(before) + place + 1 - len(stop))
        self._state = state
        return _head(before, text, len(before) + len(text) - automaton.depth[state])

    def finish(self) -> str:
        """What was held: no more text will come, so it was not a stop."""
        held, self._state = self._automaton.path(self._state), 0
        return held


def _head(before: str, text: str, length: int) -> str:
    """The first `length` characters of `before + text`."""
    return before[:length] + text[: max(0, length - len(before))]


class _Automaton:
    """Nodes are heads of stop strings, node 0 the empty one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]  # the longest proper suffix that is also a node
        self._of: list[str] = [""]  # one stop that begins with the node
        self.depth = [0]
        self.ended: list[str | None] = [None]  # the longest stop that ends here
        for stop in stops:
            self._insert(stop)
        self._link()

    def path(self, node: int) -> str:
        return self._of[node][: self.depth[node]]

    def step(self, node: int, character: str) -> int:
        while character not in self._next[node]:
            if node == 0:
                return 0
            node = self._fallback[node]
        return self._next[node][character]

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            child = self._next[node].get(character)
            if child is None:
                child = len(self._next)
                self._next[node][character] = child
                self._next.append({})
                self._fallback.append(0)
                self._of.append(stop)
                self.depth.append(self.depth[node] + 1)
                self.ended.append(None)
            node = child
        self.ended[node] = stop

    def _link(self) -> None:
        """Breadth first, so that every shorter node is linked before a longer one falls back to it."""
        waiting = deque(self._next[0].values())
        while waiting:
            node = waiting.popleft()
            for character, child in self._next[node].items():
                fallback = self.step(self._fallback[node], character)
                self._fallback[child] = fallback
                if self.ended[child] is None:
                    self.ended[child] = self.ended[fallback]
                waiting.append(child)
