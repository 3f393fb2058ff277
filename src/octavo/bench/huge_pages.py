"""Memory in huge pages, to measure what the pages of a pool cost."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
from pathlib import Path

HUGE_PAGE_BYTES = 2 << 20

_SMAPS = Path("/proc/self/smaps")


class HugePages:
    """`nbytes` from a multiple of 2 MiB on, in huge pages if the system gives them (madvise(2)); Linux."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        whole = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._mapping = mmap.mmap(-1, whole + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES

    @property
    def are_huge(self) -> bool:
        """Whether nearly all of it is, once it has been written."""
        first = self.address
        return _huge_bytes(first, first + self.nbytes) >= 0.9 * self.nbytes

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._mapping.close()


def _huge_bytes(begin: int, end: int) -> int:
    """In huge pages, of the mappings that hold some of these addresses."""
    total, inside = 0, False
    try:
        lines = _SMAPS.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(text, 16) for text in mapping.groups())
            inside = first < end and last > begin
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) << 10
    return total
