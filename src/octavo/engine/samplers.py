"""From sampling parameters to the native object that draws one choice's tokens."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.engine.sampling_params import SamplingParams
    from octavo.kernels import Sampler


class SamplerFactory(Protocol):
    """Makes the object that `Model.step` draws one choice's tokens with."""

    def __call__(
        self, vocab_size: int, params: SamplingParams, *, choice_index: int, stop_token_ids: frozenset[int]
    ) -> Sampler: ...


def native_sampler(
    vocab_size: int, params: SamplingParams, *, choice_index: int, stop_token_ids: frozenset[int]
) -> Sampler:
    """`octavo.kernels.Sampler` for one choice; without a seed of its own it gets a random one.

    stop_token_ids: what `min_tokens` keeps from being drawn.

    Raises: ValueError for token ids outside the vocabulary.
    """
    from octavo.kernels import Sampler

    return Sampler(
        vocab_size,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed if params.seed is not None else secrets.randbits(63),
        choice_index=choice_index,
        num_logprobs=params.logprobs if params.logprobs is not None else -1,
        logit_bias=dict(params.logit_bias),
        min_tokens=params.min_tokens,
        stop_token_ids=sorted(stop_token_ids),
    )
