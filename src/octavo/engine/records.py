"""What is known of each request while it lives and for a while after: numbers, and where its prefix broke.

    open (submitted) --> live: numbers read from its generations --close--> finished: the last few are kept

A record holds no prompt and no answer: only the few tokens around a break, for the owner's eyes. The engine
thread knows nothing of it. One thread: the event loop's.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

from octavo.engine.conversations import Conversation, Conversations, Owner, PrefixBreak, Tokens, find_break

if TYPE_CHECKING:
    from octavo.engine.generation import Generation
    from octavo.engine.request import RequestStats, Standing

MAX_FINISHED = 256
"""Finished requests that are kept, of everybody, and"""

MAX_FINISHED_OF_ACCOUNT = 32
"""of one account, whatever its users are called."""

SEARCHED_AT_ONCE = 8192
"""Tokens, of the prompts and of what they are compared with, up to which the event loop does it itself (one
or two milliseconds); more are searched in a thread."""

STATUSES = ("running", "paused", "waiting", "finished")
"""A request has the first of these that one of its choices has."""


class ChoiceNumbers(NamedTuple):
    """One choice as it is now: why it waits, if it does; where its prompt left an earlier conversation, if it
    did."""

    status: str
    stats: RequestStats
    standing: Standing | None
    prefix_break: PrefixBreak | None


class Choice:
    """One generation as its record sees it. The record must not keep its tokens alive, so it holds the
    numbers and watches the rest."""

    __slots__ = ("_generation", "_stats")

    def __init__(self, generation: Generation) -> None:
        self._generation = ref(generation)
        self._stats = generation.stats

    def now(self) -> tuple[str, RequestStats, Standing | None]:
        """Its status, its numbers and why it waits."""
        if self._stats.finish_reason is None and (generation := self._generation()) is not None:
            return generation.status, generation.progress(), generation.standing()
        # Nobody reads it any more: until the engine thread has seen that, it still runs.
        return "running" if self._stats.finish_reason is None else "finished", self._stats, None


class RequestRecord:
    """One request of one owner. `created`: seconds since 1970. `number`: in order of submission. `account`:
    the owner's account by name, for whoever runs the server."""

    def __init__(
        self,
        number: int,
        request_id: str,
        owner: Owner,
        account: str,
        created: int,
        generations: Sequence[Generation],
        num_prompts: int,
    ) -> None:
        self.number = number
        self.request_id = request_id
        self.owner = owner
        self.account = account
        self.created = created
        self._choices = [Choice(generation) for generation in generations]
        self._breaks: list[PrefixBreak | None] = [None] * num_prompts
        self._search: asyncio.Future[None] | None = None

    async def choices(self) -> list[ChoiceNumbers]:
        """All of them as they are now, in the order of their indexes."""
        if self._search is not None:
            await asyncio.shield(self._search)
        per_prompt = len(self._choices) // len(self._breaks)
        return [
            ChoiceNumbers(*choice.now(), self._breaks[index // per_prompt])
            for index, choice in enumerate(self._choices)
        ]

    def search(self, prompts: Sequence[Tokens], earlier: Sequence[Conversation]) -> None:
        """Find where the prompts left earlier conversations; in a thread, where that takes long."""

        def find() -> None:
            self._breaks[:] = [find_break(prompt, earlier) for prompt in prompts]

        num_tokens = sum(map(len, prompts)) + len(prompts) * sum(one.num_tokens for one in earlier)
        if num_tokens <= SEARCHED_AT_ONCE:
            find()
        else:
            self._search = asyncio.get_running_loop().run_in_executor(None, find)


class RequestRecords:
    """Every live request, and the last finished ones.

    remembers_conversations: off, no token is kept and no break is found; for engines without prefix caching.
    """

    def __init__(self, *, remembers_conversations: bool = True) -> None:
        self.conversations = Conversations()
        self._remembers = remembers_conversations
        self._num_opened = 0
        self._live: dict[str, RequestRecord] = {}
        self._finished: OrderedDict[str, RequestRecord] = OrderedDict()
        self._num_finished_of: Counter[bytes] = Counter()
        self._conversations_of: dict[str, list[Conversation]] = {}

    def open(
        self,
        request_id: str,
        owner: Owner,
        prompts: Sequence[list[int]],
        generations: Sequence[Generation],
        *,
        account: str,
        cache_salt: str,
        created: int,
    ) -> None:
        """A request has been submitted: `generations` are its choices, as many of each prompt, in order."""
        self._num_opened += 1
        record = RequestRecord(
            self._num_opened, request_id, owner, account, created, generations, len(prompts)
        )
        self._live[request_id] = record
        if not self._remembers:
            return
        salt = hashlib.blake2b(cache_salt.encode(), digest_size=16).digest()
        tokens = [array("i", prompt) for prompt in prompts]
        record.search(tokens, self.conversations.earlier(owner, salt))
        mine = [Conversation(request_id, owner, salt, prompt) for prompt in tokens]
        self._conversations_of[request_id] = mine
        for conversation in mine:
            self.conversations.remember(conversation)

    def close(self, request_id: str, answers: Sequence[list[int]]) -> None:
        """It has ended, or nobody waits for it any more. Idempotent.

        answers: the tokens of each choice that its owner has seen and whose keys were computed.
        """
        record = self._live.pop(request_id, None)
        if record is None:
            return
        mine = self._conversations_of.pop(request_id, [])
        for index, conversation in enumerate(mine):
            per_prompt = len(answers) // len(mine)
            choices = answers[index * per_prompt : (index + 1) * per_prompt]
            self.conversations.answered(conversation, [array("i", answer) for answer in choices])
        self._finished[request_id] = record
        account = record.owner.account
        self._num_finished_of[account] += 1
        if self._num_finished_of[account] > MAX_FINISHED_OF_ACCOUNT:
            self._drop(next(one for one in self._finished.values() if one.owner.account == account))
        elif len(self._finished) > MAX_FINISHED:
            self._drop(next(iter(self._finished.values())))

    def find(self, owner: Owner, request_id: str) -> RequestRecord | None:
        """A request of this owner; None for those of others as for those that nobody knows."""
        record = self.find_of_all(request_id)
        return record if record is not None and record.owner == owner else None

    def of(self, owner: Owner) -> list[RequestRecord]:
        """All of one owner that are known, the latest submitted first."""
        return [record for record in self.of_all() if record.owner == owner]

    def find_of_all(self, request_id: str) -> RequestRecord | None:
        """A request of anybody."""
        return self._live.get(request_id) or self._finished.get(request_id)

    def of_all(self) -> list[RequestRecord]:
        """Everybody's that are known, the latest submitted first."""
        known = (*self._live.values(), *self._finished.values())
        return sorted(known, key=lambda record: record.number, reverse=True)

    def _drop(self, record: RequestRecord) -> None:
        del self._finished[record.request_id]
        account = record.owner.account
        self._num_finished_of[account] -= 1
        if not self._num_finished_of[account]:
            del self._num_finished_of[account]
