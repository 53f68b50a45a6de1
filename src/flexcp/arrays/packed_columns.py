"""Packed columns: write int64 columns in few bytes, and read them from bytes that are not trusted.

A column is stored as its values, or as the differences of neighbouring values if these need fewer bytes. The smallest
is subtracted, and each takes 0, 1, 2, 4 or 8 bytes:

    how (1 byte: width, +16 for differences), smallest (8 bytes), values

A block of columns is its row count (8 bytes) and the columns one after the other. A column of one repeated value takes
no bytes per row, so a small block may need much memory. :class:`Reader` therefore has a memory budget, and refuses a
block that needs more before it allocates anything.
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
    """Return a block of equally long columns as bytes."""
    rows = len(columns[0])
    return struct.pack("<Q", rows) + b"".join(_packed(column) for column in columns)


def _packed(column: Ints) -> bytes:
    """Return one column as bytes."""
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
    """Return how many bytes per value hold the differences to the smallest value."""
    span = int(column.max()) - int(column.min())
    return 0 if span == 0 else next(w for w in (1, 2, 4, 8) if span < 1 << 8 * w)


class Reader:
    """Reads blocks one after the other from ``data``; their columns may take at most ``budget`` bytes of memory.

    Data that is no sequence of blocks raises ValueError.
    """

    def __init__(self, data: bytes, budget: int) -> None:
        self.data, self.at, self.budget = data, 0, budget

    def block(self, columns: int) -> list[Ints]:
        """Read the next block and return its columns; it must have this number of columns."""
        (rows,) = struct.unpack("<Q", self._bytes(8))
        self.spend(rows * columns * 8, f"{rows} rows of {columns} columns")
        return [self._column(rows) for _ in range(columns)]

    def spend(self, amount: int, what: str) -> None:
        """Subtract ``amount`` bytes from the memory budget; raise ValueError if that is too small.

        ``what`` says what the bytes are for, in the message.
        """
        if amount > self.budget:
            raise ValueError(f"{what} is more than a file of this size may ask for")
        self.budget -= amount

    def end(self) -> None:
        """Raise ValueError if bytes are left."""
        if self.at != len(self.data):
            raise ValueError(f"{len(self.data) - self.at} bytes are left after the last table")

    def _column(self, rows: int) -> Ints:
        """Read the next column, which has ``rows`` values."""
        how, low = struct.unpack("<Bq", self._bytes(9))
        width = how & ~DIFFERENCES
        if width == 0:
            column = np.zeros(rows, np.int64)
        elif width in _UNSIGNED:
            column = np.frombuffer(self._bytes(rows * width), _UNSIGNED[width]).astype(np.int64)
        else:
            raise ValueError(f"a column has {width} bytes per value; it may have 0, 1, 2, 4 or 8")
        column += low
        return np.cumsum(column, dtype=np.int64) if how & DIFFERENCES else column

    def _bytes(self, count: int) -> bytes:
        """Read the next ``count`` bytes; raise ValueError if there are fewer."""
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            raise ValueError("a table is cut short")
        self.at += count
        return found
