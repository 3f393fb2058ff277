"""The sampling pipeline in float64 numpy with a full sort: slow, obvious, independent of the native one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The parameters of `octavo.kernels.Sampler` that shape a distribution, under the same names."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()


def edited_logits(
    logits: npt.NDArray[np.float32], rules: Rules, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> Floats:
    """Bias, bans and penalties applied from scratch, for the position after `output`."""
    x = logits.astype(np.float64)
    for token_id, bias in rules.logit_bias.items():
        x[token_id] += bias
    if len(output) < rules.min_tokens:
        x[list(rules.stop_token_ids)] = -np.inf
    for token_id in {*prompt, *output}:
        factor = rules.repetition_penalty
        x[token_id] = x[token_id] / factor if x[token_id] > 0 else x[token_id] * factor
    for token_id, count in Counter(output).items():
        x[token_id] -= rules.frequency_penalty * count + rules.presence_penalty
    return x


def best_first(x: Floats) -> Ids:
    """Token ids by falling logit, equals by rising id."""
    return np.lexsort((np.arange(len(x)), -x))


def survivors(x: Floats, rules: Rules) -> tuple[Ids, Floats]:
    """Edited logits through temperature, min_p, top_k, top_p.

    Returns: who may be drawn, best first, and their probabilities.
    """
    scaled = x / rules.temperature
    order = best_first(x)
    weights = np.exp(scaled - scaled.max())[order]
    # As much less likely than the likeliest as a weight of 2^-41 is never drawn, by definition.
    keep = (weights >= rules.min_p) & (weights >= 2.0**-41)
    if rules.top_k > 0:
        keep[rules.top_k :] = False
    weights = np.where(keep, weights, 0.0)
    if rules.top_p < 1.0:
        reached = np.cumsum(weights) >= rules.top_p * weights.sum()
        weights[int(np.argmax(reached)) + 1 :] = 0.0
    count = int(np.count_nonzero(weights))
    return order[:count], weights[:count] / weights.sum()


def log_softmax(logits: npt.NDArray[np.float32]) -> Floats:
    x = logits.astype(np.float64)
    shifted = x - x.max()
    result: Floats = shifted - np.log(np.exp(shifted).sum())
    return result


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (right >> 32) ^ c[1] ^ k[0],
            right & 0xFFFFFFFF,
            (left >> 32) ^ c[3] ^ k[1],
            left & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def random_number(seed: int, choice_index: int, position: int) -> int:
    """The 64-bit random number of one output position."""
    key = seed % 2**64
    words = philox4x32(
        [position & 0xFFFFFFFF, position >> 32, choice_index, 0], [key & 0xFFFFFFFF, key >> 32]
    )
    return words[1] << 32 | words[0]


def chi_square_bound(degrees: int) -> float:
    """The value that a right sampler stays under in 9,999 of 10,000 runs (Wilson and Hilferty 1931)."""
    spread = 2.0 / (9.0 * degrees)
    return float(degrees * (1.0 - spread + 3.72 * spread**0.5) ** 3)


def chi_square(observed: npt.NDArray[np.int64], probabilities: Floats) -> tuple[float, int]:
    """Statistic and degrees of freedom; outcomes expected fewer than 5 times are taken together."""
    expected = probabilities * observed.sum()
    rare = expected < 5.0
    seen = np.append(observed[~rare], observed[rare].sum()).astype(np.float64)
    due = np.append(expected[~rare], expected[rare].sum())
    if due[-1] < 5.0:
        seen[-2:-1] += seen[-1]
        due[-2:-1] += due[-1]
        seen, due = seen[:-1], due[:-1]
    return float(((seen - due) ** 2 / due).sum()), len(due) - 1
