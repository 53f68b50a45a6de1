"""Loops of climbing: rows change bins where that saves keys (compiled).

After packing, the rows of a document in different bins are often interleaved: two bins read the same keys, although one
of them could read them for both. For each item (a range of a document's rows), the bins that have rows of its document
are tried: the whole item, or as much of either end as fits, moves there; or the item or one of its ends is exchanged
for an item or an end of an item there. The best of these is done if it saves keys and no bin gets more than its limit
(or more than it has, if it exceeds a limit already). There are a few sweeps over all items, fewer if one finds nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexcp.arrays.jit import compiled, compiled_inline, compiled_leaf
from flexcp.planners.blocks.compiled_shared import (
    BIN,
    DOC,
    HI,
    LO,
    LOAD,
    Bins,
    Item,
    Ruler,
    Table,
    bin_cost,
    chains,
    cost_change,
    cost_now,
    filled,
    head_within,
    item_at,
    load_of,
    pass_on,
    tail_within,
    tried_items,
    with_chains,
    write_item,
)

TAIL, HEAD = range(2)
"""Ends of an item: its last rows, its first rows."""
WHOLE_FOR_WHOLE, WHOLE_FOR_TAIL, WHOLE_FOR_HEAD, TAIL_FOR_WHOLE, HEAD_FOR_WHOLE = range(5)
"""Kinds of exchanges: what an item gives, and what it gets of an item in the other bin."""


class Search(NamedTuple):
    """What a sweep works on.

    The items of bin b that may be exchanged are a linked list that begins with ``lists[0, b]``; ``lists[1, i]`` is the
    item after i, -1 the end. ``seen[b]`` is the last item for which bin b was tried, ``changed[b]`` the last sweep that
    moved rows of bin b.
    """

    table: Table
    lists: Any
    bins: Bins
    ruler: Ruler
    seen: Any
    changed: Any


class Move(NamedTuple):
    """Rows ``lo..hi`` of an item go to bin ``to``, in exchange for rows ``back_lo..back_hi`` of item ``back`` there.

    ``back`` is -1 if nothing comes back. ``change`` is the change in the keys that the two bins fetch.
    """

    change: int
    to: int
    lo: int
    hi: int
    back: int
    back_lo: int
    back_hi: int


class Leaving(NamedTuple):
    """How many keys an item's bin fetches for the item's document (``here``), and how this changes when rows leave.

    The changes are those if the whole item, a little of its tail, or a little of its head leaves.
    """

    here: int
    whole: int
    tail: int
    head: int


class Visit(NamedTuple):
    """Item ``number`` and another bin that it may go to.

    ``here`` and ``there`` are the keys that its own bin and the other fetch for its document. ``whole``, ``tail`` and
    ``head`` are how their sum changes when the whole item, a little of its tail, or a little of its head moves there,
    regardless of limits.
    """

    number: int
    item: Item
    to: int
    here: int
    there: int
    whole: int
    tail: int
    head: int


@compiled_leaf
def detach(items, n, chain, lists, i, x, y, part):
    """Take rows x..y of item ``i``, all of it or one end, out of its bin; return (index of the item, item count).

    ``part`` is the load of these rows. An end becomes a new item, the n-th. The item that is taken out is in no bin.
    """
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
    """Put an item that is in no bin into bin ``b``; if it continues an item there, join it to that and empty it."""
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
    """Join items of one bin that continue each other and drop empty ones; return the item count.

    ``documents`` is the number of documents.
    """
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
    """Move or exchange rows between bins that share a document while that saves keys within limits.

    Return (item count, pairs of items tried). The module docstring lists the moves that are tried for each item;
    ``sweeps`` is the most sweeps over all items.
    """
    held, changed, tried = filled(items, n, cap_load, cap_rows), np.zeros(bins, np.int64), 0
    for sweep in range(sweeps):
        n = joined(items, n, len(reads.thin))
        table, lists = with_chains(items, n, reads), np.full((2, max(bins, len(items))), -1, np.int64)
        listed, count = tried_items(items, n, table.chain, bins)
        for at in range(count - 1, -1, -1):
            i = listed[at]
            lists[1, i], lists[0, items[i, BIN]] = lists[0, items[i, BIN]], i
        search = Search(table, lists, held, ruler, np.full(bins, -1, np.int64), changed)
        n, moves, more = sweep_items(search, n, sweep)
        tried += more
        if moves == 0:
            break
    return joined(items, n, len(reads.thin)), tried


@compiled_leaf
def sweep_items(search, n, sweep):
    """For each item in turn, do the move that saves most keys, if any does; return (item count, moves, pairs tried)."""
    items, moves, tried = search.table.items, 0, 0
    for i in range(n):
        if items[i, BIN] < 0 or n + 2 >= len(items):
            continue
        best, more = best_move(search, i, sweep)
        tried += more
        if best.to >= 0:
            search.changed[items[i, BIN]] = search.changed[best.to] = sweep
            n = carry_out(search, n, i, best)
            moves += 1
    return n, moves, tried


@compiled_inline
def carry_out(search, n, i, move):
    """Do a :class:`Move` of item ``i``; return the item count."""
    items, chain, lists = search.table.items, search.table.chain, search.lists
    home, part = items[i, BIN], load_of(search.ruler, items[i, DOC], move.lo, move.hi)
    out, n = detach(items, n, chain, lists, i, move.lo, move.hi, part)
    pass_on(search.bins, home, move.to, part, move.hi - move.lo)
    if move.back >= 0:
        part = load_of(search.ruler, items[move.back, DOC], move.back_lo, move.back_hi)
        back, n = detach(items, n, chain, lists, move.back, move.back_lo, move.back_hi, part)
        pass_on(search.bins, move.to, home, part, move.back_hi - move.back_lo)
        attach(items, chain, lists, back, home)
    attach(items, chain, lists, out, move.to)
    return n


@compiled_inline
def better(best, move):
    """Return the move that saves more keys, the first of two equal ones."""
    return move if move.change < best.change else best


@compiled_inline
def best_move(search, i, sweep):
    """Return (the move of item ``i`` that saves most keys, how many items were tried against it).

    If no move saves keys, the bin ``to`` of the move is -1. Bins that have not changed since the last sweep are not
    tried again with each other.
    """
    items, chain, seen, changed = search.table.items, search.table.chain, search.seen, search.changed
    item, tried = item_at(items, i), 0
    best, leaving = Move(0, -1, 0, 0, -1, 0, 0), Leaving(-1, 0, 0, 0)
    seen[item.bin] = i
    other = chain[0, item.doc]
    while other >= 0:
        to = items[other, BIN]
        other = chain[1, other]
        if to < 0 or seen[to] == i:
            continue
        seen[to] = i
        if changed[item.bin] < sweep - 1 and changed[to] < sweep - 1:
            continue  # neither bin has changed since the last sweep
        if leaving.here < 0:
            leaving = when_leaving(search, i, item)
        best, more = best_move_to(search, i, item, leaving, to, best)
        tried += more
    return best, tried


@compiled_inline
def when_leaving(search, i, item):
    """Return how the keys of an item's bin change when item ``i``, or a little of either end, leaves."""
    table, little = search.table, min(search.ruler.grain, item.hi - item.lo)
    here = cost_now(table, item.bin, item.doc)
    whole = bin_cost(table, item.bin, item.doc, i, 0, 0, 0, 0) - here
    tail = bin_cost(table, item.bin, item.doc, i, item.lo, item.hi - little, 0, 0) - here
    head = bin_cost(table, item.bin, item.doc, i, item.lo + little, item.hi, 0, 0) - here
    return Leaving(here, whole, tail, head)


