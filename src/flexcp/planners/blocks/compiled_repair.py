"""Loops of repairing: rows leave the bin that exceeds its limits most (compiled).

For every item (a range of a document's rows) of the worst bin and every other bin, this tries to move the item or one
of its ends: as much as the worst bin has too much (of load or of rows), or as much as fits into the other bin. Only if
no such move lowers the violation of the two bins are items exchanged one for one. Moves are compared by their change of
the violation, multiplied by a weight, plus the change of the keys that bins fetch. Repairing ends when no bin exceeds a
limit, when nothing helps, or after a number of moves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexcp.arrays.jit import compiled, compiled_inline, compiled_leaf
from flexcp.planners.blocks.compiled_shared import (
    BIN,
    DOC,
    HI,
    HUGE,
    LO,
    LOAD,
    MILLION,
    Bins,
    Ruler,
    Table,
    bin_cost,
    cost_change,
    cost_now,
    fetched,
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

WHOLE, TAIL_BY_LOAD, HEAD_BY_LOAD, TAIL_BY_ROWS, HEAD_BY_ROWS, PARTS = range(6)
"""Parts of an item that may leave: all of it, or an end chosen by load or by rows. ``PARTS`` is their number."""
FIRST, LAST, LEAVES, ALONE, KNOWN = range(5)
"""Columns of what is known about a part: its first and last row, and how keys change if it moves.

