"""Loops of slot work: regions cut along what their ranks hold, pair by pair of a query and a key segment; compiled.

``held`` are the segments of one side (queries or keys), by head range, then rank, then place in the stream, where those
of one head range and rank are apart; ``first[range * ranks + rank]`` is where a rank's begin, ``heads[range]`` the
query heads of a range. ``slices`` are of regions, in stream coordinates, those of a region side by side; ``regions``
are the rows RANK to LAST_HEAD.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.jit import compiled, compiled_inline, compiled_leaf
from flexcp.simulator.compiled_rings import band_area

Ints = NDArray[np.int64]
START, STOP, SLOT, SHELF, HELD_ROWS = range(5)
RANK, FIRST_HEAD, LAST_HEAD, TILES, REGION_ROWS = range(5)
PAIRS, ROW_TILES, OWN_PAIRS, OWN_ROW_TILES, SUMS = range(5)
QUERIES, KEYS, LOW, HIGH = range(4)
REMEMBERED = 1 << 12
"""Launches that are remembered, so that most are noted once."""


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
    """(sums ``[PAIRS to OWN_ROW_TILES, rank, slot]``, launches, some of them more than once).

    ``sizes`` are ranks, slots, query heads and shelves. Own pairs are those of a rank's own rows and keys, both on
    shelf 0. A pass over a region in a slot, own work apart, for heads that begin with the same one, has its row tiles
    once.
    """
    ranks, slots, heads, shelves = sizes[0], sizes[1], sizes[2], sizes[3]
    found = np.zeros((SUMS, ranks, slots), np.int64)
    launches, count = np.empty(1 << 10, np.int64), 0
    remembered = np.full(REMEMBERED, -1, np.int64)
    passed = np.full((slots, 2, heads), -1, np.int64)  # the region that was last counted there
    both = np.empty((len(query_heads) * len(key_heads), 4), np.int64)
    at = 0
    while at < len(index):
        region = index[at]
        end = at
        while end < len(index) and index[end] == region:
            end += 1
        rank = regions[RANK, region]
        for pair in range(head_ranges(both, regions, region, query_heads, key_heads)):
            f, g = both[pair, QUERIES] * ranks + rank, both[pair, KEYS] * ranks + rank
            k_begin, k_end, low, high = first_key[g], first_key[g + 1], both[pair, LOW], both[pair, HIGH]
            for s in range(at, end if k_begin < k_end else at):
                launches, count = add_whole_slice(
                    found,
                    passed,
                    launches,
                    count,
                    remembered,
                    region,
                    regions,
                    slices,
                    s,
                    queries,
                    first_query[f],
                    first_query[f + 1],
                    keys,
                    k_begin,
                    k_end,
                    low,
                    high,
                    shelves,
                )
        at = end
    return found, launches[:count]


@compiled_inline
def add_whole_slice(
    found,
    passed,
    launches,
    count,
    remembered,
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
    """Count slice ``s``, with more room for launches whenever there is none left: (launches, how many are noted)."""
    i = first_behind(queries, q_begin, q_end, slices[s, 0])
    while i >= 0:
        i, count = add_slice(
            found,
            passed,
            launches,
            count,
            remembered,
            region,
            regions,
            slices,
            s,
            queries,
            i,
            q_end,
            keys,
            k_begin,
            k_end,
            low,
            high,
            shelves,
        )
        if i >= 0:
            launches = np.concatenate((launches, np.empty(len(launches) + k_end - k_begin, np.int64)))
    return launches, count


@compiled_leaf
def head_ranges(both, regions, region, query_heads, key_heads):
    """Write the head ranges of queries and of keys that meet in a region, and the heads that all three share;
    how many there are.
    """
    count = 0
    for g in range(len(key_heads)):
        for f in range(len(query_heads)):
            low = max(regions[FIRST_HEAD, region], query_heads[f, 0], key_heads[g, 0])
            high = min(regions[LAST_HEAD, region], query_heads[f, 1], key_heads[g, 1])
            if low < high:
                both[count, QUERIES], both[count, KEYS], both[count, LOW], both[count, HIGH] = f, g, low, high
                count += 1
    return count


@compiled_leaf
def add_slice(
    found,
    passed,
    launches,
    count,
    remembered,
    region,
    regions,
    slices,
    s,
    queries,
    i,
    q_end,
    keys,
    k_begin,
    k_end,
    low,
    high,
    shelves,
):
    """Count slice ``s`` from segment ``i`` of the rows on: (the first segment that is still
    to be counted, or -1; launches noted).
    """
    rank, slots, heads = regions[RANK, region], found.shape[2], passed.shape[2]
    q0, q1, k0, k1, lo, hi = slices[s, 0], slices[s, 1], slices[s, 2], slices[s, 3], slices[s, 4], slices[s, 5]
    while i < q_end and queries[START, i] < q1:
        if count + k_end - k_begin > len(launches):
            return i, count
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
                launch = (launch * heads + low) * (heads + 1) + high
                place = (launch ^ (launch >> 15)) & (REMEMBERED - 1)
                if remembered[place] != launch:
                    remembered[place] = launch
                    launches[count] = launch
                    count += 1
            j += 1
        i += 1
    return -1, count


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