@compiled_inline
def best_move_to(search, i, item, leaving, to, best):
    """Return (the better of ``best`` and the best move of item ``i`` to bin ``to``, how many items were tried)."""
    table, bins, lists = search.table, search.bins, search.lists
    there = cost_now(table, to, item.doc)
    whole = leaving.whole + bin_cost(table, to, item.doc, -1, item.lo, item.hi, 0, 0) - there
    room_load, room_rows = max(bins.cap_load[to] - bins.load[to], 0), max(bins.cap_rows[to] - bins.rows[to], 0)
    if item.load <= room_load and item.hi - item.lo <= room_rows:
        return better(best, Move(whole, to, item.lo, item.hi, -1, 0, 0)), 0
    little = min(search.ruler.grain, item.hi - item.lo)
    tail = leaving.tail + bin_cost(table, to, item.doc, -1, item.hi - little, item.hi, 0, 0) - there
    head = leaving.head + bin_cost(table, to, item.doc, -1, item.lo, item.lo + little, 0, 0) - there
    visit = Visit(i, item, to, leaving.here, there, whole, tail, head)
    for end in range(2):
        # If moving a little of an end saves nothing, moving more of it is not tried.
        if (tail if end == TAIL else head) < 0:
            best = better(best, end_that_fits(search, visit, end, room_load, room_rows))
    saves, tried = whole < 0 or tail < 0 or head < 0, 0
    j = lists[0, to]
    while j >= 0:
        tried += 1
        # If this item saves nothing, exchanges with other documents are found when their items are tried.
        if saves or table.items[j, DOC] == item.doc:
            best = best_exchange(search, visit, j, best)
        j = lists[1, j]
    return best, tried


