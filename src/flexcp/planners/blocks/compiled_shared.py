"""Loops that several steps of packing share: loads of rows, items, and the keys that rows read (compiled).

All numbers are 64-bit integers, so the result is the same on every machine. An item, a range of a document's rows, is a
row of an array with the columns ``DOC LO HI LOAD BIN``. Rows ``lo..hi`` never include ``hi``.

Compiling must not take long. So loops go over elements: operations on whole arrays would also compile the texts of
their error messages. Sorting is our own (:mod:`flexcp.arrays.compiled_sort`). Every function is compiled once more into
each function that calls it, so large ones are called from few places.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexcp.arrays.jit import compiled, compiled_leaf

DOC, LO, HI, LOAD, BIN = range(5)
MILLION = 1_000_000
HUGE = 1 << 62
TRIED_ITEMS = 4096
"""If there are more items than this, only some are tried one by one.

So the time of searching is in proportion to the number of documents and not to its square.
"""
HEAVY_PART = 256
"""Items with more than 1/256 of a bin's mean load or rows are always tried."""


class Ruler(NamedTuple):
    """Loads of rows: ``before[first[d] + i]`` is the load of the first ``i * grain`` rows of document d.

    Documents have ``lengths[d]`` rows; the last entry of a document is the load of all of them.
    """

    before: Any
    first: Any
    lengths: Any
    grain: int


class Reads(NamedTuple):
    """What rows read: document d has the slices ``slices[first[d] : first[d + 1]]`` (:mod:`flexcp.masks.slices`).

    The thin rows of a document (:mod:`flexcp.planners.blocks.pack`) are in none of its slices; they cost every bin with
    rows of the document as much as fetching ``thin[d]`` keys.

    If ``nested[d]`` is not 0, the document is a tree: the keys of a slice are the rows from its first row to the first
    row of the next slice, and each key is seen by its own row and all later rows of the slice. ``around[s]`` is the
    slice around slice s, counted from the first of the document, or -1; ``nested[d]`` is how many slices are nested in
    each other at most.
    """

    slices: Any
    first: Any
    thin: Any
    around: Any
    nested: Any


class Item(NamedTuple):
    """Rows ``lo..hi`` of a document, their load, and their bin (-1: in none)."""

    doc: int
    lo: int
    hi: int
    load: int
    bin: int


class Table(NamedTuple):
    """Items, and what is needed to count the keys that bins fetch.

    ``chain`` holds the chains of items (:func:`chains`), ``reads`` what rows read. ``ranges`` (of rows) and ``spans``
    (of keys) are space for intermediate results.
    """

    items: Any
    chain: Any
    reads: Reads
    ranges: Any
    spans: Any


class Bins(NamedTuple):
    """The load and rows that each bin holds, and the most that it may hold."""

    load: Any
    rows: Any
    cap_load: Any
    cap_rows: Any


@compiled_leaf
def item_at(items, i):
    """Return row ``i`` of a table of items as an :class:`Item`."""
    return Item(items[i, DOC], items[i, LO], items[i, HI], items[i, LOAD], items[i, BIN])


@compiled_leaf
def write_item(items, i, d, lo, hi, load, b):
    """Write an item to row ``i`` of a table: rows ``lo..hi`` of document ``d`` with their load, in bin ``b``."""
    items[i, DOC] = d
    items[i, LO] = lo
    items[i, HI] = hi
    items[i, LOAD] = load
    items[i, BIN] = b


@compiled_leaf
def most_spans(reads):
    """Return the most spans of keys that a range of rows of any document reads, at least 1.

    There is one span for each slice, or in a tree one for the rows themselves and one for each slice around them.
    """
    most = 1
    for d in range(len(reads.thin)):
        spans = reads.nested[d] + 1 if reads.nested[d] else reads.first[d + 1] - reads.first[d]
        most = max(most, spans)
    return most


@compiled_leaf
def load_before(ruler, d, row):
    """Return the load of document d's rows before ``row``: exact at multiples of the grain, interpolated in between."""
    base, grain = ruler.first[d], ruler.grain
    at, rest = base + row // grain, row % grain
    if rest == 0:
        return ruler.before[at]
    width = min(grain, ruler.lengths[d] - (row - rest))
    return ruler.before[at] + (ruler.before[at + 1] - ruler.before[at]) * rest // width


@compiled_leaf
def load_of(ruler, d, lo, hi):
    """Return the load of rows ``lo..hi`` of document d."""
    return load_before(ruler, d, hi) - load_before(ruler, d, lo)


