"""Operations timed the way a step runs them.

A recorded program of many equal operations is one native call, with the barriers between them that a step
has and with nothing else: the time of a program without them is taken off. Timing single calls instead would
measure how fast sleeping threads wake up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from octavo.bench.spread import Spread
from octavo.kernels import Matrix, Program, ThreadPool, WeightStore

ROW_TILE = 256
_VOCABULARY = 8
_BLOCK = 64

_LEAST_SECONDS = 0.25
"""For a ratio: short steps of a small model are spoilt by whatever else the machine does."""

Ints = npt.NDArray[np.int32]


class RecordedProgram:
    """A program that embeds its tokens into `buffer`, then does what `record` has recorded.

    width: of `buffer`, float32[row_tile, width]. record: called with the program and `buffer`.
    row_tile: tokens that go through the operations together; more of them are several passes in one step.
    """

    def __init__(
        self,
        pool: ThreadPool,
        instruction_set: str,
        width: int,
        record: Callable[[Program, int], None] | None = None,
        row_tile: int = ROW_TILE,
    ) -> None:
        store = WeightStore()
        values = np.random.default_rng(width).uniform(-1, 1, (_VOCABULARY, width)).astype(np.float32)
        table = Matrix(store, "F32", values.view(np.uint8).reshape(-1), _VOCABULARY, width, pool)
        self._program = Program(pool, instruction_set, row_tile)
        buffer = self._program.buffer(width)
        self._program.embed(table, buffer)
        if record is not None:
            record(self._program, buffer)
        # A program is complete with its head; without a sampler no row reaches it.
        self._program.logits(buffer, np.ones(width, dtype=np.float32), 1e-5, table)
        self._own_arena: npt.NDArray[np.uint8] | None = None

    @property
    def instruction_set(self) -> str:
        """The one in use, where none was named."""
        return self._program.instruction_set

    def bind(
        self, address: int, extent_bytes: int, num_blocks: int, block_size: int, kv_dtype: str = "f16"
    ) -> None:
        self._program.bind(address, extent_bytes, num_blocks, block_size, kv_dtype)

    def bind_nothing(self) -> None:
        """For programs without attention, over `chunks_without_kv`: one block that nobody reads."""
        self._own_arena = np.zeros(1, dtype=np.uint8)
        self._program.bind(self._own_arena.ctypes.data, 1, 1, _BLOCK)

    def share_prefixes(self, share: bool) -> None:
        """Whether the next steps read equal runs of several sequences once."""
        self._program.shared_prefix_attention = share

    @property
    def kv_rows(self) -> tuple[int, int]:
        """Of all steps since `bind` and all layers: positions of one KV head that were read for attention,
        and that would have been read if no sequences had been attended together."""
        return self._program.kv_rows_read, self._program.kv_rows_attended

    def seconds(self, chunk_starts: Ints, chunk_lens: Ints, offsets: Ints, tables: Ints) -> float:
        """Wall seconds of one step over these chunks."""
        token_ids = np.arange(int(chunk_lens.sum()), dtype=np.int32) % _VOCABULARY
        samplers = [None] * len(chunk_lens)
        begin = time.perf_counter()
        self._program.step(token_ids, chunk_starts, chunk_lens, offsets, tables, samplers)
        return time.perf_counter() - begin


def chunks_without_kv(num_tokens: int) -> tuple[Ints, Ints, Ints, Ints]:
    """chunk_starts, chunk_lens, block_table_offsets and block_tables of tokens that all share one block."""
    lengths = np.array([min(_BLOCK, num_tokens - at) for at in range(0, num_tokens, _BLOCK)], dtype=np.int32)
    zeros = np.zeros(len(lengths), dtype=np.int32)
    return zeros, lengths, np.arange(len(lengths) + 1, dtype=np.int32), zeros


def alternated(
    arms: Sequence[Callable[[int], float]],
    without: Callable[[], float],
    operations: int,
    rounds: int,
    least_seconds: float = 0.0,
) -> list[list[float]]:
    """Seconds of one of `operations` in each arm's steps: [arm][round], after one round to warm up.

    An arm is called with the number of its round. The arms of a round are neighbours in time, and every other
    round goes backwards: the ratio of two of them holds while the machine's speed does not. Rounds go on, up
    to eight times as many, until they have taken least_seconds.
    """
    taken: list[list[float]] = [[] for _ in arms]
    total = 0.0
    for turn in range(8 * rounds + 1):
        if turn > rounds and total >= least_seconds:
            break
        base = without()
        forwards = range(len(arms))
        for index in forwards if turn % 2 == 0 else reversed(forwards):
            seconds = arms[index](turn)
            if turn > 0:
                total += seconds
                taken[index].append(max(seconds - base, 1e-9) / operations)
    return taken


def compared(
    arms: Sequence[Callable[[int], float]], without: Callable[[], float], operations: int, repeats: int
) -> list[list[float]]:
    """`alternated`, two rounds a repeat and more where they are short: a ratio near 1 needs more of them than
    a rate does."""
    return alternated(arms, without, operations, 2 * repeats, _LEAST_SECONDS)


def spread_of_one(
    with_operations: Callable[[], float], without: Callable[[], float], operations: int, repeats: int
) -> Spread:
    """Seconds of one of `operations`, over `repeats` pairs of timed steps after one pair to warm up."""
    return Spread.of(alternated([lambda _: with_operations()], without, operations, repeats)[0])


def ratios(of: Sequence[float], to: Sequence[float]) -> Spread:
    """Of two arms, round by round: the median and the quartiles."""
    return Spread.middle_half_of(a / b for a, b in zip(of, to, strict=True))
