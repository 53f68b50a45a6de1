"""Loops of ring work: sort a placement's runs by document, and check that they are placed as in a ring (compiled).

``runs`` are the runs in the order of the stream, cut where documents end; ``first_run[document]`` is the first run of a
document. A *region* is a range of one document whose adjacent runs all belong to ranks of one ring position. ``seat``
has the rows of :class:`flexcp.simulator.ring_counts.Seats`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.compiled_sort import stable_order
from flexcp.arrays.jit import compiled, compiled_leaf

Ints = NDArray[np.int64]
Table = NDArray[np.int32]
OWNER, BEGIN, END, REGION, RUN_COLUMNS = range(5)
PIECE_DOCUMENT = REGION  # the same column holds the document until regions are known
POSITION, DOCUMENT, Q0, Q1, REGION_COLUMNS = range(5)
"""Columns of the tables of runs and regions, which hold 32-bit integers: enough for places in a document."""
LENGTH = POSITION  # the length of the document, in tables that are sorted by position
GROUP, NUMBER, MEMBER, POSITIONS, MEMBERS, LEADER, HEADS0, HEADS1, SEAT_ROWS = range(9)


@compiled
def cut_runs(rank: Ints, start: Ints, stop: Ints, starts: Ints, seat: Ints) -> tuple[Table, Ints, Table]:
    """Return (runs in the order of the stream, first run of each document, regions).

    Document d is the stream from ``starts[d]`` to ``starts[d + 1]``; runs behind the last document are left out. The
    runs are given rank by rank. They are first distributed to their documents and then sorted in each document. Most
    documents are cut like the one before, so its order is tried first.
    """
    documents, count, d = len(starts) - 1, 0, 0
    pieces = np.empty((len(rank) + documents, RUN_COLUMNS), np.int32)
    first = np.zeros(documents + 1, np.int64)
    for i in range(len(rank)):
        at, end = start[i], min(stop[i], starts[documents])
        if at < starts[d]:
            d = 0  # the runs of the next rank begin
        while at < end:
            while starts[d + 1] <= at:
                d += 1
            pieces[count, OWNER], pieces[count, PIECE_DOCUMENT] = rank[i], d
            pieces[count, BEGIN], pieces[count, END] = at - starts[d], min(end, starts[d + 1]) - starts[d]
            first[d + 1] += 1
            count += 1
            at = starts[d + 1]
    for d in range(documents):
        first[d + 1] += first[d]
    dealt = by_document(pieces, count, first)
    runs, regions = np.empty((count, RUN_COLUMNS), np.int32), np.empty((count, REGION_COLUMNS), np.int32)
    order, region = np.zeros(0, np.int64), -1
    for d in range(documents):
        low, high = first[d], first[d + 1]
        last = region
        region, ascending = lay_runs(runs, regions, region, dealt, d, low, high, order, seat)
        if not ascending:
            order = stable_order(dealt[low:high, BEGIN])
            region, _ = lay_runs(runs, regions, last, dealt, d, low, high, order, seat)
    return runs, first, regions[: region + 1]


@compiled
def by_document(pieces: Table, count: int, first: Ints) -> Table:
    """Return the first ``count`` pieces of runs sorted by document, without changing the order inside a document.

    The pieces of document d begin at ``first[d]`` in the result.
    """
    found, free = np.empty((count, RUN_COLUMNS), np.int32), first[:-1].copy()
    for i in range(count):
        to = free[pieces[i, PIECE_DOCUMENT]]
        free[pieces[i, PIECE_DOCUMENT]] += 1
        found[to, OWNER], found[to, PIECE_DOCUMENT] = pieces[i, OWNER], pieces[i, PIECE_DOCUMENT]
        found[to, BEGIN], found[to, END] = pieces[i, BEGIN], pieces[i, END]
    return found


@compiled_leaf
def lay_runs(runs, regions, region, dealt, d, low, high, order, seat):
    """Write the runs ``low..high`` of document ``d`` in the given order, and its regions after number ``region``.

    ``dealt`` has the runs by document, and ``order`` says which of them comes first, second, and so on. Return (the
    number of the last region, whether the runs ascend). If ``order`` has the wrong length, nothing is written and the
    runs count as not ascending, unless the document has no runs.
    """
    if len(order) != high - low:
        return region, high == low
    ascending, position, last = True, -1, -1
    for i in range(low, high):
        at = low + order[i - low]
        owner, begin, end = dealt[at, OWNER], dealt[at, BEGIN], dealt[at, END]
        ascending &= begin >= last
        last = begin
        leader = seat[LEADER, owner]
        if leader != position:
            position = leader
            region += 1
            regions[region, POSITION], regions[region, DOCUMENT], regions[region, Q0] = leader, d, begin
        regions[region, Q1] = end
        runs[i, OWNER], runs[i, BEGIN], runs[i, END], runs[i, REGION] = owner, begin, end, region
    return region, ascending


@compiled
def is_placed_as_ring(
    runs: Table,
    first_run: Ints,
    regions: Table,
    seat: Ints,
    lengths: Ints,
    rank: Ints,
    document: Ints,
    q0: Ints,
    q1: Ints,
    k0: Ints,
    k1: Ints,
    h0: Ints,
    h1: Ints,
) -> bool:
    """Return whether the placement is that of a ring.

    In a ring, documents stay in one group, and every rank computes the regions of its position, in order, with all keys
    and for its own heads. The columns from ``rank`` on are the placement's regions, rank by rank; the other tables are
    explained in the module's docstring. Differences are collected in one integer instead of returning at the first one,
    which is faster.
    """
    ranks, differ = seat.shape[1], 0
    if seat[GROUP].max() > 0:
        for d in range(len(first_run) - 1):
            for i in range(first_run[d] + 1, first_run[d + 1]):
                differ |= seat[GROUP, runs[i, OWNER]] ^ seat[GROUP, runs[i - 1, OWNER]]
    mine, first = by_position(regions, lengths, ranks)
    low = 0
    for r in range(ranks):
        zero, size = first[seat[LEADER, r]], first[seat[LEADER, r] + 1] - first[seat[LEADER, r]]
        if low + size > len(rank):
            return False
        heads0, heads1 = seat[HEADS0, r], seat[HEADS1, r]
        for i in range(size):
            at, of = low + i, zero + i
            differ |= (mine[of, LENGTH] ^ k1[at]) | (mine[of, DOCUMENT] ^ document[at])
            differ |= (mine[of, Q0] ^ q0[at]) | (mine[of, Q1] ^ q1[at])
        for at in range(low, low + size):
            differ |= (rank[at] ^ r) | k0[at] | (h0[at] ^ heads0) | (h1[at] ^ heads1)
        low += size
    return differ == 0 and low == len(rank)


@compiled
def by_position(regions: Table, lengths: Ints, ranks: int) -> tuple[Table, Ints]:
    """Return (regions sorted by ring position, first region of each position); a position is named by its first rank.

    In the result the column LENGTH, the length of the document, takes the place of the column POSITION.
    """
    first = np.zeros(ranks + 1, np.int64)
    for g in range(len(regions)):
        first[regions[g, POSITION] + 1] += 1
    for r in range(ranks):
        first[r + 1] += first[r]
    found, free = np.empty((len(regions), REGION_COLUMNS), np.int32), first[:-1].copy()
    for g in range(len(regions)):
        to, d = free[regions[g, POSITION]], regions[g, DOCUMENT]
        free[regions[g, POSITION]] += 1
        found[to, LENGTH], found[to, DOCUMENT] = lengths[d], d
        found[to, Q0], found[to, Q1] = regions[g, Q0], regions[g, Q1]
    return found, first
