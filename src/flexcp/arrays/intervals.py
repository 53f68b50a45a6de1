"""Half-open intervals in columns: the arithmetic that planning is made of, vectorised.

Everything here takes and returns parallel int64 arrays. A *group* is any integer label; intervals of different groups
never touch each other. Where a function wants its intervals sorted and disjoint it says so.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """(index repeated counts[index] times, running number inside each): the ragged
    ``for i: for j in range(counts[i])``.
    """
    index = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    before = np.cumsum(counts) - counts
    return index, np.arange(len(index), dtype=np.int64) - before[index]


def offsets(counts: Ints) -> Ints:
    """Start of each ragged row, with the total at the end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def united(group: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """The union of each group's intervals, sorted by (group, start), merged where they touch; empty ones vanish."""
    keep = start < stop
    group, start, stop = group[keep], start[keep], stop[keep]
    if len(group) == 0:
        return group, start, stop
    order = np.lexsort((start, group))
    group, start, stop = group[order], start[order], stop[order]
    # One axis for all groups: a group's coordinates never reach the next group's.
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
    """Index pairs (i, j) of intervals that share a point; the *other* intervals are sorted and disjoint."""
    first = np.searchsorted(other_stop, start, side="right")
    last = np.searchsorted(other_start, stop, side="left")
    index, within = spread(np.where(start < stop, np.maximum(last - first, 0), 0))
    return index, first[index] + within


def covered_once(group: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """The union of each group cut where "exactly one interval covers this" changes:
    (group, start, stop, once), sorted.
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
