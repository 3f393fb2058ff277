"""The life of one request that generates: submit every choice, then stream them or wait for them.

    prompts x n --submit--> generations --ChoiceStream--> pieces of text --Shape--> chunks or one body

Whatever happens on the way (a refusal half through, a failed step, the client gone), no generation outlives
the request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from octavo.api.caller import Caller
from octavo.api.disconnect import ClientDisconnected, until_disconnect
from octavo.api.errors import APIError, from_exception, invalid, log_fault
from octavo.api.key_limits import check_context, computed_tokens, longest_request, reserve
from octavo.api.openai.choices import ChoiceStream, Piece, WholeChoice, collect, merged
from octavo.api.openai.requests import GenerationRequest
from octavo.api.openai.responses import PromptTokensDetails, Usage
from octavo.api.rate_limit import Reservation
from octavo.api.served_model import ServedModel
from octavo.api.sse import DONE, EventStream
from octavo.api.standing import comment_line, in_words
from octavo.engine.request import RequestFailed, RequestRefused
from octavo.engine.sampling_params import MAX_CHOICES, SamplingParams

logger = logging.getLogger("octavo.api")

CLIENT_CLOSED_REQUEST = 499
"""nginx's word for an answer that nobody waits for; it only shows in logs."""


class Shape(Protocol):
    """How one endpoint writes an answer; every method returns JSON."""

    def opening(self, index: int) -> bytes | None:
        """The chunk before a choice's first text."""

    def chunks(self, index: int, piece: Piece) -> Iterable[bytes]: ...

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes: ...


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def check_num_choices(num_prompts: int, n: int, *, prompt_param: str) -> None:
    """Raises APIError 400 where `n` choices of each prompt are more than one request may ask for."""
    if num_prompts * n > MAX_CHOICES:
        raise invalid(
            f"{num_prompts:,} prompts with 'n' of {n} make {num_prompts * n:,} choices; "
            f"the limit is {MAX_CHOICES}.",
            param="n" if n > 1 else prompt_param,
        )


