"""Ring counts: the (query, key) pairs between the positions of a ring.

In a ring, the keys of whole ranks move from position to position, and a rank computes, for its heads, all rows that its
position keeps. So the work differs only by position: the keys of a hop all come from one position. Cutting a document
over r positions along what arrives would give r squared parts; here its runs are swept once
(:mod:`flexcp.simulator.compiled_rings`), which gives the same sums.

Most documents are cut alike: their runs have the same owners in the same order and differ only in length. Under a
causal or a full mask, the pairs of run i with run j are then the same product of lengths in all these documents, so one
matrix product counts them together. Which positions a region sees does not depend on the lengths, so only one of these
documents is swept, with the row tiles of all.

Counts are exact. Products are computed in floating point, which holds integers up to 2**53; batches that may have more
pairs are not counted here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.tables import Table
from flexcp.batch import LayerMask
from flexcp.masks import HI, K0, K1, LO, Q0, Q1
from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
EXACT = 1 << 53
"""Floating point holds all integers up to this one."""


class Seats(NamedTuple):
    """The place of each rank: its group, its position in the group's ring and its place among the position's ranks.

    They are ``group``, ``number`` and ``member``. ``positions`` and ``members`` are how many positions its ring and how
    many members each position has. ``leader`` is the first rank of its position. The rank computes the query heads
    ``first_head`` to ``last_head`` (exclusive). These columns are the rows of the table ``seat`` in
    :mod:`flexcp.simulator.compiled_rings`.
    """

    group: Ints
    number: Ints
    member: Ints
    positions: Ints
    members: Ints
    leader: Ints
    first_head: Ints
    last_head: Ints


class RingCounts(NamedTuple):
    """(Query, key) pairs of one head, and row tiles, between the ranks and positions of rings.

    ``pairs[rank, position]`` are the pairs of the rows that a rank keeps with the keys of a position,
    ``home_pairs[rank, member]`` those with the keys of each member of its own position. ``tiles[leader, position]`` are
    the row tiles of the regions of a position (given by its leader) that see keys of another. ``own_tiles[rank]`` are
    the row tiles of the rank's runs that see own keys, and ``other_tiles[rank]`` those of the regions that have other
    pairs inside the position. Row tiles are given as the pairs that cost as much.
    """

    seats: Seats
    pairs: Ints
    home_pairs: Ints
    tiles: Ints
    own_tiles: Ints
    other_tiles: Ints


def count_ring(plan: Plan, mask: int) -> RingCounts | None:
    """Return the (query, key) pairs between the positions of a ring under a mask, or None.

    It is None if the placement is not that of a ring, or if the batch may have more than 2**53 pairs.
    """
    from flexcp.simulator import compiled_ring_runs as placed  # compiled: only simulations need Numba
    from flexcp.simulator import compiled_rings as loops

    placement, batch = plan.placement, plan.batch
    pairs = float(np.square(batch.lengths, dtype=np.float64).sum())
    if placement.traffic.kind != "ring" or placement.assemble_own or pairs > EXACT:
        return None
    seats = _seats(placement, plan.shape.heads)
    if seats is None:
        return None
    table, given, layer = np.stack(seats), placement.regions[mask], batch.masks[mask]
    cut = placed.cut_runs(*_columns(placement.runs), _own(batch.starts), table)
    if not placed.is_placed_as_ring(*cut, table, _own(batch.lengths), *_columns(given)):
        return None
    runs, first_run, regions = cut
    which, reaches_ahead = _documents_of_one_kind(layer, batch.lengths, np.diff(first_run))
    alike, sizes = loops.find_alike(runs, first_run, which) if len(which) > 1 else (which, np.zeros((0, 0)))
    others = np.delete(np.arange(batch.documents), alike[1:])
    tiles, run_tiles = loops.row_tiles(runs, first_run, regions, alike)
    slices = _own(layer.slices), _own(layer.first)
    pairs, home_pairs, *tiled = loops.count_rings(
        runs, first_run, *slices, table, _crews(seats), tiles, run_tiles, others
    )
    if len(sizes):
        low, high = first_run[alike[0]], first_run[alike[0] + 1]
        seen = _seen(loops.sum_products(sizes), sizes.sum(axis=0), reaches_ahead)
        _add_pairs(pairs, home_pairs, seats, runs[low:high, placed.OWNER], seen)
    return RingCounts(seats, pairs.astype(np.int64), home_pairs, *(plan.cost.row_tile_pairs * count for count in tiled))


def _documents_of_one_kind(layer: LayerMask, lengths: Ints, runs: Ints) -> tuple[Ints, bool]:
    """Return (documents that may be cut alike, whether they have a full mask); ``runs`` is their number of runs.

    These are the documents with a causal mask or those with a full mask, whichever are more. Of these, only documents
    with one number of runs are returned: the number that has the most runs in total.
    """
    one = np.flatnonzero(np.diff(layer.first) == 1)
    slices, n = layer.slices[layer.first[one]], lengths[one]
    whole = (slices[:, Q0] == 0) & (slices[:, Q1] == n) & (slices[:, K0] == 0) & (slices[:, K1] == n)
    whole &= slices[:, LO] <= 1 - n
    kinds = one[whole & (slices[:, HI] == 0)], one[whole & (slices[:, HI] >= n - 1)]
    ahead = len(kinds[1]) > len(kinds[0])
    found = kinds[ahead]
    usual = np.bincount(runs[found], weights=runs[found]).argmax() if len(found) else 0
    return found[runs[found] == usual], ahead


def _seen(products: Floats, sizes: Floats, ahead: bool) -> Floats:
    """Return the (query, key) pairs ``[run of rows, run of keys]``, from the products of the runs' lengths.

    ``products`` are at and below the diagonal, summed over documents, and may be changed. ``sizes`` are the total
    lengths of each run; ``ahead`` is True for full masks, in which rows also see later keys.
    """
    if ahead:
        return products + np.tril(products, -1).T
    np.fill_diagonal(products, (np.diag(products) + sizes) / 2)
    return products


def _add_pairs(pairs: Floats, home_pairs: Ints, seats: Seats, owner: Ints, seen: Floats) -> None:
    """Add the pairs ``seen[run of rows, run of keys]`` to both counts; ``owner`` is the rank that keeps each run.

    ``pairs`` and ``home_pairs`` are those of :class:`RingCounts`.
    """
    number, member, leader = seats.number[owner], seats.member[owner], seats.leader[owner]
    place = owner[:, None] * pairs.shape[1] + number
    pairs += np.bincount(place.ravel(), seen.ravel(), pairs.size).reshape(pairs.shape)
    row, key = np.nonzero(leader[:, None] == leader)
    np.add.at(home_pairs, (owner[row], member[key]), seen[row, key].astype(np.int64))


def _seats(placement: Placement, heads: int) -> Seats | None:
    """Return the seats of all ranks, or None if the placement's groups are not rectangular grids with every rank."""
    columns = np.full((len(Seats._fields), placement.ranks), -1, np.int64)
    for g, grid in enumerate(placement.traffic.groups):
        positions, members = len(grid), len(grid[0])
        for c, row in enumerate(grid):
            if len(row) != members:
                return None
            for j, rank in enumerate(row):
                mine = j * heads // members, (j + 1) * heads // members
                columns[:, rank] = (g, c, j, positions, members, row[0], *mine)
    return Seats(*columns) if columns.min() >= 0 else None


def _crews(seats: Seats) -> Ints:
    """Return the ranks of each position, ``[leader, member]``; the leader is the first rank of the position."""
    crews = np.zeros((len(seats.leader), int(seats.members.max())), np.int64)
    crews[seats.leader, seats.member] = np.arange(len(seats.leader))
    return crews


def _columns(table: Table) -> list[Ints]:
    """Return the columns of a table as a list."""
    return [getattr(table, name) for name in table.names()]


def _own(column: Ints) -> Ints:
    """Return a contiguous, writable copy of a column.

    Some arrays of a batch are writable and some are not, and loops would be compiled separately for both.
    """
    return np.array(column, np.int64)
