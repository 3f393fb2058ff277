"""From a GGUF file's tensors to packed matrices."""

from __future__ import annotations

import math
import re

import numpy as np
import numpy.typing as npt

from octavo.kernels import PACK_STRIP_BYTES, Matrix, ThreadPool, WeightStore
from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile, TensorInfo

# Tensors that change nothing where nobody reads them: old converters copied the tables of rotations that
# checkpoints held beside their weights, and those follow from the metadata (gguf-py: MODEL_TENSOR_SKIP).
# `rope_freqs.weight`, which that list names too, has had a meaning since Llama 3.1 and is read.
_IGNORABLE = re.compile(r"rope\.freqs|blk\.\d+\.attn_rot_embd(\.weight)?")

_PANEL_COLUMNS = 32
"""Rows of a tensor are packed in panels of this many; the last one is filled up."""

_STORE_ALIGNMENT = 64

_NAMED_UNREAD = 3
"""Names in a refusal; a file may have hundreds."""


def packed_bytes(file: GGUFFile) -> int:
    """The most that all tensors of the file can take once packed, in bytes, from its header alone."""
    total = 0
    for info in file.tensors.values():
        rows = math.prod(info.shape[:-1])
        row_bytes = info.nbytes // rows
        if info.type.endswith(("_K", "_XS")):
            row_bytes += row_bytes // 16  # scales of 6 bits become bytes
        if len(info.shape) == 1:
            row_bytes = 4 * info.shape[0]  # vectors are kept as float32
        else:
            rows = -(-rows // _PANEL_COLUMNS) * _PANEL_COLUMNS
        total += rows * row_bytes + _STORE_ALIGNMENT
    return total


class Weights:
    """The tensors of one file by name, repacked as they are asked for.

    | pages given back | a strip being packed | read ahead | not touched |   a tensor of the file
                         <= PACK_STRIP_BYTES

    Resident at any moment are the packed weights and one strip of the file.
    """

    def __init__(self, file: GGUFFile, store: WeightStore, pool: ThreadPool) -> None:
        self._file = file
        self._store = store
        self._pool = pool
        self._asked_for: set[str] = set()
        self._read_ahead_until = 0

    def refuse_unread(self) -> None:
        """To be called when a network is recorded: a tensor that nobody asked for is a part that is missing.

        Raises: ModelFileError that names the first of them.
        """
        unread = [
            name
            for name in self._file.tensors
            if name not in self._asked_for and not _IGNORABLE.fullmatch(name)
        ]
        if unread:
            named = ", ".join(f"'{name}'" for name in unread[:_NAMED_UNREAD])
            more = f" and {len(unread) - _NAMED_UNREAD:,} more" if len(unread) > _NAMED_UNREAD else ""
            raise ModelFileError(
                f"{self._file.path}: nothing here computes with the tensors {named}{more}, "
                "so the answers would be wrong"
            )

    def matrix(self, name: str, out_features: int, in_features: int) -> Matrix:
        """The matrix [out_features, in_features], packed in panels of columns.

        Raises: ModelFileError if it is missing, of another shape, of a type without kernels, or has a scale
        that is not finite.
        """
        info = self._info(name, (out_features, in_features))

        def have_read(begin: int, end: int) -> None:
            self._file.drop_pages(info.offset + begin, info.offset + end)
            self._read_ahead(info.offset + end)

        self._read_ahead(info.offset)
        try:
            return Matrix(
                self._store,
                info.type,
                self._file.data(name),
                out_features,
                in_features,
                self._pool,
                have_read=have_read,
            )
        except ValueError as fault:
            raise ModelFileError(f"{self._file.path}: the tensor '{name}': {fault}") from None

    def vector(self, name: str, length: int) -> npt.NDArray[np.float32]:
        """The vector [length] as float32.

        Raises: ModelFileError if it is missing, of another length or not of floats.
        """
        info = self._info(name, (length,))
        element = {"F32": "<f4", "F16": "<f2"}.get(info.type)
        if element is None:
            raise ModelFileError(
                f"{self._file.path}: the tensor '{name}' is {info.type}; vectors are read as F32 or F16"
            )
        vector = np.frombuffer(self._file.data(name), dtype=element).astype(np.float32)
        self._file.drop_pages(info.offset, info.offset + info.nbytes)
        if not np.isfinite(vector).all():
            raise ModelFileError(f"{self._file.path}: the tensor '{name}' has values that are not finite")
        return vector

    def _read_ahead(self, position: int) -> None:
        """Two strips, so that the next one is being read while this one is packed. Tensors are asked for
        nearly in the order of the file; where one lies further back, its pages come when they are touched.
        """
        until = position + 2 * PACK_STRIP_BYTES
        self._file.read_ahead(max(position, self._read_ahead_until), until)
        self._read_ahead_until = max(self._read_ahead_until, until)

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._file.tensors.get(name)
        self._asked_for.add(name)
        if info is None:
            raise ModelFileError(f"{self._file.path}: the tensor '{name}' is missing")
        if info.shape != shape:
            raise ModelFileError(
                f"{self._file.path}: the tensor '{name}' is {list(info.shape)}, expected {list(shape)}"
            )
        return info
