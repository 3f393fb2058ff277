"""What a request asks of its generation: how tokens are chosen, and when to stop."""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.kernels import Sampler

MAX_CHOICES = 128
"""Most choices of one request, as OpenAI's `n`."""

MAX_LOGPROBS = 20
"""Most alternatives reported with a token, as OpenAI's `top_logprobs`."""

MAX_LOGIT_BIASES = 1024
"""Most tokens with a bias, as OpenAI's `logit_bias`: each costs time at every output token."""

MAX_STOP_STRINGS = 16
"""Most stop strings: OpenAI allows 4, and local clients send a few more (every role name of a chat)."""

MAX_STOP_STRING_LENGTH = 1024
"""Characters of one stop string: text that may begin one is held back from the stream."""

MAX_STOP_TOKEN_IDS = 128
"""Most stop tokens."""

_INT32_MAX = 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class InvalidParameter(ValueError):
    """A parameter of a request is of the wrong type or out of range.

    param: the field's name. message: one sentence with the permitted range and the value that was given.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.message = message

    def renamed(self, names: Mapping[str, str]) -> InvalidParameter:
        """The same mistake, told to somebody who knows some fields by other names (ours -> theirs)."""
        message = self.message
        for ours, theirs in names.items():
            message = re.sub(rf"\b{ours}\b", theirs, message)
        return InvalidParameter(names.get(self.param, self.param), message)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Names and meanings follow vLLM.

    Every field is checked when it is made.

    Raises: InvalidParameter, with the field's name, the permitted range and the value.

    n: choices generated for the prompt, 1 to 128.
    temperature: 0 picks the likeliest token; any finite value from 0. OpenAI stops at 2, vLLM does not.
    top_p: keep the smallest set of likeliest tokens whose probability reaches this; above 0, 1 is off.
    top_k: keep this many likeliest tokens; 0 or -1 is off, and is stored as 0.
    min_p: keep tokens at least this probable relative to the likeliest, 0 (off) to 1.
    repetition_penalty: for every token in the prompt or the output, divides its logit if above zero and
        multiplies it if below; 1 is off, 0.01 to 100 (beyond it float32 logits overflow).
    presence_penalty, frequency_penalty: subtracted from the logit of a token in the output, once, and once
        for each time it appeared; -2 to 2, as OpenAI.
    seed: any signed 64-bit integer; the same request with the same seed gets the same tokens. None draws a
        fresh seed.
    max_tokens: output tokens, at least 1; None means up to the context's limit.
    min_tokens: output tokens before end-of-text or a stop token may be drawn, 0 to max_tokens.
    stop: up to 16 strings of 1 to 1,024 characters that end the output; one string may be given alone.
        Stored as a tuple.
    stop_token_ids: up to 128 token ids that end the output. Stored as a tuple.
    ignore_eos: go on after an end-of-text token.
    logprobs: None reports none; 0 the sampled token's; up to 20 also those of as many likeliest tokens.
        Nats, of the raw logits.
    logit_bias: token id -> -100 to 100, added to its logit; up to 1,024 entries.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        self._integer("n", 1, MAX_CHOICES)
        self._number("temperature", 0.0, math.inf)
        self._number("top_p", 0.0, 1.0, above=True)
        self._integer("top_k", -1, _INT32_MAX, "be an integer of at least 1, or 0 or -1 (off)")
        self._store("top_k", max(self.top_k, 0))
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.01, 100.0)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        if self.seed is not None:
            self._integer("seed", _INT64_MIN, _INT64_MAX, "be a signed 64-bit integer")
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, _INT32_MAX)
        self._integer("min_tokens", 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens",
                f"min_tokens must be at most max_tokens of {self.max_tokens}, got {self.min_tokens}",
            )
        self._store("stop", self._checked_stop())
        self._store("stop_token_ids", self._checked_stop_token_ids())
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", "be true or false", self.ignore_eos)
        if self.logprobs is not None:
            self._integer("logprobs", 0, MAX_LOGPROBS)
        self._store("logit_bias", self._checked_logit_bias())

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises: InvalidParameter, with the field, the id and vocab_size, for an id that is outside."""
        for param, token_ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise InvalidParameter(
                        param,
                        f"{param} must hold token ids below the vocabulary's size of {vocab_size}, "
                        f"got {token_id}",
                    )

    def make_sampler(
        self, vocab_size: int, *, choice_index: int = 0, eos_token_ids: Collection[int] = ()
    ) -> Sampler:
        """The native sampler of one choice. Made once for its whole stream: a missing seed is drawn here.

        vocab_size: of the model's logits. choice_index: 0 to n - 1; each choice has draws of its own.
        eos_token_ids: the model's end-of-text tokens, banned with stop_token_ids during the first min_tokens
            (unless ignore_eos, which lets them pass as ordinary tokens).

        Raises: InvalidParameter as `check_vocabulary` does.
        """
        from octavo.kernels import Sampler

        self.check_vocabulary(vocab_size)
        seed = self.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little", signed=True)
        banned = set(self.stop_token_ids)
        if not self.ignore_eos:
            banned.update(eos_token_ids)
        return Sampler(
            vocab_size,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=seed,
            choice_index=choice_index,
            num_logprobs=-1 if self.logprobs is None else min(self.logprobs, vocab_size),
            logit_bias=dict(self.logit_bias),
            min_tokens=self.min_tokens,
            stop_token_ids=sorted(banned),
        )

    def _store(self, param: str, value: object) -> None:
        object.__setattr__(self, param, value)

    def _integer(self, param: str, least: int, most: int, must: str | None = None) -> None:
        """Stores the field as a Python int (numpy integers are welcome, booleans are not)."""
        if must is None:
            must = f"be an integer from {least} to {most}"
        self._store(param, _integer(param, getattr(self, param), least, most, must))

    def _number(self, param: str, least: float, most: float, *, above: bool = False) -> None:
        """Stores the field as a float. above: `least` itself is not permitted."""
        if math.isinf(most):
            must = f"be a finite number of at least {least:g}"
        elif above:
            must = f"be a number above {least:g} and at most {most:g}"
        else:
            must = f"be a number from {least:g} to {most:g}"
        self._store(param, _number(param, getattr(self, param), least, most, must, above=above))

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple):
            raise _wrong("stop", "be a string or a list of strings", stop)
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidParameter(
                "stop", f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(stop)}"
            )
        for text in stop:
            if not isinstance(text, str):
                raise _wrong("stop", "be a string or a list of strings", text)
            if not 1 <= len(text) <= MAX_STOP_STRING_LENGTH:
                raise InvalidParameter(
                    "stop",
                    f"stop must hold strings of 1 to {MAX_STOP_STRING_LENGTH} characters, "
                    f"got one of {len(text)}",
                )
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise _wrong("stop", "hold valid Unicode without lone surrogates", text)
        return tuple(stop)

    def _checked_stop_token_ids(self) -> tuple[int, ...]:
        token_ids = self.stop_token_ids
        if not isinstance(token_ids, list | tuple):
            raise _wrong("stop_token_ids", "be a list of token ids", token_ids)
        if len(token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameter(
                "stop_token_ids",
                f"stop_token_ids must hold at most {MAX_STOP_TOKEN_IDS} token ids, got {len(token_ids)}",
            )
        return tuple(_token_id("stop_token_ids", token_id) for token_id in token_ids)

    def _checked_logit_bias(self) -> dict[int, float]:
        bias = self.logit_bias
        if not isinstance(bias, Mapping):
            raise _wrong("logit_bias", "be a mapping from token ids to numbers", bias)
        if len(bias) > MAX_LOGIT_BIASES:
            raise InvalidParameter(
                "logit_bias", f"logit_bias must hold at most {MAX_LOGIT_BIASES} tokens, got {len(bias)}"
            )
        must = "hold token ids with numbers from -100 to 100"
        return {
            _token_id("logit_bias", token_id): _number("logit_bias", value, -100.0, 100.0, must)
            for token_id, value in bias.items()
        }


def _wrong(param: str, must: str, value: object) -> InvalidParameter:
    try:
        got = reprlib.repr(value)  # short, whatever a client sends
    except ValueError:
        got = "an integer too long to print"  # Python refuses above 4,300 digits
    return InvalidParameter(param, f"{param} must {must}, got {got}")


def _integer(param: str, value: object, least: int, most: int, must: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise _wrong(param, must, value)
    return int(value)


def _token_id(param: str, value: object) -> int:
    return _integer(param, value, 0, _INT32_MAX, "hold token ids of at least 0")


def _number(param: str, value: object, least: float, most: float, must: str, *, above: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong(param, must, value)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond float64
        raise _wrong(param, must, value) from None
    if not (least < number if above else least <= number) or number > most or math.isinf(number):
        raise _wrong(param, must, value)
    return number
