"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.body import decode, offload, read_body
from octavo.api.caller import caller_of
from octavo.api.openai.answer import Answer, new_id
from octavo.api.openai.choices import Piece, PlacedLogprobs, WholeChoice
from octavo.api.openai.logprobs import chat_logprobs
from octavo.api.openai.requests import ChatCompletionRequest, template_messages
from octavo.api.openai.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    Usage,
)
from octavo.api.openai.unsupported import UnknownFields, refuse_unsupported
from octavo.api.served_model import ServedModel
from octavo.engine.sampling_params import SamplingParams

_decoder = msgspec.json.Decoder(ChatCompletionRequest)


class ChatCompletions:
    """The endpoint: messages in, one or more answers out."""

    def __init__(self, served: ServedModel, unknown_fields: UnknownFields, *, log_content: bool) -> None:
        self._served = served
        self._unknown_fields = unknown_fields
        self._log_content = log_content

    async def answer(self, request: Request) -> Response:
        raw = await read_body(request)
        body, params, prompt = await offload(len(raw), self._understand, raw)
        shape = _ChatShape(self._served, body)
        choices = Answer(self._served, [prompt], log_content=self._log_content)
        choices.submit(
            params,
            request_id=shape.id,
            created=shape.created,
            caller=caller_of(request, body.user, background=bool(body.background)),
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            deadline=body.deadline,
            latest_only=body.latest_only,
            prompt_param="messages",
            limit_param=body.limit_name,
        )
        return await choices.respond(request, body, shape)

    def _understand(self, raw: bytes) -> tuple[ChatCompletionRequest, SamplingParams, list[int]]:
        """All of the work that grows with the body. Raises APIError, InvalidParameter, ChatTemplateError."""
        body, fields = decode(raw, _decoder)
        self._unknown_fields.note(fields, ChatCompletionRequest.__struct_fields__)
        refuse_unsupported(fields)
        body.check()
        served = self._served
        served.check_name(body.model)
        params = body.params(served.tokenizer.vocab_size)
        return body, params, served.chat_prompt(template_messages(body.messages))


class _ChatShape:
    """Stream order: role, content …, finish_reason, and usage where it was asked for."""

    def __init__(self, served: ServedModel, body: ChatCompletionRequest) -> None:
        self.id = new_id("chatcmpl")
        self._served = served
        self.created = int(time.time())
        self._with_logprobs = bool(body.logprobs)
        # With include_usage every chunk has the field, and only the last one a value.
        self._no_usage: UnsetType | None = None if body.include_usage else UNSET
        self._encoder = msgspec.json.Encoder()

    def opening(self, index: int) -> bytes:
        return self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))

    def chunks(self, index: int, piece: Piece) -> Iterable[bytes]:
        if piece.text or piece.logprobs:
            logprobs = self._logprobs(piece.logprobs)
            yield self._chunk(ChatChunkChoice(index, ChatDelta(content=piece.text), logprobs))
        if piece.finish_reason is not None:
            yield self._chunk(ChatChunkChoice(index, ChatDelta(), None, piece.finish_reason))

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._encoder.encode(self._envelope([], usage))

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        return self._encoder.encode(
            ChatCompletion(
                id=self.id,
                created=self.created,
                model=self._served.id,
                choices=[
                    ChatChoice(
                        choice.index,
                        AssistantMessage(choice.text),
                        self._logprobs(choice.logprobs),
                        choice.finish_reason,
                    )
                    for choice in choices
                ],
                usage=usage,
            )
        )

    def _logprobs(self, placed: list[PlacedLogprobs]) -> ChatLogprobs | None:
        return chat_logprobs(placed, self._served.tokenizer) if self._with_logprobs else None

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        return self._encoder.encode(self._envelope([choice], self._no_usage))

    def _envelope(
        self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id, created=self.created, model=self._served.id, choices=choices, usage=usage
        )