@compiled_inline
def end_that_fits(search, visit, end, room_load, room_rows):
    """Return the move of as much of an end of the item as fits into the other bin; it saves nothing if no row fits.

    ``end`` is ``TAIL`` or ``HEAD``; the rooms are what the other bin may still take.
    """
    item, ruler = visit.item, search.ruler
    lo, hi, most_rows = item.lo, item.hi, room_rows // ruler.grain * ruler.grain
    if end == TAIL:
        lo = max(tail_within(ruler, item.doc, lo, hi, room_load), hi - most_rows)
    else:
        hi = min(head_within(ruler, item.doc, lo, hi, room_load), lo + most_rows)
    if lo >= hi:
        return Move(0, visit.to, lo, hi, -1, 0, 0)
    stay_lo, stay_hi = (item.lo, lo) if end == TAIL else (hi, item.hi)
    change = bin_cost(search.table, item.bin, item.doc, visit.number, stay_lo, stay_hi, 0, 0) - visit.here
    change += bin_cost(search.table, visit.to, item.doc, -1, lo, hi, 0, 0) - visit.there
    return Move(change, visit.to, lo, hi, -1, 0, 0)


@compiled_inline
def best_exchange(search, visit, j, best):
    """Return the better of ``best`` and the best exchange of an item, or an end of it, for item ``j`` or an end."""
    item, other = visit.item, item_at(search.table.items, j)
    for kind in range(5):
        # An exchange for rows of another document can only be worth it if the item's own move saves keys.
        if kind <= WHOLE_FOR_HEAD and item.doc != other.doc and visit.whole >= 0:
            continue
        if (kind == TAIL_FOR_WHOLE and visit.tail >= 0) or (kind == HEAD_FOR_WHOLE and visit.head >= 0):
            continue
        lo, hi, back_lo, back_hi = exchanged_rows(search, item, other, kind)
        if lo >= hi or back_lo >= back_hi:
            continue
        out = item.load if kind <= WHOLE_FOR_HEAD else load_of(search.ruler, item.doc, lo, hi)
        ends_come = WHOLE_FOR_TAIL <= kind <= WHOLE_FOR_HEAD
        back = load_of(search.ruler, other.doc, back_lo, back_hi) if ends_come else other.load
        if within_limits(search.bins, item.bin, visit.to, out - back, (hi - lo) - (back_hi - back_lo)):
            move = Move(0, visit.to, lo, hi, j, back_lo, back_hi)
            change = exchange_change(search.table, visit, other, move, kind, best.change)
            best = better(best, Move(change, visit.to, lo, hi, j, back_lo, back_hi))
    return best


