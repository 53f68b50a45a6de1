"""Ring work: the work of every slot of a ring, from what its positions see of each other.

:mod:`flexcp.simulator.ring_counts` counts that once for both directions; transfers say in which slot the keys of a
position are there. The result is that of :mod:`flexcp.simulator.slot_work`, which cuts every region along what arrives.

A ring is what its tables say, not its strategy's name: where transfers are not those of a ring, there is no answer
here.
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
    """When keys are there: those of each position ``[rank, position]`` (-1: none come),
    and what the others of the own one keep.
    """

    hop: Ints
    home: Ints


def find_slots(
    plan: Plan, mask: int, backward: bool, seats: Seats, inputs: Transfers | None = None
) -> RingSlots | None:
    """The slots of a ring's keys; None where transfers are not those of a ring. ``inputs`` are the pass's,
    where they are at hand.

    In a ring every rank gets the queries and keys of the others of its position, all in one slot, then the keys of one
    more position a slot, all of a rank's tokens at a time.
    """
    from flexcp.simulator.compiled_ring_slots import find_ring_slots  # compiled: only who simulates loads Numba

    program = plan.programs[mask][backward]
    if program.held or program.keys_kept or program.own_stage != 0:
        return None
    inputs = pass_inputs(plan, mask, backward) if inputs is None else inputs
    own = seats.first_head, seats.last_head
    pieces = (inputs.stage, inputs.target, inputs.owner, inputs.start, inputs.stop, inputs.h0, inputs.h1)
    is_keys = (inputs.kind == Kind.KV).astype(np.int64)
    heads = np.stack([own, plan.shape.kv_range(*own)])
    hop, home, fits = find_ring_slots(*pieces, is_keys, plan.placement.tokens, np.stack(seats), heads, program.stages)
    return RingSlots(hop, home) if fits else None


def ring_slot_work(counts: RingCounts, slots: RingSlots, stages: int) -> tuple[Ints, Ints, Ints]:
    """``[rank, slot]`` work with row tiles, pairs, kernels."""
    from flexcp.simulator.compiled_ring_slots import lay_hops  # compiled: only who simulates loads Numba

    leader, member = counts.seats.leader, counts.seats.member
    heads = (counts.seats.last_head - counts.seats.first_head)[:, None]
    of_position = _sum_by_position(counts.pairs, counts.seats)
    pairs, tiles, kernels = lay_hops(slots.hop, leader, of_position, counts.pairs, counts.tiles, stages)
    # A kernel takes queries that a rank keeps or those it was sent, and keys of one slot, of which own and sent ones
    # are apart.
    # At home: what a rank keeps of rows and keys, then the rest.
    own = counts.home_pairs[np.arange(len(leader)), member]
    rows = counts.home_pairs.sum(axis=1)
    columns = _sum_by_position(counts.home_pairs, counts.seats)
    whole, column = columns.sum(axis=1)[leader], columns[leader, member]
    pairs[:, 0], tiles[:, 0], kernels[:, 0] = own, counts.own_tiles, own > 0
    several = np.flatnonzero(slots.home > 0)
    here = several, slots.home[several]
    sent = (rows > own) * 1 + (column > own) + (whole - rows - column + own > 0)
    pairs[here], tiles[here], kernels[here] = (whole - own)[several], counts.other_tiles[several], sent[several]
    return (pairs + tiles) * heads, pairs * heads, kernels


def _sum_by_position(values: Ints, seats: Seats) -> Ints:
    """The sums over the ranks of each position, in the row of its leader."""
    found = np.zeros_like(values)
    for member in range(int(seats.members.max())):
        of = np.flatnonzero(seats.member == member)
        found[seats.leader[of]] += values[of]
    return found
