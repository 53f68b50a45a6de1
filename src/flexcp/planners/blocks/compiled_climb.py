"""Loops of climbing: rows change bins where that saves keys, compiled.

After packing, bins of a document's rows are often interleaved: two bins read the same keys, where either could have read them for both. For
each item this tries the bins that have rows of its document: all of the item, or as much of either end as fits, moves there; or all
of it, or an end, changes places with an item or an end of one there. The best of these is taken if it saves keys and takes no
bin over a limit (or, if it is over already, further over). Sweeps over all items go on until none finds anything.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.jit import compiled, compiled_leaf
from flexcp.planners.blocks.compiled_shared import (
    BIN,
    DOC,
    HI,
    LO,
    LOAD,
    bin_cost,
    chains,
    cost_change,
    head_within,
    load_of,
    most_spans,
    tail_within,
    tried_items,
    write_item,
)


@compiled_leaf
def detach(items, n, chain, lists, i, x, y, part):
    """Rows x..y of item ``i``, all of it or one of its ends, as an item in no bin; (its index, the item count)."""
    d, lo, hi, a = items[i, DOC], items[i, LO], items[i, HI], items[i, BIN]
    if x > lo or y < hi:
        if x > lo:
            items[i, HI] = x
        else:
            items[i, LO] = y
        items[i, LOAD] -= part
        write_item(items, n, d, x, y, part, -1)
        chain[1, n], chain[0, d] = chain[0, d], n
        return n, n + 1
    j, before = lists[0, a], -1
    while j != i:
        before, j = j, lists[1, j]
    if before < 0:
        lists[0, a] = lists[1, i]
    else:
        lists[1, before] = lists[1, i]
    items[i, BIN] = -1
    return i, n


@compiled_leaf
def attach(items, chain, lists, i, b):
    """An item in no bin to bin ``b``, joined to an item there that it continues."""
    j = chain[0, items[i, DOC]]
    while j >= 0:
        if items[j, BIN] == b and (items[j, HI] == items[i, LO] or items[j, LO] == items[i, HI]):
            items[j, LO], items[j, HI] = min(items[i, LO], items[j, LO]), max(items[i, HI], items[j, HI])
            items[j, LOAD] += items[i, LOAD]
            items[i, HI], items[i, LOAD] = items[i, LO], 0
            return
        j = chain[1, j]
    items[i, BIN] = b
    lists[1, i], lists[0, b] = lists[0, b], i


@compiled
def joined(items, n, documents):
    """Items of one bin that continue each other become one, empty ones go; returns the item count."""
    chain = chains(items, n, documents)
    for i in range(n):
        again = items[i, LO] < items[i, HI]
        while again:
            again = False
            j = chain[0, items[i, DOC]]
            while j >= 0:
                if items[j, BIN] == items[i, BIN] and items[j, LO] == items[i, HI] and items[j, LO] < items[j, HI]:
                    items[i, HI] = items[j, HI]
                    items[i, LOAD] += items[j, LOAD]
                    items[j, HI] = items[j, LO]
                    again = True
                j = chain[1, j]
    kept = 0
    for i in range(n):
        if items[i, LO] < items[i, HI]:
            write_item(items, kept, items[i, DOC], items[i, LO], items[i, HI], items[i, LOAD], items[i, BIN])
            kept += 1
    return kept


@compiled
def climb(items, n, bins, ruler, cap_load, cap_rows, reads, sweeps):
    """Move or exchange rows between bins that share a document while that saves keys and no limit is passed; (item count, pairs tried).

    For each item: all of it, or as much of either end as fits, to another bin; or all of it, or an end, against an item or an end there.
    """
    grain = ruler.grain
    load, rows = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    for i in range(n):
        load[items[i, BIN]] += items[i, LOAD]
        rows[items[i, BIN]] += items[i, HI] - items[i, LO]
    most = most_spans(reads)
    ranges = np.zeros((len(items) + 3, 2), np.int64)
    spans = np.zeros(((len(items) + 3) * most, 2), np.int64)
    changed, ends, short = np.zeros(bins, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64)
    steps = 0
    for sweep in range(sweeps):
        n = joined(items, n, len(reads.thin))
        chain = chains(items, n, len(reads.thin))
        lists = np.full((2, max(bins, len(items))), -1, np.int64)
        tried, count = tried_items(items, n, chain, bins)
        for at in range(count - 1, -1, -1):
            i = tried[at]
            lists[1, i], lists[0, items[i, BIN]] = lists[0, items[i, BIN]], i
        seen = np.full(bins, -1, np.int64)
        improved = False
        for i in range(n):
            a, d, lo, hi = items[i, BIN], items[i, DOC], items[i, LO], items[i, HI]
            if a < 0 or n + 2 >= len(items):
                continue
            here = -1
            best, best_b, best_x, best_y, best_j, best_u, best_v = 0, -1, 0, 0, -1, 0, 0
            other = chain[0, d]
            seen[a] = i
            while other >= 0:
                b = items[other, BIN]
                other = chain[1, other]
                if b < 0 or seen[b] == i:
                    continue
                seen[b] = i
                if changed[a] < sweep - 1 and changed[b] < sweep - 1:
                    continue  # nothing new since the last sweep
                if here < 0:
                    here = bin_cost(items, chain, a, d, -1, 0, 0, 0, 0, reads, ranges, spans)
                    without = bin_cost(items, chain, a, d, i, 0, 0, 0, 0, reads, ranges, spans) - here
                    x, y = max(lo, hi - grain), min(hi, lo + grain)
                    short[0] = bin_cost(items, chain, a, d, i, lo, x, 0, 0, reads, ranges, spans) - here
                    short[1] = bin_cost(items, chain, a, d, i, y, hi, 0, 0, reads, ranges, spans) - here
                there = bin_cost(items, chain, b, d, -1, 0, 0, 0, 0, reads, ranges, spans)
                room_load, room_rows = max(cap_load[b] - load[b], 0), max(cap_rows[b] - rows[b], 0)
                whole = without + bin_cost(items, chain, b, d, -1, lo, hi, 0, 0, reads, ranges, spans) - there
                if items[i, LOAD] <= room_load and hi - lo <= room_rows:
                    if whole < best:
                        best, best_b, best_x, best_y, best_j = whole, b, lo, hi, -1
                    continue
                # As much of either end as fits. An end that saves nothing when a little of it moves will not do so when more does.
                for end in range(2):
                    x, y = (lo, min(hi, lo + grain)) if end else (max(lo, hi - grain), hi)
                    ends[end] = short[end] + bin_cost(items, chain, b, d, -1, x, y, 0, 0, reads, ranges, spans) - there
                    if ends[end] >= 0:
                        continue
                    x, y = lo, hi
                    if end == 0:
                        x = max(tail_within(ruler, d, lo, hi, room_load), hi - room_rows // grain * grain)
                    else:
                        y = min(head_within(ruler, d, lo, hi, room_load), lo + room_rows // grain * grain)
                    if x >= y:
                        continue
                    r0, r1 = (lo, x) if end == 0 else (y, hi)
                    change = bin_cost(items, chain, a, d, i, r0, r1, 0, 0, reads, ranges, spans) - here
                    change += bin_cost(items, chain, b, d, -1, x, y, 0, 0, reads, ranges, spans) - there
                    if change < best:
                        best, best_b, best_x, best_y, best_j = change, b, x, y, -1
                # Against rows of b. What rows of another document save is found when they are looked at.
                foreign = whole < 0 or ends[0] < 0 or ends[1] < 0
                j = lists[0, b]
                while j >= 0:
                    steps += 1
                    e, p, q = items[j, DOC], items[j, LO], items[j, HI]
                    for kind in range(5 if d == e or foreign else 0):
                        # 0: i for j; 1, 2: i for the tail, the head of j; 3, 4: the tail, the head of i for j.
                        x, y, u, v = lo, hi, p, q
                        if kind < 3 and d != e and whole >= 0:
                            continue
                        if kind == 1 or kind == 2:
                            # At least what b must give, at most what a can take.
                            give_load = load[b] + items[i, LOAD] - max(cap_load[b], load[b])
                            give_rows = rows[b] + (hi - lo) - max(cap_rows[b], rows[b])
                            if kind == 1:
                                u = q if give_load <= 0 else tail_within(ruler, e, p, q, give_load) - grain
                                u = min(u, q - give_rows) // grain * grain
                                if u <= p:
                                    continue
                            else:
                                v = p if give_load <= 0 else head_within(ruler, e, p, q, give_load) + grain
                                v = (max(v, p + give_rows) + grain - 1) // grain * grain
                                if v >= q:
                                    continue
                        elif kind >= 3:
                            if ends[kind - 3] >= 0:
                                continue
                            give_load = load[a] + items[j, LOAD] - max(cap_load[a], load[a])
                            give_rows = rows[a] + (q - p) - max(cap_rows[a], rows[a])
                            if kind == 3:
                                x = hi if give_load <= 0 else tail_within(ruler, d, lo, hi, give_load) - grain
                                x = min(x, hi - give_rows) // grain * grain
                                if x <= lo:
                                    continue
                            else:
                                y = lo if give_load <= 0 else head_within(ruler, d, lo, hi, give_load) + grain
                                y = (max(y, lo + give_rows) + grain - 1) // grain * grain
                                if y >= hi:
                                    continue
                        if x >= y or u >= v:
                            continue
                        out = items[i, LOAD] if kind < 3 else load_of(ruler, d, x, y)
                        back = load_of(ruler, e, u, v) if kind == 1 or kind == 2 else items[j, LOAD]
                        net_load, net_rows = out - back, (y - x) - (v - u)
                        if net_load > 0 and load[b] + net_load > cap_load[b]:
                            continue
                        if net_load < 0 and load[a] - net_load > cap_load[a]:
                            continue
                        if net_rows > 0 and rows[b] + net_rows > cap_rows[b]:
                            continue
                        if net_rows < 0 and rows[a] - net_rows > cap_rows[a]:
                            continue
                        r0, r1 = (lo, x) if x > lo else (y, hi)
                        s0, s1 = (p, u) if u > p else (v, q)
                        if d == e:
                            change = bin_cost(items, chain, a, d, i, r0, r1, u, v, reads, ranges, spans) - here
                            change += bin_cost(items, chain, b, d, j, s0, s1, x, y, reads, ranges, spans) - there
                        else:
                            if kind < 3:
                                change = whole
                            else:
                                change = bin_cost(items, chain, a, d, i, r0, r1, 0, 0, reads, ranges, spans) - here
                                change += bin_cost(items, chain, b, d, -1, x, y, 0, 0, reads, ranges, spans) - there
                            if change >= 0 and kind > 0:
                                continue
                            change += cost_change(items, chain, b, e, j, s0, s1, reads, ranges, spans)
                            if change >= best:
                                continue
                            change += cost_change(items, chain, a, e, -1, u, v, reads, ranges, spans)
                        if change < best:
                            best, best_b, best_x, best_y, best_j, best_u, best_v = change, b, x, y, j, u, v
                    j = lists[1, j]
            if best_b < 0:
                continue
            improved = True
            b, j = best_b, best_j
            changed[a], changed[b] = sweep, sweep
            part, length = load_of(ruler, d, best_x, best_y), best_y - best_x
            out, n = detach(items, n, chain, lists, i, best_x, best_y, part)
            load[a], load[b], rows[a], rows[b] = load[a] - part, load[b] + part, rows[a] - length, rows[b] + length
            if j >= 0:
                part, length = load_of(ruler, items[j, DOC], best_u, best_v), best_v - best_u
                back, n = detach(items, n, chain, lists, j, best_u, best_v, part)
                load[a], load[b], rows[a], rows[b] = load[a] + part, load[b] - part, rows[a] + length, rows[b] - length
                attach(items, chain, lists, back, a)
            attach(items, chain, lists, out, b)
        if not improved:
            break
    return joined(items, n, len(reads.thin)), steps
