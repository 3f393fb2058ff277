"""What a type of KV cache costs: SmolLM2 on real text, with a short and a long context, against float64.

`benchmarks/kv_cache_effect.py` prints the same measurement.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.kv.layout import KV_DTYPES
from octavo.model.gguf import GGUFFile
from octavo.text.tokenizer import Tokenizer
from oracle.fidelity import CONTEXT, POSITIONS, KVCacheEffect, short_and_long
from oracle.real_text import real_tokens

pytestmark = pytest.mark.slow

# Mean KL in nats, largest KL, share of equal top tokens. Measured with Python 3.11's text, short and long:
#   f16  0.00023 0.00023    0.003 0.004    98.9 % 98.7 %
#   q8   0.00085 0.00064    0.017 0.010    98.3 % 97.8 %
BOUNDS = {"f16": (0.0005, 0.02, 0.975), "q8": (0.001, 0.04, 0.97)}


@pytest.fixture(scope="module")
def effects(smollm2_path: Path) -> dict[str, list[KVCacheEffect]]:
    with GGUFFile(smollm2_path) as file:
        tokens = real_tokens(Tokenizer.from_gguf(file.metadata), CONTEXT)
    return short_and_long(smollm2_path, tokens, KV_DTYPES)


# The first test computes the float64 forward of 4,352 tokens, where nobody has before.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("context", ["short", "long"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_cache_of_any_type_stays_close_to_float64(
    effects: dict[str, list[KVCacheEffect]], dtype: str, context: str
) -> None:
    (effect,) = (effect for effect in effects[context] if effect.dtype == dtype)
    found = effect.against_float64
    print(f"{dtype}, {context} context: {found}")
    print(f"against {KV_DTYPES[0]}: {effect.against_first}")
    assert len(found.divergence) == POSITIONS
    mean, largest, same_top = BOUNDS[dtype]
    assert found.mean <= mean
    assert found.largest <= largest
    assert found.same_top_share >= same_top
    # Types that agree in every digit are one type.
    assert (effect.against_first.mean == 0.0) == (dtype == KV_DTYPES[0])
