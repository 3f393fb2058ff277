"""GET /v1/requests and /v1/requests/{id}: what the server knows of its owner's requests, live or finished.

Whoever asks sees the requests of their own API key (address, where the server has no key) and `user`. Those
of others are not there, in the very words for those that never were. With `?all=true` whoever runs the server
(a key with `admin`) sees the numbers of everybody's, and nothing of their texts.
"""

from __future__ import annotations

import codecs
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.caller import Caller, caller_of
from octavo.api.errors import APIError, invalid
from octavo.api.served_model import ServedModel
from octavo.api.standing import Waiting, waiting_of
from octavo.engine.conversations import PrefixBreak, Tokens
from octavo.engine.records import (
    MAX_FINISHED,
    MAX_FINISHED_OF_ACCOUNT,
    STATUSES,
    ChoiceNumbers,
    RequestRecord,
)
from octavo.text.tokenizer import Tokenizer

_YES, _NO = ("true", "1"), ("false", "0")


class Preemption(msgspec.Struct):
    """`at`: seconds since submission. `reason`: "kv" (blocks were taken for somebody more entitled) or
    "kv_full" (there was none to go on with). `tokens_lost`: computed tokens whose KV was taken."""

    at: float
    reason: str
    tokens_lost: int


class Differing(msgspec.Struct):
    """A few tokens as text: the end of what is common, then the earlier request's own, and this one's."""

    before: str
    now: str


class Prefix(msgspec.Struct, kw_only=True):
    """`broke_at`: position of the first token that differs from the request `with`; null where nothing broke.
    `tokens_lost`: tokens behind it that `with` has behind it too."""

    cached_tokens: int
    broke_at: int | None
    tokens_lost: int
    with_: str | None = msgspec.field(name="with")
    differing: Differing | UnsetType | None = UNSET


class RequestChoice(msgspec.Struct, kw_only=True):
    """Times in seconds since submission. `total_time` grows until the end. `waiting`: why it has no token yet
    or stands still; null while it generates and after its end.

    computed_tokens = prompt_tokens - cached_tokens + output_tokens - 1, once it has ended by itself, and what
    was computed again after preemptions.
    """

    index: int
    status: str
    waiting: Waiting | None
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    queue_time: float | None
    first_token_time: float | None
    total_time: float | None
    tokens_per_second: float
    finish_reason: str | None
    num_preemptions: int
    tokens_lost: int
    preemptions: list[Preemption]
    prefix: Prefix


class RequestBody(msgspec.Struct, kw_only=True):
    """`account`: the name of the key or the address, for an admin who asked for everybody's."""

    id: str
    account: str | UnsetType = UNSET
    object: Literal["request"] = "request"
    status: str
    model: str
    created: int
    choices: list[RequestChoice]


class RequestList(msgspec.Struct):
    data: list[RequestBody]
    object: Literal["list"] = "list"


class RequestEndpoints:
    def __init__(self, served: ServedModel) -> None:
        self._served = served

    async def list(self, request: Request) -> Response:
        """The latest submitted first; texts only one by one. Raises APIError 400, 403."""
        caller, of_all = _caller(request)
        known = self._served.records
        records = known.of_all() if of_all else known.of(caller.owner)
        bodies = [await self._body(record, with_account=of_all) for record in records]
        return _json(RequestList(bodies))

    async def one(self, request: Request) -> Response:
        """Raises APIError 404 for an id that is unknown, forgotten or of somebody else; 400, 403."""
        with_text = _flag(request, "text")
        request_id = request.path_params["request_id"]
        caller, of_all = _caller(request)
        known = self._served.records
        record = known.find_of_all(request_id) if of_all else known.find(caller.owner, request_id)
        if record is None:
            raise APIError(
                404,
                "No request of yours is known by this id. Those of another API key, address or 'user' are "
                f"not shown; of finished ones the last {MAX_FINISHED_OF_ACCOUNT} of a key or address and the "
                f"last {MAX_FINISHED} of all are kept.",
                code="request_not_found",
                param="id",
            )
        if with_text and record.owner != caller.owner:
            raise APIError(
                403, "The text of a request is only its owner's to see ('text').", code="owner_required"
            )
        return _json(await self._body(record, with_text=with_text, with_account=of_all))

    async def _body(
        self, record: RequestRecord, *, with_text: bool = False, with_account: bool = False
    ) -> RequestBody:
        choices = await record.choices()
        statuses = {choice.status for choice in choices}
        return RequestBody(
            id=record.request_id,
            account=record.account if with_account else UNSET,
            status=next(status for status in STATUSES if status in statuses),
            model=self._served.id,
            created=record.created,
            choices=[
                _choice(index, choice, self._served.tokenizer if with_text else None)
                for index, choice in enumerate(choices)
            ],
        )


def _choice(index: int, numbers: ChoiceNumbers, tokenizer: Tokenizer | None) -> RequestChoice:
    """With a tokenizer, what differs is shown."""
    stats = numbers.stats
    return RequestChoice(
        index=index,
        status=numbers.status,
        waiting=waiting_of(numbers.standing),
        prompt_tokens=stats.num_prompt_tokens,
        cached_tokens=stats.num_cached_tokens,
        computed_tokens=stats.num_computed_tokens,
        output_tokens=stats.num_output_tokens,
        queue_time=stats.queue_time,
        first_token_time=stats.first_token_time,
        total_time=stats.total_time,
        tokens_per_second=stats.tokens_per_second,
        finish_reason=stats.finish_reason,
        num_preemptions=stats.num_preemptions,
        tokens_lost=stats.num_lost_tokens,
        preemptions=[Preemption(pause.at, pause.reason.value, pause.tokens_lost) for pause in stats.pauses],
        prefix=_prefix(stats.num_cached_tokens, numbers.prefix_break, tokenizer),
    )


def _prefix(cached_tokens: int, found: PrefixBreak | None, tokenizer: Tokenizer | None) -> Prefix:
    differing: Differing | UnsetType | None = UNSET
    if tokenizer is not None:
        differing = None
        if found is not None:
            differing = Differing(_excerpt(found.before, tokenizer), _excerpt(found.now, tokenizer))
    return Prefix(
        cached_tokens=cached_tokens,
        broke_at=found.position if found is not None else None,
        tokens_lost=found.tokens_lost if found is not None else 0,
        with_=found.request_id if found is not None else None,
        differing=differing,
    )


def _excerpt(token_ids: Tokens, tokenizer: Tokenizer) -> str:
    """Tokens out of the middle of a text, control tokens as they are spelled; a character of which only a
    part lies in them is left out."""
    spoken = b"".join(map(tokenizer.spoken_bytes, token_ids))
    begin = next((at for at, byte in enumerate(spoken) if byte & 0xC0 != 0x80), len(spoken))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(spoken[begin:])


def _caller(request: Request) -> tuple[Caller, bool]:
    """Who asks, and whether for everybody's requests. Raises APIError 403 where that is not theirs to see."""
    caller = caller_of(request, request.query_params.get("user"))
    of_all = _flag(request, "all")
    if of_all and not caller.admin:
        raise APIError(
            403, "Only an admin's API key sees the requests of others ('all').", code="admin_required"
        )
    return caller, of_all


def _flag(request: Request, name: str) -> bool:
    given = request.query_params.get(name, "false")
    if given not in (*_YES, *_NO):
        raise invalid(f"'{name}' must be {', '.join((*_YES, *_NO))}.", param=name)
    return given in _YES


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
