"""Loops of stages under contention: how long slots of work take with what travels beside them, over all ranks together, compiled.

In every slot the margin is taken under which the slowest rank is done first, as the plan's will be
(:mod:`flexcp.schedule.execution`). What a slot brings starts when all who send it have begun the slot.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.jit import compiled, compiled_leaf

SLOW, ALONE, LINK = range(3)


@compiled
def together_ns(work, beside, start, across, rows, source, target):
    """When the last rank is done under each way to cut; ``work`` and ``beside`` are ``[way, slot, rank]``, ``start[rank]`` when it begins.

    ``across[rank]`` is 1 where a rank exchanges with other nodes alone; ``rows[across, margin]`` are the prices of contention, per mille.
    """
    ways, slots, ranks = work.shape
    found = np.zeros(ways, np.int64)
    begin, ready = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    for way in range(ways):
        begin[:] = start
        for slot in range(slots):
            margin = best_margin(work[way, slot], beside[way, slot], across, rows)
            ready[:] = begin
            for i in range(len(source)):
                ready[target[i]] = max(ready[target[i]], begin[source[i]])
            for r in range(ranks):
                row = rows[across[r], margin]
                moved, computed = beside[way, slot, r], work[way, slot, r]
                begin[r] += overlapped(computed, moved, row)
                if moved > 0:
                    alone = moved if computed == 0 else moved * 1000 // row[LINK]
                    begin[r] = max(begin[r], ready[r] + alone)
        for r in range(ranks):
            found[way] = max(found[way], begin[r])
    return found


@compiled_leaf
def overlapped(work, beside, row):
    """:func:`flexcp.schedule.execution.overlapped_ns` of one rank."""
    if beside == 0:
        return work
    if work == 0:
        return beside
    linked, computed = beside * 1000 // row[LINK], work * row[SLOW] // 1000
    if linked >= computed:
        return linked
    return linked + (work - linked * 1000 // row[SLOW]) * row[ALONE] // 1000


@compiled_leaf
def best_margin(work, beside, across, rows):
    """The margin under which the slowest rank is done first, and then all of them."""
    best, least, least_sum = 0, -1, 0
    for margin in range(rows.shape[1]):
        most, total = 0, 0
        for r in range(len(work)):
            ns = overlapped(work[r], beside[r], rows[across[r], margin])
            most = max(most, ns)
            total += ns
        if least < 0 or most < least or (most == least and total < least_sum):
            best, least, least_sum = margin, most, total
    return best
