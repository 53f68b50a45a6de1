"""Loops of slot work: cut regions along the segments that their ranks hold and count the pairs of each part (compiled).

A *part* is what a query segment and a key segment of one rank have in common with a slice of a region. Arguments that
several functions share:

- ``held`` (``queries`` or ``keys``) are the segments of one side, in rows START to SHELF, sorted by head range, then
  rank, then place in the stream. Segments of one head range and rank do not overlap. ``first[range * ranks + rank]``
  (``first_query``, ``first_key``) is the first segment of a rank in a head range, and ``query_heads[range]`` and
  ``key_heads[range]`` are the query heads of a range.
- ``slices`` are the slices of the regions in stream coordinates, with the slices of a region side by side.
- ``regions`` is a table with the rows RANK to LAST_ROW. TILES is the price of a region's row tiles, in pairs; the rows
  of the stream that it computes are FIRST_ROW to LAST_ROW (exclusive).
- ``launched`` is a hash table with open addressing of the kernel launches seen so far, each as one number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.jit import compiled, compiled_leaf
from flexcp.cost import TILE_ROWS
from flexcp.masks.compiled_area import band_area
from flexcp.simulator.compiled_held import SHELF, SLOT, START, STOP

Ints = NDArray[np.int64]
RANK, FIRST_HEAD, LAST_HEAD, TILES, FIRST_ROW, LAST_ROW = range(6)
PAIRS, ROW_TILES, OWN_PAIRS, OWN_ROW_TILES, SUMS = range(5)
QUERIES, KEYS, LOW, HIGH = range(4)
NOTHING = -1


@compiled
def sum_parts(
    index: Ints,
    slices: Ints,
    regions: Ints,
    queries: Ints,
    first_query: Ints,
    query_heads: Ints,
    keys: Ints,
    first_key: Ints,
    key_heads: Ints,
    sizes: Ints,
) -> tuple[Ints, Ints]:
    """Return (sums ``[PAIRS to OWN_ROW_TILES, rank, slot]``, kernel launches ``[rank, slot]``).

    ``index`` is the region of each slice; ``sizes`` holds the numbers of ranks, slots, query heads and shelves, and the
    price of a row tile. A pair is *own* if its row and its key are both on shelf 0, which has the rank's own tokens.
    The row tiles of a region are counted once for each slot and first head of other work; for own work, those of the
    region's own rows are counted. One kernel launch takes the rows of one shelf and the keys of one shelf, for the same
    heads.
    """
    ranks, slots, heads, shelves, price = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    found, kernels = np.zeros((SUMS, ranks, slots), np.int64), np.zeros((ranks, slots), np.int64)
    launched, count = np.full(1 << 10, NOTHING, np.int64), 0
    passed = np.full((slots, heads), -1, np.int64)  # the region whose row tiles were last counted there
    own_passed = np.full(queries.shape[1], -1, np.int64)  # the same for each segment of own rows
    both = np.empty((len(query_heads) * len(key_heads), 4), np.int64)
    at = 0
    while at < len(index):
        region = index[at]
        end = at
        while end < len(index) and index[end] == region:
            end += 1
        rank = regions[RANK, region]
        for pair in range(head_ranges(both, regions, region, first_query, query_heads, first_key, key_heads, ranks)):
            f, g = both[pair, QUERIES] * ranks + rank, both[pair, KEYS] * ranks + rank
            q_begin, q_end, k_begin, k_end = first_query[f], first_query[f + 1], first_key[g], first_key[g + 1]
            most = count + min((q_end - q_begin) * (k_end - k_begin), shelves * shelves)
            if 2 * most > len(launched):
                launched = with_room(launched, 2 * most)
            for s in range(at, end):
                count = add_slice(
                    found,
                    kernels,
                    passed,
                    own_passed,
                    launched,
                    count,
                    region,
                    regions,
                    slices,
                    s,
                    queries,
                    q_begin,
                    q_end,
                    keys,
                    k_begin,
                    k_end,
                    both[pair, LOW],
                    both[pair, HIGH],
                    shelves,
                    price,
                )
        at = end
    return found, kernels


@compiled_leaf
def head_ranges(both, regions, region, first_query, query_heads, first_key, key_heads, ranks):
    """Write to ``both`` the pairs of query and key head ranges that meet in a region; return how many there are.

    Each row has the two ranges, and the first head that they share with the region and the end (exclusive). Only ranges
    of which the region's rank holds segments are looked at: there may be many ranges, and most ranks hold few of them.
    The other arguments are explained in the module's docstring.
    """
    count, rank = 0, regions[RANK, region]
    for g in range(len(key_heads)):
        if first_key[g * ranks + rank] == first_key[g * ranks + rank + 1]:
            continue
        for f in range(len(query_heads)):
            low = max(regions[FIRST_HEAD, region], query_heads[f, 0], key_heads[g, 0])
            high = min(regions[LAST_HEAD, region], query_heads[f, 1], key_heads[g, 1])
            if low < high and first_query[f * ranks + rank] < first_query[f * ranks + rank + 1]:
                both[count, QUERIES], both[count, KEYS], both[count, LOW], both[count, HIGH] = f, g, low, high
                count += 1
    return count


@compiled_leaf
def add_slice(
    found,
    kernels,
    passed,
    own_passed,
    launched,
    count,
    region,
    regions,
    slices,
    s,
    queries,
    q_begin,
    q_end,
    keys,
    k_begin,
    k_end,
    low,
    high,
    shelves,
    price,
):
    """Count slice ``s`` of a region for one query and one key head range; return the number of launches noted so far.

    ``q_begin..q_end`` and ``k_begin..k_end`` are the segments that the region's rank holds of the two ranges, and
    ``low..high`` are the heads they share; all ends are exclusive. ``count`` is the number of launches noted before.
    The other arguments are those of :func:`sum_parts` and its tables.
    """
    rank, slots, heads = regions[RANK, region], found.shape[2], passed.shape[1]
    q0, q1, k0, k1, lo, hi = slices[s, 0], slices[s, 1], slices[s, 2], slices[s, 3], slices[s, 4], slices[s, 5]
    i = first_behind(queries, q_begin, q_end, q0)
    while i < q_end and queries[START, i] < q1:
        rows0, rows1 = max(queries[START, i], q0), min(queries[STOP, i], q1)
        seen0, seen1 = max(k0, rows0 + lo), min(k1, rows1 + hi)
        j = first_behind(keys, k_begin, k_end, seen0)
        while j < k_end and keys[START, j] < seen1:
            area = band_area(rows0, rows1, max(keys[START, j], k0), min(keys[STOP, j], k1), lo, hi)
            if area > 0:
                slot = max(queries[SLOT, i], keys[SLOT, j])
                if queries[SHELF, i] == 0 and keys[SHELF, j] == 0:
                    add_own_part(found, own_passed, region, regions, slot, queries, i, high - low, area, price)
                else:
                    add_part(found, passed, region, regions, rank, slot, low, high, area)
                launch = ((rank * slots + slot) * shelves + queries[SHELF, i]) * shelves + keys[SHELF, j]
                if note(launched, (launch * heads + low) * (heads + 1) + high):
                    kernels[rank, slot] += 1
                    count += 1
            j += 1
        i += 1
    return count


@compiled_leaf
def note(launched, launch):
    """Put a launch into the hash table; return whether it was new."""
    last = len(launched) - 1
    place = (launch ^ (launch >> 15)) & last
    while launched[place] != NOTHING and launched[place] != launch:
        place = (place + 1) & last
    new = launched[place] == NOTHING
    launched[place] = launch
    return new


@compiled
def with_room(launched, most):
    """Return a hash table with the same launches whose length is a power of two and at least ``most``."""
    room = len(launched)
    while room < most:
        room *= 2
    found = np.full(room, NOTHING, np.int64)
    for launch in launched:
        if launch != NOTHING:
            note(found, launch)
    return found


@compiled_leaf
def add_own_part(found, own_passed, region, regions, slot, queries, i, heads, area, price):
    """Add the pairs of a part of own rows (segment ``i``) and own keys, and its row tiles if it is the segment's first.

    The part has ``area`` pairs in each of ``heads`` heads; a row tile costs as much as ``price`` pairs.
    """
    rank, tiles = regions[RANK, region], 0
    if own_passed[i] != region:
        own_passed[i] = region
        rows = min(queries[STOP, i], regions[LAST_ROW, region]) - max(queries[START, i], regions[FIRST_ROW, region])
        tiles = (rows + TILE_ROWS - 1) // TILE_ROWS * price
    found[PAIRS, rank, slot] += area * heads
    found[OWN_PAIRS, rank, slot] += area * heads
    found[ROW_TILES, rank, slot] += tiles * heads
    found[OWN_ROW_TILES, rank, slot] += tiles * heads


@compiled_leaf
def add_part(found, passed, region, regions, rank, slot, low, high, area):
    """Add the pairs of one part of a region, and the region's row tiles if it is the first part of its pass.

    The part has ``area`` pairs in each of the heads ``low..high`` (exclusive), and not both its rows and its keys are
    the rank's own. A pass is all such parts of a region in one slot that begin with the same head.
    """
    found[PAIRS, rank, slot] += area * (high - low)
    if passed[slot, low] != region:
        passed[slot, low] = region
        found[ROW_TILES, rank, slot] += regions[TILES, region] * (high - low)


@compiled_leaf
def first_behind(held, low, high, token):
    """Return the first of the segments ``low..high`` (exclusive) that ends after ``token``, or ``high``."""
    while low < high:
        middle = (low + high) // 2
        if held[STOP, middle] <= token:
            low = middle + 1
        else:
            high = middle
    return low