@compiled_inline
def exchanged_rows(search, item, other, kind):
    """Return the rows that an item gives and those that it gets of ``other``: first, last, first, last (exclusive).

    A range is empty if there is no exchange of this kind.
    """
    if kind == WHOLE_FOR_WHOLE:
        return item.lo, item.hi, other.lo, other.hi
    if kind <= WHOLE_FOR_HEAD:
        back_lo, back_hi = least_end(search, other, item, kind - WHOLE_FOR_TAIL)
        return item.lo, item.hi, back_lo, back_hi
    lo, hi = least_end(search, item, other, kind - TAIL_FOR_WHOLE)
    return lo, hi, other.lo, other.hi


@compiled_inline
def least_end(search, given, taken, end):
    """Return the fewest rows at an end of ``given`` that make room for all of ``taken`` in its bin.

    The result is (first, last) row, last exclusive. It is empty if it would have to be all rows, or if these are too
    few.
    """
    bins, ruler, grain, b = search.bins, search.ruler, search.ruler.grain, given.bin
    # A bin that exceeds a limit already may keep as much as it has.
    load = bins.load[b] + taken.load - max(bins.cap_load[b], bins.load[b])
    rows = bins.rows[b] + (taken.hi - taken.lo) - max(bins.cap_rows[b], bins.rows[b])
    if end == TAIL:
        cut = given.hi if load <= 0 else tail_within(ruler, given.doc, given.lo, given.hi, load) - grain
        cut = min(cut, given.hi - rows) // grain * grain
        return (cut, given.hi) if cut > given.lo else (given.hi, given.hi)
    cut = given.lo if load <= 0 else head_within(ruler, given.doc, given.lo, given.hi, load) + grain
    cut = (max(cut, given.lo + rows) + grain - 1) // grain * grain
    return (given.lo, cut) if cut < given.hi else (given.lo, given.lo)


@compiled_inline
def within_limits(bins, giver, taker, load, rows):
    """Return whether ``load`` and ``rows`` can go from bin ``giver`` to bin ``taker`` within limits.

    Either may be negative, and then goes the other way. Only the limits of the bin that gets more are checked.
    """
    if load > 0 and bins.load[taker] + load > bins.cap_load[taker]:
        return False
    if load < 0 and bins.load[giver] - load > bins.cap_load[giver]:
        return False
    if rows > 0 and bins.rows[taker] + rows > bins.cap_rows[taker]:
        return False
    return not (rows < 0 and bins.rows[giver] - rows > bins.cap_rows[giver])


@compiled_inline
def exchange_change(table, visit, other, move, kind, best):
    """Return how an exchange changes the keys that both bins fetch.

    If its first parts together save no more than ``best``, the others are not counted; the result is then not below
    ``best``.
    """
    item, home, to = visit.item, visit.item.bin, visit.to
    stay_lo, stay_hi = (item.lo, move.lo) if move.lo > item.lo else (move.hi, item.hi)
    left_lo, left_hi = (other.lo, move.back_lo) if move.back_lo > other.lo else (move.back_hi, other.hi)
    if item.doc == other.doc:
        change = (
            bin_cost(table, home, item.doc, visit.number, stay_lo, stay_hi, move.back_lo, move.back_hi) - visit.here
        )
        return change + bin_cost(table, to, item.doc, move.back, left_lo, left_hi, move.lo, move.hi) - visit.there
    change = visit.whole
    if kind >= TAIL_FOR_WHOLE:
        change = bin_cost(table, home, item.doc, visit.number, stay_lo, stay_hi, 0, 0) - visit.here
        change += bin_cost(table, to, item.doc, -1, move.lo, move.hi, 0, 0) - visit.there
        if change >= 0:
            return 0
    change += cost_change(table, to, other.doc, move.back, left_lo, left_hi)
    if change >= best:
        return change
    return change + cost_change(table, home, other.doc, -1, move.back_lo, move.back_hi)
