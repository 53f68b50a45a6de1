"""Loops of ring work: what the rows of every rank see of the keys of every ring position; compiled.

A document is a row of runs, each kept by one rank. The runs are swept once for each slice of its mask. Under a slice a run of rows sees
most runs of keys whole or not at all: whole are those in a range of runs that only moves forward while the sweep does. The sweep therefore
carries along how many keys of each position lie in that range, and a run of rows adds them all with one product. Only the few runs at the
range's ends, which the band of the slice cuts, are counted one by one.

``runs`` are the runs in the order of the stream, cut where documents end; ``first_run[document]`` is where a document's begin. A *region* is
what the ranks of one position keep side by side of one document. ``seat`` says where ranks are: in which group, at which position of its
ring, as which member of the position.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.jit import compiled, compiled_leaf

Ints = NDArray[np.int64]
OWNER, BEGIN, END, REGION, RUN_ROWS = range(5)
POSITION, DOCUMENT, Q0, Q1, REGION_ROWS = range(5)
GROUP, NUMBER, MEMBER, POSITIONS, MEMBERS, LEADER, HEADS0, HEADS1, SEAT_ROWS = range(9)


@compiled
def cut_runs(order: Ints, rank: Ints, start: Ints, stop: Ints, starts: Ints, seat: Ints) -> tuple[Ints, Ints, Ints]:
    """(runs in the order of the stream, where each document's begin, regions); what lies behind the last document is left out."""
    documents = len(starts) - 1
    runs = np.empty((RUN_ROWS, len(order) + documents), np.int64)
    regions = np.empty((REGION_ROWS, len(order) + documents), np.int64)
    first = np.zeros(documents + 1, np.int64)
    count, region, document = 0, -1, 0
    for i in order:
        at, leader = start[i], seat[LEADER, rank[i]]
        while at < min(stop[i], starts[documents]):
            while starts[document + 1] <= at:
                document += 1
                first[document] = count
            begin, end = at - starts[document], min(stop[i], starts[document + 1]) - starts[document]
            if count == first[document] or regions[POSITION, region] != leader:
                region += 1
                regions[POSITION, region], regions[DOCUMENT, region], regions[Q0, region] = leader, document, begin
            regions[Q1, region] = end
            runs[OWNER, count], runs[BEGIN, count], runs[END, count], runs[REGION, count] = rank[i], begin, end, region
            count += 1
            at = starts[document] + end
    first[document + 1 :] = count
    return runs[:, :count].copy(), first, regions[:, : region + 1].copy()


@compiled
def is_placed_as_ring(
    runs: Ints, first_run: Ints, regions: Ints, seat: Ints, lengths: Ints,
    rank: Ints, document: Ints, q0: Ints, q1: Ints, k0: Ints, k1: Ints, h0: Ints, h1: Ints,
) -> bool:  # fmt: skip
    """Whether documents stay in groups, and every rank computes the regions of its position, in order, with all keys, for its heads.

    The columns from ``rank`` on are the placement's regions.
    """
    for d in range(len(first_run) - 1):
        for i in range(first_run[d] + 1, first_run[d + 1]):
            if seat[GROUP, runs[OWNER, i]] != seat[GROUP, runs[OWNER, i - 1]]:
                return False
    ranks, count = seat.shape[1], regions.shape[1]
    first, taken = np.zeros(ranks + 1, np.int64), np.zeros(ranks, np.int64)
    for g in range(count):
        first[regions[POSITION, g] + 1] += 1
    for r in range(ranks):
        first[r + 1] += first[r]
    by_position, free = np.empty(count, np.int64), first[:-1].copy()
    for g in range(count):
        by_position[free[regions[POSITION, g]]] = g
        free[regions[POSITION, g]] += 1
    for i in range(len(rank)):
        r = rank[i]
        leader = seat[LEADER, r]
        at = first[leader] + taken[r]
        taken[r] += 1
        if at >= first[leader + 1]:
            return False
        g = by_position[at]
        if regions[DOCUMENT, g] != document[i] or regions[Q0, g] != q0[i] or regions[Q1, g] != q1[i]:
            return False
        if k0[i] != 0 or k1[i] != lengths[document[i]] or h0[i] != seat[HEADS0, r] or h1[i] != seat[HEADS1, r]:
            return False
    for r in range(ranks):
        if taken[r] != first[seat[LEADER, r] + 1] - first[seat[LEADER, r]]:
            return False
    return True


@compiled
def count_rings(
    runs: Ints, first_run: Ints, slices: Ints, first_slice: Ints, seat: Ints, crew: Ints, tiles: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Pairs of each rank's rows with the keys of each position, and of each member of its own; row tiles of regions that have any.

    Row tiles (``tiles[region]``) are of each position (its leader) by the position whose keys are seen, and at home of each rank: of regions
    with pairs of its own rows and keys, and of regions with others. ``crew[leader]`` are the ranks of a position.
    """
    ranks = seat.shape[1]
    widest, members = seat[POSITIONS].max(), seat[MEMBERS].max()
    pairs, home_pairs = np.zeros((ranks, widest), np.int64), np.zeros((ranks, members), np.int64)
    tiled, own_tiled, other_tiled = np.zeros((ranks, widest), np.int64), np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    most = 0
    for d in range(len(first_run) - 1):
        most = max(most, first_run[d + 1] - first_run[d])
    # Of a document's regions: whether they see each position, pairs at home, those of each member with itself.
    sees = np.zeros((most, widest), np.uint8)
    at_home, own = np.zeros(most, np.int64), np.zeros((most, members), np.int64)
    # Keys of each position, and of each member of it, in the range of runs that are seen whole; below 2**30, as documents are.
    keys, keys_of = np.zeros(widest, np.int32), np.zeros((widest, members), np.int32)
    for d in range(len(first_run) - 1):
        low, high = first_run[d], first_run[d + 1]
        if low == high:
            continue
        zero = runs[REGION, low]
        count = runs[REGION, high - 1] - zero + 1
        sees[:count] = 0
        at_home[:count] = 0
        own[:count] = 0
        for s in range(first_slice[d], first_slice[d + 1]):
            keys[:] = 0
            keys_of[:] = 0
            sweep(runs, low, high, slices, s, seat, keys, keys_of, pairs, home_pairs, sees, at_home, own)
        for i in range(low, high):
            g = runs[REGION, i]
            if i == low or g != runs[REGION, i - 1]:
                leader = seat[LEADER, runs[OWNER, i]]
                add_tiles(leader, tiles[g], seat, crew, g - zero, sees, at_home, own, tiled, own_tiled, other_tiled)
    return pairs, home_pairs, tiled, own_tiled, other_tiled


@compiled_leaf
def sweep(runs, low, high, slices, s, seat, keys, keys_of, pairs, home_pairs, sees, at_home, own):
    """Count one slice of the document whose runs are ``low..high``."""
    q0, q1, k0, k1, lo, hi = slices[s, 0], slices[s, 1], slices[s, 2], slices[s, 3], slices[s, 4], slices[s, 5]
    zero = runs[REGION, low]
    positions, members = seat[POSITIONS, runs[OWNER, low]], seat[MEMBERS, runs[OWNER, low]]
    i = first_ending_after(runs, low, high, q0)
    # Runs of keys: those before ``visible`` are out of sight for good; ``gone..come`` are seen whole.
    visible = gone = come = first_ending_after(runs, low, high, k0)
    while i < high and runs[BEGIN, i] < q1:
        rows0, rows1 = max(runs[BEGIN, i], q0), min(runs[END, i], q1)
        rank, g = runs[OWNER, i], runs[REGION, i] - zero
        number, member = seat[NUMBER, rank], seat[MEMBER, rank]
        whole0, whole1 = max(k0, rows1 - 1 + lo), min(k1, rows0 + hi + 1)
        some0, some1 = max(k0, rows0 + lo), min(k1, rows1 + hi)
        while come < high and runs[BEGIN, come] < k1 and min(runs[END, come], k1) <= whole1:
            add_keys(runs, come, 1, k0, k1, seat, keys, keys_of)
            come += 1
        while gone < high and runs[BEGIN, gone] < k1 and max(runs[BEGIN, gone], k0) < whole0:
            add_keys(runs, gone, -1, k0, k1, seat, keys, keys_of)
            gone += 1
        if gone < come:
            rows = np.int32(rows1 - rows0)
            for p in range(positions):
                pairs[rank, p] += np.int64(rows) * np.int64(keys[p])
            for p in range(positions):
                sees[g, p] |= keys[p] > 0
            at_home[g] += np.int64(rows) * keys[number]
            own[g, member] += np.int64(rows) * keys_of[number, member]
            for n in range(members):
                home_pairs[rank, n] += np.int64(rows) * keys_of[number, n]
        while visible < high and runs[END, visible] <= some0:
            visible += 1
        j = visible
        while j < high and runs[BEGIN, j] < some1:
            if gone <= j < come:
                j = come
                continue
            found = band_area(rows0, rows1, max(runs[BEGIN, j], k0), min(runs[END, j], k1), lo, hi)
            if found > 0:
                of = runs[OWNER, j]
                pairs[rank, seat[NUMBER, of]] += found
                sees[g, seat[NUMBER, of]] = 1
                if seat[NUMBER, of] == number:
                    home_pairs[rank, seat[MEMBER, of]] += found
                    at_home[g] += found
                    if of == rank:
                        own[g, member] += found
            j += 1
        i += 1


@compiled_leaf
def add_tiles(leader, tiles, seat, crew, g, sees, at_home, own, tiled, own_tiled, other_tiled):
    """A region's row tiles, wherever it has pairs."""
    for p in range(seat[POSITIONS, leader]):
        tiled[leader, p] += tiles * sees[g, p]
    for n in range(seat[MEMBERS, leader]):
        if own[g, n] > 0:
            own_tiled[crew[leader, n]] += tiles
        if at_home[g] > own[g, n]:
            other_tiled[crew[leader, n]] += tiles


@compiled_leaf
def add_keys(runs, i, sign, k0, k1, seat, keys, keys_of):
    """A run of keys comes into the range that is seen whole (+1) or leaves it (-1)."""
    rank, length = runs[OWNER, i], np.int32(sign * (min(runs[END, i], k1) - max(runs[BEGIN, i], k0)))
    keys[seat[NUMBER, rank]] += length
    keys_of[seat[NUMBER, rank], seat[MEMBER, rank]] += length


@compiled_leaf
def first_ending_after(runs, low, high, token):
    """The first of the runs ``low..high`` that ends behind a token."""
    while low < high:
        middle = (low + high) // 2
        if runs[END, middle] <= token:
            low = middle + 1
        else:
            high = middle
    return low


@compiled_leaf
def band_area(q0, q1, k0, k1, lo, hi):
    """Pairs with ``lo <= k - q <= hi`` in a rectangle."""
    lo, hi = max(lo, k0 - q1 + 1), min(hi, k1 - 1 - q0)
    if q0 >= q1 or k0 >= k1 or lo > hi:
        return 0
    width = k1 - k0
    upper = ramp(q1 + hi + 1 - k0, width) - ramp(q0 + hi + 1 - k0, width)
    return upper - ramp(q1 + lo - k0, width) + ramp(q0 + lo - k0, width)


@compiled_leaf
def ramp(x, width):
    """Sum of clamp(j, 0, width) over all j < x."""
    x = max(x, 0)
    inside = min(x, width + 1)
    return inside * (inside - 1) // 2 + (x - inside) * width
