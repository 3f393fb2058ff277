"""Fields of OpenAI's and vLLM's requests that Octavo knows and cannot honour.

Ignoring one would answer another question than the one asked: a client that sent `response_format` parses
JSON, one that sent `tools` waits for a call. Such a field is a 400, unless its value says what happens
anyway. Fields nobody knows are ignored, and named once in the log, so that a typing error can be found.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from octavo.api.errors import APIError, invalid

logger = logging.getLogger("octavo.api")

_HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": ({},),
    "logits_processors": ([],),
    "modalities": ([], ["text"]),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Beside null, the values under which ignoring the field changes nothing."""

_NO_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    }
)
"""OpenAI's fields about its own service; clients send them by habit and the answer is the same without
them.
"""


def refuse_unsupported(fields: Mapping[str, msgspec.Raw]) -> None:
    """Raises APIError 400 naming the first field that asks for something Octavo does not do."""
    for name in fields:
        harmless = _HARMLESS_VALUES.get(name)
        if harmless is None:
            continue
        try:
            value = msgspec.json.decode(fields[name])
        except msgspec.DecodeError:
            raise invalid(f"'{name}' is not valid text.", param=name, code="invalid_unicode") from None
        if value is None or value in harmless:
            continue
        allowed = "".join(f" or {msgspec.json.encode(item).decode()}" for item in harmless)
        raise APIError(
            400,
            f"'{name}' is not supported by this server; leave it out, or send null{allowed}.",
            code="unsupported_parameter",
            param=name,
        )


class UnknownFields:
    """Remembers which unknown fields the log has named."""

    MAX_NAMES = 256  # a client that invents names must not grow this without end

    def __init__(self) -> None:
        self._named: set[str] = set()

    def note(self, fields: Iterable[str], known: Iterable[str]) -> None:
        for name in set(fields).difference(known, _HARMLESS_VALUES, _NO_EFFECT, self._named):
            if len(self._named) == self.MAX_NAMES:
                return
            self._named.add(name)
            logger.warning("ignoring unknown request field %s", ascii(name[:64]))
