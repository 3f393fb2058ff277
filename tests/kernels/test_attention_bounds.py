"""No kernel reads beside the arena: both its ends lie beside pages that cannot be read.

A fault ends the process, so that another one asks.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernels.paged_kv import Arena, Chunk, Kind, random_chunk, random_kv, same_bytes
from kernels.paths import AVAILABLE
from octavo.kernels import ThreadPool
from octavo.kernels._native import paged_attention

PAGE = mmap.PAGESIZE
NO_ACCESS = 0  # PROT_NONE of sys/mman.h


class FencedBytes:
    """Memory of `size` bytes that begins, or ends, where a page begins whose neighbour cannot be read."""

    def __init__(self, size: int, at_end: bool) -> None:
        pages = -(-size // PAGE)
        self._mapping = mmap.mmap(-1, (pages + 2) * PAGE)
        everything = np.frombuffer(self._mapping, dtype=np.uint8)
        first = PAGE + (pages * PAGE - size if at_end else 0)
        self.bytes: npt.NDArray[np.uint8] = everything[first : first + size]
        mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for page in (0, pages + 1):
            if mprotect(everything.ctypes.data + page * PAGE, PAGE, NO_ACCESS) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")


def attend_between_fences(chunk: Chunk, kind: Kind, block_size: int, instruction_set: str) -> None:
    """A sequence whose blocks fill the arena from end to end, one layer each and no padding."""
    heads = chunk.kv.keys.shape[1:]
    arena = Arena(heads, block_size, kv_dtype=kind.kv_dtype)
    (table,) = arena.lay_out([chunk.kv])
    outs = [arena.attend([chunk], [table], ThreadPool(1), kind, instruction_set)[0]]
    layer = arena.bytes[:, arena.layer_bytes : 2 * arena.layer_bytes]
    for at_end in (False, True):
        # In order, and the other way round: the first block at either end.
        ids = np.arange(len(table), dtype=np.int32)[:: -1 if at_end else 1].copy()
        fenced = FencedBytes(len(table) * arena.layer_bytes, at_end)
        fenced.bytes.reshape(len(table), -1)[ids] = layer[table]
        asked = (
            fenced.bytes,
            arena.layer_bytes,
            0,
            block_size,
            heads[0],
            chunk.queries,
            np.array([chunk.start], dtype=np.int32),
            np.array([len(chunk.queries)], dtype=np.int32),
            np.array([0, len(table)], dtype=np.int32),
            ids,
            instruction_set,
            kind.kv_dtype,
            kind.window,
            kind.soft_cap,
        )
        outs.append(paged_attention(ThreadPool(1), *asked))
    if not (same_bytes(outs[0], outs[1]) and same_bytes(outs[0], outs[2])):
        raise AssertionError("other bytes between fences")


def attend_everything(instruction_set: str) -> None:
    random = np.random.default_rng(0)
    for kv_dtype in ("f16", "q8"):
        for block_size in (8, 16, 256):
            for head_dim, group in ((16, 1), (80, 3), (256, 13)):
                for tokens, rows in ((1, 1), (7, 1), (8, 8), (block_size + 1, 1), (260, 3), (300, 1)):
                    kv = random_kv(random, tokens, 2, head_dim)
                    chunk = random_chunk(random, kv, group, tokens - rows, rows)
                    for window in (0, 3):
                        kind = Kind(kv_dtype, window)
                        print(instruction_set, kind, block_size, head_dim, group, tokens, rows, flush=True)
                        attend_between_fences(chunk, kind, block_size, instruction_set)


def test_nothing_beside_the_arena_is_read() -> None:
    script = (
        "from kernels.test_attention_bounds import attend_everything\n"
        f"for name in {AVAILABLE}: attend_everything(name)\n"
        "print('all attended')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr)
    assert done.stdout.splitlines()[-1] == "all attended"


def test_a_fence_ends_a_process_that_reads_past_it() -> None:
    """Or nothing above would be proved."""
    script = (
        "from kernels.test_attention_bounds import FencedBytes\n"
        "import ctypes\n"
        "fenced = FencedBytes(100, True)\n"
        "ctypes.string_at(fenced.bytes.ctypes.data, 100)\n"
        "print('inside', flush=True)\n"
        "ctypes.string_at(fenced.bytes.ctypes.data + 100, 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert done.stdout == "inside\n"
    assert done.returncode < 0
