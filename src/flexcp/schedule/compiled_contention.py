"""Loops of stages under contention: how long slots of work take with what travels beside them,
over all ranks together, compiled.

In every slot the margin is taken under which the slowest rank is done first, as the plan's will be
(:mod:`flexcp.schedule.execution`). What a slot brings starts when all who send it have begun the slot.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.jit import compiled, compiled_inline, compiled_leaf

SLOW, ALONE, LINK = range(3)


@compiled
def together_ns(work, beside, start, across, rows, source, target):
    """When the last rank is done; ``work`` and ``beside`` are ``[slot, rank]``, ``start[rank]`` is when it begins.

    ``across[slot, rank]`` is 1 where a rank exchanges with other nodes alone; ``rows[across, margin]`` are the prices
    of contention, per mille.
    """
    slots, ranks = work.shape
    begin, ready = start.copy(), np.zeros(ranks, np.int64)
    for slot in range(slots):
        margin = best_margin(work[slot], beside[slot], across[slot], rows)
        ready[:] = begin
        for i in range(len(source)):
            ready[target[i]] = max(ready[target[i]], begin[source[i]])
        for r in range(ranks):
            row = rows[across[slot, r], margin]
            moved, computed = beside[slot, r], work[slot, r]
            begin[r] += overlapped(computed, moved, row)
            if moved > 0:
                alone = moved if computed == 0 else moved * 1000 // row[LINK]
                begin[r] = max(begin[r], ready[r] + alone)
    return begin.max()


@compiled
def thinnest(own, rest, at_keys, there, back, home, reads, limits, shares, start, across, rows, source, target):
    """The best stages with thin ends: (when the last rank is done, ``borders[rank, stage]``, per mille
    of own work held back).

    ``rest`` is a rank's work on keys that come, ``at_keys`` that for which only queries do; ``there``, ``back`` and
    ``home`` are how long inputs, gradients and results travel. ``limits`` are the parts of a whole, of the thinnest and
    of the thickest end, and the stages.
    """
    ranks = len(own)
    first, last = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    held, borders = np.zeros(ranks, np.int64), np.zeros((ranks, limits[3] + 1), np.int64)
    best, best_held, best_borders = -1, held, borders
    for share in shares:
        for same in range(2):
            thin_ends(first, last, rest, at_keys, there, back, limits, share)
            if same == 1:
                as_thick_as_the_thickest(first, last, reads)
            write_borders(borders, first, last, reads, limits)
            for way in range(3):
                work, beside = lay_slots(held, borders, own, rest, at_keys, there, back, home, reads, limits, way)
                ns = together_ns(work, beside, start, across, rows, source, target)
                if best < 0 or ns < best:
                    best, best_held, best_borders = ns, held.copy(), borders.copy()
    return best, best_borders, best_held


@compiled
def inside_then_across(own, rest, near, again, at_keys, there, back, home, limits, start, rows, source, target):
    """The best number of stages for what crosses nodes, behind one of all that comes from the same node.

    Returns when the last rank is done, that number, and per mille of own work held back. ``near`` is a rank's part of
    ``rest`` on keys of its node, ``again`` one more pass over what reads others; ``there`` and ``back`` are
    ``[across, rank]``, the others as in :func:`thinnest`. ``limits`` are the parts of a whole and the most stages that
    cross.
    """
    whole, most = limits
    held = np.zeros(len(own), np.int64)
    best, best_count, best_held = -1, 0, held
    for count in range(1, most + 1):
        for way in range(3):
            work, beside, across = lay_levels(
                held, own, rest, near, again, at_keys, there, back, home, count, whole, way
            )
            ns = together_ns(work, beside, start, across, rows, source, target)
            if best < 0 or ns < best:
                best, best_count, best_held = ns, count, held.copy()
    return best, best_count, best_held


@compiled_inline
def lay_levels(held, own, rest, near, again, at_keys, there, back, home, count, whole, way):
    """(work, what travels beside it, whether that only crosses nodes), all ``[slot, rank]``;
    writes the own work that is held back.
    """
    slots = count + 3
    work, beside = np.zeros((slots, len(own)), np.int64), np.zeros((slots, len(own)), np.int64)
    across = np.ones((slots, len(own)), np.int64)
    for r in range(len(own)):
        inside = rest[r] * near[r] // whole
        crosses = near[r] < whole
        end = slots - 1 if crosses else 2
        last = back[0, r] + home[r]
        held[r] = held_back(own[r], there[0, r], last, way)
        after = own[r] * held[r] // 1000
        work[0, r], work[1, r], beside[0, r] = own[r] - after, at_keys[r] + inside, there[0, r]
        across[0, r] = 0
        if crosses:
            for s in range(count):
                work[s + 2, r] = (rest[r] - inside) // count + again[r]
                beside[s + 1, r] = -(-there[1, r] // count)
            # Gradients of a stage's keys leave a slot after the work on them; those of the last one with the results.
            for s in range(3, slots):
                beside[s, r] = max(beside[s, r], -(-back[1, r] // count))
        work[end, r] += after
        if last > 0:
            beside[end, r] = max(beside[end, r], last)
            across[end, r] = 0
    return work, beside, across


@compiled_inline
def thin_ends(first, last, rest, at_keys, there, back, limits, share):
    """Write how thick each rank's first and last stage are, in parts of the whole;
    ``share`` is per mille of what would hide all.
    """
    whole, least, most, count = limits
    for r in range(len(first)):
        # What the first end has besides hides as much of what travels.
        left = max(there[r] - at_keys[r], 0)
        first[r] = max(least, min(most, share * whole // 1000 * left // (rest[r] + left + 1)))
        last[r] = 0
        if count == 3:
            last[r] = max(least, min(most, share * whole // 1000 * back[r] // (rest[r] + back[r] + 1)))


@compiled_inline
def as_thick_as_the_thickest(first, last, reads):
    """Make all ends as thick as the thickest of a rank that reads."""
    thick_first, thick_last = 0, 0
    for r in range(len(first)):
        if reads[r]:
            thick_first, thick_last = max(thick_first, first[r]), max(thick_last, last[r])
    first[:] = thick_first
    last[:] = thick_last


@compiled_inline
def write_borders(borders, first, last, reads, limits):
    """Write where stages begin and end, in parts of the whole; all of it in the first for a rank that does not read."""
    whole, _, _, count = limits
    for r in range(len(first)):
        borders[r, 1:] = whole
        if reads[r]:
            borders[r, 1] = first[r]
            if count == 3:
                borders[r, 2] = whole - last[r]


@compiled_inline
def lay_slots(held, borders, own, rest, at_keys, there, back, home, reads, limits, way):
    """(work, what travels beside it), both ``[slot, rank]``; writes the own work that each rank holds back,
    by one of three ways.
    """
    whole, _, _, count = limits
    work, beside = np.zeros((count + 2, len(own)), np.int64), np.zeros((count + 2, len(own)), np.int64)
    for r in range(len(own)):
        there_first, back_last = there[r] * borders[r, 1] // whole, home[r]
        if count == 3:
            back_last += back[r] * (whole - borders[r, 2]) // whole
            beside[3, r] = back[r] * borders[r, 2] // whole
        held[r] = held_back(own[r], there_first, back_last, way)
        after = own[r] * held[r] // 1000
        work[0, r] = own[r] - after
        work[1, r] = at_keys[r]
        for s in range(count):
            work[s + 1, r] += rest[r] * (borders[r, s + 1] - borders[r, s]) // whole
        work[count + 1 if reads[r] else 2, r] += after
        beside[0, r], beside[1, r], beside[count + 1, r] = there_first, there[r] - there_first, back_last
    return work, beside


@compiled_leaf
def held_back(own, first, last, way):
    """Per mille of own work that is held back: in proportion to both ends, as much as hides the last,
    or all but what hides the first.
    """
    if way == 0:
        return 1000 * last // max(first + last, 1)
    if way == 1:
        return 1000 * min(own, last + last // 8) // max(own, 1)
    return 1000 - 1000 * min(own, first + first // 8) // max(own, 1)


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
