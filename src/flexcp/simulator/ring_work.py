"""Ring work: the work of every slot of a ring, counted from what positions see of each other.

In a ring whole ranks' keys move, position by position, and a rank computes for its heads all rows that its position keeps. So work has no
more kinds than positions: the keys that a hop brings come from one of them. What the rows of a rank see of the keys of a position is
counted in one sweep over the documents (:mod:`flexcp.simulator.loops_rings`), the same for both directions; transfers say in which slot those
keys are there. That is the count of :mod:`flexcp.simulator.slot_work`, which cuts every region along what arrives, without the parts: a
document over a ring of r positions has r squared of them.

A ring is what its tables say, not its strategy's name. Where regions or transfers are not those of a ring, nothing is counted here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan
from flexcp.plan.program import Transfers
from flexcp.plan.slots import pass_inputs
from flexcp.shape import Kind

Ints = NDArray[np.int64]


class Seats(NamedTuple):
    """Where each rank is: its group, its position in the group's ring, which member of the position; how many there are of both.

    ``leader`` is the first rank of its position; it computes the query heads ``first_head..last_head``. These columns are the rows of the
    table that :mod:`flexcp.simulator.loops_rings` reads.
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
    """Pairs of one head and row tiles, of rank by position of its ring or member of its position.

    ``pairs[rank, position]`` are those of the rows that the rank keeps, ``home_pairs[rank, member]`` likewise inside its own position.
    ``tiles[leader, position]`` are of the regions of a position that see another; ``own_tiles[rank]`` and ``other_tiles[rank]`` at home, of
    the regions with pairs of the rank's own rows and keys, and of those with any others.
    """

    seats: Seats
    pairs: Ints
    home_pairs: Ints
    tiles: Ints
    own_tiles: Ints
    other_tiles: Ints


class RingSlots(NamedTuple):
    """When keys are there: those of each position ``[rank, position]`` (-1: none come), and what the others of the own one keep."""

    hop: Ints
    home: Ints


def count_ring(plan: Plan, mask: int) -> RingCounts | None:
    """What positions see of each other under a mask; None where the placement is not that of a ring."""
    from flexcp.simulator import loops_rings as loops  # compiled: only who simulates loads Numba

    placement = plan.placement
    if placement.traffic.kind != "ring" or placement.assemble_own:
        return None
    seats = _seats(placement, plan.shape.heads)
    if seats is None:
        return None
    table = np.stack(seats)
    kept, batch, given = placement.runs, placement.batch, placement.regions[mask]
    order = np.argsort(kept.start, kind="stable")
    cut = loops.cut_runs(order, kept.rank, kept.start, kept.stop, _own(batch.starts), table)
    runs, first_run, regions = cut
    columns = (given.rank, given.document, given.q0, given.q1, given.k0, given.k1, given.h0, given.h1)
    if not loops.is_placed_as_ring(*cut, table, _own(batch.lengths), *columns):
        return None
    tiles = plan.cost.row_tiles_work(regions[loops.Q1] - regions[loops.Q0])
    layer = batch.masks[mask]
    found = loops.count_rings(runs, first_run, _own(layer.slices), _own(layer.first), table, _crews(seats), _own(tiles))
    return RingCounts(seats, *found)


