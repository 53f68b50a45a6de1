"""Loops of stages under contention: how long slots of work and transfers take over all ranks together (compiled).

Every slot uses the margin with which its slowest rank finishes first, as the plan will
(:mod:`flexcp.schedule.execution`). The transfers beside a slot start when all their senders have begun the slot. The
senders are all ranks that send to a rank at all, of its own node or of other nodes or both, by what travels there.

Arguments that several functions share, as arrays over ranks and in nanoseconds unless said otherwise:

- ``own``: work on a rank's own rows and keys; ``rest``: work on keys that arrive; ``at_keys``: work on own keys for
  which only queries arrive.
- ``there``, ``back``, ``home``: how long inputs, gradients of keys and results for moved queries travel.
- ``start``: when a rank begins. ``source[i]``: the ranks that send to others; those of its own node that send to rank r
  are from ``senders[2 * r]`` on, and those of other nodes from ``senders[2 * r + 1]`` to ``senders[2 * r + 2]``.
- ``rows[across, margin]``: the costs of contention, SLOW, ALONE and LINK, per mille; ``across`` is 1 beside transfers
  that only cross nodes.
- ``held``: per mille of own work that is held back until after the stages. ``way``: one of the three ways of choosing
  it (:func:`held_back`).
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.jit import compiled, compiled_inline, compiled_leaf

SLOW, ALONE, LINK = range(3)
CLOSE_PERMILLE = 1020
"""Ways to cut are compared over two layers if they take at most this, per mille of the fastest in one layer."""
INSIDE, ACROSS, BOTH = range(3)
"""Which transfers of a rank are beside a slot: some of its own node only, some that cross nodes only, or both kinds."""


@compiled
def together_ns(work, beside, start, levels, rows, source, senders, layers):
    """Return how long a layer takes in one direction, in nanoseconds.

    ``work`` and ``beside`` (the transfers beside it) are ``[slot, rank]`` in nanoseconds. ``levels[slot, rank]`` says
    which transfers these are (``INSIDE``, ``ACROSS`` or ``BOTH``). ``start`` is how long each rank computes in the
    layer before its attention begins. The other arguments are explained in the module's docstring.

    With two ``layers``, it is the time from the last rank's end of the first to the last rank's end of the second,
    because a rank that is done with a layer begins the next one. With one, all ranks begin it together, and it is the
    time until the last rank is done. This is faster to compute, and right if there is nothing but attention.
    """
    begin, before = start.copy(), np.zeros(work.shape[1], np.int64)
    run_slots(begin, before, work, beside, levels, rows, source, senders)
    done = begin.max()
    if layers == 1 or start.max() == 0:
        return done
    begin += start
    run_slots(begin, before, work, beside, levels, rows, source, senders)
    return begin.max() - done


@compiled
def run_slots(begin, before, work, beside, levels, rows, source, senders):
    """Run all slots: ``begin`` is when each rank begins its attention, and becomes when it is done, in nanoseconds.

    ``before`` is memory for one number per rank. The other arguments are those of :func:`together_ns`.
    """
    slots, ranks = work.shape
    for slot in range(slots):
        margin = best_margin(work[slot], beside[slot], levels[slot], rows)
        before[:] = begin
        for r in range(ranks):
            level, moved, computed = levels[slot, r], beside[slot, r], work[slot, r]
            row = rows[level % BOTH, margin]
            begin[r] += overlapped(computed, moved, row)
            if moved > 0:
                ready = before[r]
                for i in range(senders[2 * r + (level == ACROSS)], senders[2 * r + 1 + (level != INSIDE)]):
                    ready = max(ready, before[source[i]])
                alone = moved if computed == 0 else moved * 1000 // row[LINK]
                begin[r] = max(begin[r], ready + alone)


@compiled
def thinnest(own, rest, at_keys, there, back, home, reads, limits, shares, start, levels, rows, source, senders):
    """Return the best stages with thin ends: (when the last rank is done, ``borders[rank, border]``, ``held``).

    ``reads`` says which ranks read keys of others. ``limits`` are the number of parts of all inputs, the parts of the
    thinnest and of the thickest end, and the number of stages. ``shares`` are the shares to try (:func:`thin_ends`).
    The other arguments and ``held`` are explained in the module's docstring.
    """
    ranks = len(own)
    first, last = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    held, borders = np.zeros(ranks, np.int64), np.zeros((ranks, limits[3] + 1), np.int64)
    best, best_way, best_borders = -1, 0, borders
    for share in shares:
        for same in range(2):
            thin_ends(first, last, rest, at_keys, there, back, limits, share)
            if same == 1:
                as_thick_as_the_thickest(first, last, reads)
            write_borders(borders, first, last, reads, limits)
            for way in range(3):
                work, beside = lay_slots(held, borders, own, rest, at_keys, there, back, home, reads, limits, way)
                ns = together_ns(work, beside, start, levels, rows, source, senders, 1)
                if best < 0 or ns < best:
                    best, best_way, best_borders = ns, way, borders.copy()
    work, beside = lay_slots(held, best_borders, own, rest, at_keys, there, back, home, reads, limits, best_way)
    best = together_ns(work, beside, start, levels, rows, source, senders, 2)
    return best, best_borders, held


@compiled
def inside_then_across(own, rest, near, again, at_keys, there, back, home, borders, start, rows, source, senders):
    """Return (how long a layer takes, ``held``) for each way to cut keys that cross nodes into stages.

    Before these, one stage brings everything from the same node. ``near`` is the share of ``rest`` that is on keys of
    the rank's own node, and ``again`` is the work of one more pass over rows that read keys from other nodes. ``there``
    and ``back`` are ``[across, rank]``. Each row of ``borders`` is a way to cut, from 0 to as many parts as ``near`` is
    counted in, which rows with fewer stages repeat. ``held`` is ``[row, rank]``. Times are -1 for rows that are clearly
    slower than others. The other arguments are explained in the module's docstring.
    """
    count = len(borders)
    first, found, best_way = np.full(count, -1, np.int64), np.full(count, -1, np.int64), np.zeros(count, np.int64)
    held = np.zeros((count, len(own)), np.int64)
    for row in range(count):
        for way in range(3):
            work, beside, levels = lay_levels(
                held[row], own, rest, near, again, at_keys, there, back, home, borders[row], way
            )
            ns = together_ns(work, beside, start, levels, rows, source, senders, 1)
            if first[row] < 0 or ns < first[row]:
                first[row], best_way[row] = ns, way
    for row in range(count):
        work, beside, levels = lay_levels(
            held[row], own, rest, near, again, at_keys, there, back, home, borders[row], best_way[row]
        )
        if first[row] <= first.min() * CLOSE_PERMILLE // 1000:
            found[row] = together_ns(work, beside, start, levels, rows, source, senders, 2)
    return found, held


@compiled_inline
def lay_levels(held, own, rest, near, again, at_keys, there, back, home, borders, way):
    """Return (work, transfers beside it, which transfers these are), all ``[slot, rank]``; write ``held``.

    The slots are those of :mod:`flexcp.schedule.inside_first`. ``borders`` are those of the stages that cross nodes;
    ``near`` and ``again`` are as in :func:`inside_then_across`, the other arguments are explained in the module's
    docstring.
    """
    whole = borders[-1]
    count = np.searchsorted(borders, whole)
    slots = count + 3
    work, beside = np.zeros((slots, len(own)), np.int64), np.zeros((slots, len(own)), np.int64)
    levels = np.full((slots, len(own)), ACROSS, np.int64)
    for r in range(len(own)):
        inside = rest[r] * near[r] // whole
        reads_across = near[r] < whole
        end = slots - 1 if reads_across else 2
        last = back[0, r] + home[r]
        held[r] = held_back(own[r], there[0, r], last, way)
        after = own[r] * held[r] // 1000
        work[0, r], work[1, r], beside[0, r] = own[r] - after, at_keys[r] + inside, there[0, r]
        levels[0, r] = INSIDE
        if reads_across:
            for s in range(count):
                part = borders[s + 1] - borders[s]
                work[s + 2, r] = (rest[r] - inside) * part // whole + again[r]
                beside[s + 1, r] = max(beside[s + 1, r], there[1, r] * part // whole)
                # Gradients leave one slot after the work on their keys; those of the last stage leave with the results.
                beside[s + 3, r] = back[1, r] * part // whole
        work[end, r] += after
        if last > 0:
            beside[end, r] = max(beside[end, r], last)
            levels[end, r] = BOTH if reads_across else INSIDE
    return work, beside, levels


@compiled_inline
def thin_ends(first, last, rest, at_keys, there, back, limits, share):
    """Write to ``first`` and ``last`` how thick these stages of each rank are, in parts of all its inputs.

    ``share`` is per mille of the thickness at which the work of an end would just hide the transfers beside it. With
    only two stages, ``last`` is 0. ``limits`` are as in :func:`thinnest`; the other arguments are explained in the
    module's docstring.
    """
    whole, least, most, count = limits
    for r in range(len(first)):
        # Work on own keys is in the first end as well and hides part of the inputs.
        left = max(there[r] - at_keys[r], 0)
        first[r] = max(least, min(most, share * whole // 1000 * left // (rest[r] + left + 1)))
        last[r] = 0
        if count == 3:
            last[r] = max(least, min(most, share * whole // 1000 * back[r] // (rest[r] + back[r] + 1)))


@compiled_inline
def as_thick_as_the_thickest(first, last, reads):
    """Make the ends of all ranks as thick as the thickest end of a rank that reads keys of others."""
    thick_first, thick_last = 0, 0
    for r in range(len(first)):
        if reads[r]:
            thick_first, thick_last = max(thick_first, first[r]), max(thick_last, last[r])
    first[:] = thick_first
    last[:] = thick_last


@compiled_inline
def write_borders(borders, first, last, reads, limits):
    """Write where each rank's stages begin and end, in parts of all its inputs, to ``borders[rank, border]``.

    A rank that reads no keys of others has everything in its first stage. ``limits`` are as in :func:`thinnest`.
    """
    whole, _, _, count = limits
    for r in range(len(first)):
        borders[r, 1:] = whole
        if reads[r]:
            borders[r, 1] = first[r]
            if count == 3:
                borders[r, 2] = whole - last[r]


@compiled_inline
def lay_slots(held, borders, own, rest, at_keys, there, back, home, reads, limits, way):
    """Return (work, transfers beside it), both ``[slot, rank]``, for stages with thin ends; write ``held``.

    ``reads`` and ``limits`` are as in :func:`thinnest`; the other arguments are explained in the module's docstring.
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
    """Return per mille of a rank's own work to hold back until after the stages.

    ``first`` and ``last`` are how many nanoseconds the transfers beside the first and the last share of own work take.
    The three ways are: in proportion to both (0), as much as hides the last transfers (1), or all but what hides the
    first transfers (2).
    """
    if way == 0:
        return 1000 * last // max(first + last, 1)
    if way == 1:
        return 1000 * min(own, last + last // 8) // max(own, 1)
    return 1000 - 1000 * min(own, first + first // 8) // max(own, 1)


@compiled_leaf
def overlapped(work, beside, row):
    """Return the nanoseconds of one rank's work and the transfers beside it, from their times without each other.

    The same as :func:`flexcp.schedule.execution.overlapped_ns`, but rounded down. ``row`` is (slow, alone, link).
    """
    if beside == 0:
        return work
    if work == 0:
        return beside
    linked, computed = beside * 1000 // row[LINK], work * row[SLOW] // 1000
    if linked >= computed:
        return linked
    return linked + (work - linked * 1000 // row[SLOW]) * row[ALONE] // 1000


@compiled_leaf
def best_margin(work, beside, levels, rows):
    """Return the index of the margin with which the slowest rank finishes one slot first.

    Of equal ones, it is the one with the least sum over all ranks. ``work``, ``beside`` and ``levels`` are arrays over
    ranks, ``rows`` is ``[across, margin]``.
    """
    best, least, least_sum = 0, -1, 0
    for margin in range(rows.shape[1]):
        most, total = 0, 0
        for r in range(len(work)):
            ns = overlapped(work[r], beside[r], rows[levels[r] % BOTH, margin])
            most = max(most, ns)
            total += ns
        if least < 0 or most < least or (most == least and total < least_sum):
            best, least, least_sum = margin, most, total
    return best