``LEAVES`` is how the keys of its bin change without it, ``ALONE`` how many keys a bin without other rows of the
document would fetch for it. ``KNOWN`` is the number of columns.
"""


class Search(NamedTuple):
    """What repairing works on. Only the items ``tried`` are moved; ``over[b]`` is the violation of bin b.

    A violation is a penalty (:func:`violation`), and ``weight`` is what a million of it costs in keys. For the present
    item: ``holds[b]`` is its index if bin b has rows of its document, and ``known[part]`` has the columns FIRST to
    ALONE. For exchanges: ``arrives[b]`` is how the keys of bin b change when the item arrives, and ``swaps[j]`` is how
    keys change when item j leaves its bin for the worst one; both are HUGE as long as they are not known.
    """

    table: Table
    bins: Bins
    ruler: Ruler
    mean_load: int
    mean_rows: int
    weight: int
    tried: Any
    over: Any
    holds: Any
    known: Any
    arrives: Any
    swaps: Any


class Move(NamedTuple):
    """Rows ``lo..hi`` of an item go to bin ``to``, in exchange for all of the item ``back``, or for nothing (-1).

    The score is the change of violations times their weight, plus the change of the keys fetched; the lowest is the
    best.
    """

    score: int
    item: int
    to: int
    lo: int
    hi: int
    back: int


@compiled
def repair(items, n, bins, ruler, cap_load, cap_rows, mean_load, mean_rows, reads, weight, moves):
    """Move, cut and exchange items out of the worst bin while that lowers violation x weight + keys fetched.

    Return (item count, pairs tried). ``moves`` is the most moves, ``weight`` the cost in keys of exceeding a limit by
    the mean load or the mean rows of a bin.
    """
    table, held = with_chains(items, n, reads), filled(items, n, cap_load, cap_rows)
    tried, count = tried_items(items, n, table.chain, bins)
    over, holds, arrives = np.zeros(bins, np.int64), np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    known, swaps = np.zeros((PARTS, KNOWN), np.int64), np.zeros(len(items), np.int64)
    search = Search(table, held, ruler, mean_load, mean_rows, weight, tried, over, holds, known, arrives, swaps)
    return moved_out(search, n, count, moves)


@compiled_leaf
def moved_out(search, n, count, moves):
    """Do up to ``moves`` moves, each out of the bin that is then the worst; return (item count, pairs tried).

    ``count`` is how many items may move.
    """
    steps = 0
    for _ in range(moves):
        worst = worst_bin(search)
        if worst < 0 or n + 2 >= len(search.table.items):
            break
        best, more = best_move(search, worst, count)
        steps += more
        if best.item < 0:  # exchanges are tried only if no move helps, because there are many of them
            best, more = best_exchange(search, worst, count)
            steps += more
        if best.item < 0 or best.score >= 0:
            break
        n, count = carry_out(search, n, count, best)
    return n, steps


@compiled_inline
def violation(search, b, load, rows):
    """Return how far bin ``b`` would exceed its limits with this much more load and rows, as a penalty.

    An excess x of load or rows is in millionths of the mean; its penalty is x + x * x / 100,000.
    """
    bins, found = search.bins, 0
    excess_load, excess_rows = bins.load[b] + load - bins.cap_load[b], bins.rows[b] + rows - bins.cap_rows[b]
    if excess_load > 0:  # rarely true, which saves expensive divisions
        part = min(excess_load * MILLION // search.mean_load, 1 << 28)
        found += part + part * part // 100_000
    if excess_rows > 0:
        part = min(excess_rows * MILLION // search.mean_rows, 1 << 28)
        found += part + part * part // 100_000
    return found


@compiled_inline
def worst_bin(search):
    """Return the bin that exceeds its limits most, -1 if none does; write the violation of each bin to ``over``."""
    worst, most = -1, 0
    for b in range(len(search.over)):
        search.over[b] = violation(search, b, 0, 0)
        if search.over[b] > most:
            worst, most = b, search.over[b]
    return worst


@compiled_inline
def better(best, move):
    """Return the move with the lower score, the first of two equal ones."""
    return move if move.score < best.score else best


@compiled_inline
def best_move(search, worst, count):
    """Return (the best move of an item of the worst bin, or a part of one, to another bin, how many pairs were tried).

    A pair is an item and a bin; ``count`` is how many items may move. The item of the move is -1 if none lowers a
    violation.
    """
    items, holds, known = search.table.items, search.holds, search.known
    best, steps = Move(HUGE, -1, -1, 0, 0, -1), 0
    for b in range(len(holds)):
        holds[b] = -1
    for at in range(count):
        i = search.tried[at]
        if items[i, BIN] != worst:
            continue
        steps += len(holds)
        for part in range(PARTS):
            known[part, FIRST] = -1
        note_holders(search, i)
        here = cost_now(search.table, worst, items[i, DOC])
        for to in range(len(holds)):
            if to != worst:
                best = best_move_to(search, i, here, to, best)
    return best, steps


@compiled_inline
def note_holders(search, i):
    """Write to ``holds`` which bins have rows of the document of item ``i``."""
    items, chain = search.table.items, search.table.chain
    other = chain[0, items[i, DOC]]
    while other >= 0:
        search.holds[items[other, BIN]] = i
        other = chain[1, other]


@compiled_inline
def best_move_to(search, i, here, to, best):
    """Return the better of ``best`` and the best move of item ``i``, or a part of it, to bin ``to``.

    ``here`` is how many keys the item's own bin fetches for its document.
    """
    table, known, item = search.table, search.known, item_at(search.table.items, i)
    before, there = search.over[item.bin] + search.over[to], -1
    for part in range(PARTS):
        lo, hi = rows_of_part(search, item, to, part)
        if lo >= hi or (part != WHOLE and lo == item.lo and hi == item.hi):
            continue
        load, rows = load_of(search.ruler, item.doc, lo, hi), hi - lo
        after = violation(search, item.bin, -load, -rows) + violation(search, to, load, rows)
        if after >= before:
            continue
        if known[part, FIRST] != lo or known[part, LAST] != hi:
            learn_part(search, i, here, part, lo, hi)
        change = known[part, LEAVES]
        if search.holds[to] == i:
            if there < 0:
                there = cost_now(table, to, item.doc)
            change += bin_cost(table, to, item.doc, -1, lo, hi, 0, 0) - there
        else:
            change += known[part, ALONE]
        score = (after - before) * search.weight // MILLION + change
        best = better(best, Move(score, i, to, lo, hi, -1))
    return best


@compiled_inline
def rows_of_part(search, item, to, part):
    """Return the rows ``lo, hi`` (``hi`` exclusive) of a part of an item of the worst bin.

    ``part`` is ``WHOLE``, or a tail or head by load or by rows. A tail or head has about as much of that as the worst
    bin has too much, or as bin ``to`` has room for if that is less: at most the whole item, and no rows without excess
    or room.
    """
    bins, ruler, grain, worst = search.bins, search.ruler, search.ruler.grain, item.bin
    if part == WHOLE:
        return item.lo, item.hi
    if part <= HEAD_BY_LOAD:
        excess, room = bins.load[worst] - bins.cap_load[worst], bins.cap_load[to] - bins.load[to]
        if excess <= 0 or room <= 0:
            return item.lo, item.lo
        more = grain if excess <= room else 0
        if part == TAIL_BY_LOAD:
            return max(item.lo, tail_within(ruler, item.doc, item.lo, item.hi, min(excess, room)) - more), item.hi
        return item.lo, min(item.hi, head_within(ruler, item.doc, item.lo, item.hi, min(excess, room)) + more)
    excess, room = bins.rows[worst] - bins.cap_rows[worst], bins.cap_rows[to] - bins.rows[to]
    if excess <= 0 or room <= 0:
        return item.lo, item.lo
    rows = min((excess + grain - 1) // grain * grain, room // grain * grain)
    if part == TAIL_BY_ROWS:
        return max(item.lo, (item.hi - rows + grain - 1) // grain * grain), item.hi
    return item.lo, min(item.hi, item.lo + rows)


@compiled_inline
def learn_part(search, i, here, part, lo, hi):
    """Note how keys change if a part leaves the worst bin, and how many a bin without the document would fetch."""
    table, known, item = search.table, search.known, item_at(search.table.items, i)
    stay_lo, stay_hi = (item.lo, lo) if lo > item.lo else (hi, item.hi)
    table.ranges[0, 0], table.ranges[0, 1] = lo, hi
    alone = fetched(table.ranges, 1, table.ranges, 1, table.reads, item.doc, table.spans)
    known[part, FIRST], known[part, LAST] = lo, hi
    known[part, ALONE] = table.reads.thin[item.doc] + alone
    known[part, LEAVES] = bin_cost(table, item.bin, item.doc, i, stay_lo, stay_hi, 0, 0) - here


@compiled_inline
def best_exchange(search, worst, count):
    """Return (the best exchange of an item of the worst bin for an item of another bin, pairs of items tried).

    The change of an exchange is a sum over its four sides, each of which is computed once. Items of the same document
    are not exchanged.
    """
    items, best, steps = search.table.items, Move(HUGE, -1, -1, 0, 0, -1), 0
    for at in range(count):
        search.swaps[search.tried[at]] = HUGE
    for at in range(count):
        i = search.tried[at]
        if items[i, BIN] == worst:
            steps += count
            best = best_exchange_of(search, i, count, best)
    return best, steps


@compiled_inline
def best_exchange_of(search, i, count, best):
    """Return the better of ``best`` and the best exchange of item ``i`` for an item of another bin."""
    table, over, arrives, swaps = search.table, search.over, search.arrives, search.swaps
    item = item_at(table.items, i)
    leaves = cost_change(table, item.bin, item.doc, i, 0, 0)
    for b in range(len(arrives)):
        arrives[b] = HUGE
    for at in range(count):
        j = search.tried[at]
        other = item_at(table.items, j)
        if other.bin == item.bin:
            continue
        load, rows = item.load - other.load, (item.hi - item.lo) - (other.hi - other.lo)
        before, after = over[item.bin] + over[other.bin], violation(search, item.bin, -load, -rows)
        if after >= before:
            continue
        after += violation(search, other.bin, load, rows)
        if after >= before or other.doc == item.doc:
            continue
        if arrives[other.bin] == HUGE:
            arrives[other.bin] = cost_change(table, other.bin, item.doc, -1, item.lo, item.hi)
        if swaps[j] == HUGE:
            swaps[j] = cost_change(table, other.bin, other.doc, j, 0, 0)
            swaps[j] += cost_change(table, item.bin, other.doc, -1, other.lo, other.hi)
        score = (after - before) * search.weight // MILLION + leaves + arrives[other.bin] + swaps[j]
        best = better(best, Move(score, i, other.bin, item.lo, item.hi, j))
    return best


@compiled_inline
def carry_out(search, n, count, move):
    """Do a move; return (item count, how many items may move). A part that moves becomes an item of its own."""
    items, chain, i = search.table.items, search.table.chain, move.item
    item = item_at(items, i)
    load, rows = load_of(search.ruler, item.doc, move.lo, move.hi), move.hi - move.lo
    if move.back >= 0:
        other = item_at(items, move.back)
        load, rows = item.load - other.load, rows - (other.hi - other.lo)
        items[i, BIN], items[move.back, BIN] = move.to, item.bin
    elif rows == item.hi - item.lo:
        items[i, BIN] = move.to
    else:
        write_item(items, n, item.doc, move.lo, move.hi, load, move.to)
        chain[1, n], chain[0, item.doc] = chain[0, item.doc], n
        search.tried[count] = n
        n, count = n + 1, count + 1
        if move.lo > item.lo:
            items[i, HI] = move.lo
        else:
            items[i, LO] = move.hi
        items[i, LOAD] -= load
    pass_on(search.bins, item.bin, move.to, load, rows)
    return n, count
