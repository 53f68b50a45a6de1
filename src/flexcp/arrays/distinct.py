"""Distinct values: each once, ascending.

``np.unique`` hashes (NumPy 2.3 and later), which takes ten times as long as sorting where most values differ, and a
hundred times as long as marking them where they are few.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MARKED = 1 << 22
"""Values below this are marked in a table of bytes instead of sorted, where there are enough of them for its size."""


def distinct(values: Ints, below: int | None = None) -> Ints:
    """The values in ascending order, each once; all are from 0 to ``below``, where that is given."""
    if below is not None and below <= min(MARKED, 64 * len(values)):
        marks = np.zeros(below, bool)
        marks[values] = True
        return np.flatnonzero(marks)
    ordered = np.sort(values)
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]
