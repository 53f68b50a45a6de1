"""Loops of even rows: every rank ends up with exactly the rows it should keep, and computes what it keeps, compiled.

Packing leaves counts a little off. A rank with too many rows passes some on to one with too few: the first or last rows of an item, to
a rank that has rows of the same document, where a shifted cut costs almost nothing. Often the two share none: then the rows of one
cut push those of the next, along the cheapest path. Moving rows without their work (:mod:`flexcp.planners.blocks.row_limits`) is always
possible and costs q and o; a path that costs more is not taken.

A team with split rows is one *unit* here: who of the team keeps them is free.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.jit import compiled
from flexcp.planners.blocks.compiled_climb import attach, detach
from flexcp.planners.blocks.compiled_shared import (
    BIN,
    DOC,
    HI,
    HUGE,
    LO,
    LOAD,
    bin_cost,
    cost_now,
    fetched,
    load_of,
    with_chains,
    write_item,
)


@compiled
def even_rows(work, targets, limit, ruler, kv, row, reads):
    """``work`` with rows passed on until units keep their ranks' ``targets`` (or that gets too dear), loads within ``limit``."""
    ranks = len(targets)
    unit, team = np.arange(ranks), np.ones(ranks, np.int64)
    for i in range(len(work)):
        if work[i, 1] > 1:
            for r in range(work[i, 0], work[i, 0] + work[i, 1]):
                unit[r] = work[i, 0]
            team[work[i, 0]] = work[i, 1]
    room, excess = np.full(ranks, HUGE, np.int64), np.zeros(ranks, np.int64)
    whole = limit.copy()
    items = np.zeros((3 * len(work) + 8 * ranks + 64, 5), np.int64)
    fixed = np.zeros(len(work), np.bool_)
    n = 0
    for i in range(len(work)):
        r = work[i, 0]
        u = unit[r]
        load = load_of(ruler, work[i, 2], work[i, 3], work[i, 4])
        excess[u] += work[i, 4] - work[i, 3]
        fixed[i] = work[i, 1] < team[u]
        if fixed[i]:
            whole[r] -= load
            continue
        write_item(items, n, work[i, 2], work[i, 3], work[i, 4], load, u)
        n += 1
    for r in range(ranks):
        room[unit[r]] = min(room[unit[r]], whole[r])
        excess[unit[r]] -= targets[r]
    for u in range(ranks):
        room[u] *= team[u]
    for i in range(n):
        room[items[i, BIN]] -= items[i, LOAD]
    table = with_chains(items, n, reads)
    chain = table.chain
    lists = np.full((2, max(ranks, len(items))), -1, np.int64)
    for i in range(n - 1, -1, -1):
        lists[1, i], lists[0, items[i, BIN]] = lists[0, items[i, BIN]], i
    given_up = np.zeros(ranks, np.bool_)
    for _ in range(4 * ranks):
        donor = -1
        for u in range(ranks):
            if excess[u] > 0 and not given_up[u] and (donor < 0 or excess[u] > excess[donor]):
                donor = u
        if donor < 0 or n + 2 * ranks >= len(items):
            break
        wanted = excess[donor]
        taker, before, via, tail = path(table, lists, unit, excess, room, donor, wanted, ruler, kv, row)
        if taker < 0:
            given_up[donor] = True
            continue
        rows = min(wanted, -excess[taker])
        excess[donor] -= rows
        excess[taker] += rows
        # From the far end, so that what arrives is not what leaves.
        u = taker
        while u != donor:
            i = via[u]
            d, x, y = items[i, DOC], items[i, LO], items[i, HI]
            if tail[u]:
                x = y - rows
            else:
                y = x + rows
            part = load_of(ruler, d, x, y)
            piece, n = detach(items, n, chain, lists, i, x, y, part)
            attach(items, chain, lists, piece, u)
            room[u] -= part
            room[before[u]] += part
            u = before[u]
    found, count = np.zeros((len(work) + n, 5), np.int64), 0
    for i in range(len(work)):
        if fixed[i]:
            write_item(found, count, work[i, 0], work[i, 1], work[i, 2], work[i, 3], work[i, 4])
            count += 1
    for i in range(n):
        if items[i, LO] < items[i, HI]:
            u = items[i, BIN]
            write_item(found, count, u, team[u], items[i, DOC], items[i, LO], items[i, HI])
            count += 1
    return found[:count]


@compiled
def path(table, lists, unit, excess, room, donor, rows, ruler, kv, row):
    """The cheapest way for ``rows`` rows from ``donor`` to a unit that lacks some: (taker or -1, and for each unit on the way: the
    one before, the item there that gives, whether it gives its last rows)."""
    items, chain, reads, ranges, spans = table
    units = len(excess)
    limit = rows * (row + kv) // kv
    cost = np.full(units, limit, np.int64)
    before, via, tail = np.full(units, -1, np.int64), np.full(units, -1, np.int64), np.zeros(units, np.bool_)
    done = np.zeros(units, np.bool_)
    near = np.full(units, -1, np.int64)
    carried = np.zeros(units, np.int64)
    cost[donor] = 0
    while True:
        a = -1
        for u in range(units):
            if not done[u] and cost[u] < limit and (a < 0 or cost[u] < cost[a]):
                a = u
        if a < 0:
            return -1, before, via, tail
        if excess[a] < 0:
            return a, before, via, tail
        done[a] = True
        stranger, strange_item, strange_tail = limit, -1, False
        i = lists[0, a]
        while i >= 0:
            d, lo, hi = items[i, DOC], items[i, LO], items[i, HI]
            for end in range(2):
                x, y = (hi - rows, hi) if end else (lo, lo + rows)
                if x < lo or y > hi:
                    continue
                r0, r1 = (lo, x) if end else (y, hi)
                part = load_of(ruler, d, x, y)
                if a != donor and carried[a] - part > room[a]:
                    continue
                change = cost[a] - cost_now(table, a, d)
                change += bin_cost(table, a, d, i, r0, r1, 0, 0)
                other = chain[0, d]
                while other >= 0:
                    b = items[other, BIN]
                    other = chain[1, other]
                    if b < 0 or done[b] or near[b] == 2 * i + end or (excess[b] < 0 and part > room[b]):
                        continue
                    near[b] = 2 * i + end
                    total = change - cost_now(table, b, d)
                    total += bin_cost(table, b, d, -1, x, y, 0, 0)
                    total = max(total, cost[a])
                    if total < cost[b]:
                        cost[b], before[b], via[b], tail[b], carried[b] = total, a, i, end == 1, part
                ranges[0, 0], ranges[0, 1] = x, y
                alone = change + reads.thin[d] + fetched(ranges, 1, ranges, 1, reads, d, spans)
                if alone < stranger:
                    stranger, strange_item, strange_tail = alone, i, end == 1
            i = lists[1, i]
        if strange_item < 0:
            continue
        lo, hi = items[strange_item, LO], items[strange_item, HI]
        x, y = (hi - rows, hi) if strange_tail else (lo, lo + rows)
        part = load_of(ruler, items[strange_item, DOC], x, y)
        stranger = max(stranger, cost[a])
        for b in range(units):
            if unit[b] == b and excess[b] < 0 and not done[b] and part <= room[b] and stranger < cost[b]:
                cost[b], before[b], via[b], tail[b] = stranger, a, strange_item, strange_tail
