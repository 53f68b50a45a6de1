"""Loops of :mod:`flexcp.schedule.inputs_first`: how long passes take whose inputs are all posted first (compiled).

Arguments that are not explained here are those of :mod:`flexcp.schedule.compiled_contention`.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.jit import compiled, compiled_leaf
from flexcp.schedule.compiled_contention import ACROSS, ALONE, BOTH, INSIDE, LINK, SLOW, best_margin, held_back

USUAL_WAY = 2
"""The way in which own work is held back when ways to cut are compared: all but what hides the first transfers."""
UNEVEN_PERMILLE = 20
"""How much longer transfers that cross nodes take in a backward for each further part, per mille.

Owners follow each other there, so in some parts an owner is read by more ranks than on average.
"""


@compiled
def inputs_first_ns(
    own, rest, near, again, at_keys, there, back, home, borders, inside, latency, best, start, rows, source, senders
):
    """Return (how long a layer takes, ``held``) for each way to cut keys that cross nodes into stages.

    ``near``, ``again``, ``there``, ``back`` and ``borders`` are as in
    :func:`flexcp.schedule.compiled_contention.inside_then_across`. If anything is exchanged ``inside`` nodes, a stage
    before these brings all of it. Starting a transfer takes ``latency``. ``held`` is ``[row, rank]``.

    All ways to cut are compared over one layer, with own work held back in one way. The ``best`` of them are compared
    over two layers, with own work held back in three ways; the times of the others are -1.
    """
    count = len(borders)
    first, found = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    held, held_now = np.zeros((count, len(own)), np.int64), np.zeros(len(own), np.int64)
    for row in range(count):
        work, into, out = lay(
            held_now, own, rest, near, again, at_keys, there, back, home, borders[row], inside, latency, USUAL_WAY
        )
        first[row] = posted_first_ns(work, into, out, inside, start, rows, source, senders, 1)
    for row in np.argsort(first, kind="mergesort")[:best]:
        for way in range(3):
            work, into, out = lay(
                held_now, own, rest, near, again, at_keys, there, back, home, borders[row], inside, latency, way
            )
            ns = posted_first_ns(work, into, out, inside, start, rows, source, senders, 2)
            if found[row] < 0 or ns < found[row]:
                found[row] = ns
                held[row] = held_now
    return found, held


@compiled
def lay(held, own, rest, near, again, at_keys, there, back, home, borders, inside, latency, way):
    """Return (work of all slots, inputs of all stages, what returns after all slots), ``[slot or stage, rank]``.

    Inputs are those that arrive before a slot. What returns when a slot is done are gradients of its keys; after the
    last stage, these are also gradients inside nodes and results for moved queries. ``inside`` says that the first
    stage is what comes from the same node. Write ``held`` too.
    """
    whole, ranks, first = borders[-1], len(own), 2 if inside else 1
    stages = first - 1 + np.searchsorted(borders, whole)
    work, into = np.zeros((stages + 2, ranks), np.int64), np.zeros((stages + 2, ranks), np.int64)
    out = np.zeros((stages + 2, ranks), np.int64)
    uneven = 1000 + UNEVEN_PERMILLE * (stages - first) if back[1].max() > 0 else 1000
    for r in range(ranks):
        of_node = rest[r] * near[r] // whole
        reads_across = near[r] < whole
        if inside:
            work[1, r], into[1, r] = at_keys[r] + of_node, there[0, r]
        for s in range(first, stages + 1):
            part = borders[s - first + 1] - borders[s - first]
            into[s, r] = part_of(there[1, r], part, whole, uneven, latency)
            out[s, r] = part_of(back[1, r], part, whole, uneven, latency)
            if reads_across:
                # The first pass over the rows is part of ``rest``.
                further = again[r] if near[r] > 0 or s > 1 else 0
                work[s, r] += (rest[r] - of_node) * part // whole + further
        out[stages, r] += back[0, r] + home[r]
        held[r] = held_back(own[r], into[1, r], out[stages, r], way)
        after = own[r] * held[r] // 1000
        work[0, r] = own[r] - after
        work[stages + 1 if reads_across else min(2, stages + 1), r] += after
    return work, into, out


@compiled_leaf
def part_of(ns, part, whole, uneven, latency):
    """Return how long one of several parts of a transfer of ``ns`` nanoseconds takes, ``part / whole`` of it.

    ``uneven`` is per mille of its share of the time; starting it takes ``latency``, which is part of ``ns``.
    """
    return 0 if ns == 0 else max(ns - latency, 0) * part // whole * uneven // 1000 + latency


@compiled
def posted_first_ns(work, into, out, inside, start, rows, source, senders, layers):
    """Return how long a layer takes in one direction, in nanoseconds.

    ``work``, ``into`` and ``out`` are those of :func:`lay`. ``layers`` is 1 or 2, as in
    :func:`flexcp.schedule.compiled_contention.together_ns`.
    """
    begin = start.copy()
    run(begin, work, into, out, inside, rows, source, senders)
    done = begin.max()
    if layers == 1 or start.max() == 0:
        return done
    begin += start
    run(begin, work, into, out, inside, rows, source, senders)
    return begin.max() - done


@compiled
def run(begin, work, into, out, inside, rows, source, senders):
    """Run all slots: ``begin`` is when each rank begins its attention, and becomes when it is done, in nanoseconds.

    Transfers of a rank run one after the other, in the order of their stages, and each begins when both its ranks are
    done with the one before. Results are posted in the slot after the work on them.
    """
    slots, ranks = work.shape
    stages = slots - 2
    margin = np.zeros(slots, np.int64)
    levels = np.full((slots, ranks), ACROSS, np.int64)
    if inside:
        levels[0], levels[slots - 1] = INSIDE, BOTH
    for slot in range(slots):
        beside = into[slot + 1].copy() if slot < stages else np.zeros(ranks, np.int64)
        if slot > 1:
            beside += out[slot - 1]
        margin[slot] = best_margin(work[slot], beside, levels[slot], rows)
    gone, before = begin.copy(), np.empty(ranks, np.int64)
    arrived = np.empty((stages + 1, ranks), np.int64)
    arrived[0] = begin
    for stage in range(1, stages + 1):
        before[:] = gone
        level = levels[stage - 1, 0]
        travel(gone, before, into[stage], level, rows[level % BOTH, margin[stage - 1]], source, senders)
        arrived[stage] = gone
    for slot in range(slots):
        if slot <= stages:
            for r in range(ranks):
                begin[r] = max(begin[r], arrived[slot, r])
        if slot > 1:
            for r in range(ranks):
                before[r] = max(begin[r], gone[r])
            level = levels[slot, 0]
            travel(gone, before, out[slot - 1], level, rows[level % BOTH, margin[slot]], source, senders)
        row = rows[levels[slot, 0] % BOTH, margin[slot]]
        for r in range(ranks):
            if has_posted(into[:, r], out[:, r], slot):
                begin[r] += beside_transfers(work[slot, r], gone[r] - begin[r], row)
            else:
                begin[r] += work[slot, r]
    for r in range(ranks):
        begin[r] = max(begin[r], gone[r])


@compiled_leaf
def travel(gone, before, amount, level, row, source, senders):
    """Run the transfers of one stage, of ``amount`` nanoseconds each; ``gone`` becomes when those of a rank are done.

    They begin when the rank and the ranks that send to it are ready, at ``before``. ``level`` and ``row`` are the kind
    of the transfers and the costs of contention beside them.
    """
    for r in range(len(gone)):
        if amount[r] > 0:
            ready = before[r]
            for i in range(senders[2 * r + (level == ACROSS)], senders[2 * r + 1 + (level != INSIDE)]):
                ready = max(ready, before[source[i]])
            gone[r] = ready + amount[r] * 1000 // row[LINK]


@compiled_leaf
def has_posted(into, out, slot):
    """Return whether a rank has posted transfers in ``slot`` for which it waits only later, and leaves room for them.

    ``into`` and ``out`` are its transfers by stage.
    """
    found = False
    for stage in range(len(into)):
        found |= (stage > slot and into[stage] > 0) or (stage < slot and out[stage] > 0)
    return found


@compiled_leaf
def beside_transfers(work, span, row):
    """Return the nanoseconds of some work that begins when transfers are under way for ``span`` more nanoseconds."""
    if span <= 0:
        return work * row[ALONE] // 1000
    slowed = work * row[SLOW] // 1000
    if slowed <= span:
        return slowed
    return span + (work - span * 1000 // row[SLOW]) * row[ALONE] // 1000
