"""Read a GGUF model file: its metadata and, without copying, its tensors.

| magic, version, counts | metadata: key, type, value | tensor infos | padding | tensor data, each aligned |
  24 bytes                 in file order                name, shape, type, offset

The file is mapped, never read whole: what a tensor costs in memory is the pages that somebody touches.
A file is untrusted input: every count and every offset is compared with the bytes that are there before it
is used, and whatever is wrong is one sentence in a `ModelFileError`.

Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from octavo.model.errors import ModelFileError

# ggml's numbers of its tensor types: name, elements a block, bytes a block. Missing numbers were withdrawn.
_TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

# Value types of the metadata that are one number: the type's number -> how numpy reads it.
_NUMBER_TYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING = 8
_ARRAY = 9

_MAX_DIMENSIONS = 4  # ggml's limit
_MAX_NESTING = (
    4  # arrays in arrays are allowed and unused; a bound keeps a hostile file from exhausting the stack
)
_DEFAULT_ALIGNMENT = 32

_FAULT_AROUND_BYTES = 64 << 10
"""A first touch maps the pages of a whole aligned piece of this size (Linux, fault_around_bytes)."""

_READ_AHEAD_BYTES = 128 << 10
"""Of one request: more than the device's read_ahead_kb, usually 128, is silently not read."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and how it is coded."""

    name: str
    type: str
    """ggml's name of the coding, such as `F32` or `Q4_1`."""
    shape: tuple[int, ...]
    """numpy's order, slowest first: a matrix is (out, in), whose rows are whole blocks of its coding."""
    offset: int
    """First byte, counted from the start of the file."""
    nbytes: int


