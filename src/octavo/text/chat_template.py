"""The chat template a model file carries: messages to the one text the model was trained to continue.

Templates are Jinja2 programs written for Hugging Face's `apply_chat_template`; the environment here gives
them the same settings and functions (`raise_exception`, `strftime_now`, `tojson`, `{% generation %}`, loop
controls). They come with a downloaded file, so they run in Jinja's immutable sandbox, with bounds on the
template, on what it multiplies and on what it writes.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.text.file_keys import FileKeys
from octavo.text.shield import Shield

if TYPE_CHECKING:
    import jinja2

MAX_TEMPLATE_CHARS = 1 << 20
MAX_PROMPT_CHARS = 1 << 26
"""64 Mi characters: far beyond any context, small enough that a template in a loop ends as an error."""

_UNKNOWN, _CONTROL = 2, 3  # the kinds of tokens that `parse_special` reads besides user-defined ones
# Whose words may be quoted from anywhere. The operator writes `system`; an assistant's message may replay
# what a model wrote.
_SHIELDED_ROLES = frozenset({"user", "tool", "function", "ipython"})


class ChatTemplateError(Exception):
    """The messages cannot be rendered: the template's own words, or what is wrong with the template."""


class ChatTemplate:
    """One compiled template. `render` may be called from any thread."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        control_tokens: Sequence[str] = (),
    ) -> None:
        """source: Jinja2. special_tokens: `bos_token`, `eos_token`, ... as the template may write them.
        control_tokens: spellings that a person's text must not smuggle in (see `shield`).

        Raises: ChatTemplateError if the source does not compile or is longer than MAX_TEMPLATE_CHARS.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(
                f"the model's chat template has {len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}"
            )
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._shield = Shield(control_tokens)
        self._template = _compile(source)
        self._wants_parts = self._reads_only_parts()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> ChatTemplate | None:
        """The template in a file's metadata (`tokenizer.chat_template`), or None where there is none.

        Raises: ChatTemplateError if it does not compile, ModelFileError if a key is of another type than its
            own.
        """
        keys = FileKeys(metadata)
        source = keys.text("tokenizer.chat_template")
        if source is None or not source.strip():
            return None
        tokens = keys.texts("tokenizer.ggml.tokens") or []
        kinds = keys.whole_numbers("tokenizer.ggml.token_type") or []
        special = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = keys.token_id(key)
            # Published files name padding beyond their vocabulary; the template then finds none.
            if token_id is not None and 0 <= token_id < len(tokens):
                special[f"{name}_token"] = tokens[token_id]
        control = [token for token, kind in zip(tokens, kinds, strict=False) if kind in (_UNKNOWN, _CONTROL)]
        return cls(source, special_tokens=special, control_tokens=control)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt for `messages` ({"role", "content", ...}; content: text, None, or a list of text parts).

        Encode the result with `parse_special=True`. Control tokens spelled in the words of users and tools
        are marked (see `shield`) and then read as ordinary text. Text parts are joined with newlines, as
        llama.cpp and vLLM join them, unless the template reads parts itself.

        Raises: ChatTemplateError with the template's message (for example: roles must alternate), for a part
            that is not text, or for a prompt over MAX_PROMPT_CHARS.
        """
        plain = [self._plain_message(message, number) for number, message in enumerate(messages)]
        return self._run(plain, add_generation_prompt)

    def _run(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            ):
                length += len(piece)
                if length > MAX_PROMPT_CHARS:
                    raise ChatTemplateError(
                        f"the rendered prompt is longer than {MAX_PROMPT_CHARS} characters"
                    )
                pieces.append(piece)
        except ChatTemplateError:
            raise
        except Exception as error:
            # A template is somebody else's program: whatever it raises is its own fault.
            raise ChatTemplateError(f"the model's chat template failed: {error}") from error
        return "".join(pieces)

    def _plain_message(self, message: Mapping[str, Any], number: int) -> dict[str, Any]:
        """The message as the template reads it: text, or text parts where it wants them; shielded."""
        content = message.get("content")
        texts = [content or ""] if isinstance(content, str | None) else _texts_of_parts(content, number)
        if message.get("role") in _SHIELDED_ROLES:
            texts = [self._shield.apply(text) for text in texts]
        if self._wants_parts:
            return {**message, "content": [{"type": "text", "text": text} for text in texts]}
        return {**message, "content": "\n".join(texts)}

    def _reads_only_parts(self) -> bool:
        """Whether the template leaves out plain text but writes text parts (some multimodal families)."""
        needle = "Qhq7 needle"
        try:
            if needle in self._run([{"role": "user", "content": needle}], True):
                return False
            return needle in self._run(
                [{"role": "user", "content": [{"type": "text", "text": needle}]}], True
            )
        except ChatTemplateError:
            return False  # it refuses such a conversation; what it says is for the caller who tries one


def _texts_of_parts(content: object, number: int) -> list[str]:
    if not isinstance(content, Sequence):
        raise ChatTemplateError(f"content of message {number} must be text or a list of text parts")
    texts = []
    for place, part in enumerate(content):
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatTemplateError(
                f"content part {place} of message {number} has type {kind!r}; only 'text' parts are supported"
            )
        texts.append(part["text"])
    return texts


def _compile(source: str) -> jinja2.Template:
    import jinja2

    from octavo.text.template_sandbox import TemplateSandbox

    sandbox = TemplateSandbox()
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    try:
        return sandbox.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the model's chat template is broken at line {error.lineno}: {error.message}"
        ) from error


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: Jinja's own escapes `<`, `>` and `&`, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