@compiled_leaf
def tail_within(ruler, d, lo, hi, load):
    """Return the smallest cut x such that rows ``x..hi`` of document d have at most ``load``; ``hi`` if there is none.

    x is ``lo``, ``hi``, or a multiple of the grain between them.
    """
    base, grain = ruler.first[d], ruler.grain
    low, high = (lo + grain - 1) // grain, (hi + grain - 1) // grain
    wanted = load_before(ruler, d, hi) - load
    while low < high:
        middle = (low + high) // 2
        if ruler.before[base + middle] >= wanted:
            high = middle
        else:
            low = middle + 1
    return min(max(low * grain, lo), hi)


@compiled_leaf
def head_within(ruler, d, lo, hi, load):
    """Return the largest cut x such that rows ``lo..x`` of document d have at most ``load``; ``lo`` if there is none.

    x is ``lo``, ``hi``, or a multiple of the grain between them.
    """
    base, grain = ruler.first[d], ruler.grain
    low, high = lo // grain, (hi + grain - 1) // grain
    wanted = load_before(ruler, d, lo) + load
    while low < high:
        middle = (low + high + 1) // 2
        if ruler.before[base + middle] <= wanted:
            low = middle
        else:
            high = middle - 1
    return min(max(low * grain, lo), hi)


@compiled_leaf
def spans_of_slices(rows, count, reads, d, spans):
    """Write to ``spans`` the ranges of keys that some rows of document ``d`` read, and return their number.

    The rows are the ranges ``rows[:count]``. Spans are sorted by first key and may overlap.
    """
    slices, found = reads.slices, 0
    for j in range(count):
        for s in range(reads.first[d], reads.first[d + 1]):
            r0, r1 = max(slices[s, 0], rows[j, 0]), min(slices[s, 1], rows[j, 1])
            if r0 >= r1:
                continue
            lo, hi, k0, k1 = slices[s, 4], slices[s, 5], slices[s, 2], slices[s, 3]
            r0, r1 = max(r0, k0 - hi), min(r1, k1 - lo)
            a, b = max(k0, r0 + lo), min(k1, r1 + hi)
            if r0 >= r1 or a >= b:
                continue
            at = found
            while at > 0 and spans[at - 1, 0] > a:
                spans[at, 0], spans[at, 1] = spans[at - 1, 0], spans[at - 1, 1]
                at -= 1
            spans[at, 0], spans[at, 1] = a, b
            found += 1
    return found


@compiled_leaf
def spans_of_tree(rows, count, reads, d, spans):
    """Do the same as :func:`spans_of_slices`, faster, for a document that is a tree.

    A range of rows reads itself and what its first row reads before it.
    """
    slices, start, found = reads.slices, reads.first[d], 0
    for j in range(count):
        x, y = rows[j, 0], rows[j, 1]
        if x >= y:
            continue
        low, high = start, reads.first[d + 1] - 1
        while low < high:
            middle = (low + high + 1) // 2
            if slices[middle, 0] <= x:
                low = middle
            else:
                high = middle - 1
        more, s = 1, low - start
        while s >= 0:
            more, s = more + 1, reads.around[start + s]
        # The spans found so far and the new ones are both sorted, so they are merged from the back.
        i, at = found - 1, found + more - 1
        a, b, s = x, y, low - start
        for _ in range(more):
            while i >= 0 and spans[i, 0] > a:
                spans[at, 0], spans[at, 1] = spans[i, 0], spans[i, 1]
                i, at = i - 1, at - 1
            spans[at, 0], spans[at, 1] = a, b
            at -= 1
            if s >= 0:
                a, b = slices[start + s, 2], min(slices[start + s, 3], x)
                s = reads.around[start + s]
        found += more
    return found


@compiled_leaf
def fetched(rows, count, owned, kept, reads, d, spans):
    """Return how many keys some rows of document ``d`` read that are not kept with them.

    The rows are the ranges ``rows[:count]``, what is kept are the ranges ``owned[:kept]``; ``spans`` is space for
    results.
    """
    read = (rows, count, reads, d, spans)
    found = spans_of_tree(*read) if reads.nested[d] else spans_of_slices(*read)
    total, reach = 0, -1
    for i in range(found):
        a, b = max(spans[i, 0], reach), spans[i, 1]
        if b <= a:
            continue
        reach = b
        total += b - a
        for j in range(kept):
            both = min(b, owned[j, 1]) - max(a, owned[j, 0])
            if both > 0:
                total -= both
    return total


