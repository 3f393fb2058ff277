"""Matrix products against the machine's limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.bench.limits import Limits
from octavo.bench.recorded import ROW_TILE, RecordedProgram, chunks_without_kv, spread_of_one
from octavo.kernels import Matrix, Program, ThreadPool, WeightStore

TYPES = ("Q4_0", "Q8_0")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MOST_ROWS = 512

_OPERATIONS_A_STEP = 4e9
"""Where arithmetic takes the time, a step need not go through all copies: about 30 ms on two cores."""


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """x[rows, in_features] times a matrix [out_features, in_features], for at most `most_rows` rows.

    gated: two matrices of half the columns, whose results become silu(first) * second, as in a model.
    """

    model: str
    name: str
    out_features: int
    in_features: int
    most_rows: int = MOST_ROWS
    gated: bool = False

    @property
    def matrix_columns(self) -> int:
        return self.out_features // 2 if self.gated else self.out_features


@dataclass(frozen=True, slots=True)
class MatmulResult:
    """One product of `rows` activations, their quantisation included; a gate and its up, and what joins them.

    out_features: as measured, less than the model's where its matrix would be too large. seconds: median,
    with the fastest and the slowest repeat. weights_from: "memory" where each product reads weights that the
    caches cannot hold any more, else "cache". weight_gbs: packed bytes read a second, 10^9, each once for
    every 256 rows.
    percent_of_peak: of `peak`, a limit of the same run: "fp32" for floats, "int8_summed" where products of
    codes of up to 6 bits are added before they are widened, "int8" for 8-bit and table codes. (8-bit weights
    meet 16-bit activations: with VNNI they reach half of "int8" at most.)
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
    most_bytes: int,
    repeats: int,
    say: Callable[[str], None],
) -> Iterator[MatmulResult]:
    """rows: each at most MOST_ROWS. cold_bytes: weights that, read in turn, push each other out of every
    cache. most_bytes: of one matrix in a file; of a larger one as many columns are measured as fit. Shapes
    that `left_out` names are not measured.

    Memory: the source of one matrix, and packed copies of it: one, or cold_bytes and one where that is less.
    """
    for shape in shapes:
        for type_ in types:
            if not _is_whole(shape, type_):
                continue
            say(f"{shape.model} {shape.name} {type_}")
            part = _within(shape, type_, most_bytes)
            weights = _Copies(pool, part, type_, cold_bytes)
            empty = RecordedProgram(pool, instruction_set, shape.in_features)
            empty.bind_nothing()
            for count in rows:
                if count <= shape.most_rows:
                    yield _measure(
                        pool, instruction_set, limits, part, weights, empty, count, cold_bytes, repeats
                    )


def left_out(shapes: Sequence[MatmulShape], types: Sequence[str]) -> list[str]:
    """A sentence for each product whose rows a type's blocks do not fill."""
    return [
        f"{shape.model} {shape.name} as {type_}: rows of {shape.in_features:,} weights are not whole blocks "
        f"of {_block_of(type_)[0]}"
        for shape in shapes
        for type_ in types
        if not _is_whole(shape, type_)
    ]


def _is_whole(shape: MatmulShape, type_: str) -> bool:
    return shape.in_features % _block_of(type_)[0] == 0


def _within(shape: MatmulShape, type_: str, most_bytes: int) -> MatmulShape:
    """The shape, or as many of its columns in whole panels as fit, one panel at least."""
    weights, size = _block_of(type_)
    columns = most_bytes // (shape.in_features // weights * size) // _PANEL_COLUMNS * _PANEL_COLUMNS
    return dataclasses.replace(shape, out_features=min(shape.out_features, max(columns, _PANEL_COLUMNS)))


class _Copies:
    """Enough copies of a shape's matrices to fill `cold_bytes`, and no fewer than one product needs."""

    def __init__(self, pool: ThreadPool, shape: MatmulShape, type_: str, cold_bytes: int) -> None:
        columns = shape.matrix_columns
        source = random_weights(type_, columns, shape.in_features)
        store = WeightStore()

        def pack() -> tuple[Matrix, ...]:
            matrices = 2 if shape.gated else 1
            return tuple(
                Matrix(store, type_, source, columns, shape.in_features, pool) for _ in range(matrices)
            )

        self.products = [pack()]
        wanted = -(-cold_bytes // self.nbytes)
        self.products += [pack() for _ in range(wanted - 1)]

    @property
    def type(self) -> str:
        return self.products[0][0].type

    @property
    def nbytes(self) -> int:
        """That one product reads, packed."""
        return sum(matrix.nbytes for matrix in self.products[0])


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
    # One product that takes a step's time alone needs no second.
    copies = min(len(weights.products), max(1, -int(-_OPERATIONS_A_STEP // operations)))

    def record(program: Program, x: int) -> None:
        out = program.buffer(shape.matrix_columns)
        for matrices in weights.products[:copies]:
            if shape.gated:
                gate, up = matrices
                program.gated_linear(x, gate, up, out)
            else:
                program.linear(x, matrices, out, False)

    full = RecordedProgram(pool, instruction_set, shape.in_features, record)
    full.bind_nothing()
    chunks = chunks_without_kv(rows)
    taken = spread_of_one(lambda: full.seconds(*chunks), lambda: empty.seconds(*chunks), copies, repeats)
    peak = _peak_of(weights.type)
    gops = operations / taken.median / 1e9
    gbs = weights.nbytes * -(-rows // ROW_TILE) / taken.median / 1e9
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
        percent_of_peak=100 * gops / limits.gops_of(peak),
        percent_of_read=100 * gbs / limits.read_gbs,
    )


def _peak_of(type_: str) -> str:
    """The name of the limit that products of this type are held against."""
    if type_ in _FLOATS:
        return "fp32"
    return "int8" if type_ in _WIDENED_AT_ONCE else "int8_summed"


_FLOATS = ("F16", "BF16")

_WIDENED_AT_ONCE = ("Q8_0", "IQ4_NL", "IQ4_XS")
"""Types of which no two products fit 16 bits."""

_PANEL_COLUMNS = 32

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
    if type_ not in (*_BLOCKS, *_FLOATS):
        raise ValueError(f"weights are measured as {', '.join((*_BLOCKS, *_FLOATS))}, not as {type_}")


def _block_of(type_: str) -> tuple[int, int]:
    """Weights and bytes of a block in a file."""
    return (1, 2) if type_ in _FLOATS else _BLOCKS[type_][:2]


def random_weights(type_: str, out_features: int, in_features: int) -> npt.NDArray[np.uint8]:
    """A GGUF tensor of random codes with small scales: uint8[its bytes]. Raises ValueError (`check_type`).

    What lies beyond the first million blocks (or numbers) repeats: a large head is made in no time.
    """
    check_type(type_)
    random = np.random.default_rng(out_features * in_features)
    count = out_features * in_features
    if type_ in _FLOATS:
        values = random.uniform(-0.05, 0.05, min(count, _DISTINCT)).astype("<f4")
        halves = values.astype("<f2").view("<u2") if type_ == "F16" else values.view("<u4") >> np.uint32(16)
        return np.resize(halves.astype("<u2"), count).view(np.uint8)
    weights, size, scales = _BLOCKS[type_]
    count //= weights
    blocks = random.integers(0, 256, (min(count, _DISTINCT), size), dtype=np.uint8)
    for at, scale in scales.items():
        blocks[:, at : at + 2] = np.array([scale], dtype="<f2").view(np.uint8)
    return np.resize(blocks.reshape(-1), count * size)


_DISTINCT = 1 << 20