class GGUFFile:
    """One opened, mapped and checked model file. Close it, or use it as a context manager.

    Views handed out by `data` stay valid after `close`: the mapping goes when the last of them does.

    Raises: ModelFileError if the file is missing, damaged, or not a little-endian GGUF of version 2 or 3.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._mapping = _map(self.path)
        try:
            reader = _Reader(self.path, self._mapping)
            tensor_count, metadata_count = reader.header()
            self.metadata: dict[str, Any] = reader.metadata(metadata_count)
            self.tensors: dict[str, TensorInfo] = reader.tensors(tensor_count, self.metadata)
        except BaseException:
            self.close()
            raise

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The coded bytes of one tensor: uint8[nbytes], read-only, a view of the mapping.

        Raises: ModelFileError if the file has no tensor of this name.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self.path}: the tensor '{name}' is missing")
        return np.frombuffer(self._mapping, dtype=np.uint8, count=info.nbytes, offset=info.offset)

    def drop_pages(self, begin: int = 0, end: int | None = None) -> None:
        """Give the pages of bytes [begin, end) of the file, all by default, back to the system, so that
        repacked weights are not resident twice. They stay in the page cache, which counts as free memory.

        Views stay valid; reading them again reads the file again.
        """
        self._advise(mmap.MADV_DONTNEED, begin, len(self._mapping) if end is None else end)

    def read_ahead(self, begin: int, end: int) -> None:
        """Have the system begin to read bytes [begin, end) into the page cache, without waiting for them.
        What lies there already costs two microseconds a quarter of a megabyte.
        """
        for piece in range(begin, end, _READ_AHEAD_BYTES):
            self._advise(mmap.MADV_WILLNEED, piece, min(piece + _READ_AHEAD_BYTES, end))

    def _advise(self, advice: int, begin: int, end: int) -> None:
        start = begin // _FAULT_AROUND_BYTES * _FAULT_AROUND_BYTES
        length = min(-(-end // _FAULT_AROUND_BYTES) * _FAULT_AROUND_BYTES, len(self._mapping)) - start
        if length > 0:
            self._mapping.madvise(advice, start, length)

    def close(self) -> None:
        """Let go of the mapping. Idempotent."""
        try:
            self._mapping.close()
        except BufferError:
            # Somebody holds a view: the mapping ends with it, which is what they were promised.
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError(f"{path}: the file is empty (0 bytes)")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ModelFileError(f"{path}: this is a folder, not a GGUF file") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


class _Reader:
    """A position that walks the head of the file once, front to back."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self._path = path
        self._buffer = buffer
        self._size = len(buffer)
        self._position = 0

    def _fault(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self._path}: {what}")

    def _cut_short(self, what: str) -> ModelFileError:
        return self._fault(f"the file is cut short: it ends at byte {self._size:,}, inside {what}")

    def _need(self, count: int, what: str) -> None:
        if count > self._size - self._position:
            raise self._cut_short(what)

    def _u32(self, what: str) -> int:
        self._need(4, what)
        (value,) = _U32.unpack_from(self._buffer, self._position)
        self._position += 4
        return int(value)

    def _u64(self, what: str) -> int:
        self._need(8, what)
        (value,) = _U64.unpack_from(self._buffer, self._position)
        self._position += 8
        return int(value)

    def _string(self, what: str) -> str:
        length = self._u64(what)
        self._need(length, what)
        raw = self._buffer[self._position : self._position + length]
        self._position += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._fault(f"{what} is not UTF-8 text") from None

    def header(self) -> tuple[int, int]:
        """How many tensors, how many metadata entries."""
        magic = self._buffer[:4]
        if magic != b"GGUF":
            raise self._fault(f"this is not a GGUF file: it begins with {_shown(magic)} instead of 'GGUF'")
        self._position = 4
        version = self._u32("the header")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in (1, 2, 3):
                raise self._fault("the file is big-endian, and only little-endian files are supported")
            raise self._fault(f"GGUF version {version} is not supported, only 2 and 3")
        tensor_count, metadata_count = self._u64("the header"), self._u64("the header")
        # The smallest tensor info takes 24 bytes, the smallest metadata entry 13: more cannot be in the file.
        for count, smallest, what in (
            (tensor_count, 24, "tensors"),
            (metadata_count, 13, "metadata entries"),
        ):
            if count * smallest > self._size - self._position:
                raise self._fault(
                    f"the header counts {count:,} {what}, which cannot fit in a file of {self._size:,} bytes"
                )
        return tensor_count, metadata_count

    def metadata(self, count: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for number in range(count):
            key = self._string(f"the name of metadata entry {number}")
            if key in entries:
                raise self._fault(f"the metadata entry '{key}' appears twice")
            what = f"the metadata entry '{key}'"
            entries[key] = self._value(self._u32(what), what)
        return entries

    def _value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(what, nesting=1)
        if kind not in _NUMBER_TYPES:
            raise self._fault(f"{what} has the unknown value type {kind}")
        return self._numbers(_NUMBER_TYPES[kind], 1, what)[0]

    def _array(self, what: str, nesting: int) -> list[Any]:
        kind = self._u32(what)
        count = self._u64(what)
        if kind == _STRING:
            return self._strings(count, what)
        if kind in _NUMBER_TYPES:
            return self._numbers(_NUMBER_TYPES[kind], count, what)
        if kind != _ARRAY:
            raise self._fault(f"{what} is an array of the unknown value type {kind}")
        if nesting == _MAX_NESTING:
            raise self._fault(f"{what} nests arrays more than {_MAX_NESTING} deep")
        self._need(count * 12, what)
        return [self._array(what, nesting + 1) for _ in range(count)]

    def _numbers(self, dtype: np.dtype[Any], count: int, what: str) -> list[Any]:
        self._need(count * dtype.itemsize, what)
        values = np.frombuffer(self._buffer, dtype=dtype, count=count, offset=self._position)
        self._position += count * dtype.itemsize
        numbers: list[Any] = values.tolist()
        return numbers

    def _strings(self, count: int, what: str) -> list[str]:
        """Vocabularies hold up to 262,144 strings: this loop is most of what opening a file takes."""
        self._need(count * 8, what)
        buffer, unpack, position = self._buffer, _U64.unpack_from, self._position
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(buffer, position)[0]
                append(buffer[start:position].decode())
        except (struct.error, OverflowError):
            raise self._cut_short(what) from None
        except UnicodeDecodeError:
            raise self._fault(f"string {len(strings):,} of {what} is not UTF-8 text") from None
        if position > self._size:
            raise self._cut_short(what)
        self._position = position
        return strings

    def tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8 != 0:
            raise self._fault(f"general.alignment is {_shown(alignment)}, not a positive multiple of 8")
        relative: dict[str, TensorInfo] = {}
        for number in range(count):
            info = self._tensor_info(number)
            if info.name in relative:
                raise self._fault(f"the tensor '{info.name}' appears twice")
            if info.offset % alignment:
                raise self._fault(
                    f"the tensor '{info.name}' lies at offset {info.offset:,}, not a multiple of {alignment}"
                )
            relative[info.name] = info
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in relative.values():
            offset = data_start + info.offset
            if offset + info.nbytes > self._size:
                raise self._fault(
                    f"the file is cut short: the tensor '{info.name}' ends at byte {offset + info.nbytes:,} "
                    f"of {self._size:,}"
                )
            tensors[info.name] = TensorInfo(info.name, info.type, info.shape, offset, info.nbytes)
        for before, after in _neighbours(tensors):
            if before.offset + before.nbytes > after.offset:
                raise self._fault(f"the tensors '{before.name}' and '{after.name}' overlap")
        return tensors

    def _tensor_info(self, number: int) -> TensorInfo:
        """One entry of the table, its offset still counted from the start of the tensor data."""
        name = self._string(f"the name of tensor {number}")
        what = f"the description of the tensor '{name}'"
        dimensions = self._u32(what)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._fault(
                f"the tensor '{name}' has {dimensions:,} dimensions, not 1 to {_MAX_DIMENSIONS}"
            )
        shape = tuple(self._u64(what) for _ in range(dimensions))[::-1]  # the file has the fastest first
        kind = self._u32(what)
        offset = self._u64(what)
        if kind not in _TENSOR_TYPES:
            raise self._fault(f"the tensor '{name}' has the unknown type {kind}")
        type_name, block_elements, block_bytes = _TENSOR_TYPES[kind]
        elements = 1
        for extent in shape:
            if extent == 0:
                raise self._fault(f"the tensor '{name}' of shape {shape} is empty")
            elements *= extent
        if shape[-1] % block_elements:
            raise self._fault(
                f"the tensor '{name}' has rows of {shape[-1]:,} elements, "
                f"but {type_name} codes {block_elements} at a time"
            )
        return TensorInfo(name, type_name, shape, offset, elements // block_elements * block_bytes)


def _neighbours(tensors: dict[str, TensorInfo]) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    by_offset = sorted(tensors.values(), key=lambda info: info.offset)
    return itertools.pairwise(by_offset)


def _shown(value: Any) -> str:
    """A value from the file, fit for one line of a message whatever it holds."""
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"
