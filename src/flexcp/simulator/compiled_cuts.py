"""Loops of slot work: regions cut along what their ranks hold, pair by pair of a query and a key segment; compiled.

``held`` are the segments of one side (queries or keys), by head range, then rank, then place in the stream, where those
of one head range and rank are apart; ``first[range * ranks + rank]`` is where a rank's begin, ``heads[range]`` the
query heads of a range. ``slices`` are of regions, in stream coordinates, those of a region side by side; ``regions``
are the rows RANK to LAST_HEAD. Launches of kernels are numbers in a table, each in the first free place from its own
one on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.jit import compiled, compiled_leaf
from flexcp.simulator.compiled_rings import band_area

Ints = NDArray[np.int64]
START, STOP, SLOT, SHELF, HELD_ROWS = range(5)
RANK, FIRST_HEAD, LAST_HEAD, TILES, REGION_ROWS = range(5)
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
    """(sums ``[PAIRS to OWN_ROW_TILES, rank, slot]``, kernels ``[rank, slot]``).

    ``sizes`` are ranks, slots, query heads and shelves. Own pairs are those of a rank's own rows and keys, both on
    shelf 0. A pass over a region in a slot, own work apart, for heads that begin with the same one, has its row tiles
    once. A kernel takes the rows of one shelf and the keys of one, for the same heads.
    """
    ranks, slots, heads, shelves = sizes[0], sizes[1], sizes[2], sizes[3]
    found, kernels = np.zeros((SUMS, ranks, slots), np.int64), np.zeros((ranks, slots), np.int64)
    launched, count = np.full(1 << 10, NOTHING, np.int64), 0
    passed = np.full((slots, 2, heads), -1, np.int64)  # the region that was last counted there
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
                )
        at = end
    return found, kernels


@compiled_leaf
def head_ranges(both, regions, region, first_query, query_heads, first_key, key_heads, ranks):
    """Write the head ranges of queries and of keys that meet in a region, and the heads that all three share;
    how many there are.

    Only ranges of which the region's rank holds anything: there may be many ranges, and few ranks hold more than a few.
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
):
    """Count slice ``s`` of a region, of the rows and keys that its rank holds of two head ranges;
    how many kernels there are then.
    """
    rank, slots, heads = regions[RANK, region], found.shape[2], passed.shape[2]
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
                own = queries[SHELF, i] == 0 and keys[SHELF, j] == 0
                add_part(found, passed, region, regions, rank, slot, own, low, high, area)
                launch = ((rank * slots + slot) * shelves + queries[SHELF, i]) * shelves + keys[SHELF, j]
                if note(launched, (launch * heads + low) * (heads + 1) + high):
                    kernels[rank, slot] += 1
                    count += 1
            j += 1
        i += 1
    return count


@compiled_leaf
def note(launched, launch):
    """Put a launch into the table of those there were, unless it is there: whether it was not."""
    last = len(launched) - 1
    place = (launch ^ (launch >> 15)) & last
    while launched[place] != NOTHING and launched[place] != launch:
        place = (place + 1) & last
    new = launched[place] == NOTHING
    launched[place] = launch
    return new


@compiled
def with_room(launched, most):
    """The same table of launches, at least so long and a power of two."""
    room = len(launched)
    while room < most:
        room *= 2
    found = np.full(room, NOTHING, np.int64)
    for launch in launched:
        if launch != NOTHING:
            note(found, launch)
    return found


@compiled_leaf
def add_part(found, passed, region, regions, rank, slot, own, low, high, area):
    """Count one part of a region; its row tiles where it is the first of its pass."""
    pairs = area * (high - low)
    found[PAIRS, rank, slot] += pairs
    tiles = 0
    mine = 1 if own else 0
    if passed[slot, mine, low] != region:
        passed[slot, mine, low] = region
        tiles = regions[TILES, region] * (high - low)
        found[ROW_TILES, rank, slot] += tiles
    if own:
        found[OWN_PAIRS, rank, slot] += pairs
        found[OWN_ROW_TILES, rank, slot] += tiles


@compiled_leaf
def first_behind(held, low, high, token):
    """The first of the segments ``low..high`` that ends behind a token."""
    while low < high:
        middle = (low + high) // 2
        if held[STOP, middle] <= token:
            low = middle + 1
        else:
            high = middle
    return low
