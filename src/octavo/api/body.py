"""Reading a request body: bounded, and with the name of the field that is wrong.

`msgspec` decodes and type-checks in one pass and its errors carry a path. JSON that is broken has no path,
yet the usual causes (NaN, Infinity, half of a surrogate pair) do sit in a field; a slower second reading
finds it for the message.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from octavo.api.errors import APIError, invalid

T = TypeVar("T")

MAX_BODY_BYTES = 32 * 2**20
"""A context of 262,144 tokens is about 1 MiB of text; this leaves room for escapes and is read into memory
once.
"""

OFFLOAD_BYTES = 16 * 1024
"""Work on more text than this (about 5 ms of tokenising) goes to a thread, so that the streams of others go
on.
"""

_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>.*)`$")
_EXPECTED = re.compile(r"^Expected `(?P<expected>[^`]+)`, got `(?P<got>[^`]+)`")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]+)`")
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_SURROGATE = re.compile("[\ud800-\udfff]")


async def offload(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """Run `work(*arguments)`, in a thread where its text of `size` bytes would hold up the event loop."""
    if size <= OFFLOAD_BYTES:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


async def read_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """The whole body. Raises APIError 413 with both numbers where it is longer than `limit` bytes."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        elif (
            size > 2 * limit
        ):  # up to here it is read and dropped: closing at once would lose the answer with the data
            break
    if size > limit:
        raise APIError(
            413,
            f"The request body has at least {size:,} bytes; the limit is {limit:,}.",
            code="request_too_large",
        )
    return b"".join(chunks)


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> tuple[T, dict[str, msgspec.Raw]]:
    """Decode a JSON object into the decoder's struct.

    Returns: the struct, and every top-level field by name, undecoded.
    Raises: APIError 400; `param` names the field ("messages[0].content") wherever one can be named.
    """
    if not body:
        raise invalid("The request body is empty; it must be a JSON object.", code="invalid_json")
    try:
        # Every key first: the struct alone would ignore the unknown ones without a word.
        fields = _fields_decoder.decode(body)
        return decoder.decode(body), fields
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except RecursionError:
        raise invalid("The request body is nested too deeply.", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from None


_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _wrong_type(said: str) -> APIError:
    path = _PATH.search(said)
    param = path["path"].replace("[...]", "[]") if path else None
    if missing := _MISSING.match(said):
        param = f"{param}.{missing['field']}" if param else missing["field"]
        return invalid(f"'{param}' is required.", param=param, code="missing_required_parameter")
    if match := _EXPECTED.match(said):
        expected, got = _words(match["expected"]), _words(match["got"])
        what = f"'{param}'" if param else "The request body"
        if "at `key` in" in said:
            what = f"Every key of {what}"
        return invalid(f"{what} must be {expected}, not {got}.", param=param, code="invalid_type")
    problem = said[: path.start()] if path else said
    return invalid(f"'{param}': {problem[:1].lower()}{problem[1:]}." if param else f"{problem}.", param=param)


def _words(types: str) -> str:
    names = [name for name in types.split(" | ") if name != "null" or types == "null"]
    return " or ".join(_WORDS.get(name, name) for name in names)


class _NotANumber:
    def __init__(self, text: str) -> None:
        self.text = text


def _malformed(body: bytes, said: str) -> APIError:
    """Say what breaks the JSON and, where it is inside a value that can be read otherwise, in which field."""
    try:
        text = body.decode("utf-8", "surrogateescape")  # bytes that are not UTF-8 become lone surrogates too
        for path, value in _walk(json.loads(text, parse_constant=_NotANumber)):
            if isinstance(value, _NotANumber):
                return invalid(
                    f"'{path}' must be a finite number; {value.text} is not JSON.",
                    param=path,
                    code="invalid_json",
                )
            if isinstance(value, str) and _SURROGATE.search(value):
                return invalid(
                    f"'{path}' is not valid text: it has half a surrogate pair or bytes beside UTF-8.",
                    param=path or None,
                    code="invalid_unicode",
                )
    except (ValueError, RecursionError):
        pass  # broken beyond reading: the position is all there is to say
    return invalid(f"The request body is not valid JSON: {said}.", code="invalid_json")


def _walk(document: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf and key with its path, in document order, without recursion."""
    pending: list[tuple[str, Any]] = [("", document)]
    while pending:
        path, value = pending.pop()
        children: Iterable[tuple[str, Any]]
        if isinstance(value, dict):
            for key in value:
                yield path, key
            children = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
        elif isinstance(value, list):
            children = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        else:
            yield path, value
            continue
        pending.extend(reversed(list(children)))
