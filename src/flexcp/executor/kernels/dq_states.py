"""States of dq: what becomes of each row and head of a query shelf's dq in a backward pass.

While work lists share a dq that they leave open (:mod:`flexcp.executor.run.prepared`), most of it is often not theirs:
plans that split documents by heads compute a few heads of a document on each rank, and lay the results of the others
(:mod:`flexcp.executor.run.laid_rows`). Opening and closing dq moves much memory, so a kernel is told what it may leave
out.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from flexcp.masks import Q0, Q1, trim

Ints = NDArray[np.int64]
States = NDArray[np.uint8]
OTHERS, ADDED, EMPTY = 0, 1, 2
"""The states: the result comes from elsewhere, lists add to it, or nothing does, so that it is 0."""


def dq_states(rows: int, heads: int, lists: Iterable[tuple[Ints, slice]], laid: Ints) -> States:
    """Return the state of each row and head, ``[rows, heads]``.

    ``lists`` are the slices of each work list and its heads, and ``laid`` the areas of laid results.
    """
    states = np.full((rows, heads), EMPTY, np.uint8)
    for h0, h1, first, last in laid.tolist():
        states[first:last, h0:h1] = OTHERS
    for slices, own in lists:
        for first, last in trim(slices)[:, [Q0, Q1]].tolist():
            states[first:last, own] = ADDED
    return states
