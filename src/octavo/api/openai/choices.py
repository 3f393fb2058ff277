"""From generations (tokens) to choices (text): detokenizing, stop strings, log-probabilities, and many at
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from octavo.engine.request import RequestFailed
from octavo.text.detokenizer import Detokenizer
from octavo.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from octavo.engine.generation import Generation
    from octavo.engine.request import Delta, TokenLogprobs
    from octavo.engine.sampling_params import SamplingParams
    from octavo.text.tokenizer import Tokenizer


class PlacedLogprobs(NamedTuple):
    """One token's log-probabilities, and where in the choice's text (characters) the token begins."""

    entry: TokenLogprobs
    text_offset: int


@dataclass(slots=True)
class Piece:
    """What a choice gained: text that is safe to show, or its end."""

    text: str
    logprobs: list[PlacedLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


class ChoiceStream:
    """One choice as pieces of text. Iterate once; the last piece alone carries a finish_reason.

    | shown | held back: may begin a stop string | unfinished character |
    """

    def __init__(
        self, index: int, generation: Generation, tokenizer: Tokenizer, params: SamplingParams
    ) -> None:
        self.index = index
        self.generation = generation
        self.num_tokens = 0
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(params.stop)
        self._min_tokens = params.min_tokens
        self._num_characters = 0

    async def __aiter__(self) -> AsyncIterator[Piece]:
        pending: list[PlacedLogprobs] = []
        async for delta in self.generation:
            text, finish_reason = self._take(delta, pending)
            if text or (finish_reason is not None and pending):
                yield Piece(text, pending)
                pending = []
            if finish_reason is not None:
                yield Piece("", [], finish_reason)
                return
        raise RequestFailed("The request was cancelled inside the server.", code="cancelled")

    def _take(self, delta: Delta, pending: list[PlacedLogprobs]) -> tuple[str, str | None]:
        """The text that `delta` makes safe to show, and why the choice ended if it did."""
        shown = []
        shown_ids = delta.text_token_ids
        # One token at a time: tokens after a stop string belong to nobody, however many came in one delta.
        for position, token_id in enumerate(shown_ids):
            self.num_tokens += 1
            if delta.logprobs:
                pending.append(PlacedLogprobs(delta.logprobs[position], self._num_characters))
            text = self._detokenizer.add([token_id])
            self._num_characters += len(text)
            shown.append(self._screen(text))
            if self._stops.matched is not None:
                self.generation.cancel(reason="stop")
                return "".join(shown), "stop"
        if delta.finish_reason is None:
            return "".join(shown), None
        self.num_tokens += len(delta.token_ids) - len(shown_ids)
        shown.append(self._stops.push(self._detokenizer.finish()))
        matched = self._stops.matched is not None
        if not matched:
            shown.append(self._stops.finish())
        return "".join(shown), "stop" if matched else delta.finish_reason

    def _screen(self, text: str) -> str:
        """Stop strings end nothing before `min_tokens`; what came by then can be no part of one."""
        return text if self.num_tokens <= self._min_tokens else self._stops.push(text)


async def merged(choices: Sequence[ChoiceStream]) -> AsyncGenerator[tuple[ChoiceStream, Piece], None]:
    """Pieces of all choices as they come. Raises what any of them raises, at once."""
    if len(choices) == 1:
        async for piece in choices[0]:
            yield choices[0], piece
        return
    # One place: a reader that stalls stalls every choice, and so each sequence is held by its own bound.
    queue: asyncio.Queue[tuple[ChoiceStream, Piece] | Exception] = asyncio.Queue(maxsize=1)

    async def pump(choice: ChoiceStream) -> None:
        try:
            async for piece in choice:
                await queue.put((choice, piece))
        except Exception as error:
            await queue.put(error)

    pumps = [asyncio.ensure_future(pump(choice)) for choice in choices]
    try:
        unfinished = len(choices)
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            unfinished -= item[1].finish_reason is not None
            yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@dataclass(slots=True)
class WholeChoice:
    """A choice that has ended: all of its text at once."""

    index: int
    text: str
    logprobs: list[PlacedLogprobs]
    finish_reason: str


async def collect(pieces: AsyncIterator[tuple[ChoiceStream, Piece]], count: int) -> list[WholeChoice]:
    """All `count` choices to their end, in the order of their indexes."""
    texts: list[list[str]] = [[] for _ in range(count)]
    whole = [WholeChoice(index, "", [], "") for index in range(count)]
    async for choice, piece in pieces:
        texts[choice.index].append(piece.text)
        whole[choice.index].logprobs += piece.logprobs
        whole[choice.index].finish_reason = piece.finish_reason or ""
    for choice_text, one in zip(texts, whole, strict=True):
        one.text = "".join(choice_text)
    return whole
