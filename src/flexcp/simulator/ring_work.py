"""Ring work: the work of every slot of a ring, from what its positions see of each other.

:mod:`flexcp.simulator.ring_counts` counts that once for both directions; transfers say in which slot the keys of a position are there. The
result is that of :mod:`flexcp.simulator.slot_work`, which cuts every region along what arrives.

A ring is what its tables say, not its strategy's name: where transfers are not those of a ring, there is no answer here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.plan import Plan
from flexcp.plan.program import Transfers
from flexcp.plan.slots import pass_inputs
from flexcp.shape import Kind
from flexcp.simulator.ring_counts import RingCounts, Seats

Ints = NDArray[np.int64]


class RingSlots(NamedTuple):
    """When keys are there: those of each position ``[rank, position]`` (-1: none come), and what the others of the own one keep."""

    hop: Ints
    home: Ints


def find_slots(plan: Plan, mask: int, backward: bool, seats: Seats) -> RingSlots | None:
    """The slots of a ring's keys; None where transfers are not those of a ring.

    In a ring every rank gets the queries and keys of the others of its position, all in one slot, then the keys of one more position a
    slot, all of a rank's tokens at a time.
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
        there = np.bincount(t.target * ranks + t.owner, minlength=ranks * ranks).reshape(ranks, ranks)
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
    slots = np.sort(
        np.concatenate([np.where(hop < 0, -1 - np.arange(hop.shape[1]), hop), home[:, None]], axis=1), axis=1
    )
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