@compiled
def chains(items, n, documents):
    """Return the items of each document as a linked list.

    ``chain[0, d]`` is the first item of document d, ``chain[1, i]`` the item after i, -1 the end.
    """
    chain = np.full((2, max(documents, len(items))), -1, np.int64)
    for i in range(n - 1, -1, -1):
        chain[1, i] = chain[0, items[i, DOC]]
        chain[0, items[i, DOC]] = i
    return chain


@compiled
def tried_items(items, n, chain, bins):
    """Return (indices of the items that a search may move, how many there are).

    If there are few items, these are all. If there are many, they are the items of cut documents, the heavy ones, and a
    regular sample of the light whole items, which are many and much alike. The array has space for items that are added
    later.
    """
    found, count = np.empty(len(items), np.int64), 0
    load, rows = 0, 0
    for i in range(n):
        load += items[i, LOAD]
        rows += items[i, HI] - items[i, LO]
    every = 1 if n <= TRIED_ITEMS else n // TRIED_ITEMS + 1
    least_load, least_rows = load // (bins * HEAVY_PART), rows // (bins * HEAVY_PART)
    for i in range(n):
        first = chain[0, items[i, DOC]]
        cut = chain[1, first] >= 0
        if i % every == 0 or cut or items[i, LOAD] > least_load or items[i, HI] - items[i, LO] > least_rows:
            found[count] = i
            count += 1
    return found, count


@compiled
def with_chains(items, n, reads):
    """Return a :class:`Table` of the first ``n`` items, with space for as many ranges as there can be items."""
    room = len(items) + 3
    ranges, spans = np.zeros((room, 2), np.int64), np.zeros((room * most_spans(reads), 2), np.int64)
    return Table(items, chains(items, n, len(reads.thin)), reads, ranges, spans)


@compiled
def filled(items, n, cap_load, cap_rows):
    """Return the bins with the load and rows of the first ``n`` items, and with the given limits."""
    load, rows = np.zeros(len(cap_load), np.int64), np.zeros(len(cap_load), np.int64)
    for i in range(n):
        load[items[i, BIN]] += items[i, LOAD]
        rows[items[i, BIN]] += items[i, HI] - items[i, LO]
    return Bins(load, rows, cap_load, cap_rows)


@compiled_leaf
def pass_on(bins, giver, taker, load, rows):
    """Move load and rows from one bin to another in the sums of ``bins``."""
    bins.load[giver] -= load
    bins.rows[giver] -= rows
    bins.load[taker] += load
    bins.rows[taker] += rows


@compiled_leaf
def bin_cost(table, b, d, skip, x0, x1, y0, y1):
    """Return how many keys bin ``b`` would fetch for document ``d`` with other rows of it than it has.

    Item ``skip`` is left out (-1: none), and the rows x0..x1 and y0..y1 are added; either range may be empty. The price
    of thin rows is included.
    """
    items, chain, ranges = table.items, table.chain, table.ranges
    count = 0
    i = chain[0, d]
    while i >= 0:
        if items[i, BIN] == b and i != skip:
            ranges[count, 0], ranges[count, 1] = items[i, LO], items[i, HI]
            count += 1
        i = chain[1, i]
    if x0 < x1:
        ranges[count, 0], ranges[count, 1] = x0, x1
        count += 1
    if y0 < y1:
        ranges[count, 0], ranges[count, 1] = y0, y1
        count += 1
    if count == 0:
        return 0
    return table.reads.thin[d] + fetched(ranges, count, ranges, count, table.reads, d, table.spans)


@compiled_leaf
def cost_now(table, b, d):
    """Return how many keys bin ``b`` fetches for document ``d``, including the price of thin rows."""
    return bin_cost(table, b, d, -1, 0, 0, 0, 0)


@compiled_leaf
def cost_change(table, b, d, skip, x0, x1):
    """Return how the keys of bin ``b`` for document ``d`` change if item ``skip`` leaves and rows x0..x1 come."""
    return bin_cost(table, b, d, skip, x0, x1, 0, 0) - cost_now(table, b, d)


@compiled
def total_cost(items, n, bins, reads):
    """Return how many keys all bins fetch for the first ``n`` items, including the price of thin rows."""
    table = with_chains(items[:n], n, reads)
    total = 0
    for i in range(n):
        # The keys of a bin for a document are counted once, at the bin's last item in the chain.
        j = table.chain[1, i]
        while j >= 0 and items[j, BIN] != items[i, BIN]:
            j = table.chain[1, j]
        if j < 0:
            total += cost_now(table, items[i, BIN], items[i, DOC])
    return total
