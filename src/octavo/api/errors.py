"""Every error the server answers with, in one shape: `{"error": {"message", "type", "code", "param"}}`.

Whatever goes wrong on the way of a request ends here, so that a client needs one parser: mistakes in the
request (400, 401, 404, 405, 413), refusals by the engine (400, 503) and faults of our own (500). Messages
carry the numbers that decided; a fault of ours tells the client nothing more, because its cause may quote
somebody's text.
"""

from __future__ import annotations

import logging
import math
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.engine.fault import describe
from octavo.engine.request import RequestFailed, RequestRefused
from octavo.engine.sampling_params import InvalidParameter
from octavo.text.chat_template import ChatTemplateError
from octavo.text.tokenizer import InvalidText

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("octavo.api")

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

_UNAVAILABLE = frozenset({"shutting_down", "engine_failed", "queue_full"})
"""Codes of the engine that say: not now, or not here. A client may try again."""


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    code: str | None
    param: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class APIError(Exception):
    """An answer that is not a success: HTTP status, and what the body says."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.type = type or (INVALID_REQUEST if status < 500 else SERVER_ERROR)
        self.headers = headers or {}

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, self.type, self.code, self.param)))

    def response(self) -> Response:
        return Response(self.body(), self.status, headers=self.headers, media_type="application/json")


def invalid(message: str, *, param: str | None = None, code: str | None = "invalid_value") -> APIError:
    """A 400: the request says something it cannot mean."""
    return APIError(400, message, param=param, code=code)


def from_exception(error: Exception, *, prompt_param: str | None = None) -> APIError:
    """The answer to any exception. `prompt_param` is the field that held the prompt, for refusals about its
    length.
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestRefused):
        status = 503 if error.code in _UNAVAILABLE else 400
        headers = {"Retry-After": str(math.ceil(max(1.0, error.retry_after or 1.0)))} if status == 503 else {}
        param = error.param or (prompt_param if status == 400 else None)
        return APIError(status, error.message, code=error.code, param=param, headers=headers)
    if isinstance(error, RequestFailed):
        return APIError(503 if error.code in _UNAVAILABLE else 500, error.message, code=error.code)
    if isinstance(error, InvalidParameter):
        return invalid(error.message, param=error.param)
    if isinstance(error, ChatTemplateError):
        return invalid(f"The model's chat template refused the messages: {error}", param="messages")
    if isinstance(error, InvalidText):
        return invalid(f"The prompt cannot be read: {error}.", param=prompt_param, code="invalid_unicode")
    if isinstance(error, HTTPException):
        return _from_http_exception(error)
    return APIError(
        500, "The server failed to handle this request; its log has the cause.", code="internal_error"
    )


def log_fault(error: BaseException, what: str, *, log_content: bool) -> None:
    """Write where an unexpected exception came from. Its text may quote a prompt, so that only with
    `log_content`.
    """
    logger.error("%s failed\n%s", what, describe(error, log_content=log_content))


def _from_http_exception(error: HTTPException) -> APIError:
    detail = error.detail or HTTPStatus(error.status_code).phrase
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return APIError(error.status_code, detail, code=code, headers=dict(error.headers or {}))


def answer(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for everything that names a status of its own."""
    failure = from_exception(error)
    if failure.status == 404 and failure.code == "not_found":
        failure.message = (
            f"There is nothing at {request.url.path}; OpenAI's API is under /v1, as in /v1/chat/completions."
        )
    elif failure.status == 405:
        allowed = failure.headers.get("Allow", "another method")
        failure.message = f"{request.method} is not allowed on {request.url.path}; it takes {allowed}."
    return failure.response()


class ErrorBoundary:
    """The outermost layer: an exception nobody expected becomes a 500 without content, and a traceback in the
    log.
    """

    def __init__(self, app: ASGIApp, *, log_content: bool) -> None:
        self.app = app
        self.log_content = log_content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def remember_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, remember_start)
        except ClientDisconnect:
            return  # it left while it was still sending its request: nobody is there to be told
        except Exception as error:
            log_fault(error, f"{scope['method']} {scope['path']}", log_content=self.log_content)
            if started:  # too late for a status: closing the connection is the only honest end
                raise ConnectionAbortedError("a response broke off") from None
            await from_exception(error).response()(scope, receive, send)
