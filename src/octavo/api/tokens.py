"""POST /tokenize and /detokenize, as vLLM has them: what a text costs, and what ids say."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.auth import key_of
from octavo.api.body import decode, offload, read_body
from octavo.api.errors import APIError, invalid
from octavo.api.integers import Int64, check_token_ids
from octavo.api.key_limits import longest_request
from octavo.api.openai.requests import ChatMessage, template_messages
from octavo.api.openai.unsupported import UnknownFields
from octavo.api.served_model import ServedModel

MAX_TEXT_CHARS = 4 * 2**20
"""About 1 million tokens, four times the longest context there is; one second of counting."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, omit_defaults=True):
    """`max_model_len`: the longest request in tokens that the caller may send, prompt and answer together."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[Int64]


class DetokenizeResponse(msgspec.Struct):
    prompt: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


class TokenEndpoints:
    def __init__(self, served: ServedModel, unknown_fields: UnknownFields) -> None:
        self._served = served
        self._unknown_fields = unknown_fields

    async def tokenize(self, request: Request) -> Response:
        raw = await read_body(request)
        body, fields = await offload(len(raw), decode, raw, _tokenize_decoder)
        self._unknown_fields.note(fields, TokenizeRequest.__struct_fields__)
        self._served.check_name(body.model)
        longest = longest_request(key_of(request), self._served.longest_request)
        return _json(await offload(len(raw), self._tokenize, body, longest))

    async def detokenize(self, request: Request) -> Response:
        raw = await read_body(request)
        body, fields = await offload(len(raw), decode, raw, _detokenize_decoder)
        self._unknown_fields.note(fields, DetokenizeRequest.__struct_fields__)
        self._served.check_name(body.model)
        return _json(await offload(len(raw), self._detokenize, body))

    def _tokenize(self, body: TokenizeRequest, longest: int) -> bytes:
        tokenizer = self._served.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Either 'prompt' or 'messages' is required, and not both.", param="prompt")
        if body.messages is not None:
            messages = template_messages(body.messages)
            _check_length(sum(len(message["content"]) for message in messages), param="messages")
            text = self._served.render(
                messages, add_generation_prompt=body.add_generation_prompt is not False
            )
            add_special, param = bool(body.add_special_tokens), "messages"
        else:
            text = body.prompt or ""
            _check_length(len(text), param="prompt")
            add_special, param = body.add_special_tokens is not False, "prompt"
        token_ids = self._served.encode(text, add_special=add_special, param=param)
        names = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
        return msgspec.json.encode(TokenizeResponse(token_ids, len(token_ids), longest, names))

    def _detokenize(self, body: DetokenizeRequest) -> bytes:
        tokenizer = self._served.tokenizer
        if len(body.tokens) > MAX_TEXT_CHARS:
            raise _too_long("tokens", len(body.tokens), "tokens")
        check_token_ids(body.tokens, tokenizer.vocab_size, param="tokens")
        return msgspec.json.encode(DetokenizeResponse(tokenizer.decode(body.tokens, skip_special=False)))


def _check_length(chars: int, *, param: str) -> None:
    if chars > MAX_TEXT_CHARS:
        raise _too_long(param, chars, "characters")


def _too_long(param: str, count: int, unit: str) -> APIError:
    return invalid(f"'{param}' has {count:,} {unit}; the limit here is {MAX_TEXT_CHARS:,}.", param=param)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
