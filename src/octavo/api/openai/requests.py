"""What a client may send: request bodies, field by field, and their way to `SamplingParams`.

Types are checked while decoding; ranges by `SamplingParams`, once for every door of the house. A field that
is null counts as left out, as OpenAI's API has it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.api.errors import invalid
from octavo.api.integers import Int64
from octavo.engine.sampling_params import InvalidParameter, SamplingParams

MAX_TAG_CHARACTERS = 128

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where none is given, as in OpenAI's API; less where the context ends
first.
"""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles taken, and what the template is told: OpenAI renamed `system` to `developer`, templates did not."""

_PASSED_ON = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "logit_bias",
)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields that chat completions and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[Int64, float] | None = None
    best_of: Int64 | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None
    background: bool | None = None
    deadline: float | None = None
    latest_only: str | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Raises APIError 400 for fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise invalid("'stream_options' is only allowed with 'stream': true.", param="stream_options")
        if self.deadline is not None and not self.deadline > 0:
            raise invalid(f"'deadline' must be more than 0 seconds, not {self.deadline:g}.", param="deadline")
        if self.latest_only is not None and not 0 < len(self.latest_only) <= MAX_TAG_CHARACTERS:
            raise invalid(
                f"'latest_only' must have 1 to {MAX_TAG_CHARACTERS} characters, not "
                f"{len(self.latest_only):,}.",
                param="latest_only",
            )
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            raise invalid(
                f"'best_of' is {self.best_of} and 'n' is {n}; all choices are returned, so both are one.",
                param="best_of",
                code="unsupported_parameter",
            )

    def sampling_params(
        self, *, max_tokens: int | None, logprobs: int | None, vocab_size: int
    ) -> SamplingParams:
        """Raises InvalidParameter: a number out of its range, or a token the model does not have."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _PASSED_ON}
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given["stop_token_ids"] = tuple(self.stop_token_ids or ())
        given["max_tokens"] = max_tokens
        given["logprobs"] = logprobs
        params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
        params.check_vocabulary(vocab_size)
        return params


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise invalid(
                f"'max_tokens' is {self.max_tokens} and 'max_completion_tokens' is "
                f"{self.max_completion_tokens}; they are two names of one limit.",
                param="max_completion_tokens",
            )

    @property
    def limit_name(self) -> str:
        """Under which of its two names the limit of output tokens was given."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def params(self, vocab_size: int) -> SamplingParams:
        """Raises InvalidParameter, with the names that chat has for the limit and the logprobs."""
        try:
            return self.sampling_params(
                max_tokens=getattr(self, self.limit_name),
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                vocab_size=vocab_size,
            )
        except InvalidParameter as error:
            raise error.renamed({"max_tokens": self.limit_name, "logprobs": "top_logprobs"}) from None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | Int64 | list[Int64]]
    echo: bool | None = None
    logprobs: Int64 | None = None

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            raise invalid(
                "'logprobs' together with 'echo' asks for those of the prompt, which are not computed.",
                param="logprobs",
                code="unsupported_parameter",
            )

    def params(self, vocab_size: int) -> SamplingParams:
        """Raises InvalidParameter."""
        return self.sampling_params(max_tokens=self.max_tokens, logprobs=self.logprobs, vocab_size=vocab_size)


def template_messages(messages: list[ChatMessage], *, param: str = "messages") -> list[dict[str, str]]:
    """The messages as chat templates want them: role and text. Raises APIError 400 naming the message."""
    if not messages:
        raise invalid(f"'{param}' is empty; it needs at least one message.", param=param)
    return [_template_message(message, f"{param}[{index}]") for index, message in enumerate(messages)]


def _template_message(message: ChatMessage, where: str) -> dict[str, str]:
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join(f"'{name}'" for name in _ROLES)
        raise invalid(f"'{where}.role' must be one of {known}.", param=f"{where}.role")
    if message.tool_calls or message.function_call is not None:
        field = "tool_calls" if message.tool_calls else "function_call"
        raise invalid(
            f"'{where}.{field}': tool calls are not supported by this server.",
            param=f"{where}.{field}",
            code="unsupported_parameter",
        )
    if message.content is None:
        raise invalid(
            f"'{where}.content' is required.", param=f"{where}.content", code="missing_required_parameter"
        )
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    texts = []
    for index, part in enumerate(message.content):
        if part.type != "text":
            raise invalid(
                f"'{where}.content[{index}].type' must be 'text': this server reads no other kind.",
                param=f"{where}.content[{index}].type",
                code="unsupported_parameter",
            )
        if part.text is None:
            missing = f"{where}.content[{index}].text"
            raise invalid(f"'{missing}' is required.", param=missing, code="missing_required_parameter")
        texts.append(part.text)
    return {"role": role, "content": "\n".join(texts)}


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The one or many prompts of a completion request: each text, or token ids. Raises APIError 400."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("'prompt' is empty.", param="prompt")
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind:
            raise invalid(
                f"'prompt[{index}]' is of another kind than 'prompt[0]'; a list holds texts, token ids, or "
                "lists of token ids.",
                param=f"prompt[{index}]",
                code="invalid_type",
            )
    if kind is int:
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]
