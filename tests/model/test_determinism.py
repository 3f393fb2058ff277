"""Real English on SmolLM2: a row's logits are the same bytes however the text is cut, laid out and shared,
whoever else is in the batch, and whatever lies in blocks that nobody holds.

The reference is the text alone: chunks of 256, blocks of 16 tokens, two threads. Everything else happens in
three arenas for each type of KV, which differ in block size and in how the text came into the blocks.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from model.ragged import Floats, PagedText, Piece
from octavo.kernels import Sampler
from octavo.kv.layout import BLOCK_SIZES, KV_DTYPES
from octavo.model.model import Model
from octavo.text.tokenizer import Tokenizer
from oracle.real_text import real_tokens

THREADS = (1, 2, 3)
NEIGHBOURS = (0, 1, 3, 7, 15)


@dataclass(frozen=True)
class Size:
    """Of the watched text, in tokens.

    every: how far positions that are compared lie apart. tail: at the end, where all are. one_by_one: at the
    end, computed in a step each.
    """

    length: int
    every: int
    tail: int
    one_by_one: int

    @property
    def watched(self) -> frozenset[int]:
        """Positions that are compared wherever they are computed."""
        apart = range(self.every - 1, self.length, self.every)
        return frozenset([*apart, *range(self.length - self.tail, self.length)])


SIZES = [
    pytest.param(Size(600, every=600, tail=140, one_by_one=12), id="600"),
    pytest.param(Size(4000, every=500, tail=420, one_by_one=64), id="4000", marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Schedule:
    """How the watched text comes into its blocks. late_chunk: tokens a step in the last quarter."""

    block_size: int
    threads: int
    chunk: int
    late_chunk: int

    def pieces(self, size: Size) -> Iterator[Piece]:
        start, one_by_one = 0, size.length - size.one_by_one
        while start < size.length:
            chunk = self.chunk if start < 3 * size.length // 4 else self.late_chunk
            count = 1 if start >= one_by_one else min(chunk, one_by_one - start)
            yield Piece(0, start, count)
            start += count


SCHEDULES = [
    pytest.param(Schedule(block_size=8, threads=1, chunk=256, late_chunk=256), id="256"),
    pytest.param(Schedule(block_size=16, threads=2, chunk=100, late_chunk=100), id="100"),
    pytest.param(Schedule(block_size=32, threads=3, chunk=256, late_chunk=37), id="256-then-37"),
]


class Cast:
    """The texts of an arena.

    watched    | the text                                    |
    sleeper    | in the watched one's blocks | its own       |    the same text
    siblings   | in the watched one's blocks     | their own |    the same text; 8, each shares a little less
    usurper    | another text |    as many tokens as the sleeper gives up
    strangers  | other texts |     7 of 20 to 140 tokens
    """

    WATCHED, SLEEPER, USURPER = 0, 1, 2
    SIBLINGS, STRANGERS = range(3, 11), range(11, 18)  # 15 neighbours

    def __init__(self, tokens: Sequence[int], size: Size) -> None:
        """tokens: the watched text, and behind it what the others take in turn."""
        self.size = size
        text, rest = list(tokens[: size.length]), iter(tokens[size.length :])
        own = size.tail - size.one_by_one - max(BLOCK_SIZES)
        lags = [i * own // len(self.SIBLINGS) for i in range(len(self.SIBLINGS))]
        self.kept = whole_blocks(size.length - size.tail // 2)
        """Tokens that the sleeper still holds when it is paused."""
        self.shared = [
            *(0, whole_blocks(size.length - own), 0),
            *(whole_blocks(size.length - size.one_by_one - lag) for lag in lags),
            *(0 for _ in self.STRANGERS),
        ]
        """Tokens of each text that lie in the watched one's blocks."""
        self.texts = [
            *(text, text, list(itertools.islice(rest, size.length - self.kept))),
            *(text for _ in self.SIBLINGS),
            *(list(itertools.islice(rest, 20 + 20 * i)) for i in range(len(self.STRANGERS))),
        ]
        self.watched = [size.watched if each is text else frozenset(range(len(each))) for each in self.texts]
        """Positions of each text that are compared."""

    def neighbours(self, count: int) -> list[int]:
        """Siblings and strangers by turns, a sibling first."""
        by_turns = itertools.chain(*itertools.zip_longest(self.SIBLINGS, self.STRANGERS))
        return [text for text in by_turns if text is not None][:count]


