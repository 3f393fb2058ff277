"""Matrix products against the machine's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.bench.limits import Limits
from octavo.bench.recorded import RecordedProgram, chunks_without_kv, spread_of_one
from octavo.kernels import Matrix, Program, ThreadPool, WeightStore

TYPES = ("Q4_0", "Q4_1", "Q8_0", "F16")
ROWS = (1, 2, 4, 8, 16, 64, 256)

_OPERATIONS_A_STEP = 4e9
"""Where arithmetic takes the time, a step need not go through all copies: about 30 ms on two cores."""


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """x[rows, in_features] times a matrix [out_features, in_features]."""

    model: str
    name: str
    out_features: int
    in_features: int


SMOLLM2_SHAPES = (
    MatmulShape("smollm2-135m", "qkv", 960, 576),
    MatmulShape("smollm2-135m", "o", 576, 576),
    MatmulShape("smollm2-135m", "gate+up", 3072, 576),
    MatmulShape("smollm2-135m", "down", 576, 1536),
    MatmulShape("smollm2-135m", "head", 49152, 576),
)
ONE_BILLION_SHAPES = (
    MatmulShape("1b", "qkv", 3072, 2048),
    MatmulShape("1b", "o", 2048, 2048),
    MatmulShape("1b", "gate+up", 16384, 2048),
    MatmulShape("1b", "down", 2048, 8192),
)
"""Llama 3.2 1B: 32 query and 8 key-value heads of 64. Its head of 128,256 is left out: 525 MB as F16."""


@dataclass(frozen=True, slots=True)
class MatmulResult:
    """One product of `rows` activations, their quantisation included.

    seconds: median, with the fastest and the slowest repeat. weights_from: "memory" where each product reads
    weights that the caches cannot hold any more, else "cache". weight_gbs: packed bytes read a second, 10^9.
    percent_of_peak: of `peak`, the int8 limit for quantised weights and the fp32 limit for floats.
    percent_of_read: weight_gbs of the read limit.
    """

    model: str
    shape: str
    out_features: int
    in_features: int
    type: str
    rows: int
    weights_from: str
    copies: int
    seconds: float
    seconds_low: float
    seconds_high: float
    gops: float
    weight_gbs: float
    peak: str
    percent_of_peak: float
    percent_of_read: float


def measure_matmuls(
    pool: ThreadPool,
    instruction_set: str,
    limits: Limits,
    *,
    shapes: Sequence[MatmulShape],
    types: Sequence[str],
    rows: Sequence[int],
    cold_bytes: int,
    repeats: int,
    say: Callable[[str], None],
) -> Iterator[MatmulResult]:
    """rows: each at most ROW_TILE. cold_bytes: weights that, read in turn, push each other out of every
    cache. Shapes whose rows a type's blocks do not fill are left out."""
    for type_ in types:
        for shape in shapes:
            say(f"{shape.model} {shape.name} {type_}")
            if type_ in _BLOCKS and shape.in_features % _BLOCKS[type_][0] != 0:
                say(f"left out: rows of {shape.in_features} are not whole blocks of {_BLOCKS[type_][0]}")
                continue
            weights = _Copies(pool, shape, type_, cold_bytes)
            empty = RecordedProgram(pool, instruction_set, shape.in_features)
            empty.bind_nothing()
            for count in rows:
                yield _measure(
                    pool, instruction_set, limits, shape, weights, empty, count, cold_bytes, repeats
                )


