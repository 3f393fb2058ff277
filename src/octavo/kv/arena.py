"""The memory that blocks live in: one mapping, touched when used."""

from __future__ import annotations

import ctypes
import mmap
from types import TracebackType

from octavo.kv.layout import PAGE_BYTES

_MAP_NORESERVE = 0x4000
_MINCORE_WINDOW = 64 * 1024 * 1024
_EVEN_BYTES = bytes(range(0, 256, 2))


class Arena:
    """`num_blocks` extents, back to back in one private anonymous mapping; extent `i` is block id `i`.

        address                                        address + num_blocks * extent_bytes
        | extent 0 | extent 1 | extent 2 | ... | extent num_blocks - 1 |
          resident   resident   never touched: costs nothing yet

    The system gives a page when it is first written. Nothing is reserved in the system's accounts
    (MAP_NORESERVE), and huge pages are refused: one touched block must not make 2 MiB resident. Linux only.

    Raises: ValueError, if `extent_bytes` is not whole pages or a size is not positive; OSError, if the system
        refuses the mapping.
    """

    def __init__(self, extent_bytes: int, num_blocks: int) -> None:
        if extent_bytes < 1 or extent_bytes % PAGE_BYTES:
            raise ValueError(f"extent_bytes is {extent_bytes}, it must be a multiple of {PAGE_BYTES}")
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, it must be at least 1")
        self.extent_bytes = extent_bytes
        self.num_blocks = num_blocks
        self._mapping = mmap.mmap(
            -1, extent_bytes * num_blocks, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        )
        self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        # A ctypes view is the plain way to a mapping's address. It must not outlive this line: while a view
        # exists, the mapping cannot be closed.
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    @property
    def address(self) -> int:
        """Where extent 0 begins. Raises ValueError once closed: no kernel may read memory that is gone."""
        if self._mapping.closed:
            raise ValueError("the arena is closed")
        return self._address

    @property
    def nbytes(self) -> int:
        """Size of the mapping, bytes: what the memory budget is charged."""
        return self.extent_bytes * self.num_blocks

    def copy(self, source: int, destination: int) -> None:
        """Copy the whole of extent `source` to extent `destination`.

        Raises: ValueError once closed, and for ids that are not two different extents.
        Cost: extent_bytes; 30 microseconds for 360 KB.
        """
        if (
            not (0 <= source < self.num_blocks and 0 <= destination < self.num_blocks)
            or source == destination
        ):
            raise ValueError(f"extents {source} and {destination} are not two of {self.num_blocks}")
        to, of = (self.address + block * self.extent_bytes for block in (destination, source))
        ctypes.memmove(to, of, self.extent_bytes)

    def resident_bytes(self) -> int:
        """How much of the arena takes physical memory now, bytes, as mincore(2) sees it."""
        libc = ctypes.CDLL(None, use_errno=True)
        num_pages = 0
        for offset in range(0, self.nbytes, _MINCORE_WINDOW):
            length = min(_MINCORE_WINDOW, self.nbytes - offset)
            pages = (ctypes.c_ubyte * (length // PAGE_BYTES))()
            start = ctypes.c_void_p(self.address + offset)
            if libc.mincore(start, ctypes.c_size_t(length), pages) != 0:
                error = ctypes.get_errno()
                raise OSError(error, "mincore failed on the arena")
            # Only the lowest bit of each byte has a meaning.
            num_pages += len(bytes(pages).translate(None, _EVEN_BYTES))
        return num_pages * PAGE_BYTES

    def close(self) -> None:
        """Unmap. Idempotent; the caller sees to it that no kernel is at work."""
        self._mapping.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
