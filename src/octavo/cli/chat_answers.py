"""Where `octavo chat` gets its answers: the seam, and the engine inside this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from octavo.engine.sampling_params import SamplingParams
    from octavo.llm import LLM

Message = dict[str, str]
"""{"role": "system" | "user" | "assistant", "content": ...}."""


class ChatError(Exception):
    """No answer, or no more of it: one sentence for the person at the terminal."""


@dataclass(slots=True)
class Numbers:
    """What an answer cost, as far as it is known: tokens, and tokens a second after the first."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    tokens_per_second: float | None = None


class Answer(Protocol):
    """One answer on its way. Leaving its `with` stops it, wherever it was."""

    finish_reason: str | None
    """"stop" or "length" once every piece has come."""

    def __iter__(self) -> Iterator[str]:
        """The answer's text, piece by piece. Raises ChatError."""

    def numbers(self) -> Numbers: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class AnswerSource(Protocol):
    """Somebody who answers."""

    @property
    def name(self) -> str:
        """The model's name, for the greeting."""

    def ask(self, messages: Sequence[Message]) -> Answer:
        """Begin an answer. Raises ChatError if it is refused."""

    def close(self) -> None: ...


class LocalSource:
    """An engine in this process."""

    def __init__(self, llm: LLM, params: SamplingParams, name: str) -> None:
        """Takes over `llm` and closes it. Raises ChatError if its file has no chat template."""
        if llm.chat_template is None:
            llm.close()
            raise ChatError(f"{name} has no chat template: it continues texts and does not chat")
        self.name = name
        self._llm = llm
        self._template = llm.chat_template
        self._params = params

    def ask(self, messages: Sequence[Message]) -> LocalAnswer:
        """Raises ChatError where the template or the engine refuses, with its words and numbers."""
        from octavo.engine.request import RequestRefused
        from octavo.text.chat_template import ChatTemplateError

        try:
            # As the server does: a template writes its own first token.
            prompt = self._llm.tokenizer.encode(
                self._template.render(messages), add_special=False, parse_special=True
            )
            return LocalAnswer(self._llm, prompt, self._params)
        except (ChatTemplateError, RequestRefused, ValueError) as error:
            raise ChatError(str(error)) from error

    def close(self) -> None:
        self._llm.close()


class LocalAnswer:
    """Tokens of one generation, as text."""

    def __init__(self, llm: LLM, prompt: list[int], params: SamplingParams) -> None:
        from octavo.text.text_stream import TextStream

        self.finish_reason: str | None = None
        self._generation = llm.engine.submit(prompt, params)
        self._text = TextStream(llm.tokenizer, params.stop, min_tokens=params.min_tokens)

    def __iter__(self) -> Iterator[str]:
        from octavo.engine.request import RequestFailed

        try:
            for delta in self._generation:
                yield self._text.add(delta.text_token_ids, last=delta.finish_reason is not None).text
                self.finish_reason = delta.finish_reason
                if self._text.matched is not None:
                    self._generation.cancel(reason="stop")
                    self.finish_reason = "stop"
        except RequestFailed as error:
            raise ChatError(error.message) from error

    def numbers(self) -> Numbers:
        stats = self._generation.stats
        return Numbers(
            prompt_tokens=stats.num_prompt_tokens,
            cached_tokens=stats.num_cached_tokens,
            output_tokens=stats.num_output_tokens,
            tokens_per_second=stats.tokens_per_second or None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._generation.cancel()


class Stopwatch:
    """Tokens a second as the reader sees them, for answers that come over a wire."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0

    def piece(self) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last

    def tokens_per_second(self, output_tokens: int | None) -> float | None:
        if self._first is None or output_tokens is None or self._last <= self._first:
            return None
        return (output_tokens - 1) / (self._last - self._first)