class _Copies:
    """Enough copies of one matrix to fill `cold_bytes`, at least two."""

    def __init__(self, pool: ThreadPool, shape: MatmulShape, type_: str, cold_bytes: int) -> None:
        source = random_weights(type_, shape.out_features, shape.in_features)
        store = WeightStore()

        def pack() -> Matrix:
            return Matrix(store, type_, source, shape.out_features, shape.in_features, pool)

        self.matrices = [pack()]
        wanted = max(2, -(-cold_bytes // self.matrices[0].nbytes))
        self.matrices += [pack() for _ in range(wanted - 1)]

    @property
    def type(self) -> str:
        return self.matrices[0].type

    @property
    def nbytes(self) -> int:
        """Of one matrix, packed."""
        return self.matrices[0].nbytes


def _measure(
    pool: ThreadPool,
    instruction_set: str,
    limits: Limits,
    shape: MatmulShape,
    weights: _Copies,
    empty: RecordedProgram,
    rows: int,
    cold_bytes: int,
    repeats: int,
) -> MatmulResult:
    operations = 2 * shape.out_features * shape.in_features * rows
    copies = min(len(weights.matrices), max(2, int(_OPERATIONS_A_STEP / operations)))

    def record(program: Program, x: int) -> None:
        out = program.buffer(shape.out_features)
        for matrix in weights.matrices[:copies]:
            program.linear(x, [matrix], out, False)

    full = RecordedProgram(pool, instruction_set, shape.in_features, record)
    full.bind_nothing()
    chunks = chunks_without_kv(rows)
    taken = spread_of_one(lambda: full.seconds(*chunks), lambda: empty.seconds(*chunks), copies, repeats)
    peak, peak_gops = ("fp32", limits.fp32_gflops) if weights.type == "F16" else ("int8", limits.int8_gops)
    gops = operations / taken.median / 1e9
    gbs = weights.nbytes / taken.median / 1e9
    return MatmulResult(
        model=shape.model,
        shape=shape.name,
        out_features=shape.out_features,
        in_features=shape.in_features,
        type=weights.type,
        rows=rows,
        weights_from="memory" if copies * weights.nbytes >= cold_bytes else "cache",
        copies=copies,
        seconds=taken.median,
        seconds_low=taken.low,
        seconds_high=taken.high,
        gops=gops,
        weight_gbs=gbs,
        peak=peak,
        percent_of_peak=100 * gops / peak_gops,
        percent_of_read=100 * gbs / limits.read_gbs,
    )


# A block in a file: weights, bytes, and where which f16 scale (or minimum) stands.
_BLOCKS: dict[str, tuple[int, int, dict[int, float]]] = {
    "Q4_0": (32, 18, {0: 0.01}),
    "Q4_1": (32, 20, {0: 0.01, 2: -0.08}),
    "Q5_0": (32, 22, {0: 0.005}),
    "Q5_1": (32, 24, {0: 0.005, 2: -0.08}),
    "Q8_0": (32, 34, {0: 0.001}),
    "Q2_K": (256, 84, {80: 0.004, 82: 0.006}),
    "Q3_K": (256, 110, {108: 0.001}),
    "Q4_K": (256, 144, {0: 0.0003, 2: 0.002}),
    "Q5_K": (256, 176, {0: 0.00015, 2: 0.002}),
    "Q6_K": (256, 210, {208: 0.00005}),
    "IQ4_NL": (32, 18, {0: 0.001}),
    "IQ4_XS": (256, 136, {0: 0.00005}),
}


def check_type(type_: str) -> None:
    """Raises ValueError for a type there is no layout for here."""
    if type_ != "F16" and type_ not in _BLOCKS:
        raise ValueError(f"weights are measured as {', '.join([*_BLOCKS, 'F16'])}, not as {type_}")


def random_weights(type_: str, out_features: int, in_features: int) -> npt.NDArray[np.uint8]:
    """A GGUF tensor of random codes with small scales: uint8[its bytes]. Raises ValueError (`check_type`)."""
    check_type(type_)
    random = np.random.default_rng(out_features * in_features)
    if type_ == "F16":
        values = random.uniform(-0.05, 0.05, out_features * in_features).astype("<f2")
        return values.view(np.uint8)
    weights, size, scales = _BLOCKS[type_]
    blocks = random.integers(0, 256, (out_features * in_features // weights, size), dtype=np.uint8)
    for at, scale in scales.items():
        blocks[:, at : at + 2] = np.array([scale], dtype="<f2").view(np.uint8)
    return blocks.reshape(-1)
