"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.body import decode, offload, read_body
from octavo.api.caller import caller_of
from octavo.api.openai.answer import Answer, check_num_choices, new_id
from octavo.api.openai.choices import Piece, PlacedLogprobs, WholeChoice
from octavo.api.openai.logprobs import completion_logprobs
from octavo.api.openai.requests import DEFAULT_COMPLETION_TOKENS, CompletionRequest, prompts_of
from octavo.api.openai.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from octavo.api.openai.unsupported import UnknownFields, refuse_unsupported
from octavo.api.served_model import ServedModel
from octavo.engine.sampling_params import SamplingParams

_decoder = msgspec.json.Decoder(CompletionRequest)


class Completions:
    """The endpoint: one or many prompts, as text or as token ids, each continued `n` times."""

    def __init__(self, served: ServedModel, unknown_fields: UnknownFields, *, log_content: bool) -> None:
        self._served = served
        self._unknown_fields = unknown_fields
        self._log_content = log_content

    async def answer(self, request: Request) -> Response:
        raw = await read_body(request)
        body, params, prompts, echoes = await offload(len(raw), self._understand, raw)
        shape = _CompletionShape(self._served, body, echoes)
        choices = Answer(self._served, prompts, log_content=self._log_content)
        choices.submit(
            params,
            request_id=shape.id,
            created=shape.created,
            caller=caller_of(request, body.user, background=bool(body.background)),
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            deadline=body.deadline,
            latest_only=body.latest_only,
            prompt_param="prompt",
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        )
        return await choices.respond(request, body, shape)

    def _understand(self, raw: bytes) -> tuple[CompletionRequest, SamplingParams, list[list[int]], list[str]]:
        """All of the work that grows with the body: its fields, the prompts' token ids, and what each choice
        echoes. Raises APIError, InvalidParameter.
        """
        body, fields = decode(raw, _decoder)
        self._unknown_fields.note(fields, CompletionRequest.__struct_fields__)
        refuse_unsupported(fields)
        body.check()
        served = self._served
        served.check_name(body.model)
        params = body.params(served.tokenizer.vocab_size)
        given = prompts_of(body.prompt)
        check_num_choices(len(given), params.n, prompt_param="prompt")  # before anything is tokenised
        prompts = served.prompts(given)
        texts = map(served.text_of, given) if body.echo else ()
        return body, params, prompts, [text for text in texts for _ in range(params.n)]


class _CompletionShape:
    """Stream order: the echoed prompt where asked for, text …, finish_reason, usage where asked for."""

    def __init__(self, served: ServedModel, body: CompletionRequest, echoes: Sequence[str]) -> None:
        self.id = new_id("cmpl")
        self._served = served
        self.created = int(time.time())
        self._with_logprobs = body.logprobs is not None
        self._echoes = echoes
        self._no_usage: UnsetType | None = None if body.include_usage else UNSET
        self._encoder = msgspec.json.Encoder()

    def opening(self, index: int) -> bytes | None:
        return (
            self._body([CompletionChoice(index, self._echoes[index])], self._no_usage)
            if self._echoes
            else None
        )

    def chunks(self, index: int, piece: Piece) -> Iterable[bytes]:
        if piece.text or piece.logprobs:
            choice = CompletionChoice(index, piece.text, self._logprobs(piece.logprobs))
            yield self._body([choice], self._no_usage)
        if piece.finish_reason is not None:
            yield self._body([CompletionChoice(index, "", None, piece.finish_reason)], self._no_usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._body([], usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        written = [
            CompletionChoice(
                choice.index,
                (self._echoes[choice.index] if self._echoes else "") + choice.text,
                self._logprobs(choice.logprobs),
                choice.finish_reason,
            )
            for choice in choices
        ]
        return self._body(written, usage)

    def _logprobs(self, placed: list[PlacedLogprobs]) -> CompletionLogprobs | None:
        return completion_logprobs(placed, self._served.tokenizer) if self._with_logprobs else None

    def _body(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        return self._encoder.encode(
            Completion(id=self.id, created=self.created, model=self._served.id, choices=choices, usage=usage)
        )
