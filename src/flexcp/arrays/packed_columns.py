"""Packed columns: int64 columns as few bytes, and back without trusting them.

A column is its values, or the differences of neighbours where those are narrower, less their smallest, in 0, 1, 2, 4 or
8 bytes each:

    how (1 byte: width, +16 for differences), smallest (8 bytes), values

A block of columns is its row count (8 bytes) and the columns one after the other. A column of one repeated value has no
bytes per row, so a block's memory is not bounded by its bytes: :class:`Reader` carries a budget of memory, and a block
that needs more is refused before anything of it is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

DIFFERENCES = 16
_UNSIGNED = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def packed(columns: Sequence[Ints]) -> bytes:
    """A block of equally long columns."""
    rows = len(columns[0])
    return struct.pack("<Q", rows) + b"".join(_packed(column) for column in columns)


def _packed(column: Ints) -> bytes:
    if len(column) == 0:
        return struct.pack("<Bq", 0, 0)
    how, low, width = 0, int(column.min()), _width(column)
    if len(column) > 1 and width > 1:
        steps = np.diff(column, prepend=column[:1] * 0)
        if _width(steps) < width:
            how, column, low, width = DIFFERENCES, steps, int(steps.min()), _width(steps)
    values = (column - low).astype(_UNSIGNED[width]).tobytes() if width else b""
    return struct.pack("<Bq", how + width, low) + values


def _width(column: Ints) -> int:
    """Bytes that hold every value less the smallest."""
    span = int(column.max()) - int(column.min())
    return 0 if span == 0 else next(w for w in (1, 2, 4, 8) if span < 1 << 8 * w)


class Reader:
    """Reads blocks one after the other from ``data`` and makes at most ``budget`` bytes of columns of them."""

    def __init__(self, data: bytes, budget: int) -> None:
        self.data, self.at, self.budget = data, 0, budget

    def block(self, columns: int) -> list[Ints]:
        """The next block, which has so many columns."""
        (rows,) = struct.unpack("<Q", self._bytes(8))
        self.spend(rows * columns * 8, f"{rows} rows of {columns} columns")
        return [self._column(rows) for _ in range(columns)]

    def spend(self, amount: int, what: str) -> None:
        """Take so many bytes of memory out of the budget, or refuse."""
        if amount > self.budget:
            raise ValueError(f"{what} is more than a file of this size may ask for")
        self.budget -= amount

    def end(self) -> None:
        """Refuse anything that is left."""
        if self.at != len(self.data):
            raise ValueError(f"{len(self.data) - self.at} bytes are left after the last table")

    def _column(self, rows: int) -> Ints:
        how, low = struct.unpack("<Bq", self._bytes(9))
        width = how & ~DIFFERENCES
        if width == 0:
            column = np.zeros(rows, np.int64)
        elif width in _UNSIGNED:
            column = np.frombuffer(self._bytes(rows * width), _UNSIGNED[width]).astype(np.int64)
        else:
            raise ValueError(f"a column of {width} bytes a value")
        column += low
        return np.cumsum(column, dtype=np.int64) if how & DIFFERENCES else column

    def _bytes(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            raise ValueError("a table is cut short")
        self.at += count
        return found
