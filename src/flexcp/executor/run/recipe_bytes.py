"""Recipe bytes: convert a rank recipe to bytes and back, to send it from a planner process to the training process.

The bytes are a pickle in which each array is replaced by its number in a table of distinct arrays, because forward and
backward, sender and receiver share most of theirs. All arrays together are stored as one column of differences,
compressed by zlib, because index maps mostly ascend by one. Decompression releases the interpreter lock, so it runs
beside the training thread.

Use this only on the pipe from a process that the training process started itself: unlike the reader of plan files,
unpickling trusts its input.
"""

from __future__ import annotations

import io
import pickle
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.run.rank_recipe import RankRecipe

LEVEL = 1
"""Compression level of zlib: the differences are so regular that higher levels gain little."""


def pack_recipe(recipe: RankRecipe) -> bytes:
    """Return the recipe as bytes."""
    buffer = io.BytesIO()
    writer = _Writer(buffer)
    writer.dump(recipe)
    arrays = [array.T.reshape(-1).astype(np.int64) for array in writer.arrays]
    steps = np.diff(np.concatenate([np.zeros(1, np.int64), *arrays]))
    narrow = np.int32 if len(steps) == 0 or int(np.abs(steps).max()) < 1 << 31 else np.int64
    shapes = [(array.shape, array.dtype.str) for array in writer.arrays]
    return zlib.compress(
        pickle.dumps((shapes, steps.astype(narrow), buffer.getvalue()), pickle.HIGHEST_PROTOCOL), LEVEL
    )


def unpack_recipe(data: bytes) -> RankRecipe:
    """Return the recipe that :func:`pack_recipe` wrote."""
    shapes, steps, body = pickle.loads(zlib.decompress(data))
    column = np.cumsum(steps, dtype=np.int64)
    reader = _Reader(io.BytesIO(body))
    at = 0
    for shape, dtype in shapes:
        size = int(np.prod(shape))
        flat = column[at : at + size].astype(dtype, copy=False)
        reader.arrays.append(flat if len(shape) == 1 else np.ascontiguousarray(flat.reshape(shape[::-1]).T))
        at += size
    recipe: RankRecipe = reader.load()
    return recipe


class _Writer(pickle.Pickler):
    """A pickler that replaces each array by its number in ``arrays``, the list of distinct arrays that it fills."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.arrays: list[NDArray[Any]] = []
        self._numbers: dict[tuple[tuple[int, ...], str, bytes], int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, np.ndarray):
            return None
        key = (obj.shape, obj.dtype.str, obj.tobytes())
        if key not in self._numbers:
            self._numbers[key] = len(self.arrays)
            self.arrays.append(obj)
        return self._numbers[key]


class _Reader(pickle.Unpickler):
    """An unpickler of what :class:`_Writer` wrote; ``arrays`` must be filled with the same arrays first."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.arrays: list[NDArray[Any]] = []

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        found: NDArray[Any] = self.arrays[pid]
        return found
