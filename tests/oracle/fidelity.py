"""How far apart two sets of logits are, and what each type of KV cache costs on real text."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.model.model import Model
from oracle.float64_llama import Float64Llama
from oracle.teacher_forced import log_softmax, paged_logits

CONTEXT = 4352
"""Tokens of the long text: 17 runs of attention."""
POSITIONS = 1200
"""Tokens that are measured: the last of the long text, with all that stands before them and without it."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Ours against a reference, position by position.

    divergence: float64[positions], KL(reference || ours) in nats. same_top: bool[positions], whether the most
    likely token is the same.
    """

    divergence: npt.NDArray[np.float64]
    same_top: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, reference: npt.NDArray[np.float64], ours: npt.NDArray[np.float64]) -> Fidelity:
        """Both log probabilities, float64[positions, vocabulary]."""
        assert np.isfinite(ours).all()
        divergence = (np.exp(reference) * (reference - ours)).sum(axis=-1)
        return cls(divergence, reference.argmax(axis=-1) == ours.argmax(axis=-1))

    @classmethod
    def joined(cls, parts: Sequence[Fidelity]) -> Fidelity:
        return cls(
            np.concatenate([part.divergence for part in parts]),
            np.concatenate([part.same_top for part in parts]),
        )

    @property
    def mean(self) -> float:
        """Mean KL, nats."""
        return float(self.divergence.mean())

    @property
    def largest(self) -> float:
        """Largest KL, nats."""
        return float(self.divergence.max())

    @property
    def same_top_share(self) -> float:
        return float(self.same_top.mean())

    def __str__(self) -> str:
        return f"mean KL {self.mean:.5f}, largest {self.largest:.5f}, same top {self.same_top_share:.2%}"


def against_float64(model: Model, path: Path, tokens: Sequence[int]) -> Fidelity:
    """Every position of a text, against the float64 forward of the same file."""
    reference = Float64Llama(path)
    states = reference.cached_hidden(tokens)
    parts = []
    for start, logits in paged_logits(model, tokens):
        exact = log_softmax(reference.logits(states[start : start + len(logits)]))
        parts.append(Fidelity.of(exact, log_softmax(logits)))
    return Fidelity.joined(parts)


@dataclass(frozen=True, slots=True)
class KVCacheEffect:
    """One type of KV cache on one text.

    against_first: the first type's logits in the place of float64. More than the cache differs there: after
    its first rounding, activations are rounded otherwise too.
    """

    dtype: str
    bytes_per_token: int
    against_float64: Fidelity
    against_first: Fidelity


def kv_cache_effect(
    path: Path, tokens: Sequence[int], first: int, dtypes: Sequence[str]
) -> list[KVCacheEffect]:
    """Positions [first, len(tokens)) of a text, by each type, compared with float64 and `dtypes[0]`."""
    reference = Float64Llama(path)
    states = reference.cached_hidden(tokens)
    sizes: dict[str, int] = {}
    parts: dict[str, list[tuple[Fidelity, Fidelity]]] = {dtype: [] for dtype in dtypes}
    with contextlib.ExitStack() as stack:
        streams = []
        for dtype in dtypes:
            model = stack.enter_context(contextlib.closing(Model.load(path)))
            stream = paged_logits(model, tokens, dtype=dtype, first=first)
            streams.append(stack.enter_context(contextlib.closing(stream)))
            sizes[dtype] = model.kv_layout(dtype=dtype).bytes_per_token
        for steps in zip(*streams, strict=True):
            begin = max(first, steps[0][0])
            ours = [log_softmax(logits[begin - start :]) for start, logits in steps]
            exact = log_softmax(reference.logits(states[begin : begin + len(ours[0])]))
            for dtype, own in zip(dtypes, ours, strict=True):
                parts[dtype].append((Fidelity.of(exact, own), Fidelity.of(ours[0], own)))
    return [
        KVCacheEffect(dtype, sizes[dtype], *map(Fidelity.joined, zip(*parts[dtype], strict=True)))
        for dtype in dtypes
    ]


def short_and_long(
    path: Path, tokens: Sequence[int], dtypes: Sequence[str]
) -> dict[str, list[KVCacheEffect]]:
    """The same `POSITIONS` tokens twice: "short" as a text of their own, "long" where they stand.

    tokens: `CONTEXT` of them. The text is equal, so what differs is the context.
    """
    assert len(tokens) == CONTEXT
    return {
        "short": kv_cache_effect(path, tokens[-POSITIONS:], 0, dtypes),
        "long": kv_cache_effect(path, tokens, CONTEXT - POSITIONS, dtypes),
    }
