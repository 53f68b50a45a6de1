"""Loops of slot work: the segments that ranks hold of queries or keys, for ``compiled_cuts.py`` (compiled).

Runs are those of a placement in the order of the stream; ``local`` is the place of each run's first token among its
rank's tokens. Pieces name tokens by this place and may contain parts of several runs. A *group* is what one rank holds
of one head range.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.compiled_sort import stable_order
from flexcp.arrays.jit import compiled, compiled_leaf

Ints = NDArray[np.int64]
START, STOP, SLOT, SHELF, SEGMENT_ROWS = range(5)


@compiled
def lay_segments(
    run_start: Ints,
    run_stop: Ints,
    run_rank: Ints,
    local: Ints,
    target: Ints,
    owner: Ints,
    start: Ints,
    stop: Ints,
    slot: Ints,
    shelf: Ints,
    heads: Ints,
    sizes: Ints,
) -> tuple[Ints, Ints]:
    """Return (segments ``[START to SHELF, segment]``, first segment of each group); a group is a head range and a rank.

    Segments are ranges of the stream, sorted by group and place. The columns from ``target`` to ``heads`` describe the
    pieces that ranks receive; ``heads`` is the number of a piece's head range. ``sizes`` holds the number of ranks, the
    number of head ranges, the head range of the ranks' own runs and the slot from which on own runs are there, or -1 if
    ranks hold only pieces. Own runs are on shelf 0.
    """
    ranks, own_heads, own_slot = sizes[0], sizes[2], sizes[3]
    first_run = firsts(run_rank, ranks)
    of_rank, free = np.empty(len(run_rank), np.int64), first_run.copy()
    for i in range(len(run_rank)):
        of_rank[free[run_rank[i]]] = i
        free[run_rank[i]] += 1
    first = np.zeros(ranks * sizes[1] + 1, np.int64)
    found, room = np.empty((SEGMENT_ROWS, 0), np.int64), first
    for laying in (False, True):  # the first time segments are only counted
        if own_slot >= 0:
            for i in range(len(run_rank)):
                own = own_heads * ranks + run_rank[i]
                if laying:
                    lay(found, room[own], run_start[i], run_stop[i], own_slot, 0)
                    room[own] += 1
                else:
                    first[own + 1] += 1
        for p in range(len(target)):
            group = heads[p] * ranks + target[p]
            at = run_with(start[p], of_rank, first_run[owner[p]], first_run[owner[p] + 1], local, run_start, run_stop)
            while at < first_run[owner[p] + 1] and local[of_rank[at]] < stop[p] and start[p] < stop[p]:
                run = of_rank[at]
                if laying:
                    move = run_start[run] - local[run]
                    end = min(stop[p] + move, run_stop[run])
                    lay(found, room[group], max(start[p] + move, run_start[run]), end, slot[p], shelf[p])
                    room[group] += 1
                else:
                    first[group + 1] += 1
                at += 1
        if not laying:
            for g in range(len(first) - 1):
                first[g + 1] += first[g]
            found, room = np.empty((SEGMENT_ROWS, first[-1]), np.int64), first.copy()
    for g in range(len(first) - 1):
        put_in_order(found, first[g], first[g + 1])
    return found, first


@compiled
def firsts(labels, count):
    """Return where the items of each label begin when items are sorted by label; labels are below ``count``.

    The last of the ``count + 1`` entries is the number of items.
    """
    first = np.zeros(count + 1, np.int64)
    for label in labels:
        first[label + 1] += 1
    for i in range(count):
        first[i + 1] += first[i]
    return first


@compiled_leaf
def lay(found, at, start, stop, slot, shelf):
    """Write one segment to column ``at``."""
    found[START, at], found[STOP, at], found[SLOT, at], found[SHELF, at] = start, stop, slot, shelf


@compiled_leaf
def run_with(token, of_rank, low, high, local, run_start, run_stop):
    """Return the first of a rank's runs ``low..high`` (exclusive) that ends after token number ``token`` of the rank.

    ``low``, ``high`` and the result are places in ``of_rank``, which lists runs rank by rank.
    """
    while low < high:
        middle = (low + high) // 2
        i = of_rank[middle]
        if local[i] + run_stop[i] - run_start[i] <= token:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def put_in_order(found, low, high):
    """Sort the segments ``low..high`` (exclusive) by their first token."""
    for i in range(low + 1, high):
        if found[START, i] < found[START, i - 1]:
            found[:, low:high] = found[:, low + stable_order(found[START, low:high])]
            return