def find_slots(plan: Plan, mask: int, backward: bool, seats: Seats) -> RingSlots | None:
    """The slots of a ring's keys; None where transfers are not those of a ring.

    In a ring every rank gets the queries and keys of the others of its position, all in one slot, then the keys of one more position a slot,
    all of a rank's tokens at a time.
    """
    program = plan.programs[mask][backward]
    if program.held or program.keys_kept or program.own_stage != 0:
        return None
    number, leader = seats.number, seats.leader
    inputs = pass_inputs(plan, mask, backward)
    tokens, ranks = plan.placement.tokens, plan.ranks
    keeps = (tokens > 0) & ~np.eye(ranks, dtype=bool)
    queries, keys = (inputs.take(inputs.kind == kind) for kind in (Kind.Q, Kind.KV))
    heads = seats.first_head, seats.last_head
    expected = ((queries, leader, *heads), (keys, seats.group, *plan.shape.kv_range(*heads)))
    for t, label, low, high in expected:
        whole = (t.start == 0) & (t.stop == tokens[t.owner]) & (t.h0 == low[t.target]) & (t.h1 == high[t.target])
        there = np.zeros((ranks, ranks), np.int64)
        np.add.at(there, (t.target, t.owner), 1)
        if not whole.all() or not np.array_equal(there, keeps & (label[:, None] == label)):
            return None
    home = np.zeros(ranks, np.int64)
    hop = np.full((ranks, int(number.max()) + 1), -1, np.int64)
    near = leader[keys.target] == leader[keys.owner]
    home[queries.target] = queries.stage
    far = keys.take(~near)
    hop[far.target, number[far.owner]] = far.stage
    mates = Transfers.join([queries, keys.take(near)])
    together = (home[mates.target] == mates.stage).all() and (hop[far.target, number[far.owner]] == far.stage).all()
    # One slot for what is at home, one for the rest of the position, one for each hop.
    slots = np.sort(np.concatenate([np.where(hop < 0, -1 - np.arange(hop.shape[1]), hop), home[:, None]], axis=1), axis=1)
    apart = (np.diff(slots, axis=1) > 0).all() and ((hop < 0) | (hop > home[:, None])).all()
    return RingSlots(hop, home) if together and apart else None


def ring_slot_work(counts: RingCounts, slots: RingSlots, stages: int) -> tuple[Ints, Ints, Ints]:
    """``[rank, slot]`` work with row tiles, pairs, kernels."""
    leader, member = counts.seats.leader, counts.seats.member
    heads = (counts.seats.last_head - counts.seats.first_head)[:, None]
    pairs, tiles, kernels = np.zeros((3, len(leader), stages), np.int64)
    # A kernel takes queries that a rank keeps or those it was sent, and keys of one slot, of which own and sent ones are apart.
    at, position = np.nonzero(slots.hop >= 0)
    of_position = np.zeros_like(counts.pairs)
    np.add.at(of_position, leader, counts.pairs)
    both, slot = of_position[leader[at], position], slots.hop[at, position]
    pairs[at, slot], tiles[at, slot] = both, counts.tiles[leader[at], position]
    kept = counts.pairs[at, position]
    kernels[at, slot] = (kept > 0) * 1 + (both > kept)
    # At home: what a rank keeps of rows and keys, then the rest.
    own = counts.home_pairs[np.arange(len(leader)), member]
    rows = counts.home_pairs.sum(axis=1)
    columns = np.zeros_like(counts.home_pairs)
    np.add.at(columns, leader, counts.home_pairs)
    whole, column = columns.sum(axis=1)[leader], columns[leader, member]
    pairs[:, 0], tiles[:, 0], kernels[:, 0] = own, counts.own_tiles, own > 0
    several = np.flatnonzero(slots.home > 0)
    here = several, slots.home[several]
    sent = (rows > own) * 1 + (column > own) + (whole - rows - column + own > 0)
    pairs[here], tiles[here], kernels[here] = (whole - own)[several], counts.other_tiles[several], sent[several]
    return (pairs + tiles) * heads, pairs * heads, kernels


def _seats(placement: Placement, heads: int) -> Seats | None:
    """The seats of a placement's groups, or None where these are no grids of all ranks."""
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
    """``[leader, member]``: the ranks of each position."""
    crews = np.zeros((len(seats.leader), int(seats.members.max())), np.int64)
    crews[seats.leader, seats.member] = np.arange(len(seats.leader))
    return crews


def _own(column: Ints) -> Ints:
    """A contiguous array that may be written: of what a batch holds some may, some may not, and loops are compiled for either."""
    return np.array(column, np.int64)
