"""Intervals: vectorised arithmetic on half-open intervals, which most of planning consists of.

All functions take and return parallel int64 arrays. A *group* is any integer label; intervals of different groups are
independent of each other. A function that needs sorted and disjoint intervals says so.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.distinct import distinct

Ints = NDArray[np.int64]


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """Return all pairs (i, j) with ``0 <= j < counts[i]`` as two arrays: ``for i: for j in range(counts[i])``."""
    index = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    before = np.cumsum(counts) - counts
    return index, np.arange(len(index), dtype=np.int64) - before[index]


def offsets(counts: Ints) -> Ints:
    """Return where each part begins if parts of these sizes are laid end to end: ``[2, 3]`` gives ``[0, 2, 5]``.

    The result has one more entry than ``counts``; the last one is the total.
    """
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def united(group: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the union of the half-open intervals of each group as (group, start, stop), sorted by group and start.

    Intervals that overlap or touch are merged, and empty ones are left out.
    """
    keep = start < stop
    group, start, stop = group[keep], start[keep], stop[keep]
    if len(group) == 0:
        return group, start, stop
    order = np.lexsort((start, group))
    group, start, stop = group[order], start[order], stop[order]
    # Put all groups on one axis, each shifted so far that it does not reach the next.
    span = int(stop.max()) - int(start.min()) + 2
    base = (group - group[0]) * span - int(start.min())
    reach = np.maximum.accumulate(base + stop)
    first = np.ones(len(group), bool)
    first[1:] = base[1:] + start[1:] > reach[:-1]
    first[1:] |= group[1:] != group[:-1]
    last = np.ones(len(group), bool)
    last[:-1] = first[1:]
    return group[first], start[first], reach[last] - base[last]


def overlaps(start: Ints, stop: Ints, other_start: Ints, other_stop: Ints) -> tuple[Ints, Ints]:
    """Return the index pairs (i, j), as two arrays, of half-open intervals i and *other* ones j that share a point.

    The other intervals must be sorted and disjoint. Pairs are sorted by i, then j.
    """
    first = np.searchsorted(other_stop, start, side="right")
    last = np.searchsorted(other_start, stop, side="left")
    index, within = spread(np.where(start < stop, np.maximum(last - first, 0), 0))
    return index, first[index] + within


def cut_apart(group: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut half-open intervals so that two parts of the same group are equal or share no point.

    Groups must not be negative. Returns (interval, start, stop) of each part, sorted by interval and start.
    """
    span = int(stop.max(initial=0)) + 1  # one axis for all groups
    low, high = group * span + start, group * span + stop
    borders = distinct(np.concatenate([low, high]))
    first = np.searchsorted(borders, low)
    interval, within = spread(np.searchsorted(borders, high) - first)
    at = first[interval] + within
    begin = borders[at] % span
    return interval, begin, begin + borders[at + 1] - borders[at]


def covered_once(group: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """Return the union of the half-open intervals of each group as (group, start, stop, once), sorted.

    It is sorted by group and start, and cut into parts that exactly one interval covers (``once``) and parts that
    several intervals cover.
    """
    if len(group) == 0:
        return group, start, stop, np.zeros(0, bool)
    at = np.concatenate([start, stop])
    of = np.concatenate([group, group])
    step = np.concatenate([np.ones(len(start), np.int64), -np.ones(len(stop), np.int64)])
    order = np.lexsort((at, of))
    at, of, depth = at[order], of[order], np.cumsum(step[order])
    real = (at[:-1] < at[1:]) & (of[:-1] == of[1:]) & (depth[:-1] > 0)
    g, a, b, once = of[:-1][real], at[:-1][real], at[1:][real], depth[:-1][real] == 1
    merged_group, merged_start, merged_stop = united(g * 2 + once, a, b)
    order = np.lexsort((merged_start, merged_group // 2))
    label = merged_group[order]
    return label // 2, merged_start[order], merged_stop[order], label % 2 == 1
