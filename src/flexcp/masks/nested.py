"""Nested slices: whose rows lie in each other or apart, as those of a tree do.

A document may have thousands of slices, and a range of its rows meets few of them: those that begin inside the range,
which are neighbours where slices stand in the order of their first rows, and those around its first row, which are
found by going from each to the one around it. So what rows meet takes time in proportion to what they meet.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexcp.arrays.intervals import spread
from flexcp.masks.slices import Q0, Q1, Ints

FEW = 8
"""Documents of fewer slices than this are not worth the search."""
NONE = -1
NOT_NESTED = -2


class Nesting(NamedTuple):
    """Of each slice: the one around it, counted from its document's first (``NONE``, or ``NOT_NESTED`` for all slices
    of a document that has few or whose rows are not nested), and how many are around it.
    """

    around: Ints
    level: Ints


def nesting(first: Ints, slices: Ints) -> Nesting:
    """How the slices of documents are nested; those of document d are ``slices[first[d] : first[d + 1]]``."""
    around, level = np.full(len(slices), NOT_NESTED), np.zeros(len(slices), np.int64)
    for document in np.flatnonzero(np.diff(first) >= FEW).tolist():
        mine = slice(int(first[document]), int(first[document + 1]))
        found = _around(slices[mine, Q0].tolist(), slices[mine, Q1].tolist())
        if found is not None:
            around[mine], level[mine] = found
    return Nesting(around, level)


def _around(begins: list[int], ends: list[int]) -> tuple[list[int], list[int]] | None:
    """The slice around each, and how many are; None if the rows are not nested, or empty, or not in order."""
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
    """(range, slice) of every slice of a nested document that has rows in a range of rows, ordered by range,
    then slice.

    ``begins`` and ``ends`` are the rows of the slices, ``around`` the slice around each.
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
