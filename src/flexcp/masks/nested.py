"""Nested slices: find quickly which slices of a document have rows in a given range.

The slices of a document are *nested* if the rows of any two either lie inside each other or are disjoint, as in a tree.
A document may have thousands of slices, of which a range of rows meets few. With slices sorted by their first row,
those that begin inside the range are neighbours, and those that begin before it are found by going from a slice to the
slice around it. So the search takes time in proportion to the number of slices found.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import spread
from flexcp.masks.slices import Q0, Q1, Ints

FEW = 8
"""Documents with fewer slices than this are not searched: all of their slices are tested."""
NONE = -1


class Nesting(NamedTuple):
    """How the slices of each document are nested.

    ``nested[d]`` says whether the slices of document d are nested; documents with fewer than ``FEW`` slices count as
    not nested, because testing all of their slices is faster than a search. For a slice i of a nested document,
    ``around[i]`` is the innermost slice around it, as a number inside its document (``NONE`` if there is none), and
    ``level[i]`` the number of slices around it.
    """

    nested: NDArray[np.bool_]
    around: Ints
    level: Ints


def nesting(first: Ints, slices: Ints) -> Nesting:
    """Return how the slices of documents are nested; document d has ``slices[first[d] : first[d + 1]]``."""
    nested = np.zeros(len(first) - 1, np.bool_)
    around, level = np.full(len(slices), NONE), np.zeros(len(slices), np.int64)
    for document in np.flatnonzero(np.diff(first) >= FEW).tolist():
        mine = slice(int(first[document]), int(first[document + 1]))
        found = _around(slices[mine, Q0].tolist(), slices[mine, Q1].tolist())
        if found is not None:
            nested[document] = True
            around[mine], level[mine] = found
    return Nesting(nested, around, level)


def _around(begins: list[int], ends: list[int]) -> tuple[list[int], list[int]] | None:
    """Return the innermost slice around each slice of a document and the number of slices around it.

    Return None if the slices are not nested, or not sorted by their first row, or if one has no rows.
    """
    around: list[int] = []
    level: list[int] = []
    before = NONE
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if begin >= end or (number and begins[number - 1] > begin):
            return None
        while before != NONE and ends[before] <= begin:
            before = around[before]
        if before != NONE and ends[before] < end:
            return None
        around.append(before)
        level.append(0 if before == NONE else level[before] + 1)
        before = number
    return around, level


def meeting(begins: Ints, ends: Ints, around: Ints, q0: Ints, q1: Ints) -> tuple[Ints, Ints]:
    """Return (range, slice) for every slice of a nested document that has rows in range ``q0 <= q < q1``.

    ``begins`` and ``ends`` are the row ranges of the slices, ``around`` is the slice around each. The result is sorted
    by range, then by slice.
    """
    inside = np.searchsorted(begins, q0, side="right")
    index, within = spread(np.where(q0 < q1, np.maximum(np.searchsorted(begins, q1) - inside, 0), 0))
    ranges, slices = [index], [inside[index] + within]
    alive = np.flatnonzero((inside > 0) & (q0 < q1))
    at = inside[alive] - 1
    while len(alive):
        meets = ends[at] > q0[alive]
        ranges.append(alive[meets])
        slices.append(at[meets])
        at = around[at]
        alive, at = alive[at >= 0], at[at >= 0]
    index, found = np.concatenate(ranges), np.concatenate(slices)
    order = np.lexsort((found, index))
    return index[order], found[order]
