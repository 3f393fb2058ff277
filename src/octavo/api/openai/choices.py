"""From generations (tokens) to choices (text and log-probabilities), and many of them at once."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from octavo.engine.request import RequestFailed
from octavo.text.text_stream import TextStream

if TYPE_CHECKING:
    from octavo.engine.generation import Generation
    from octavo.engine.request import TokenLogprobs
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

    num_tokens: those that belong to the answer so far, as `usage` counts them. num_seen: those of them whose
    text was given out, that is, not those of a stop string; complete at the end.
    """

    def __init__(
        self, index: int, generation: Generation, tokenizer: Tokenizer, params: SamplingParams
    ) -> None:
        self.index = index
        self.generation = generation
        self.num_tokens = 0
        self.num_seen = 0
        self._has_stops = bool(params.stop)
        self._text = TextStream(tokenizer, params.stop, min_tokens=params.min_tokens)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        pending: list[PlacedLogprobs] = []
        all_starts: list[int] = []
        num_characters = 0
        async for delta in self.generation:
            finish_reason = delta.finish_reason
            text, starts = self._text.add(delta.text_token_ids, last=finish_reason is not None)
            pending += map(PlacedLogprobs, delta.logprobs, starts)
            self.num_tokens += len(delta.token_ids) if self._text.matched is None else len(starts)
            self.num_seen = self.num_tokens
            if self._has_stops:
                all_starts += starts
                num_characters += len(text)
            if self._text.matched is not None:
                # A token ends where the next one begins; the last one ends inside the stop string.
                self.num_seen = bisect_right(all_starts, num_characters) - 1
                self.generation.cancel(reason="stop")
                finish_reason = "stop"
            if text or (finish_reason is not None and pending):
                yield Piece(text, pending)
                pending = []
            if finish_reason is not None:
                yield Piece("", [], finish_reason)
                return
        raise RequestFailed("The request was cancelled inside the server.", code="cancelled")


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