class Answer:
    """One HTTP request's choices: `len(prompts) * params.n` generations, prompt by prompt."""

    def __init__(self, served: ServedModel, prompts: Sequence[list[int]], *, log_content: bool) -> None:
        self._served = served
        self._prompts = prompts
        self._log_content = log_content
        self._request_id = ""
        self._choices: list[ChoiceStream] = []
        self._reservation: Reservation | None = None
        self._error: APIError | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._leave_tag: Callable[[], None] | None = None

    def submit(
        self,
        params: SamplingParams,
        *,
        request_id: str,
        created: int,
        caller: Caller,
        cache_salt: str,
        priority: int,
        prompt_param: str,
        limit_param: str = "max_tokens",
        default_max_tokens: int | None = None,
        deadline: float | None = None,
        latest_only: str | None = None,
    ) -> None:
        """Hand every choice to the engine, or none, and begin its record.

        created: seconds since 1970.
        prompt_param, limit_param: the request's fields for the prompt and for the limit of output tokens.
        default_max_tokens: where params set no limit; the context's end counts if it comes first.
        deadline: seconds from now after which it ends if none of its choices has a token.
        latest_only: a tag; an open request of the same owner with it ends, whatever becomes of this one.

        Raises: APIError 400 (the engine's refusal, with the field at fault), 403 and 429 (the key's limits),
        503.
        """
        for token_ids in self._prompts:
            check_context(
                caller.key, len(token_ids), params, prompt_param=prompt_param, limit_param=limit_param
            )
        longest = longest_request(caller.key, self._served.longest_request)
        count = len(self._prompts) * params.n
        self._request_id = request_id
        if self._log_content:
            for token_ids in self._prompts:
                text = self._served.tokenizer.decode(token_ids, skip_special=False)
                logger.info("request %s asked %r", request_id, text)
        self._reservation = reserve(caller.key, sum(map(len, self._prompts)))
        try:
            if latest_only is not None:
                tag = (caller.owner, latest_only, self)
                self._served.latest_only.enter(*tag)
                self._leave_tag = partial(self._served.latest_only.leave, *tag)
            for index in range(count):
                prompt, choice_index = divmod(index, params.n)
                token_ids = self._prompts[prompt]
                generation = self._served.engine.submit(
                    token_ids,
                    self._with_limit(params, len(token_ids), default_max_tokens, longest),
                    request_id=request_id if count == 1 else f"{request_id}-{index}",
                    group=caller.group,
                    cache_salt=cache_salt,
                    share=caller.share,
                    priority=priority,
                    choice_index=choice_index,
                    bounded=index == 0,
                )
                self._choices.append(ChoiceStream(index, generation, self._served.tokenizer, params))
            self._served.records.open(
                request_id,
                caller.owner,
                self._prompts,
                [choice.generation for choice in self._choices],
                account=caller.name,
                cache_salt=cache_salt,
                created=created,
            )
            if deadline is not None:
                loop = asyncio.get_running_loop()
                self._deadline = loop.call_later(deadline, self._miss_deadline, deadline, loop.time())
        except Exception as error:
            self.close()
            fits_alone = max(map(len, self._prompts)) < self._served.longest_request
            too_long = isinstance(error, RequestRefused) and error.code == "context_length_exceeded"
            at_fault = limit_param if too_long and fits_alone else prompt_param
            raise from_exception(error, prompt_param=at_fault) from error

    def _with_limit(
        self, params: SamplingParams, num_prompt_tokens: int, default: int | None, longest: int
    ) -> SamplingParams:
        """An end where the request sets none: the default's, or that of the caller's longest request."""
        if params.max_tokens is not None or (default is None and longest == self._served.longest_request):
            return params
        room = longest - num_prompt_tokens
        if room < 1:
            return params  # the refusal should speak of the prompt, not of a limit nobody asked for
        end = room if default is None else min(default, room)
        return replace(params, max_tokens=max(end, params.min_tokens, 1))

    def close(self) -> None:
        """End every choice that is still running, and the record. Idempotent."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._leave_tag is not None:
            self._leave_tag()
        for choice in self._choices:
            choice.generation.cancel()
        seen = [choice.generation.computed_output(choice.num_seen) for choice in self._choices]
        self._served.records.close(self._request_id, seen)
        if self._reservation is not None:
            self._reservation.settle(computed_tokens(one.generation.progress() for one in self._choices))

    def end(self, error: APIError) -> None:
        """End it now: with this answer, or with this event where a stream has begun."""
        if self._error is None:
            self._error = error
            for choice in self._choices:
                choice.generation.cancel()

    def _miss_deadline(self, deadline: float, submitted_at: float) -> None:
        stats = [choice.generation.stats for choice in self._choices]
        if any(one.first_token_time is not None or one.finish_reason is not None for one in stats):
            return
        waited = asyncio.get_running_loop().time() - submitted_at
        standings = [choice.generation.standing() for choice in self._choices]
        known = [standing for standing in standings if standing is not None]
        first = min(known, key=lambda standing: standing.position, default=None)
        self.end(
            APIError(
                503,
                f"No token has come within the 'deadline' of {deadline:g} s: the request has waited "
                f"{waited:.1f} s, and {in_words(first)}.",
                code="deadline_exceeded",
                param="deadline",
                headers={"x-should-retry": "false"},
            )
        )

    def _comment(self) -> bytes | None:
        """Where those of its choices stand that have no token yet or stand still, a line each."""
        several = len(self._choices) > 1
        lines = [
            comment_line(standing, choice=choice.index if several else None)
            for choice in self._choices
            if (standing := choice.generation.standing()) is not None
        ]
        return b"\n".join(lines) or None

    async def respond(self, request: Request, body: GenerationRequest, shape: Shape) -> Response:
        if body.stream:
            events = self._events(shape, include_usage=body.include_usage)
            return EventStream(events, on_error=self._error_event, on_close=self.close, comment=self._comment)
        try:
            whole = await until_disconnect(request.receive, collect(self._pieces(), len(self._choices)))
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            self.close()
        return Response(shape.whole(whole, self._usage()), media_type="application/json")

    async def _events(self, shape: Shape, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
        for choice in self._choices:
            opening = shape.opening(choice.index)
            if opening is not None:
                yield opening
        async with aclosing(self._pieces()) as pieces:
            async for choice, piece in pieces:
                for chunk in shape.chunks(choice.index, piece):
                    yield chunk
        self.close()  # before the client sees the end: what it asks next finds this one accounted for
        if include_usage:
            yield shape.usage_chunk(self._usage())
        yield DONE

    async def _pieces(self) -> AsyncGenerator[tuple[ChoiceStream, Piece], None]:
        said: dict[int, list[str]] = {}
        try:
            async with aclosing(merged(self._choices)) as pieces:
                async for choice, piece in pieces:
                    if self._log_content:
                        said.setdefault(choice.index, []).append(piece.text)
                    yield choice, piece
        except RequestFailed:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            for index, texts in said.items():
                logger.info("request %s choice %d said %r", self._request_id, index, "".join(texts))

    def _error_event(self, error: Exception) -> bytes:
        failure = from_exception(error)
        if failure.code == "internal_error":
            log_fault(error, "a stream", log_content=self._log_content)
        return failure.body()

    def _usage(self) -> Usage:
        """Prompts count once, as OpenAI has it; what one choice computed, the others of its prompt
        adopted.
        """
        per_prompt = len(self._choices) // len(self._prompts)
        prompt_tokens = sum(map(len, self._prompts))
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        cached_tokens = sum(
            min(
                choice.generation.stats.num_cached_tokens
                for choice in self._choices[first : first + per_prompt]
            )
            for first in range(0, len(self._choices), per_prompt)
        )
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens),
        )