def whole_blocks(tokens: int) -> int:
    """Fewer tokens, which are whole blocks of every size."""
    return tokens // max(BLOCK_SIZES) * max(BLOCK_SIZES)


@dataclass(frozen=True)
class Answer:
    """What a model says at a position. digest: of the logits' bytes; the others: of a draw from them."""

    digest: bytes
    token_id: int
    logprob: float

    @classmethod
    def of(cls, row: Floats, position: int) -> Answer:
        drawn = sampler_at(position, len(row)).sample(row)
        return cls(hashlib.sha256(row.tobytes()).digest(), drawn.token_id, drawn.logprob)


Answers = Mapping[int, Answer]
"""By position."""


def sampler_at(position: int, vocab_size: int) -> Sampler:
    return Sampler(vocab_size, temperature=0.8, seed=position, num_logprobs=0)


def compute(
    paged: PagedText, pieces: Sequence[Piece], watched: Sequence[frozenset[int]]
) -> list[dict[int, Answer]]:
    """One step. watched: positions of each text. Returns: of each piece the answers there."""
    wanted = [
        [at for at in range(piece.start, piece.start + piece.num_tokens) if at in watched[piece.sequence]]
        for piece in pieces
    ]
    if not any(wanted):
        paged.model.step(paged.batch(pieces))
        return [{} for _ in pieces]
    return [
        {at: Answer.of(rows[at - piece.start], at) for at in positions}
        for piece, positions, rows in zip(pieces, wanted, paged.logits(*pieces), strict=True)
    ]


