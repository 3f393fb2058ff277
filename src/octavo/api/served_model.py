"""The one model a server serves: its name, its text side and its engine, as the endpoints see them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from octavo.api.errors import APIError, invalid
from octavo.api.integers import check_token_ids
from octavo.api.latest_only import LatestOnly
from octavo.engine.records import RequestRecords
from octavo.text.tokenizer import TextLost

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.text.chat_template import ChatTemplate
    from octavo.text.tokenizer import Tokenizer


COUNTED_CHARS = 2**20
"""Up to here a refusal says exactly how many tokens a text has: a third of a second, in a thread."""


class ServedModel:
    """`id` is the name clients use; `created` (seconds since 1970) is when serving began; `records` are what
    clients may ask of their requests; `latest_only` are the open requests that a newer one ends.

    `chat_prompt`, `prompts` and `text_of` take as long as their text is: not for the event loop where that is
    long. Any thread may call them.
    """

    def __init__(
        self, id: str, engine: Engine, tokenizer: Tokenizer, chat_template: ChatTemplate | None
    ) -> None:
        self.id = id
        self.engine = engine
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.created = int(time.time())
        self.records = RequestRecords(remembers_conversations=engine.config.enable_prefix_caching)
        self.latest_only = LatestOnly()

    def check_name(self, name: str | None) -> None:
        """A request may leave the model out. Raises APIError 404 listing what is served, for any other
        name.
        """
        if name is not None and name != self.id:
            raise APIError(
                404,
                f"The model {_quoted(name)} is not served here; there is '{self.id}'.",
                code="model_not_found",
                param="model",
            )

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Messages through the chat template to token ids. Raises APIError 400, ChatTemplateError."""
        text = self.render(messages)
        self._refuse_hopeless(text, param="messages")
        # Templates write their own control tokens, the one at the beginning included.
        return self.encode(text, add_special=False, param="messages")

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The one text that the model continues. Raises APIError 400 without a template,
        ChatTemplateError.
        """
        if self.chat_template is None:
            raise invalid(
                f"The model '{self.id}' has no chat template; use /v1/completions.",
                param="messages",
                code="unsupported_parameter",
            )
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def prompts(self, given: Sequence[str | list[int]]) -> list[list[int]]:
        """The token ids of each prompt. Control tokens spelled out in text are taken as such: this door has
        no template, so clients write their own. Raises APIError 400.
        """
        if len(given) == 1:
            return [self._prompt(given[0], param="prompt")]
        return [self._prompt(one, param=f"prompt[{index}]") for index, one in enumerate(given)]

    def _prompt(self, given: str | list[int], *, param: str) -> list[int]:
        if isinstance(given, list):
            if len(given) >= self.longest_request:
                raise self._too_long(f"{len(given):,} tokens", param=param)
            check_token_ids(given, self.tokenizer.vocab_size, param=param)
            token_ids = given
        else:
            self._refuse_hopeless(given, param=param)
            token_ids = self.encode(given, add_special=True, param=param)
        if not token_ids:
            raise invalid(f"'{param}' is empty; it needs at least one token.", param=param)
        return token_ids

    def encode(self, text: str, *, add_special: bool, param: str) -> list[int]:
        """Token ids of a text with control tokens. Raises APIError 400 where the vocabulary cannot write
        it.
        """
        try:
            return self.tokenizer.encode(text, add_special=add_special, parse_special=True, lossless=True)
        except TextLost as error:
            raise invalid(f"'{param}': {error}.", param=param, code="unsupported_text") from None

    def text_of(self, prompt: str | list[int]) -> str:
        """A prompt as text, to be echoed."""
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special=False)

    def _refuse_hopeless(self, text: str, *, param: str) -> None:
        """Text that is too long whatever its tokens are is refused before seconds go into counting them."""
        if len(text) < COUNTED_CHARS:
            return
        least = len(text.encode()) // self._longest_token
        if least >= self.longest_request:
            raise self._too_long(f"at least {least:,} tokens ({len(text):,} characters)", param=param)

    def _too_long(self, has: str, *, param: str) -> APIError:
        message = (
            f"the prompt has {has}, and the longest request is {self.longest_request:,} tokens, prompt and "
            "answer together"
        )
        return APIError(400, message, code="context_length_exceeded", param=param)

    @cached_property
    def _longest_token(self) -> int:
        """Bytes. Asked for once, by the first long text: a vocabulary of 262,144 tokens takes a moment to go
        through.
        """
        return (
            max(len(self.tokenizer.token_bytes(token_id)) for token_id in range(self.tokenizer.vocab_size))
            or 1
        )

    @property
    def longest_request(self) -> int:
        """Tokens, prompt and answer together."""
        return self.engine.longest_request


def _quoted(name: str) -> str:
    return f"'{name}'" if len(name) <= 128 else f"'{name[:128]}…'"
