"""Where llama.cpp chose another token than we would, it must be a near tie."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo.model.model import Model

from oracle.teacher_forced import paged_logits

RECORDED = json.loads((Path(__file__).parent / "data" / "llamacpp_smollm2.json").read_text())
ANSWERS = [
    pytest.param(answer, id=f"{kind}-{number}")
    for kind in ("smollm2_q4_1_raw", "smollm2_q4_1_chat")
    for number, answer in enumerate(RECORDED[kind])
]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Model]:
    model = Model.load(smollm2_path)
    yield model
    model.close()


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_disagreement_with_llamacpp_is_a_near_tie(smollm2: Model, answer: dict[str, list[int]]) -> None:
    prompt, output = answer["prompt_ids"], answer["output_ids"]
    gaps = {}
    for start, logits in paged_logits(smollm2, prompt + output[:-1]):
        for row, ours in enumerate(logits):
            step = start + row - (len(prompt) - 1)
            if step >= 0:
                gap = float(ours.max() - ours[output[step]])
                if gap > 0.0:
                    gaps[step] = round(gap, 4)
    print(f"disagreements at {len(gaps)} of {len(output)} steps, with gaps {gaps}")
    assert all(gap <= 0.1 for gap in gaps.values()), gaps
