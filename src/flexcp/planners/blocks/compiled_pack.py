"""Loops of packing: peel, deal, and all steps together (compiled).

:mod:`flexcp.planners.blocks.pack` explains the steps.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.compiled_sort import stable_order
from flexcp.arrays.jit import compiled, compiled_leaf
from flexcp.planners.blocks.compiled_climb import climb
from flexcp.planners.blocks.compiled_repair import repair
from flexcp.planners.blocks.compiled_shared import (
    BIN,
    DOC,
    HI,
    HUGE,
    LO,
    LOAD,
    MILLION,
    head_within,
    load_of,
    tail_within,
    total_cost,
    write_item,
)


@compiled_leaf
def snapped(cut, lo, hi, slices, s0, s1):
    """Return a cut of the rows ``lo..hi``, moved to where a slice begins a little later, if there is such a slice.

    ``slices[s0:s1]`` are those of the document; only slices whose first key is after ``lo`` count. Rows before the
    beginning of such a slice are of no use to the rows after it.
    """
    reach = cut + (hi - cut) // 4
    best = cut
    for s in range(s0, s1):
        if cut < slices[s, 0] <= reach and slices[s, 2] > lo:
            best = slices[s, 0]
    return best


@compiled
def peel(items, n, bins, ruler, aim_load, cap_rows, reads, fill):
    """Put the tails of items that exceed a bin into bins of their own; return the number of items.

    The first ``n`` rows of ``items`` are in use. A tail has about the load ``aim_load`` of its bin and at most
    ``cap_rows`` rows. With ``fill``, the bin of a tail is filled up to its share of rows, first with the lightest whole
    items, then with the first rows of the item itself. Late rows with much work and early rows with little work
    together meet both limits, and the tail needs the early rows as keys anyway.
    """
    grain = ruler.grain
    opened, lightest = 0, 0
    density = np.zeros(n, np.int64)
    for i in range(n):
        density[i] = items[i, LOAD] * 64 // (items[i, HI] - items[i, LO])
    order = stable_order(density)
    while opened < bins - 1:
        big, left_rows = -1, 0
        for i in range(n):
            if items[i, BIN] < 0:
                left_rows += items[i, HI] - items[i, LO]
                if big < 0 or items[i, LOAD] > items[big, LOAD]:
                    big = i
        if big < 0 or items[big, LOAD] <= aim_load[opened] or n + 4 >= len(items):
            break
        d, lo, hi = items[big, DOC], items[big, LO], items[big, HI]
        aim = aim_load[opened]
        share = min(left_rows // (bins - opened), cap_rows[opened])
        cut = tail_within(ruler, d, lo, hi, aim)
        cut = max(cut, hi - cap_rows[opened] // grain * grain)
        rows, load = hi - cut, 0
        if fill:
            own_density = items[big, LOAD] * 64 // (hi - lo)
            # Whole items with the least load per row, as long as they fit.
            while lightest < len(order) and items[order[lightest], BIN] >= 0:
                lightest += 1
            for at in range(lightest, len(order)):
                i = order[at]
                if items[i, BIN] >= 0 or i == big:
                    continue
                length = items[i, HI] - items[i, LO]
                if rows + length > share:
                    continue
                if items[i, LOAD] * 64 // length >= own_density or load + items[i, LOAD] > aim // 2:
                    break
                items[i, BIN] = opened
                rows += length
                load += items[i, LOAD]
                new = tail_within(ruler, d, lo, hi, aim - load)
                rows += cut - new
                cut = new
            missing = (share - rows) // grain * grain
            if missing > 0:
                stop = min(lo + missing, cut)
                stop = min(stop, head_within(ruler, d, lo, hi, (aim - load) // 2))
                extra = load_of(ruler, d, lo, stop)
                if stop > lo:
                    cut = tail_within(ruler, d, stop, hi, aim - load - extra)
                    write_item(items, n, d, lo, stop, extra, opened)
                    n += 1
                    lo = stop
        cut = snapped(cut, lo, hi, reads.slices, reads.first[d], reads.first[d + 1])
        if cut >= hi:
            cut = max(lo, hi - grain)
        tail = load_of(ruler, d, cut, hi)
        if lo < cut:
            write_item(items, big, d, lo, cut, load_of(ruler, d, lo, cut), -1)
            write_item(items, n, d, cut, hi, tail, opened)
            n += 1
        else:
            write_item(items, big, d, cut, hi, tail, opened)
        opened += 1
    return n


@compiled
def deal(items, n, bins, cap_load, cap_rows, mean_load, mean_rows):
    """Put the items that are in no bin yet, largest first, whole into bins.

    Each goes to the bin whose fuller limit, load or rows, is then least full; bins that stay within their limits are
    preferred. The size of an item is its larger part of the mean load or the mean rows.
    """
    load, rows = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    size = np.zeros(n, np.int64)
    for i in range(n):
        length = items[i, HI] - items[i, LO]
        if items[i, BIN] >= 0:
            load[items[i, BIN]] += items[i, LOAD]
            rows[items[i, BIN]] += length
        size[i] = -max(items[i, LOAD] * MILLION // mean_load, length * MILLION // mean_rows)
    for i in stable_order(size):
        if items[i, BIN] >= 0:
            continue
        best, best_over, best_full = -1, False, 0
        length = items[i, HI] - items[i, LO]
        for b in range(bins):
            over = load[b] + items[i, LOAD] > cap_load[b] or rows[b] + length > cap_rows[b]
            full = max((load[b] + items[i, LOAD]) * MILLION // cap_load[b], (rows[b] + length) * MILLION // cap_rows[b])
            if best < 0 or (best_over and not over) or (over == best_over and full < best_full):
                best, best_over, best_full = b, over, full
        items[i, BIN] = best
        load[best] += items[i, LOAD]
        rows[best] += length


@compiled
def at_least_one(caps):
    """Return the limits with 0 replaced by 1, so that one can divide by them."""
    found = np.empty(len(caps), np.int64)
    for b in range(len(caps)):
        found[b] = max(caps[b], 1)
    return found


@compiled
def with_room(items, count):
    """Return the items in a larger table of ``count`` rows."""
    table = np.zeros((count, 5), np.int64)
    for i in range(len(items)):
        write_item(table, i, items[i, DOC], items[i, LO], items[i, HI], items[i, LOAD], items[i, BIN])
    return table


@compiled
def pack(items, ruler, cap_load, cap_rows, aim, reads, weight, moves, fills, aims, enough, sweeps):
    """Peel, deal and repair once for each variant, and climb from the best.

    Return (table of items, keys fetched, worst excess over a limit in millionths of the mean, pairs tried). Pairs are
    of an item and a bin, or of two items. ``cap_load`` and ``cap_rows`` are the limits of bins, ``aim`` the load that
    peeling aims for. ``fills`` and ``aims`` describe the variants (``VARIANTS`` of :mod:`flexcp.planners.blocks.pack`),
    ``enough`` is how many that keep all limits suffice, ``moves`` and ``sweeps`` limit repair and climb, ``weight`` is
    the cost in keys of exceeding a limit by the mean.
    """
    bins, count = len(cap_load), len(items)
    best = np.zeros((count, 5), np.int64)
    if bins == 1:
        for i in range(count):
            d, lo, hi = items[i, DOC], items[i, LO], items[i, HI]
            write_item(best, i, d, lo, hi, load_of(ruler, d, lo, hi), 0)
        return best, 0, 0, 0
    mean_load, mean_rows = 1, 0
    for b in range(bins):
        mean_load += aim[b]
    for i in range(count):
        mean_rows += items[i, HI] - items[i, LO]
    mean_load, mean_rows = max(1, mean_load // bins), max(1, mean_rows // bins)
    used, load, rows = np.zeros(bins, np.int64), np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    caps, row_caps = at_least_one(cap_load), at_least_one(cap_rows)
    best_keys, best_over, feasible, steps = HUGE, HUGE, 0, 0
    for variant in range(len(fills)):
        table = np.zeros((count + 4 * bins + moves + 16, 5), np.int64)
        for i in range(count):
            d, lo, hi = items[i, DOC], items[i, LO], items[i, HI]
            write_item(table, i, d, lo, hi, load_of(ruler, d, lo, hi), -1)
        for b in range(bins):
            used[b] = aim[b] + (cap_load[b] - aim[b]) * aims[variant] // 100
            load[b], rows[b] = 0, 0
        n = peel(table, count, bins, ruler, used, row_caps, reads, fills[variant])
        deal(table, n, bins, caps, row_caps, mean_load, mean_rows)
        n, more = repair(table, n, bins, ruler, caps, row_caps, mean_load, mean_rows, reads, weight, moves)
        steps += more
        keys = total_cost(table, n, bins, reads)
        for i in range(n):
            load[table[i, BIN]] += table[i, LOAD]
            rows[table[i, BIN]] += table[i, HI] - table[i, LO]
        over = 0
        for b in range(bins):
            over = max(over, (load[b] - cap_load[b]) * MILLION // mean_load)
            over = max(over, (rows[b] - cap_rows[b]) * MILLION // mean_rows)
        if over < best_over or (over == best_over and keys < best_keys):
            best, best_keys, best_over = table[:n], keys, over
        feasible += over == 0
        if feasible == enough or (keys == 0 and over == 0):
            break
    if sweeps > 0 and best_keys > 0:
        n = len(best)
        best = with_room(best, 2 * n + 4 * bins + 64)
        n, more = climb(best, n, bins, ruler, caps, row_caps, reads, sweeps)
        best, best_keys, steps = best[:n], total_cost(best, n, bins, reads), steps + more
    return best, best_keys, best_over, steps
