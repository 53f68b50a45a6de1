"""All compiled loops of planning, in one file.

Numba's disk cache does not notice changes in other files, so every compiled function lives here. Everything is 64-bit integers:
the same result on every machine. ``pack.py`` says what the steps mean; this file is how they run fast.

Rows are cut at multiples of ``grain``, or where a slice begins. ``prefix[first[d] + i]`` is the load of document d's rows before
``min(i * grain, length)``. Items are rows of one array with the columns ``DOC LO HI LOAD BIN``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

Compiled = Callable[..., Any]


def compiled(function: Compiled) -> Compiled:
    """Compile on first use and keep the result on disk; where no folder can be written, in this process only."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:
        return njit(function)


DOC, LO, HI, LOAD, BIN = range(5)
MILLION = 1_000_000
HUGE = 1 << 62


@compiled
def load_of(prefix, first, grain, d, lo, hi):
    return prefix[first[d] + (hi + grain - 1) // grain] - prefix[first[d] + (lo + grain - 1) // grain]


@compiled
def tail_within(prefix, first, grain, d, lo, hi, load):
    """Smallest cut x in [lo, hi] such that rows x..hi carry at most ``load``."""
    base = first[d]
    end = (hi + grain - 1) // grain
    low, high = (lo + grain - 1) // grain, end
    wanted = prefix[base + end] - load
    while low < high:
        middle = (low + high) // 2
        if prefix[base + middle] >= wanted:
            high = middle
        else:
            low = middle + 1
    return min(max(low * grain, lo), hi)


@compiled
def head_within(prefix, first, grain, d, lo, hi, load):
    """Largest cut x in [lo, hi] such that rows lo..x carry at most ``load``."""
    base = first[d]
    begin = (lo + grain - 1) // grain
    low, high = begin, (hi + grain - 1) // grain
    wanted = prefix[base + begin] + load
    while low < high:
        middle = (low + high + 1) // 2
        if prefix[base + middle] <= wanted:
            low = middle
        else:
            high = middle - 1
    return min(low * grain, hi)


@compiled
def snapped(cut, lo, hi, slices, s0, s1):
    """A cut moved to where a slice begins a little later, if one does: rows before it are then of no use to rows behind it."""
    reach = cut + (hi - cut) // 4
    best = cut
    for s in range(s0, s1):
        if cut < slices[s, 0] <= reach and slices[s, 2] > lo:
            best = slices[s, 0]
    return best


@compiled
def outside(ranges, count, slices, s0, s1, spans):
    """Keys that the row ``ranges[:count]`` of a document read and that are not among those rows themselves."""
    found = 0
    for j in range(count):
        for s in range(s0, s1):
            lo, hi, k0, k1 = slices[s, 4], slices[s, 5], slices[s, 2], slices[s, 3]
            r0 = max(max(slices[s, 0], ranges[j, 0]), k0 - hi)
            r1 = min(min(slices[s, 1], ranges[j, 1]), k1 - lo)
            if r0 >= r1:
                continue
            a, b = max(k0, r0 + lo), min(k1, r1 + hi)
            if a >= b:
                continue
            at = found
            while at > 0 and spans[at - 1, 0] > a:
                spans[at, 0], spans[at, 1] = spans[at - 1, 0], spans[at - 1, 1]
                at -= 1
            spans[at, 0], spans[at, 1] = a, b
            found += 1
    total, reach = 0, -1
    for i in range(found):
        a, b = max(spans[i, 0], reach), spans[i, 1]
        if b <= a:
            continue
        reach = b
        total += b - a
        for j in range(count):
            both = min(b, ranges[j, 1]) - max(a, ranges[j, 0])
            if both > 0:
                total -= both
    return total


@compiled
def bin_cost(items, chain, b, d, skip, lo1, hi1, slices, sfirst, ranges, spans):
    """Keys bin ``b`` fetches for document ``d`` without item ``skip`` and with rows lo1..hi1 (when not empty)."""
    count = 0
    i = chain[0, d]
    while i >= 0:
        if items[i, BIN] == b and i != skip:
            ranges[count, 0], ranges[count, 1] = items[i, LO], items[i, HI]
            count += 1
        i = chain[1, i]
    if lo1 < hi1:
        ranges[count, 0], ranges[count, 1] = lo1, hi1
        count += 1
    return outside(ranges, count, slices, sfirst[d], sfirst[d + 1], spans)


@compiled
def chains(items, n, documents):
    """Items of each document as a chain: ``chain[0, d]`` is the first, ``chain[1, i]`` the one after i, -1 the end."""
    chain = np.full((2, max(documents, len(items))), -1, np.int64)
    for i in range(n - 1, -1, -1):
        chain[1, i] = chain[0, items[i, DOC]]
        chain[0, items[i, DOC]] = i
    return chain


@compiled
def violation(load, rows, cap_load, cap_rows, mean_load, mean_rows):
    """How far a bin is over its limits, in millionths of the mean, linear plus ten times quadratic."""
    x = max(load - cap_load, 0) * MILLION // mean_load
    y = max(rows - cap_rows, 0) * MILLION // mean_rows
    x, y = min(x, 1 << 28), min(y, 1 << 28)
    return x + x * x // 100_000 + y + y * y // 100_000


@compiled
def peel(items, n, bins, prefix, first, grain, aim_load, cap_rows, slices, sfirst, fill):
    """Open bins for the tails of items that exceed one; returns the item count.

    A tail bin is filled up to its share of rows with the lightest whole items, then with the first rows of the item itself:
    dense late rows and light early ones together meet both limits, and the early rows are keys the tail needs anyway.
    """
    opened, lightest = 0, 0
    density = np.zeros(n, np.int64)
    for i in range(n):
        density[i] = items[i, LOAD] * 64 // (items[i, HI] - items[i, LO])
    order = np.argsort(density, kind="mergesort")
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
        cut = tail_within(prefix, first, grain, d, lo, hi, aim)
        cut = max(cut, hi - cap_rows[opened] // grain * grain)
        rows, load = hi - cut, 0
        if fill:
            own_density = items[big, LOAD] * 64 // (hi - lo)
            # The lightest items by load per row, whole, as long as they fit.
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
                new = tail_within(prefix, first, grain, d, lo, hi, aim - load)
                rows += cut - new
                cut = new
            missing = (share - rows) // grain * grain
            if missing > 0:
                stop = min(lo + missing, cut)
                stop = min(stop, head_within(prefix, first, grain, d, lo, hi, (aim - load) // 2))
                extra = load_of(prefix, first, grain, d, lo, stop)
                if stop > lo:
                    cut = tail_within(prefix, first, grain, d, stop, hi, aim - load - extra)
                    items[n, DOC], items[n, LO], items[n, HI], items[n, LOAD], items[n, BIN] = (
                        d,
                        lo,
                        stop,
                        extra,
                        opened,
                    )
                    n += 1
                    lo = stop
        cut = snapped(cut, lo, hi, slices, sfirst[d], sfirst[d + 1])
        if cut >= hi:
            cut = max(lo, hi - grain)
        items[n, DOC], items[n, LO], items[n, HI], items[n, BIN] = d, cut, hi, opened
        items[n, LOAD] = load_of(prefix, first, grain, d, cut, hi)
        n += 1
        items[big, LO], items[big, HI] = lo, cut
        items[big, LOAD] = load_of(prefix, first, grain, d, lo, cut)
        if lo >= cut:
            items[big] = items[n - 1]
            n -= 1
        opened += 1
    return n


@compiled
def deal(items, n, bins, cap_load, cap_rows, mean_load, mean_rows):
    """The items not yet in a bin, largest first, each whole into the bin that is then fullest least."""
    load, rows = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    size = np.zeros(n, np.int64)
    for i in range(n):
        length = items[i, HI] - items[i, LO]
        if items[i, BIN] >= 0:
            load[items[i, BIN]] += items[i, LOAD]
            rows[items[i, BIN]] += length
        size[i] = max(items[i, LOAD] * MILLION // mean_load, length * MILLION // mean_rows)
    for i in np.argsort(-size, kind="mergesort"):
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
def repair(
    items, n, bins, prefix, first, grain, cap_load, cap_rows, mean_load, mean_rows, slices, sfirst, weight, moves
):
    """Move, cut and swap items out of the worst bin while that lowers violation x weight + keys fetched; returns the item count."""
    load, rows = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    for i in range(n):
        load[items[i, BIN]] += items[i, LOAD]
        rows[items[i, BIN]] += items[i, HI] - items[i, LO]
    most = 1
    for d in range(len(sfirst) - 1):
        most = max(most, sfirst[d + 1] - sfirst[d])
    ranges = np.zeros((len(items) + 2, 2), np.int64)
    spans = np.zeros(((len(items) + 2) * most, 2), np.int64)
    chain = chains(items, n, len(sfirst) - 1)
    for _ in range(moves):
        worst, worst_value = -1, 0
        for b in range(bins):
            value = violation(load[b], rows[b], cap_load[b], cap_rows[b], mean_load, mean_rows)
            if value > worst_value:
                worst, worst_value = b, value
        if worst < 0 or n + 2 >= len(items):
            break
        w = worst
        excess_load, excess_rows = load[w] - cap_load[w], rows[w] - cap_rows[w]
        best_score, best_item, best_bin, best_lo, best_hi, best_swap = HUGE, -1, -1, 0, 0, -1
        for i in range(n):
            if items[i, BIN] != w:
                continue
            d, lo, hi = items[i, DOC], items[i, LO], items[i, HI]
            here = bin_cost(items, chain, w, d, -1, 0, 0, slices, sfirst, ranges, spans)
            for b in range(bins):
                if b == w:
                    continue
                room_load, room_rows = cap_load[b] - load[b], cap_rows[b] - rows[b]
                before = worst_value + violation(load[b], rows[b], cap_load[b], cap_rows[b], mean_load, mean_rows)
                there = -1
                for kind in range(5):
                    x, y = lo, hi
                    if kind == 1 or kind == 2:
                        if excess_load <= 0 or room_load <= 0:
                            continue
                        # Enough load to clear the excess, or what fits.
                        wanted = min(excess_load, room_load)
                        if kind == 1:
                            x = tail_within(prefix, first, grain, d, lo, hi, wanted)
                            if excess_load <= room_load and x > lo:
                                x = max(lo, x - grain)
                        else:
                            y = head_within(prefix, first, grain, d, lo, hi, wanted)
                            if excess_load <= room_load and y < hi:
                                y = min(hi, y + grain)
                    elif kind >= 3:
                        if excess_rows <= 0 or room_rows <= 0:
                            continue
                        length = min((excess_rows + grain - 1) // grain * grain, room_rows // grain * grain)
                        if kind == 3:
                            x = max(lo, (hi - length + grain - 1) // grain * grain)
                        else:
                            y = min(hi, lo + length)
                    if x >= y or (kind > 0 and x == lo and y == hi):
                        continue
                    part = load_of(prefix, first, grain, d, x, y)
                    after = violation(load[w] - part, rows[w] - (y - x), cap_load[w], cap_rows[w], mean_load, mean_rows)
                    after += violation(
                        load[b] + part, rows[b] + (y - x), cap_load[b], cap_rows[b], mean_load, mean_rows
                    )
                    if after >= before:
                        continue
                    if there < 0:
                        there = bin_cost(items, chain, b, d, -1, 0, 0, slices, sfirst, ranges, spans)
                    r0, r1 = (lo, x) if x > lo else (y, hi)
                    change = bin_cost(items, chain, w, d, i, r0, r1, slices, sfirst, ranges, spans) - here
                    change += bin_cost(items, chain, b, d, -1, x, y, slices, sfirst, ranges, spans) - there
                    score = (after - before) * weight // MILLION + change
                    if score < best_score:
                        best_score, best_item, best_bin, best_lo, best_hi, best_swap = score, i, b, x, y, -1
        # Swaps only where no single item can move: they are many.
        for i in range(n):
            if best_item >= 0 and best_swap < 0:
                break
            if items[i, BIN] != w:
                continue
            d, lo, hi = items[i, DOC], items[i, LO], items[i, HI]
            here = bin_cost(items, chain, w, d, -1, 0, 0, slices, sfirst, ranges, spans)
            for j in range(n):
                b = items[j, BIN]
                if b == w:
                    continue
                part, length = items[i, LOAD] - items[j, LOAD], (hi - lo) - (items[j, HI] - items[j, LO])
                before = worst_value + violation(load[b], rows[b], cap_load[b], cap_rows[b], mean_load, mean_rows)
                after = violation(load[w] - part, rows[w] - length, cap_load[w], cap_rows[w], mean_load, mean_rows)
                after += violation(load[b] + part, rows[b] + length, cap_load[b], cap_rows[b], mean_load, mean_rows)
                if after >= before:
                    continue
                e = items[j, DOC]
                if e == d:
                    continue
                change = bin_cost(items, chain, w, d, i, 0, 0, slices, sfirst, ranges, spans) - here
                change += bin_cost(items, chain, b, d, -1, lo, hi, slices, sfirst, ranges, spans)
                change -= bin_cost(items, chain, b, d, -1, 0, 0, slices, sfirst, ranges, spans)
                change += bin_cost(items, chain, b, e, j, 0, 0, slices, sfirst, ranges, spans)
                change -= bin_cost(items, chain, b, e, -1, 0, 0, slices, sfirst, ranges, spans)
                change += bin_cost(items, chain, w, e, -1, items[j, LO], items[j, HI], slices, sfirst, ranges, spans)
                change -= bin_cost(items, chain, w, e, -1, 0, 0, slices, sfirst, ranges, spans)
                score = (after - before) * weight // MILLION + change
                if score < best_score:
                    best_score, best_item, best_bin, best_lo, best_hi, best_swap = score, i, b, lo, hi, j
        if best_item < 0 or best_score >= 0:
            break
        i, b = best_item, best_bin
        d, lo, hi = items[i, DOC], items[i, LO], items[i, HI]
        if best_swap >= 0:
            j = best_swap
            part, length = items[i, LOAD] - items[j, LOAD], (hi - lo) - (items[j, HI] - items[j, LO])
            items[i, BIN], items[j, BIN] = b, w
        else:
            part, length = load_of(prefix, first, grain, d, best_lo, best_hi), best_hi - best_lo
            if length == hi - lo:
                items[i, BIN] = b
            else:
                items[n, DOC], items[n, LO], items[n, HI] = d, best_lo, best_hi
                items[n, LOAD], items[n, BIN] = part, b
                chain[1, n], chain[0, d] = chain[0, d], n
                n += 1
                if best_lo > lo:
                    items[i, HI] = best_lo
                else:
                    items[i, LO] = best_hi
                items[i, LOAD] -= part
        load[w] -= part
        rows[w] -= length
        load[b] += part
        rows[b] += length
    return n


@compiled
def keys_alone(items, slices, sfirst):
    """Keys each item would fetch if it were alone on a rank."""
    most = 1
    for d in range(len(sfirst) - 1):
        most = max(most, sfirst[d + 1] - sfirst[d])
    ranges = np.zeros((1, 2), np.int64)
    spans = np.zeros((most, 2), np.int64)
    found = np.zeros(len(items), np.int64)
    for i in range(len(items)):
        ranges[0, 0], ranges[0, 1] = items[i, LO], items[i, HI]
        d = items[i, DOC]
        found[i] = outside(ranges, 1, slices, sfirst[d], sfirst[d + 1], spans)
    return found


@compiled
def total_cost(items, n, bins, slices, sfirst):
    """Keys that all bins fetch."""
    most = 1
    for d in range(len(sfirst) - 1):
        most = max(most, sfirst[d + 1] - sfirst[d])
    ranges = np.zeros((n + 2, 2), np.int64)
    spans = np.zeros(((n + 2) * most, 2), np.int64)
    total = 0
    chain = chains(items, n, len(sfirst) - 1)
    for i in range(n):
        # A bin's share of a document is counted at its last item in the chain.
        j = chain[1, i]
        while j >= 0 and items[j, BIN] != items[i, BIN]:
            j = chain[1, j]
        if j < 0:
            total += bin_cost(items, chain, items[i, BIN], items[i, DOC], -1, 0, 0, slices, sfirst, ranges, spans)
    return total


@compiled
def pack(items, prefix, first, grain, cap_load, cap_rows, aim, slices, sfirst, weight, moves, fills, aims):
    """Peel, deal and repair once for each variant; (best table, keys it fetches, worst violation in millionths)."""
    bins, count = len(cap_load), len(items)
    mean_load, mean_rows = 1, 0
    for b in range(bins):
        mean_load += aim[b]
    for i in range(count):
        mean_rows += items[i, HI] - items[i, LO]
    mean_load, mean_rows = max(1, mean_load // bins), max(1, mean_rows // bins)
    caps, row_caps = np.maximum(cap_load, 1), np.maximum(cap_rows, 1)
    best = np.zeros((0, 5), np.int64)
    best_keys, best_over = HUGE, HUGE
    for variant in range(len(fills)):
        table = np.zeros((count + 4 * bins + moves + 16, 5), np.int64)
        for i in range(count):
            d, lo, hi = items[i, DOC], items[i, LO], items[i, HI]
            table[i, DOC], table[i, LO], table[i, HI], table[i, BIN] = d, lo, hi, -1
            table[i, LOAD] = load_of(prefix, first, grain, d, lo, hi)
        used = aim + (cap_load - aim) * aims[variant] // 100
        n = peel(table, count, bins, prefix, first, grain, used, row_caps, slices, sfirst, fills[variant])
        deal(table, n, bins, caps, row_caps, mean_load, mean_rows)
        n = repair(
            table, n, bins, prefix, first, grain, caps, row_caps, mean_load, mean_rows, slices, sfirst, weight, moves
        )
        keys = total_cost(table, n, bins, slices, sfirst)
        load, rows = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
        for i in range(n):
            load[table[i, BIN]] += table[i, LOAD]
            rows[table[i, BIN]] += table[i, HI] - table[i, LO]
        over = 0
        for b in range(bins):
            over = max(over, (load[b] - cap_load[b]) * MILLION // mean_load)
            over = max(over, (rows[b] - cap_rows[b]) * MILLION // mean_rows)
        if over < best_over or (over == best_over and keys < best_keys):
            best, best_keys, best_over = table[:n], keys, over
        if keys == 0 and over == 0:
            break
    return best, best_keys, best_over


@compiled
def ramp(x, width):
    x = max(x, 0)
    inside = min(x, width + 1)
    return inside * (inside - 1) // 2 + (x - inside) * width


@compiled
def exact_before(d, row, price, layers, sfirst, slices, shift):
    """Load of document ``d`` before ``row``, exact at any row: the closed form of :func:`flexcp.masks.rows_area`."""
    total = row * price
    for s in range(sfirst[d], sfirst[d + 1]):
        q0, q1, k0, k1, lo, hi = slices[s]
        b = min(max(row, q0), q1)
        width = max(k1 - k0, 0)
        upper = ramp(b + hi + 1 - k0, width) - ramp(q0 + hi + 1 - k0, width)
        lower = ramp(b + lo - k0, width) - ramp(q0 + lo - k0, width)
        total += layers[s] * (upper - lower)
    return total >> shift


@compiled
def level(work, n, limit, nodes, price, layers, sfirst, slices, shift):
    """Move rows from ranks over ``limit`` to ranks under it, same node first, until none is over by more than a row.

    ``work`` rows are (first rank, team size, document, first row, last row); a team's rows load each of its ranks with their
    share. What moves becomes a whole item of the rank that takes it. Returns the row count.
    """
    ranks = len(limit)
    total = np.zeros(ranks, np.int64)
    load = np.zeros(len(work), np.int64)
    for i in range(n):
        d = work[i, 2]
        load[i] = exact_before(d, work[i, 4], price, layers, sfirst, slices, shift)
        load[i] -= exact_before(d, work[i, 3], price, layers, sfirst, slices, shift)
        for r in range(work[i, 0], work[i, 0] + work[i, 1]):
            total[r] += load[i] // work[i, 1]
    while n < len(work):
        donor, taker = 0, -1
        for r in range(ranks):
            if total[r] - limit[r] > total[donor] - limit[donor]:
                donor = r
        if total[donor] <= limit[donor]:
            break
        at = -1
        for i in range(n):
            here = work[i, 0] <= donor < work[i, 0] + work[i, 1] and work[i, 3] < work[i, 4]
            if here and (at < 0 or load[i] // work[i, 1] > load[at] // work[at, 1]):
                at = i
        if at < 0:
            break
        first, team, d = work[at, 0], work[at, 1], work[at, 2]
        for r in range(ranks):
            if first <= r < first + team or total[r] >= limit[r]:
                continue
            if taker < 0:
                taker = r
                continue
            near, best = nodes[r] == nodes[donor], nodes[taker] == nodes[donor]
            if (near and not best) or (near == best and limit[r] - total[r] > limit[taker] - total[taker]):
                taker = r
        if taker < 0:
            break
        amount = min((total[donor] - limit[donor]) * team, limit[taker] - total[taker])
        end = exact_before(d, work[at, 4], price, layers, sfirst, slices, shift)
        low, high = work[at, 3], work[at, 4] - 1
        while low < high:
            middle = (low + high) // 2
            if end - exact_before(d, middle, price, layers, sfirst, slices, shift) <= amount:
                high = middle
            else:
                low = middle + 1
        moved = end - exact_before(d, high, price, layers, sfirst, slices, shift)
        if total[taker] + moved >= total[donor]:
            break  # one row is more than what is left to move
        work[n, 0], work[n, 1], work[n, 2], work[n, 3], work[n, 4] = taker, 1, d, high, work[at, 4]
        load[n] = moved
        n += 1
        work[at, 4] = high
        load[at] -= moved
        for r in range(first, first + team):
            total[r] -= moved // team
        total[taker] += moved
    return n
