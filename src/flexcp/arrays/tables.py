"""Tables: frozen dataclasses whose fields are equally long int64 columns.

Plans consist of integers in columns, not of objects in lists. This keeps planning fast, hashing trivial and the file
format plain. A table is a dataclass that inherits from :class:`Table` and names its columns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Table:
    """Base class of tables: equally long, read-only int64 columns; columns of other lengths raise ValueError."""

    def __post_init__(self) -> None:
        size = None
        for name in self.names():
            # Make a view read-only, so that the caller's array stays writable.
            column = np.ascontiguousarray(getattr(self, name), dtype=np.int64).view()
            column.flags.writeable = False
            if size is not None and len(column) != size:
                raise ValueError(f"column {name} of {type(self).__name__} has {len(column)} rows, not {size}")
            size = len(column)
            object.__setattr__(self, name, column)

    def __len__(self) -> int:
        return len(getattr(self, self.names()[0]))

    @classmethod
    @cache
    def names(cls) -> tuple[str, ...]:
        """Return the names of the columns, in order."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def make(cls, rows: int, **columns: Any) -> Self:
        """Make a table of ``rows`` rows; a column is an array, or one number, which is repeated."""
        return cls(
            **{n: c if isinstance(c := columns[n], np.ndarray) else np.full(rows, c, np.int64) for n in cls.names()}
        )

    @classmethod
    def join(cls, parts: list[Self]) -> Self:
        """Return a table with the rows of all parts, in order."""
        if not parts:
            return cls.make(0, **dict.fromkeys(cls.names(), 0))
        return cls._of({n: np.concatenate([getattr(p, n) for p in parts]) for n in cls.names()})

    def take(self, index: Any) -> Self:
        """Return a table of the rows that ``index`` (integers or booleans) selects."""
        if isinstance(index, np.ndarray) and index.dtype == bool:
            if index.all():
                return self  # tables are read-only, so no copy is needed
            index = np.flatnonzero(index)  # once here, instead of once in every column
        return self._of({n: getattr(self, n)[index] for n in self.names()})

    @classmethod
    def _of(cls, columns: dict[str, Ints]) -> Self:
        """Make a table of columns that were made from those of another table, without checking them, to save time."""
        table = object.__new__(cls)
        for column in columns.values():
            column.flags.writeable = False
        table.__dict__.update(columns)
        return table

    def sorted_by(self, *names: str) -> Self:
        """Return a table sorted by the named columns, by the first of them first; equal rows keep their order."""
        return self.take(np.lexsort(_packed([getattr(self, n) for n in names])[::-1]))

    def matrix(self) -> Ints:
        """Return all columns as one ``[columns, rows]`` array."""
        return np.stack([getattr(self, n) for n in self.names()])


def _packed(keys: list[Ints]) -> list[Ints]:
    """Return fewer keys with the same order, the most important first: neighbours are joined while they fit 62 bits.

    Every key costs ``np.lexsort`` a sort of its own.
    """
    if len(keys[0]) == 0:
        return keys
    found: list[Ints] = []
    room = 0  # how many values the last key of ``found`` has
    for key in keys:
        least = int(key.min())
        values = int(key.max()) - least + 1
        if found and room * values < 1 << 62:
            found[-1] = found[-1] * values + (key - least)
            room *= values
        else:
            found.append(key - least if values < 1 << 62 else key)
            room = values
    return found
