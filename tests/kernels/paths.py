"""The paths that can run here, by what may be asked of them.

Those that fuse multiply-adds give the same bytes. SSE4.1 has no such instruction: its integer sums are the
same, its floats are rounded once more, and within the path nothing changes a byte either.
"""

from __future__ import annotations

import pytest

from octavo.kernels import available_instruction_sets

AVAILABLE = available_instruction_sets()
WITHOUT_FMA = [name for name in AVAILABLE if name == "sse41"]
FUSED = [name for name in AVAILABLE if name not in WITHOUT_FMA]

EVERY_PATH = pytest.mark.parametrize("instruction_set", AVAILABLE)
EVERY_ARITHMETIC = pytest.mark.parametrize("instruction_set", [FUSED[0], *WITHOUT_FMA])
"""One path of those that give the same bytes, and each that does not."""


def paths_like(instruction_set: str) -> list[str]:
    """Those that must give its bytes, itself among them."""
    return FUSED if instruction_set in FUSED else [instruction_set]
