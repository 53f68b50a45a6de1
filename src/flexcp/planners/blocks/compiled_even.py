"""Loops of even rows: rows move, with their work, until every rank keeps the number of rows it should (compiled).

Packing leaves these numbers a little off. A rank with too many rows passes some on to a rank with too few: the first or
last rows of an item go to a rank that has rows of the same document, where shifting a cut costs almost nothing. Often
the two ranks share no document. Then rows are passed on along a path of ranks, from cut to cut, and the cheapest path
is taken. Moving rows without their work (:mod:`flexcp.planners.blocks.row_limits`) is always possible and costs q and
o; a path that costs more is not taken.

A team with split rows is one *unit* here, because any of its ranks may keep them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexcp.arrays.jit import compiled, compiled_inline, compiled_leaf
from flexcp.planners.blocks.compiled_climb import attach, detach
from flexcp.planners.blocks.compiled_shared import (
    BIN,
    DOC,
    HI,
    HUGE,
    LO,
    LOAD,
    Ruler,
    Table,
    cost_change,
    fetched,
    load_of,
    with_chains,
    write_item,
)


class Units(NamedTuple):
    """Units: single ranks, and teams that split rows. A unit is numbered by its first rank.

    ``of[rank]`` is the unit of a rank, ``team`` how many ranks a unit has, ``excess`` how many rows too many it keeps
    (negative: too few), and ``room`` how much more load it may take.
    """

    of: Any
    team: Any
    excess: Any
    room: Any


class Passing(NamedTuple):
    """What is needed to pass rows on: the table of items, whose bins are units, the units, and the loads of rows.

    The items of unit u are a linked list that begins with ``lists[0, u]``; ``lists[1, i]`` is the item after i.
    """

    table: Table
    lists: Any
    units: Units
    ruler: Ruler


class Ways(NamedTuple):
    """The cheapest ways to pass rows on from one unit to all others.

    For each unit: the ``cost`` in keys, the unit ``before`` it, that unit's item ``via`` which gives rows, whether it
    gives its last rows (``tail``), their load (``carried``), and whether no cheaper way is left (``done``). ``near`` is
    the last end of an item with which a unit was reached.
    """

    cost: Any
    before: Any
    via: Any
    tail: Any
    carried: Any
    done: Any
    near: Any


@compiled
def even_rows(work, targets, limit, ruler, kv, row, reads):
    """Return ``work`` with rows passed on until units keep the ``targets`` of their ranks, with loads within ``limit``.

    ``targets`` are numbers of rows. Rows stay where passing them on would cost too much. ``kv`` and ``row`` are the
    bytes of a key and of a row's q and o.
    """
    ranks = len(targets)
    units, fixed = make_units(work, targets)
    items = np.zeros((3 * len(work) + 8 * ranks + 64, 5), np.int64)
    n = write_units(items, work, fixed, units, limit, ruler)
    lists = np.full((2, max(ranks, len(items))), -1, np.int64)
    for i in range(n - 1, -1, -1):
        lists[1, i], lists[0, items[i, BIN]] = lists[0, items[i, BIN]], i
    passing = Passing(with_chains(items, n, reads), lists, units, ruler)
    given_up = np.zeros(ranks, np.bool_)
    for _ in range(4 * ranks):
        donor = -1
        for u in range(ranks):
            if units.excess[u] > 0 and not given_up[u] and (donor < 0 or units.excess[u] > units.excess[donor]):
                donor = u
        if donor < 0 or n + 2 * ranks >= len(items):
            break
        wanted = units.excess[donor]
        taker, ways = path(passing, donor, wanted, kv, row)
        if taker < 0:
            given_up[donor] = True
            continue
        n = pass_rows(passing, n, donor, taker, ways, min(wanted, -units.excess[taker]))
    return as_work(work, fixed, items, n, units)


@compiled
def make_units(work, targets):
    """Return (units, whose room is still 0; which rows of ``work`` are fixed).

    Fixed are whole items on a rank of a team.
    """
    ranks = len(targets)
    units = Units(np.arange(ranks), np.ones(ranks, np.int64), np.zeros(ranks, np.int64), np.zeros(ranks, np.int64))
    for i in range(len(work)):
        if work[i, 1] > 1:
            for r in range(work[i, 0], work[i, 0] + work[i, 1]):
                units.of[r] = work[i, 0]
            units.team[work[i, 0]] = work[i, 1]
    fixed = np.zeros(len(work), np.bool_)
    for i in range(len(work)):
        u = units.of[work[i, 0]]
        units.excess[u] += work[i, 4] - work[i, 3]
        fixed[i] = work[i, 1] < units.team[u]
    for r in range(ranks):
        units.excess[units.of[r]] -= targets[r]
    return units, fixed


@compiled
def write_units(items, work, fixed, units, limit, ruler):
    """Write the work that is not ``fixed`` as items of units, and the room that units have left; return the item count.

    Fixed work, whole items on a rank of a team, only takes up room. ``limit`` is the largest load of each rank.
    """
    ranks, n, left = len(limit), 0, limit.copy()
    for i in range(len(work)):
        load = load_of(ruler, work[i, 2], work[i, 3], work[i, 4])
        if fixed[i]:
            left[work[i, 0]] -= load
        else:
            write_item(items, n, work[i, 2], work[i, 3], work[i, 4], load, units.of[work[i, 0]])
            n += 1
    for u in range(ranks):
        units.room[u] = HUGE
    for r in range(ranks):
        units.room[units.of[r]] = min(units.room[units.of[r]], left[r])
    for u in range(ranks):
        units.room[u] *= units.team[u]
    for i in range(n):
        units.room[items[i, BIN]] -= items[i, LOAD]
    return n


@compiled_inline
def pass_rows(passing, n, donor, taker, ways, rows):
    """Pass ``rows`` rows on from unit to unit along the way from ``donor`` to ``taker``; return the item count.

    The unit at the far end takes first, so that no unit passes on the rows that it has just received.
    """
    table, units = passing.table, passing.units
    units.excess[donor] -= rows
    units.excess[taker] += rows
    u = taker
    while u != donor:
        i = ways.via[u]
        d, lo, hi = table.items[i, DOC], table.items[i, LO], table.items[i, HI]
        if ways.tail[u]:
            lo = hi - rows
        else:
            hi = lo + rows
        part = load_of(passing.ruler, d, lo, hi)
        piece, n = detach(table.items, n, table.chain, passing.lists, i, lo, hi, part)
        attach(table.items, table.chain, passing.lists, piece, u)
        units.room[u] -= part
        units.room[ways.before[u]] += part
        u = ways.before[u]
    return n


@compiled
def as_work(work, fixed, items, n, units):
    """Return a work table of the fixed rows of ``work`` and of the first ``n`` items."""
    found, count = np.zeros((len(work) + n, 5), np.int64), 0
    for i in range(len(work)):
        if fixed[i]:
            write_item(found, count, work[i, 0], work[i, 1], work[i, 2], work[i, 3], work[i, 4])
            count += 1
    for i in range(n):
        if items[i, LO] < items[i, HI]:
            u = items[i, BIN]
            write_item(found, count, u, units.team[u], items[i, DOC], items[i, LO], items[i, HI])
            count += 1
    return found[:count]


@compiled
def path(passing, donor, rows, kv, row):
    """Return (a unit that lacks rows, ways) with the cheapest way for ``rows`` rows from ``donor`` to that unit.

    The unit is -1 if all ways cost as much as moving the rows without their work.
    """
    count, limit = len(passing.units.excess), rows * (row + kv) // kv
    cost, before, via = np.full(count, limit, np.int64), np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    tail, carried = np.zeros(count, np.bool_), np.zeros(count, np.int64)
    ways = Ways(cost, before, via, tail, carried, np.zeros(count, np.bool_), np.full(count, -1, np.int64))
    return cheapest_taker(passing, ways, donor, rows, limit), ways


@compiled_leaf
def cheapest_taker(passing, ways, donor, rows, limit):
    """Find the ways from ``donor``, the cheapest first, until one reaches a unit that lacks rows.

    Return that unit, or -1 if all ways cost ``limit`` or more.
    """
    ways.cost[donor] = 0
    while True:
        giver = -1
        for u in range(len(ways.cost)):
            if not ways.done[u] and ways.cost[u] < limit and (giver < 0 or ways.cost[u] < ways.cost[giver]):
                giver = u
        if giver < 0 or passing.units.excess[giver] < 0:
            return giver
        ways.done[giver] = True
        stranger, item, tail = limit, -1, False
        i = passing.lists[0, giver]
        while i >= 0:
            for end in range(2):
                alone = reach_holders(passing, ways, donor, giver, i, end, rows)
                if alone < stranger:
                    stranger, item, tail = alone, i, end == 1
            i = passing.lists[1, i]
        if item >= 0:
            reach_strangers(passing, ways, giver, item, tail, rows, stranger)


@compiled_inline
def end_rows(items, i, end, rows):
    """Return the first and last row (exclusive) of the first (``end`` 0) or last (1) ``rows`` rows of item ``i``."""
    return (items[i, HI] - rows, items[i, HI]) if end == 1 else (items[i, LO], items[i, LO] + rows)


@compiled_inline
def reach_holders(passing, ways, donor, giver, i, end, rows):
    """Extend ways from ``giver`` to units that have rows of the document of item ``i``.

    The item gives its first (``end`` 0) or last (1) ``rows`` rows. Return what the way to a unit without rows of the
    document would cost in keys, or HUGE if the item cannot give so many rows or the giver's load would be too large.
    """
    table, units, items, chain = passing.table, passing.units, passing.table.items, passing.table.chain
    d, lo, hi = items[i, DOC], items[i, LO], items[i, HI]
    x, y = end_rows(items, i, end, rows)
    if x < lo or y > hi:
        return HUGE
    part = load_of(passing.ruler, d, x, y)
    if giver != donor and ways.carried[giver] - part > units.room[giver]:
        return HUGE
    stay_lo, stay_hi = (lo, x) if end == 1 else (y, hi)
    change = ways.cost[giver] + cost_change(table, giver, d, i, stay_lo, stay_hi)
    other = chain[0, d]
    while other >= 0:
        taker = items[other, BIN]
        other = chain[1, other]
        if taker < 0 or ways.done[taker] or ways.near[taker] == 2 * i + end:
            continue
        if units.excess[taker] < 0 and part > units.room[taker]:
            continue
        ways.near[taker] = 2 * i + end
        total = max(change + cost_change(table, taker, d, -1, x, y), ways.cost[giver])
        if total < ways.cost[taker]:
            ways.cost[taker], ways.before[taker], ways.via[taker] = total, giver, i
            ways.tail[taker], ways.carried[taker] = end == 1, part
    table.ranges[0, 0], table.ranges[0, 1] = x, y
    return change + table.reads.thin[d] + fetched(table.ranges, 1, table.ranges, 1, table.reads, d, table.spans)


@compiled_inline
def reach_strangers(passing, ways, giver, item, tail, rows, cost):
    """Extend ways from ``giver`` to units that lack rows and need not have rows of the document of ``item``.

    ``cost`` is that of the way to a unit without rows of the document; ``tail`` says that the item gives its last rows.
    """
    units, items = passing.units, passing.table.items
    x, y = end_rows(items, item, 1 if tail else 0, rows)
    part, cost = load_of(passing.ruler, items[item, DOC], x, y), max(cost, ways.cost[giver])
    for u in range(len(ways.cost)):
        if (
            units.of[u] == u
            and units.excess[u] < 0
            and not ways.done[u]
            and part <= units.room[u]
            and cost < ways.cost[u]
        ):
            ways.cost[u], ways.before[u], ways.via[u], ways.tail[u] = cost, giver, item, tail
