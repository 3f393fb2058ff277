"""Where a prompt left a conversation that the same owner had before: position, what it cost, which tokens.

    earlier   | common beginning | was  | rest ................ |   prompt and answer of an earlier request
    now       | common beginning | is now | rest ........ | new |   this prompt
                                 ^ position     ^ tokens_lost: would have been there, had nothing changed

Only tokens of one owner under one cache salt are ever compared. What is remembered is bounded, and none of it
is written anywhere. Nothing here runs on the engine thread.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = "array[int]"
"""Token ids as an array of type code "i": four bytes each."""

_Hashes: TypeAlias = npt.NDArray[np.uint64]

MAX_CONVERSATIONS = 16
"""Conversations remembered of one account, whatever its users are called; the latest ones."""

MAX_ACCOUNT_BYTES = 4 * 2**20
"""Their token ids in bytes: about a million tokens. A longer conversation is not remembered."""

MAX_BYTES = 32 * 2**20
"""Token ids of everybody in bytes, and"""

MAX_ALL_CONVERSATIONS = 1024
"""conversations of everybody."""

NEAR_TOKENS = 64
"""A prompt nearly matched a conversation if it has at least so many tokens of it, and half of its own: those
of the common beginning and those that are lost. A chat template's header (about 30 tokens with a default
system prompt) is less."""

RUN = 8  # a power of two
"""Tokens behind the break count as lost where so many in a row stand in the earlier conversation too. Fewer
say nothing: every turn of a chat begins with the same five or so."""

SHOWN_BEFORE, SHOWN_BEHIND = 8, 24
"""Tokens of either side that are kept to show the difference: of what is common, and from the break on."""


class Owner(NamedTuple):
    """Who may see what is recorded: an account (an API key or an address) and a user of it. Digests."""

    account: bytes
    user: bytes


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """Where a prompt left an earlier conversation.

    position: of the first token that differs. tokens_lost: tokens of the prompt behind it that the earlier
    conversation has behind it as well, in runs of RUN or more. request_id: the earlier request.
    before, now: a few tokens of either side around the position, for the owner's eyes only.
    """

    position: int
    tokens_lost: int
    request_id: str
    before: Tokens
    now: Tokens


class Conversation:
    """A prompt and the answers to it, as far as they are known; `answers` grows when a request ends."""

    __slots__ = ("answers", "owner", "prompt", "request_id", "salt")

    def __init__(self, request_id: str, owner: Owner, salt: bytes, prompt: Tokens) -> None:
        self.request_id = request_id
        self.owner = owner
        self.salt = salt
        self.prompt = prompt
        self.answers: list[Tokens] = []

    @property
    def num_tokens(self) -> int:
        """Of the prompt and all answers."""
        return len(self.prompt) + sum(map(len, self.answers))

    @property
    def nbytes(self) -> int:
        return self.num_tokens * self.prompt.itemsize

    def beginning_of(self, tokens: Tokens) -> Beginning:
        """The longest beginning that `tokens` have in common with the prompt and one of its answers."""
        common = common_beginning(self.prompt, tokens)
        answers = tuple(self.answers)
        if common < len(self.prompt) or not answers:
            return Beginning(common, common == len(self.prompt), self, answers)
        best = Beginning(-1, False, self, answers)
        for answer in answers:
            more = common_beginning(answer, tokens, offset=common)
            best = max(best, Beginning(common + more, more == len(answer), self, (answer,)), key=_longest)
        return best


class Beginning(NamedTuple):
    """What a prompt has in common with a conversation.

    whole: all there is of the conversation. answers: the one it goes on in; all, if it has left the prompt.
    """

    num_tokens: int
    whole: bool
    conversation: Conversation
    answers: tuple[Tokens, ...]

    @property
    def tokens(self) -> Tokens:
        """All that may have been lost: the prompt and these answers."""
        return sum(self.answers, self.conversation.prompt)


def _longest(beginning: Beginning) -> tuple[int, bool]:
    return beginning.num_tokens, beginning.whole


def common_beginning(one: Tokens, other: Tokens, *, offset: int = 0) -> int:
    """How many first tokens of `one` stand in `other` from `offset` on.

    Bytes are compared, in windows that double, and the window that differs is halved: O(common tokens).
    """
    mine, theirs = memoryview(one), memoryview(other)[offset:]
    end = min(len(mine), len(theirs))
    low, width = 0, 64
    while low < end:
        high = min(low + width, end)
        if mine[low:high].tobytes() != theirs[low:high].tobytes():
            break
        low, width = high, 2 * width
    else:
        return end
    while high - low > 1:
        middle = (low + high) // 2
        if mine[low:middle].tobytes() == theirs[low:middle].tobytes():
            low = middle
        else:
            high = middle
    return low


def tokens_in_runs(tokens: Tokens, known: Tokens, *, start: int = 0) -> int:
    """Tokens from `start` on that lie in a run of RUN or more which `known` has behind `start` too.

    Never more than `known` has there. Cost: O(n) of the tokens behind `start` where nothing is alike, else
    O(n log n); in numpy.
    """
    return _count_in_runs(_run_hashes(tokens)[start:], _run_hashes(known)[start:])


def _count_in_runs(mine: _Hashes, theirs: _Hashes) -> int:
    if not len(mine) or not len(theirs):
        return 0
    # A table of the hashes' first bits, one in sixteen set, leaves little to be sorted.
    bits = len(theirs).bit_length() + 4
    table = np.zeros(1 << bits, dtype=np.bool_)
    table[theirs >> np.uint64(64 - bits)] = True
    found = table[mine >> np.uint64(64 - bits)]
    alike = np.flatnonzero(found)
    if not len(alike):
        return 0
    found[alike] = np.isin(mine[alike], theirs)
    # A run that begins at i covers i .. i + RUN - 1.
    edges = np.zeros(len(mine) + RUN, dtype=np.int64)
    edges[: len(mine)] += found
    edges[RUN:] -= found
    return min(int(np.count_nonzero(np.cumsum(edges))), len(theirs) + RUN - 1)


def _run_hashes(tokens: Tokens) -> _Hashes:
    """A hash of each RUN tokens in a row, by where they begin: a polynomial modulo 2^64."""
    if len(tokens) < RUN:
        return np.zeros(0, dtype=np.uint64)
    hashes = np.frombuffer(tokens, dtype=np.int32).astype(np.uint64)
    factor, width = 0x9E3779B97F4A7C15, 1
    while width < RUN:  # of runs of 1, 2, 4, ... tokens
        hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
        factor, width = factor * factor % 2**64, 2 * width
    # The first bits depend on all tokens after this.
    return hashes * np.uint64(0xBF58476D1CE4E5B9)


def find_break(tokens: Tokens, earlier: Sequence[Conversation]) -> PrefixBreak | None:
    """Where a prompt left one of these conversations (the latest last) that it nearly matched.

    Of those that it nearly matched, the one with the longest common beginning, of equal ones the latest.
    None, if there is none, or if it goes on where one ends: then nothing has broken.
    Cost: O(tokens that are common) to order them, and `tokens_in_runs` for those that may be near.
    """
    hashes = _run_hashes(tokens)
    needed = max(NEAR_TOKENS, -(-len(tokens) // 2))
    beginnings = [conversation.beginning_of(tokens) for conversation in reversed(earlier)]
    for beginning in sorted(beginnings, key=_longest, reverse=True):
        position = beginning.num_tokens
        if position == len(tokens) or (beginning.whole and position):
            return None
        known = beginning.tokens
        if min(len(tokens), len(known)) < needed:
            continue
        lost = _count_in_runs(hashes[position:], _run_hashes(known)[position:])
        if position + lost >= needed:
            shown = slice(max(position - SHOWN_BEFORE, 0), position + SHOWN_BEHIND)
            request_id = beginning.conversation.request_id
            return PrefixBreak(position, lost, request_id, known[shown], tokens[shown])
    return None


class Conversations:
    """The last few conversations of each account, the latest last. One thread: the event loop's.

    num_all, nbytes: what is remembered of everybody.
    """

    def __init__(self) -> None:
        self.num_all = 0
        self.nbytes = 0
        self._of: OrderedDict[bytes, list[Conversation]] = OrderedDict()  # the latest account last

    def earlier(self, owner: Owner, salt: bytes) -> list[Conversation]:
        """What a prompt of this owner under this salt may be compared with, the latest last."""
        return [one for one in self._of.get(owner.account, ()) if (one.owner, one.salt) == (owner, salt)]

    def remember(self, conversation: Conversation) -> None:
        """A new one. Those that it goes on from, word for word, are contained in it and are forgotten."""
        for one in self.earlier(conversation.owner, conversation.salt):
            if len(one.answers) == 1 and one.beginning_of(conversation.prompt).whole:
                self._forget(one)
        account = conversation.owner.account
        self._of.setdefault(account, []).append(conversation)
        self._of.move_to_end(account)
        self.num_all += 1
        self.nbytes += conversation.nbytes
        self._shrink(account)

    def answered(self, conversation: Conversation, answers: Sequence[Tokens]) -> None:
        """A request has ended. Nothing happens if its conversation is not remembered any more."""
        account = conversation.owner.account
        if conversation in self._of.get(account, ()):
            self.nbytes -= conversation.nbytes
            conversation.answers += answers
            self.nbytes += conversation.nbytes
            self._shrink(account)

    def _shrink(self, account: bytes) -> None:
        mine = self._of[account]
        while len(mine) > MAX_CONVERSATIONS or sum(one.nbytes for one in mine) > MAX_ACCOUNT_BYTES:
            self._forget(mine[0])
        while self.nbytes > MAX_BYTES or self.num_all > MAX_ALL_CONVERSATIONS:
            self._forget(next(iter(self._of.values()))[0])

    def _forget(self, conversation: Conversation) -> None:
        account = conversation.owner.account
        self._of[account].remove(conversation)
        if not self._of[account]:
            del self._of[account]
        self.num_all -= 1
        self.nbytes -= conversation.nbytes
