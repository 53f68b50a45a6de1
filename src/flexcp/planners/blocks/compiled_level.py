"""Loops of levelling: exact loads at any row, and moving rows until every rank is within its limit (compiled)."""

from __future__ import annotations

import numpy as np

from flexcp.arrays.compiled_heap import pop, push
from flexcp.arrays.jit import compiled, compiled_leaf
from flexcp.masks.compiled_area import ramp


@compiled_leaf
def exact_before(d, row, price, layers, sfirst, slices, shift):
    """Return the load of document ``d`` before ``row``, exact at any row.

    It is the closed form of :func:`flexcp.masks.rows_area`, shifted down by ``shift`` bits. ``price`` is the load of a
    row besides its attention, ``layers[s]`` how often slice s counts, ``sfirst`` the first slice of each document.
    """
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
def level(work, n, limit, nodes, grain, price, layers, sfirst, slices, shift):
    """Move rows from ranks above their ``limit`` of load to others; return how many rows ``work`` then has in use.

    The rows of ``work`` are (first rank, team size, document, first row, last row), of which the first ``n`` are used;
    the rows of a team load each of its ranks with an equal share. What moves becomes a whole item of the rank that
    takes it; items are cut at multiples of ``grain`` rows. Ranks of the same node (``nodes[rank]``) are preferred. This
    ends when no rank is above by more than a grain, when nothing helps, or when ``work`` is full. The other arguments
    are those of :func:`exact_before`.
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
        high = max(work[at, 3], high // grain * grain)
        moved = end - exact_before(d, high, price, layers, sfirst, slices, shift)
        if total[taker] + moved >= total[donor]:
            break  # moving even one grain would not help
        work[n, 0], work[n, 1], work[n, 2], work[n, 3], work[n, 4] = taker, 1, d, high, work[at, 4]
        load[n] = moved
        n += 1
        work[at, 4] = high
        load[at] -= moved
        for r in range(first, first + team):
            total[r] -= moved // team
        total[taker] += moved
    return n


@compiled
def loads_before(lengths, first, grain, price, layers, sfirst, slices):
    """Return the load of each document before every ``grain``-th row and before its end, all in one array.

    Entry ``first[d] + i`` is the load of document d before row ``i * grain``. Loads are those of :func:`exact_before`
    without its shift, computed by cells of ``grain`` rows.
    """
    before = np.zeros(first[-1], np.int64)
    for d in range(len(lengths)):
        base = first[d]
        for c in range(first[d + 1] - base - 1):
            before[base + c + 1] = (min((c + 1) * grain, lengths[d]) - c * grain) * price
        for s in range(sfirst[d], sfirst[d + 1]):
            q0, q1, k0, k1, lo, hi = slices[s]
            width = max(k1 - k0, 0)
            if q0 >= q1 or width == 0:
                continue
            for c in range(q0 // grain, (q1 - 1) // grain + 1):
                a, b = max(q0, c * grain), min(q1, (c + 1) * grain)
                upper = ramp(b + hi + 1 - k0, width) - ramp(a + hi + 1 - k0, width)
                lower = ramp(b + lo - k0, width) - ramp(a + lo - k0, width)
                before[base + c + 1] += layers[s] * (upper - lower)
        for c in range(base, first[d + 1] - 1):
            before[c + 1] += before[c]
    return before


@compiled
def level_rows(kept, n, room, nodes):
    """Move tokens from ranks with negative ``room`` to ranks with positive ``room``; return how many rows are in use.

    The rows of ``kept`` are (rank, first token, last token), sorted by first token, of which the first ``n`` are used;
    the table has space for two more rows per rank. The longest ranges move first, and ranks of the same node are
    preferred. A range that moves as a whole changes its rank; a part of a range becomes a row of its own. A rank that
    takes tokens never gives any, so the ranges of a rank are sorted only once. There must be room for all tokens.
    """
    ranks = len(room)
    longest, begin = 1, np.zeros(ranks + 1, np.int64)
    for i in range(n):
        longest = max(longest, kept[i, 2] - kept[i, 1])
        begin[kept[i, 0] + 1] += 1
    for r in range(ranks):
        begin[r + 1] += begin[r] + 1
    heaps = np.zeros(begin[ranks], np.int64)
    for i in range(n):
        r = kept[i, 0]
        if room[r] < 0:  # of equally long ranges, the first comes first
            push(heaps[begin[r] : begin[r + 1]], (longest - (kept[i, 2] - kept[i, 1])) * len(kept) + i)
    while True:
        donor, taker = 0, -1
        for r in range(ranks):
            if room[r] < room[donor]:
                donor = r
        if room[donor] >= 0:
            break
        for r in range(ranks):
            if room[r] <= 0:
                continue
            near, best = nodes[r] == nodes[donor], taker >= 0 and nodes[taker] == nodes[donor]
            if taker < 0 or (near and not best) or (near == best and room[r] > room[taker]):
                taker = r
        mine = heaps[begin[donor] : begin[donor + 1]]
        i = pop(mine) % len(kept)
        a, b = kept[i, 1], kept[i, 2]
        amount = min(-room[donor], room[taker], b - a)
        if amount < b - a:
            kept[n, 0], kept[n, 1], kept[n, 2] = taker, a, a + amount
            n += 1
            kept[i, 1] = a + amount
            push(mine, (longest - (b - a - amount)) * len(kept) + i)
        else:
            kept[i, 0] = taker
        room[donor] += amount
        room[taker] -= amount
    return n