class Served:
    """An arena in which the watched text has been computed, piece by piece.

    After every step all blocks but those in use are filled with 0xFF. found: its answers where it is watched.
    """

    def __init__(self, cast: Cast, paged: PagedText, schedule: Schedule, expected: Sequence[Answers]) -> None:
        """expected: of each text, what it says alone."""
        self.cast = cast
        self.paged = paged
        self.expected = expected
        self.found: dict[int, Answer] = {}
        self.ends = [0] * len(cast.texts)
        """Tokens of each text whose keys and values are in use."""
        for piece in schedule.pieces(cast.size):
            self.found |= compute(paged, [piece], cast.watched)[0]
            self._note([piece])

    def step(self, *pieces: Piece) -> None:
        """Compute, and hold everybody to what they say alone."""
        for piece, found in zip(pieces, compute(self.paged, pieces, self.cast.watched), strict=True):
            for at, answer in found.items():
                assert answer == self.expected[piece.sequence][at], (piece, at)
        self._note(pieces)

    def sample(self, *pieces: Piece) -> None:
        """As `step`, in the way of serving: each piece's last row is sampled by the step itself."""
        ends = [piece.start + piece.num_tokens for piece in pieces]
        size = self.paged.model.config.vocab_size
        batch = self.paged.batch(pieces, [sampler_at(end - 1, size) for end in ends])
        for piece, end, drawn in zip(pieces, ends, self.paged.model.step(batch), strict=True):
            expected = self.expected[piece.sequence][end - 1]
            assert drawn is not None
            assert (drawn.token_id, drawn.logprob) == (expected.token_id, expected.logprob), piece
        self._note(pieces)

    def run(self, text: int, start: int, end: int, *, chunk: int) -> None:
        """Several steps: positions [start, end) of a text."""
        for at in range(start, end, chunk):
            self.step(Piece(text, at, min(chunk, end - at)))

    def forget(self, text: int, end: int) -> None:
        """Only the first `end` tokens of a text are in use from now on."""
        self.ends[text] = end

    def _note(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            end = piece.start + piece.num_tokens
            # Others read the watched text's blocks: one of its tokens computed again ends nothing.
            self.ends[piece.sequence] = max(end, self.ends[0]) if piece.sequence == Cast.WATCHED else end
        self.paged.spoil_unused(self.ends)


@pytest.fixture(scope="module")
def models(smollm2_path: Path) -> Iterator[dict[int, Model]]:
    """By number of threads."""
    loaded = {threads: Model.load(smollm2_path, num_threads=threads) for threads in THREADS}
    yield loaded
    for model in loaded.values():
        model.close()


@pytest.fixture(scope="module")
def tokens(models: dict[int, Model]) -> list[int]:
    return real_tokens(Tokenizer.from_gguf(models[1].metadata), 6000)


@pytest.fixture(scope="module", params=SIZES)
def cast(request: pytest.FixtureRequest, tokens: list[int]) -> Cast:
    return Cast(tokens, request.param)


@pytest.fixture(scope="module", params=KV_DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def alone(models: dict[int, Model]) -> Callable[[Cast, str], list[Answers]]:
    """What each text of a cast says alone, with a type of KV; each is computed once."""
    known: dict[tuple[tuple[int, ...], str], Answers] = {}

    def answers(text: list[int], watched: frozenset[int], dtype: str) -> Answers:
        key = (tuple(text), dtype)
        if key not in known:
            paged = PagedText(models[2], [text], dtype=dtype)
            found: dict[int, Answer] = {}
            for start in range(0, len(text), 256):
                piece = Piece(0, start, min(256, len(text) - start))
                found |= compute(paged, [piece], [watched])[0]
            known[key] = found
        return known[key]

    return lambda cast, dtype: [answers(*text, dtype) for text in zip(cast.texts, cast.watched, strict=True)]


@pytest.fixture(scope="module", params=SCHEDULES)
def served(
    request: pytest.FixtureRequest,
    models: dict[int, Model],
    cast: Cast,
    dtype: str,
    alone: Callable[[Cast, str], list[Answers]],
) -> Served:
    schedule: Schedule = request.param
    expected = alone(cast, dtype)
    paged = PagedText(
        models[schedule.threads],
        cast.texts,
        block_size=schedule.block_size,
        dtype=dtype,
        order=schedule.block_size,
        shared=cast.shared,
    )
    return Served(cast, paged, schedule, expected)


def test_chunks_blocks_threads_and_spoilt_blocks_change_no_byte(served: Served) -> None:
    assert served.found == served.expected[Cast.WATCHED]


def test_neighbours_threads_and_shared_reads_change_no_byte(served: Served, models: dict[int, Model]) -> None:
    """The last tokens once more, alone and among others: siblings that read the same blocks, strangers at
    other lengths, prompts and single tokens in one step, and each of them held to what it says alone."""
    size = served.cast.size
    last_tokens = itertools.cycle(range(size.length - size.one_by_one, size.length))
    turns = list(itertools.product(THREADS, (True, False), NEIGHBOURS))
    random = np.random.default_rng(size.length)
    for threads, shared_reads, count in turns if size.length > 1000 else turns[::7]:
        model = models[threads]
        served.paged.use(model)
        model.shared_prefix_attention = shared_reads
        for step in (served.step, served.sample):
            pieces = [Piece(Cast.WATCHED, next(last_tokens), 1)]
            pieces += [next_piece(served, text, random) for text in served.cast.neighbours(count)]
            step(*(pieces[i] for i in random.permutation(len(pieces))))
        read, attended = model.attention_kv_bytes_read, model.attention_kv_bytes_attended
        if not shared_reads or count == 0:
            assert read == attended
        elif count == max(NEIGHBOURS):
            assert read < attended
        model.shared_prefix_attention = True


def next_piece(served: Served, text: int, random: np.random.Generator) -> Piece:
    """A chunk of the prompt, then mostly single tokens; behind its end the text begins anew."""
    begin, end = served.cast.shared[text], len(served.cast.texts[text])
    start = max(served.ends[text], begin) % end or begin
    count = int(random.choice([5, 12, 30] if start == begin else [1, 1, 1, 5]))
    return Piece(text, start, min(count, end - start))


def test_pause_and_resume_in_other_blocks_change_no_byte(served: Served, models: dict[int, Model]) -> None:
    """The tail's blocks go to a prompt of another text, and the tail is computed again elsewhere."""
    cast, tables = served.cast, served.paged.tables
    length, kept = cast.size.length, cast.kept
    served.paged.use(models[2])
    served.run(cast.SLEEPER, cast.shared[cast.SLEEPER], length, chunk=50)

    blocks = kept // served.paged.block_size
    dropped, others = tables[cast.SLEEPER][blocks:], tables[cast.USURPER]
    tables[cast.SLEEPER][blocks:], tables[cast.USURPER] = others, dropped
    served.forget(cast.SLEEPER, kept)
    served.run(cast.USURPER, 0, length - kept, chunk=64)

    served.run(cast.SLEEPER, kept, length - 16, chunk=41)
    served.run(cast.SLEEPER, length - 16, length, chunk=1)
