"""Where llama.cpp chose another token than we would: a near tie, or the file's exact meaning is on our side.

llama.cpp rounds activations to 8 bits and sums values in half precision; we round differently. On these
answers the float64 forward itself disagrees with llama.cpp at 18 of 598 steps, with gaps of up to 0.29: a gap
above 0.1 is therefore only held against us where float64 takes llama.cpp's token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.model.model import Model
from oracle.float64_llama import Float64Llama
from oracle.teacher_forced import paged_logits

NEAR_TIE = 0.1
RECORDED = json.loads((Path(__file__).parent / "data" / "llamacpp_smollm2.json").read_text())
ANSWERS: dict[str, dict[str, list[int]]] = {
    f"{kind}-{number}": answer
    for kind in ("smollm2_q4_1_raw", "smollm2_q4_1_chat")
    for number, answer in enumerate(RECORDED[kind])
}


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Model]:
    model = Model.load(smollm2_path)
    yield model
    model.close()


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Float64Llama:
    return Float64Llama(smollm2_path)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_disagreement_with_llamacpp_is_a_near_tie_or_right(
    smollm2: Model, reference: Float64Llama, answer: dict[str, list[int]]
) -> None:
    prompt, output = answer["prompt_ids"], answer["output_ids"]
    tokens = prompt + output[:-1]
    first = len(prompt) - 1  # the position whose logits chose output[0]
    chosen: dict[int, tuple[int, float]] = {}  # step: (our token, our gap to llama.cpp's)
    for start, logits in paged_logits(smollm2, tokens):
        for row in range(max(first - start, 0), len(logits)):
            step = start + row - first
            ours, theirs = int(logits[row].argmax()), output[step]
            if ours != theirs:
                chosen[step] = ours, float(logits[row, ours] - logits[row, theirs])
    print(f"disagreements: {len(chosen)} of {len(output)} steps, (token, gap) at each: {chosen}")

    wide = {step: token for step, (token, gap) in chosen.items() if gap > NEAR_TIE}
    if wide:
        exact = reference.logits(reference.cached_hidden(tokens)[[first + step for step in wide]])
        for row, (step, token) in zip(exact, wide.items(), strict=True):
            assert row[token] > row[output[step]], (
                f"step {step}: we prefer {token} to llama.cpp's {output[step]} by {chosen[step][1]:.3f}, "
                f"float64 the other way by {row[output[step]] - row[token]:.3f}"
            )


@pytest.mark.slow
def test_the_exact_forward_does_not_take_every_token_of_llamacpp(reference: Float64Llama) -> None:
    """Why a gap above 0.1 cannot simply be forbidden: the truth has some."""
    gaps, steps = [], 0
    for answer in ANSWERS.values():
        prompt, output = answer["prompt_ids"], answer["output_ids"]
        exact = reference.logits(reference.cached_hidden(prompt + output[:-1])[len(prompt) - 1 :])
        steps += len(output)
        gaps += [float(row.max() - row[token]) for row, token in zip(exact, output, strict=True)]
    wide = [gap for gap in gaps if gap > NEAR_TIE]
    differing = sum(gap > 0.0 for gap in gaps)
    print(f"float64 differs at {differing} of {steps} steps")
    print(f"at {len(wide)} of them by more than {NEAR_TIE}, at most {max(gaps):.2f}")
    assert wide
