"""`/admin/kv-cache`: what the KV cache may take and takes; another budget; cold blocks back to the system.
`/admin/keys`: who may use the server, and how much.

For whoever owns the server, so only where API keys are configured, and for an admin key; `KeyAuth` has then
asked for one.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.auth import key_of
from octavo.api.body import decode, read_body
from octavo.api.errors import APIError, invalid
from octavo.api.keys import Keyring
from octavo.api.served_model import ServedModel
from octavo.engine.kv_memory import KVCacheRefused, KVCacheStatus
from octavo.engine.memory import parse_bytes

MAX_BODY_BYTES = 4096


class KVCacheRequest(msgspec.Struct, kw_only=True):
    """`kv_cache_memory`: the new budget, bytes or a size as `--kv-cache-memory` takes it. `release`: give
    every block that nobody uses back to the system. Both: first the budget.
    """

    kv_cache_memory: int | str | None = None
    release: bool | None = None


class BlockCounts(msgspec.Struct, frozen=True):
    """used + cached + free = total; target is what total is on its way to."""

    target: int
    total: int
    used: int
    cached: int
    free: int


class KVCacheAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`block_bytes`: keys and values of a block; `extent_bytes`: with its padding, which the budget is
    charged. `resident_bytes`: physical memory that blocks take now, from the system's own accounting.
    `max_model_len`: the longest request in tokens.
    """

    object: str = "kv_cache"
    budget_bytes: int
    resident_bytes: int
    block_bytes: int
    extent_bytes: int
    blocks: BlockCounts
    max_model_len: int


_decoder = msgspec.json.Decoder(KVCacheRequest)


class AdminEndpoints:
    def __init__(self, served: ServedModel, keyring: Keyring) -> None:
        self._served = served
        self._keyring = keyring

    async def keys(self, request: Request) -> Response:
        """The keys in the order of the file, what each allows, and what is left of its tokens this minute;
        never a hash."""
        self._check_admin(request)
        keys = [
            {
                "object": "key",
                **live.settings.described(),
                "tokens_left": None if live.bucket is None else live.bucket.remaining,
            }
            for live in self._keyring.live
        ]
        return Response(msgspec.json.encode({"object": "list", "data": keys}), media_type="application/json")

    async def kv_cache(self, request: Request) -> Response:
        """GET: how it stands. POST: change it, then how it stands. The engine is waited for, so in a
        thread."""
        self._check_admin(request)
        engine = self._served.engine
        if request.method != "POST":
            return self._answer(await asyncio.to_thread(engine.kv_cache_status))
        wanted, budget = _read(await read_body(request, MAX_BODY_BYTES))
        status: KVCacheStatus | None = None
        try:
            if budget is not None:
                status = await asyncio.to_thread(engine.resize_kv_cache, budget)
            if wanted.release or status is None:
                status = await asyncio.to_thread(engine.release_kv_cache)
        except KVCacheRefused as refused:
            raise APIError(
                409 if refused.code == "kv_cache_in_use" else 400,
                f"'kv_cache_memory': {refused.message}.",
                code=refused.code,
                param="kv_cache_memory",
            ) from None
        return self._answer(status)

    def _check_admin(self, request: Request) -> None:
        """Raises APIError 403."""
        path = request.url.path
        key = key_of(request)
        if key is None:
            raise APIError(
                403,
                f"{path} is only there for the owner, and this server has no API key to tell who that is: "
                "'octavo keys add NAME --admin' makes one, or start it with --api-key KEY or OCTAVO_API_KEY.",
                code="api_key_not_configured",
            )
        if not key.settings.admin:
            raise APIError(
                403,
                f"{path} is only there for an admin key, and the key '{key.settings.name}' is none.",
                code="admin_required",
            )

    def _answer(self, status: KVCacheStatus) -> Response:
        body = KVCacheAnswer(
            budget_bytes=status.budget_bytes,
            resident_bytes=status.resident_bytes,
            block_bytes=status.block_bytes,
            extent_bytes=status.extent_bytes,
            blocks=BlockCounts(
                target=status.target_blocks,
                total=status.num_blocks,
                used=status.num_used,
                cached=status.num_cached,
                free=status.num_free,
            ),
            max_model_len=self._served.longest_request,
        )
        return Response(msgspec.json.encode(body), media_type="application/json")


def _read(raw: bytes) -> tuple[KVCacheRequest, int | None]:
    """The request, and its budget in bytes. Raises: APIError 400 with the field's name."""
    wanted, fields = decode(raw, _decoder)
    for field in fields:
        # Elsewhere an unknown field is ignored; here it could be a budget with a typing error.
        if field not in KVCacheRequest.__struct_fields__:
            raise invalid(
                f"'{field}' is not known here; there are 'kv_cache_memory' and 'release'.",
                param=field,
                code="unknown_field",
            )
    budget = wanted.kv_cache_memory
    if budget is None and not wanted.release:
        raise invalid(
            "'kv_cache_memory' (a size such as \"2GiB\", or bytes) or 'release': true is required.",
            param="kv_cache_memory",
            code="missing_required_parameter",
        )
    if isinstance(budget, str):
        try:
            budget = parse_bytes(budget)
        except ValueError as error:
            raise invalid(f"'kv_cache_memory': {error}.", param="kv_cache_memory") from None
    if budget is not None and not 1 <= budget < 1 << 63:
        raise invalid(
            f"'kv_cache_memory' must be from 1 to {(1 << 63) - 1} bytes, not {budget}.",
            param="kv_cache_memory",
        )
    return wanted, budget
