"""Loops of ring work: count the pairs of every rank's rows with the keys of every ring position (compiled).

A document is a sequence of runs, each kept by one rank. The runs are swept once for each slice of the document's mask.
Under a slice, a run of rows sees most runs of keys completely or not at all. The runs that it sees completely form a
range that only moves forward during the sweep. So the sweep keeps the number of keys of each position in that range,
and a run of rows adds all their pairs with one product. Only the few runs at the ends of the range, which the band of
the slice cuts, are counted one by one.

``runs`` are the runs in the order of the stream, cut where documents end; ``first_run[document]`` is the first run of a
document. A *region* is a range of one document whose adjacent runs all belong to ranks of one ring position. ``seat``
says for each rank its group, its position in the group's ring, and which member of the position it is (the rows of
:class:`flexcp.simulator.ring_counts.Seats`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.jit import compiled, compiled_fused, compiled_inline, compiled_leaf
from flexcp.cost import TILE_ROWS
from flexcp.masks.compiled_area import band_area
from flexcp.simulator.compiled_ring_runs import (
    BEGIN,
    END,
    LEADER,
    MEMBER,
    MEMBERS,
    NUMBER,
    OWNER,
    POSITIONS,
    Q0,
    Q1,
    REGION,
)

Ints = NDArray[np.int64]
Table = NDArray[np.int32]
Floats = NDArray[np.float64]


@compiled
def find_alike(runs: Table, first_run: Ints, which: Ints) -> tuple[Ints, Floats]:
    """Return (documents cut like the first one of ``which``, run lengths ``[document, run]`` of all but the first).

    Documents are cut alike if their runs have the same owners in the same order.
    """
    model = which[0]
    low, count = first_run[model], first_run[model + 1] - first_run[model]
    found, size = np.empty(len(which), np.int64), np.empty((len(which), count), np.float64)
    found[0], alike = model, 1
    for d in which[1:]:
        at, differ = first_run[d], 0
        if first_run[d + 1] - at != count:
            continue
        for i in range(count):
            differ |= runs[at + i, OWNER] ^ runs[low + i, OWNER]
            size[alike, i] = runs[at + i, END] - runs[at + i, BEGIN]
        if differ == 0:
            found[alike] = d
            alike += 1
    return found[:alike], size[1:alike]


@compiled
def row_tiles(runs: Table, first_run: Ints, regions: Table, alike: Ints) -> tuple[Ints, Ints]:
    """Return the row tiles of each region and of each run.

    The first of the documents cut ``alike`` gets the tiles of all of them. The later ones keep theirs as well, but are
    not counted afterwards.
    """
    found, of_run = np.empty(len(regions), np.int64), np.empty(len(runs), np.int64)
    for g in range(len(regions)):
        found[g] = (regions[g, Q1] - regions[g, Q0] + TILE_ROWS - 1) // TILE_ROWS
    for i in range(len(runs)):
        of_run[i] = (runs[i, END] - runs[i, BEGIN] + TILE_ROWS - 1) // TILE_ROWS
    if len(alike) > 1:
        low, high = first_run[alike[0]], first_run[alike[0] + 1]
        zero = runs[low, REGION]
        count = runs[high - 1, REGION] - zero + 1
        for d in alike[1:]:
            first = runs[first_run[d], REGION]
            for g in range(count):
                found[zero + g] += found[first + g]
            for i in range(high - low):
                of_run[low + i] += of_run[first_run[d] + i]
    return found, of_run


@compiled_fused
def sum_products(sizes: Floats) -> Floats:
    """Return ``[i, j]``: the sum over documents of ``sizes[document, i] * sizes[document, j]``, for j up to i (else 0).

    Four documents at a time are added in registers. A matrix product of a library would start threads, and wait for
    them if the processor has other work.
    """
    documents, runs = sizes.shape
    found = np.zeros((runs, runs), np.float64)
    fours = documents // 4 * 4
    for d in range(0, fours, 4):
        for i in range(runs):
            a, b, c, e = sizes[d, i], sizes[d + 1, i], sizes[d + 2, i], sizes[d + 3, i]
            for j in range(i + 1):
                found[i, j] += a * sizes[d, j] + b * sizes[d + 1, j] + c * sizes[d + 2, j] + e * sizes[d + 3, j]
    for d in range(fours, documents):
        for i in range(runs):
            for j in range(i + 1):
                found[i, j] += sizes[d, i] * sizes[d, j]
    return found


@compiled
def count_rings(
    runs: Table,
    first_run: Ints,
    slices: Ints,
    first_slice: Ints,
    seat: Ints,
    crew: Ints,
    tiles: Ints,
    run_tiles: Ints,
    which: Ints,
) -> tuple[Floats, Ints, Ints, Ints, Ints]:
    """Count the documents ``which`` and return (pairs, home pairs, row tiles, own row tiles, other row tiles).

    ``pairs[rank, position]`` are the pairs of a rank's rows with the keys of each position,
    ``home_pairs[rank, member]`` those with the keys of each member of its own position. The row tiles of a region
    (``tiles[region]``) are counted in ``[leader, position]`` for every position of whose keys the region sees any, and
    in the other row tiles of a rank if the region has pairs inside the position that are not of the rank's own rows and
    keys. The own row tiles of a rank are those (``run_tiles[run]``) of its runs that see own keys. ``crew[leader]`` are
    the ranks of a position.
    """
    ranks = seat.shape[1]
    widest, members = seat[POSITIONS].max(), seat[MEMBERS].max()
    pairs, home_pairs = np.zeros((ranks, widest), np.float64), np.zeros((ranks, members), np.int64)
    tiled, own_tiled, other_tiled = (
        np.zeros((ranks, widest), np.int64),
        np.zeros(ranks, np.int64),
        np.zeros(ranks, np.int64),
    )
    most = 0
    for d in which:
        most = max(most, first_run[d + 1] - first_run[d])
    # For each region of a document: whether it sees each position, its pairs inside its own position, and the pairs of
    # each member's own rows and keys.
    sees = np.zeros((most, widest), np.uint8)
    at_home, own = np.zeros(most, np.int64), np.zeros((most, members), np.int64)
    own_of_run = np.zeros(most, np.int64)  # for each run of a document, its pairs with own keys
    # Keys of each position, and of each member of it, in the range of runs that are seen completely; below 2**30, as
    # lengths of documents are.
    keys, keys_of = np.zeros(widest, np.float64), np.zeros((widest, members), np.int64)
    for d in which:
        low, high = first_run[d], first_run[d + 1]
        if low == high:
            continue
        zero = runs[low, REGION]
        count = runs[high - 1, REGION] - zero + 1
        sees[:count] = 0
        at_home[:count] = 0
        own[:count] = 0
        own_of_run[: high - low] = 0
        for s in range(first_slice[d], first_slice[d + 1]):
            keys[:] = 0
            keys_of[:] = 0
            sweep(runs, low, high, slices, s, seat, keys, keys_of, pairs, home_pairs, sees, at_home, own, own_of_run)
        for i in range(low, high):
            g = runs[i, REGION]
            if i == low or g != runs[i - 1, REGION]:
                leader = seat[LEADER, runs[i, OWNER]]
                add_tiles(leader, tiles[g], seat, crew, g - zero, sees, at_home, own, tiled, other_tiled)
            if own_of_run[i - low] > 0:
                own_tiled[runs[i, OWNER]] += run_tiles[i]
    return pairs, home_pairs, tiled, own_tiled, other_tiled


@compiled_leaf
def sweep(runs, low, high, slices, s, seat, keys, keys_of, pairs, home_pairs, sees, at_home, own, own_of_run):
    """Count the pairs of slice ``s`` of the document whose runs are ``low..high`` (exclusive).

    ``keys[position]`` and ``keys_of[position, member]`` must be 0; they hold the keys that the current rows see
    completely. The counts ``pairs`` to ``own_of_run`` are those of :func:`count_rings`, to which it adds.
    """
    q0, q1, k0, k1, lo, hi = slices[s, 0], slices[s, 1], slices[s, 2], slices[s, 3], slices[s, 4], slices[s, 5]
    zero = runs[low, REGION]
    positions, members = seat[POSITIONS, runs[low, OWNER]], seat[MEMBERS, runs[low, OWNER]]
    i = first_ending_after(runs, low, high, q0)
    # Of the runs of keys, those before ``visible`` are seen by no later rows; ``gone..come`` are seen completely.
    visible = gone = come = first_ending_after(runs, low, high, k0)
    while i < high and runs[i, BEGIN] < q1:
        rows0, rows1 = max(runs[i, BEGIN], q0), min(runs[i, END], q1)
        rank, g = runs[i, OWNER], runs[i, REGION] - zero
        number, member = seat[NUMBER, rank], seat[MEMBER, rank]
        whole0, whole1 = max(k0, rows1 - 1 + lo), min(k1, rows0 + hi + 1)
        some0, some1 = max(k0, rows0 + lo), min(k1, rows1 + hi)
        while come < high and runs[come, BEGIN] < k1 and min(runs[come, END], k1) <= whole1:
            add_keys(runs, come, 1, k0, k1, seat, keys, keys_of)
            come += 1
        while gone < high and runs[gone, BEGIN] < k1 and max(runs[gone, BEGIN], k0) < whole0:
            add_keys(runs, gone, -1, k0, k1, seat, keys, keys_of)
            gone += 1
        if gone < come:
            rows = rows1 - rows0
            factor = np.float64(rows)
            for p in range(positions):
                pairs[rank, p] += factor * keys[p]
            for p in range(positions):
                sees[g, p] |= keys[p] > 0
            at_home[g] += rows * np.int64(keys[number])
            own[g, member] += rows * keys_of[number, member]
            own_of_run[i - low] += rows * keys_of[number, member]
            for n in range(members):
                home_pairs[rank, n] += rows * keys_of[number, n]
        while visible < high and runs[visible, END] <= some0:
            visible += 1
        j = visible
        while j < high and runs[j, BEGIN] < some1:
            if gone <= j < come:
                j = come
                continue
            found = band_area(rows0, rows1, max(runs[j, BEGIN], k0), min(runs[j, END], k1), lo, hi)
            if found > 0:
                add_pairs(found, rank, g, runs[j, OWNER], seat, pairs, home_pairs, sees, at_home, own)
                own_of_run[i - low] += found if runs[j, OWNER] == rank else 0
            j += 1
        i += 1


@compiled_inline
def add_pairs(found, rank, g, of, seat, pairs, home_pairs, sees, at_home, own):
    """Add ``found`` pairs of rows of ``rank`` in region ``g`` with keys of rank ``of`` to the counts.

    The counts ``pairs`` to ``own`` are those of :func:`count_rings`.
    """
    pairs[rank, seat[NUMBER, of]] += found
    sees[g, seat[NUMBER, of]] = 1
    if seat[NUMBER, of] == seat[NUMBER, rank]:
        home_pairs[rank, seat[MEMBER, of]] += found
        at_home[g] += found
        if of == rank:
            own[g, seat[MEMBER, rank]] += found


@compiled_leaf
def add_tiles(leader, tiles, seat, crew, g, sees, at_home, own, tiled, other_tiled):
    """Add the row tiles of region ``g``, whose position has the leader ``leader``, to the counts where it has pairs.

    ``tiled`` and ``other_tiled`` are the results of :func:`count_rings` for all positions and for other row tiles.
    """
    for p in range(seat[POSITIONS, leader]):
        tiled[leader, p] += tiles if sees[g, p] > 0 else 0
    for n in range(seat[MEMBERS, leader]):
        if at_home[g] > own[g, n]:
            other_tiled[crew[leader, n]] += tiles


@compiled_leaf
def add_keys(runs, i, sign, k0, k1, seat, keys, keys_of):
    """Add the keys of run ``i`` to the keys that are seen completely (``sign`` +1), or take them out (-1).

    Only keys in ``k0..k1`` (exclusive) count.
    """
    rank, length = runs[i, OWNER], sign * (min(runs[i, END], k1) - max(runs[i, BEGIN], k0))
    keys[seat[NUMBER, rank]] += length
    keys_of[seat[NUMBER, rank], seat[MEMBER, rank]] += length


@compiled_leaf
def first_ending_after(runs, low, high, token):
    """Return the first of the runs ``low..high`` (exclusive) that ends after ``token``, or ``high``."""
    while low < high:
        middle = (low + high) // 2
        if runs[middle, END] <= token:
            low = middle + 1
        else:
            high = middle
    return low
