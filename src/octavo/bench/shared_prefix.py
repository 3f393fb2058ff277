"""What reading a shared prefix once saves: several users on the same document.

The common blocks are those of one of the private copies: the same memory on all sides, since it matters which
(`layers_in_turn`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.bench.attention_steps import (
    BLOCK_SIZE,
    AttentionShape,
    AttentionSteps,
    NewTokens,
    Room,
    StoredKV,
)
from octavo.bench.recorded import Ints, compared, ratios
from octavo.bench.spread import Spread
from octavo.kernels import ThreadPool

USERS = 8
COMMON_TOKENS = 4000
OWN_TOKENS = (32, 64)


@dataclass(frozen=True, slots=True)
class SharedPrefixResult:
    """Decode of `users` sequences that begin with the same `common_tokens` and go on with `own_tokens` each.

    Seconds of one layer, medians. private_seconds: every user has copies of the common tokens' blocks.
    plain_seconds: the users' tables name the same blocks, and each reads them. shared_seconds: the same
    tables, equal runs read once for all. speedup_over_private, speedup_over_plain: the median over rounds of
    their seconds / shared_seconds of the same round, with the quartiles.
    kv_bytes_attended: of keys and values, a layer's, that are read where nothing is shared. kv_bytes_read:
    that were read with sharing, as the kernels count them. kv_bytes_fraction: the second of the first.
    """

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    users: int
    common_tokens: int
    own_tokens: int
    layers: int
    private_seconds: float
    plain_seconds: float
    shared_seconds: float
    speedup_over_private: float
    speedup_over_private_low: float
    speedup_over_private_high: float
    speedup_over_plain: float
    speedup_over_plain_low: float
    speedup_over_plain_high: float
    kv_bytes_attended: int
    kv_bytes_read: int
    kv_bytes_fraction: float


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """users: each with `common` tokens that all begin with, then `own` ones."""

    users: int
    common: int
    own: int

    @property
    def new(self) -> NewTokens:
        return NewTokens(self.users, self.common + self.own)

    def private_tables(self, ids: Ints) -> Ints:
        """Every user's blocks are its own: [users, blocks of one]."""
        return ids.reshape(self.users, -1)

    def common_tables(self, ids: Ints, owner: int) -> Ints:
        """The same, with the copy of one user in place of all; a block that holds other tokens too is not
        common."""
        tables = self.private_tables(ids).copy()
        blocks = self.common // BLOCK_SIZE
        tables[:, :blocks] = tables[owner, :blocks]
        return tables


CASES = tuple(SharedPrefix(USERS, COMMON_TOKENS, own) for own in OWN_TOKENS)


def measure_shared_prefixes(
    pool: ThreadPool,
    instruction_set: str,
    *,
    shapes: Sequence[AttentionShape],
    kv_dtypes: Sequence[str],
    cases: Sequence[SharedPrefix],
    room: Room,
    repeats: int,
    say: Callable[[str], None],
) -> Iterator[SharedPrefixResult]:
    """Cases that `left_out` names are not measured."""
    for shape in shapes:
        for kv_dtype in kv_dtypes:
            for case in cases:
                say(_name(shape, kv_dtype, case))
                if layers := room.most_layers(shape.num_layers, case.new.layer_bytes(shape, kv_dtype)):
                    steps = AttentionSteps(pool, instruction_set, shape, layers)
                    yield _measure(steps, shape, kv_dtype, case, repeats)


def left_out(
    shapes: Sequence[AttentionShape], kv_dtypes: Sequence[str], cases: Sequence[SharedPrefix], room: Room
) -> list[str]:
    """A sentence for each case of which the copies of one layer do not fit."""
    return [
        room.refusal(_name(shape, kv_dtype, case), case.new.layer_bytes(shape, kv_dtype))
        for shape in shapes
        for kv_dtype in kv_dtypes
        for case in cases
        if not room.most_layers(1, case.new.layer_bytes(shape, kv_dtype))
    ]


def _name(shape: AttentionShape, kv_dtype: str, case: SharedPrefix) -> str:
    tokens = f"{case.users} x ({case.common:,} + {case.own:,}) tokens"
    return f"shared prefix of {shape.model} {kv_dtype}, {tokens}"


def _measure(
    steps: AttentionSteps,
    shape: AttentionShape,
    kv_dtype: str,
    case: SharedPrefix,
    repeats: int,
) -> SharedPrefixResult:
    new, layers = case.new, steps.layers
    with StoredKV(shape, kv_dtype, layers, new.num_blocks()) as kv:
        ids = kv.scattered()
        private = case.private_tables(ids).reshape(-1)
        # Another copy in each round: nobody finds blocks that it has just read.
        common = [case.common_tables(ids, owner).reshape(-1) for owner in range(case.users)]

        def arm(share: bool, tables: Sequence[Ints]) -> Callable[[int], float]:
            def step(turn: int) -> float:
                steps.program.share_prefixes(share)
                return steps.seconds(kv, new, tables[turn % len(tables)])

            return step

        # The copies between the two others: what one has read of the common blocks is lost when the other
        # comes.
        plain_seconds, private_seconds, shared_seconds = compared(
            [arm(False, common), arm(True, [private]), arm(True, common)],
            lambda: steps.seconds_without(new),
            layers,
            repeats,
        )
        arm(True, common)(0)
        rows_read, rows_attended = steps.program.kv_rows  # of this step, which has bound its blocks anew
    row_bytes = shape.layout(kv_dtype).row_bytes
    over_private = ratios(private_seconds, shared_seconds)
    over_plain = ratios(plain_seconds, shared_seconds)
    return SharedPrefixResult(
        model=shape.model,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kv_dtype=kv_dtype,
        users=case.users,
        common_tokens=case.common,
        own_tokens=case.own,
        layers=layers,
        private_seconds=Spread.of(private_seconds).median,
        plain_seconds=Spread.of(plain_seconds).median,
        shared_seconds=Spread.of(shared_seconds).median,
        speedup_over_private=over_private.median,
        speedup_over_private_low=over_private.low,
        speedup_over_private_high=over_private.high,
        speedup_over_plain=over_plain.median,
        speedup_over_plain_low=over_plain.low,
        speedup_over_plain_high=over_plain.high,
        kv_bytes_attended=rows_attended * row_bytes // layers,
        kv_bytes_read=rows_read * row_bytes // layers,
        kv_bytes_fraction=rows_read / rows_attended,
    )
