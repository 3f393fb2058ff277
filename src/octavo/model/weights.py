"""From a GGUF file's tensors to packed matrices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.kernels import Matrix, ThreadPool, WeightStore
from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile, TensorInfo


class Weights:
    """The tensors of one file by name, repacked as they are asked for."""

    def __init__(self, file: GGUFFile, store: WeightStore, pool: ThreadPool) -> None:
        self._file = file
        self._store = store
        self._pool = pool

    def matrix(self, name: str, out_features: int, in_features: int) -> Matrix:
        """The matrix [out_features, in_features], packed in column tiles.

        Raises: ModelFileError if it is missing, of another shape, of a type without kernels, or has a scale
        that is not finite.
        """
        info = self._info(name, (out_features, in_features))
        try:
            return Matrix(
                self._store, info.type, self._file.data(name), out_features, in_features, self._pool
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
        if not np.isfinite(vector).all():
            raise ModelFileError(f"{self._file.path}: the tensor '{name}' has values that are not finite")
        return vector

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._file.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self._file.path}: the tensor '{name}' is missing")
        if info.shape != shape:
            raise ModelFileError(
                f"{self._file.path}: the tensor '{name}' is {list(info.shape)}, expected {list(shape)}"
            )
        return info
