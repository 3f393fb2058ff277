"""What a key's limits say to one request: refusals with the key's own numbers, and nobody else's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.api.errors import APIError
from octavo.api.rate_limit import MINUTE

if TYPE_CHECKING:
    from octavo.api.keys import LiveKey
    from octavo.api.rate_limit import Reservation, TokenBucket
    from octavo.engine.request import RequestStats
    from octavo.engine.sampling_params import SamplingParams


def longest_request(key: LiveKey | None, of_server: int) -> int:
    """Tokens of the longest request, prompt and answer together, that a caller may send."""
    limit = None if key is None else key.settings.max_model_len
    return of_server if limit is None else min(limit, of_server)


def check_context(
    key: LiveKey | None, num_prompt: int, params: SamplingParams, *, prompt_param: str, limit_param: str
) -> None:
    """Whether a key's longest request holds a prompt and the answer that was asked for.

    prompt_param, limit_param: the request's fields for the prompt and for the limit of output tokens.
    Raises: APIError 403 with both numbers.
    """
    if key is None or key.settings.max_model_len is None:
        return
    limit, name = key.settings.max_model_len, key.settings.name
    if num_prompt >= limit:
        raise APIError(
            403,
            f"The prompt has {num_prompt:,} tokens, and the longest request of the key '{name}' is {limit:,} "
            "tokens, prompt and answer together.",
            code="context_length_exceeded",
            param=prompt_param,
        )
    asked = params.min_tokens if params.max_tokens is None else params.max_tokens
    if num_prompt + asked > limit:
        field = "min_tokens" if params.max_tokens is None else limit_param
        raise APIError(
            403,
            f"{num_prompt + asked:,} tokens are needed ({num_prompt:,} of the prompt and {field} {asked:,}), "
            f"and the longest request of the key '{name}' is {limit:,} tokens.",
            code="context_length_exceeded",
            param=field,
        )


def reserve(key: LiveKey | None, num_prompt: int) -> Reservation | None:
    """Take the tokens of a request's prompts from the minute of its key; None where nothing is limited.

    Raises: APIError 429.
    """
    if key is None or key.bucket is None:
        return None
    bucket = key.bucket
    reservation = bucket.reserve(num_prompt)
    if reservation is not None:
        return reservation
    needed, seconds = min(num_prompt, bucket.limit), bucket.seconds_until(num_prompt)
    raise APIError(
        429,
        f"The key '{key.settings.name}' has {bucket.limit:,} tokens a minute: {bucket.remaining:,} are left "
        f"and the prompt needs {needed:,}. They will be there in {seconds:.1f} seconds.",
        code="rate_limit_exceeded",
        type="tokens",
        headers={"Retry-After": str(max(1, math.ceil(seconds)))},
    )


def computed_tokens(choices: Iterable[RequestStats]) -> int:
    """What a request is charged: prompt tokens that no cache had, and output. What a pause threw away and was
    computed again is not the client's."""
    return sum(
        stats.num_prompt_tokens - stats.num_cached_tokens + stats.num_output_tokens
        if stats.num_output_tokens
        else stats.num_computed_tokens  # left before the prompt was through
        for stats in choices
    )


def rate_limit_headers(bucket: TokenBucket) -> dict[str, str]:
    """OpenAI's headers."""
    return {
        "x-ratelimit-limit-tokens": str(bucket.limit),
        "x-ratelimit-remaining-tokens": str(bucket.remaining),
        "x-ratelimit-reset-tokens": _duration(bucket.seconds_to_full),
    }


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.25s, 0s."""
    minutes, rest = divmod(math.ceil(seconds * 1000) / 1000, MINUTE)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
