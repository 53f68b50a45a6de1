"""Tables: frozen dataclasses whose fields are equally long int64 columns.

Plans are integers in columns, not objects in lists: that keeps planning in milliseconds, hashing trivial, and the file
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
    """Equally long int64 columns, read-only."""

    def __post_init__(self) -> None:
        size = None
        for name in self.names():
            # A view, so that the caller's own array stays writable.
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
        """The columns' names, in order."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def make(cls, rows: int, **columns: Any) -> Self:
        """A table of ``rows`` rows; numbers are repeated."""
        return cls(
            **{n: c if isinstance(c := columns[n], np.ndarray) else np.full(rows, c, np.int64) for n in cls.names()}
        )

    @classmethod
    def join(cls, parts: list[Self]) -> Self:
        """The rows of all parts, in order."""
        if not parts:
            return cls.make(0, **dict.fromkeys(cls.names(), 0))
        return cls._of({n: np.concatenate([getattr(p, n) for p in parts]) for n in cls.names()})

    def take(self, index: Any) -> Self:
        """The rows that ``index`` (integers or booleans) selects."""
        if isinstance(index, np.ndarray) and index.dtype == bool:
            if index.all():
                return self  # nobody can change it
            index = np.flatnonzero(index)  # looked for once, not in every column
        return self._of({n: getattr(self, n)[index] for n in self.names()})

    @classmethod
    def _of(cls, columns: dict[str, Ints]) -> Self:
        """A table of new columns that were made from a table's, so they need no look: planning makes hundreds."""
        table = object.__new__(cls)
        for column in columns.values():
            column.flags.writeable = False
        table.__dict__.update(columns)
        return table

    def sorted_by(self, *names: str) -> Self:
        """The rows in ascending order of the named columns, the first one leading; equal rows keep their order."""
        return self.take(np.lexsort([getattr(self, n) for n in reversed(names)]))

    def matrix(self) -> Ints:
        """All columns as one ``[columns, rows]`` array."""
        return np.stack([getattr(self, n) for n in self.names()])
