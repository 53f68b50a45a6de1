"""Laid rows: results of a rank's own rows that arrive complete, so that they are copied and never summed.

A result that another rank, or another shelf of this rank, computed completely travels in the model's dtype. It is the
only one for its rows and heads, so it is *laid*: written as it is to the tensor that the pass returns. The sums of
these rows and heads in the accumulator's dtype are not used, and need not be rounded after the pass. All other results
of own rows are *summed*. Plans that split documents by heads lay most results; those that split keys sum them.

*Areas* are disjoint rectangles of own rows and heads, ``[n, 4]``: first head, last head + 1, first row, last row + 1.
Heads are query heads or KV heads, by side.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
NO_AREAS: Ints = np.zeros((0, 4), np.int64)
"""No areas."""
FINISHED = {"out": "finished", "dq": "finished", "dk": "finished_dk", "dv": "finished_dv"}
"""The fields of own results in the model's dtype, by the field with their sums in the accumulator's dtype."""


def joined_areas(rectangles: Iterable[tuple[int, int, slice | Ints]], rows: int) -> Ints:
    """Return the areas that rectangles cover together; each is (first head, last head + 1, its rows).

    ``rows`` is the number of own rows.
    """
    found = list(rectangles)
    borders = sorted({h for h0, h1, _ in found for h in (h0, h1)})
    flags = np.zeros((max(0, len(borders) - 1), rows), np.bool_)
    for h0, h1, at in found:
        flags[borders.index(h0) : borders.index(h1), at] = True
    return _areas(flags, borders)


def other_areas(areas: Ints, heads: int, rows: int) -> Ints:
    """Return the areas of all ``heads`` and ``rows`` that are not in the given ones."""
    borders = sorted({0, heads, *areas[:, :2].reshape(-1).tolist()})
    return _areas(~area_flags(areas, borders, rows), borders)


def cover_all(areas: Ints, heads: int, rows: int) -> bool:
    """Return whether areas cover all of these heads and rows, and there is anything to cover."""
    h0, h1, first, last = areas.T
    return 0 < heads * rows == int(((h1 - h0) * (last - first)).sum())


def area_flags(areas: Ints, borders: list[int], rows: int) -> Flags:
    """Return a flag for each part of the heads between two ``borders`` and each row: whether it is in an area.

    The areas' first and last heads must be among the borders.
    """
    flags = np.zeros((len(borders) - 1, rows), np.bool_)
    for h0, h1, first, last in areas.tolist():
        flags[borders.index(h0) : borders.index(h1), first:last] = True
    return flags


def ranges_of(flags: Flags) -> Ints:
    """Return the ranges (first, last + 1) in which flags are set: ``[0, 1, 1, 0, 1]`` gives ``[[1, 3], [4, 5]]``."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    return edges.reshape(-1, 2).astype(np.int64)


def _areas(flags: Flags, borders: list[int]) -> Ints:
    """Return the areas in which flags are set; ``flags[n]`` are those of the heads from border n to the next one."""
    found = [NO_AREAS]
    begin = 0
    for end in range(1, len(flags) + 1):
        if end == len(flags) or not np.array_equal(flags[end], flags[begin]):
            ranges = ranges_of(flags[begin])
            heads = np.full_like(ranges, 0) + np.array([borders[begin], borders[end]], np.int64)
            found.append(np.concatenate([heads, ranges], axis=1))
            begin = end
    return np.concatenate(found)
