"""The HTTP application: which path is answered by whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.api.admin import AdminEndpoints
from octavo.api.auth import KeyAuth, key_of
from octavo.api.errors import APIError, ErrorBoundary, answer
from octavo.api.key_limits import longest_request
from octavo.api.keys import Keyring
from octavo.api.openai.chat import ChatCompletions
from octavo.api.openai.completions import Completions
from octavo.api.openai.unsupported import UnknownFields
from octavo.api.request_records import RequestEndpoints
from octavo.api.served_model import ServedModel
from octavo.api.tokens import TokenEndpoints
from octavo.engine.request import RequestFailed
from octavo.engine.sampling_params import InvalidParameter
from octavo.text.chat_template import ChatTemplateError
from octavo.text.tokenizer import InvalidText

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.text.chat_template import ChatTemplate
    from octavo.text.tokenizer import Tokenizer


class ModelCard(msgspec.Struct, kw_only=True):
    """`max_model_len`: the longest request in tokens that the caller may send, prompt and answer together;
    vLLM's field."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    max_model_len: int


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    model_id: str,
    *,
    keyring: Keyring | None = None,
    log_content: bool = False,
) -> Starlette:
    """The ASGI application over one started engine. It owns nothing: whoever made the engine closes it.

    keyring: the keys that are asked for on every route but /health; where there are none nobody is asked, and
    /admin refuses. The engine is told their quotas.
    log_content: let the log hold prompts, answers, and exceptions that may quote them.
    """
    keyring = keyring if keyring is not None else Keyring()
    keyring.tell_quotas(engine.set_kv_quotas)
    served = ServedModel(model_id, engine, tokenizer, chat_template)
    unknown_fields = UnknownFields()
    tokens = TokenEndpoints(served, unknown_fields)
    status = StatusEndpoints(served)
    requests = RequestEndpoints(served)
    admin = AdminEndpoints(served, keyring)

    middleware = [Middleware(ErrorBoundary, log_content=log_content), Middleware(KeyAuth, keyring=keyring)]
    post = ["POST"]
    routes = [
        Route(
            "/v1/chat/completions",
            ChatCompletions(served, unknown_fields, log_content=log_content).answer,
            methods=post,
        ),
        Route(
            "/v1/completions",
            Completions(served, unknown_fields, log_content=log_content).answer,
            methods=post,
        ),
        Route("/v1/models", status.models),
        Route("/v1/models/{name:path}", status.model),
        Route("/v1/requests", requests.list),
        Route("/v1/requests/{request_id}", requests.one),
        Route("/tokenize", tokens.tokenize, methods=post),
        Route("/detokenize", tokens.detokenize, methods=post),
        Route("/health", status.health),
        Route("/metrics", status.metrics),
        Route("/admin/keys", admin.keys),
        Route("/admin/kv-cache", admin.kv_cache, methods=["GET", *post]),
    ]
    expected = (APIError, HTTPException, RequestFailed, InvalidParameter, ChatTemplateError, InvalidText)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=dict.fromkeys(expected, answer))
    app.router.redirect_slashes = False
    return app


class StatusEndpoints:
    """What is served, whether it lives, and how it does."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    async def models(self, request: Request) -> Response:
        return _json(ModelList([self._card(request)]))

    async def model(self, request: Request) -> Response:
        self._served.check_name(request.path_params["name"])
        return _json(self._card(request))

    async def health(self, _: Request) -> Response:
        """200 while work progresses or there is none; 503 when there is work and no step has completed for a
        while.
        """
        if self._served.engine.healthy():
            return _json({"status": "ok"})
        raise APIError(503, "There is work, and no step has completed for a while.", code="unhealthy")

    async def metrics(self, _: Request) -> Response:
        # Imported by the first scrape: start-up is counted.
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._served.engine.collector)
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    def _card(self, request: Request) -> ModelCard:
        served = self._served
        longest = longest_request(key_of(request), served.longest_request)
        return ModelCard(id=served.id, created=served.created, max_model_len=longest)


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
