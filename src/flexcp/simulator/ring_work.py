"""Ring work: the work of every slot of a ring, from the (query, key) pairs between its positions.

:mod:`flexcp.simulator.ring_counts` counts the pairs once for both directions; the transfers say in which slot the keys
of a position arrive. The result is the same as that of :mod:`flexcp.simulator.slot_work`, which cuts every region along
what arrives.

Whether a plan is a ring is decided by its tables, not by the name of its strategy. For transfers that are not those of
a ring, :func:`find_slots` returns None.
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
    """The slots in which the keys of a ring arrive.

    ``hop[rank, position]`` is the slot of the keys of each other position (-1: none come), ``home[rank]`` the slot of
    what the other members of the rank's own position keep (0: none come).
    """

    hop: Ints
    home: Ints


def find_slots(
    plan: Plan, mask: int, backward: bool, seats: Seats, inputs: Transfers | None = None
) -> RingSlots | None:
    """Return the slots in which a ring's keys arrive, or None if the transfers are not those of a ring.

    In a ring, every rank first receives the queries and keys of the other members of its position, all in one slot, and
    then the keys of one more position per slot; all tokens of a rank come together. ``inputs`` are the inputs of the
    pass (:func:`flexcp.plan.slots.pass_inputs`) if the caller has them.
    """
    from flexcp.simulator.compiled_ring_slots import find_ring_slots  # compiled: only simulations need Numba

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
    """Return three tables ``[rank, slot]``: work, (query, key) pairs and kernels.

    Work is pairs and row tiles; it and pairs are multiplied by the query heads of the rank.
    """
    from flexcp.simulator.compiled_ring_slots import lay_hops  # compiled: only simulations need Numba

    leader, member = counts.seats.leader, counts.seats.member
    heads = (counts.seats.last_head - counts.seats.first_head)[:, None]
    of_position = _sum_by_position(counts.pairs, counts.seats)
    pairs, tiles, kernels = lay_hops(slots.hop, leader, of_position, counts.pairs, counts.tiles, stages)
    # A kernel takes either the queries that a rank keeps or those that it received, and likewise either kept or
    # received keys. Of the work inside the position, slot 0 has the rank's own rows and keys, slot ``home`` the rest.
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
    """Return the sums of rows of ``values`` over the ranks of each position, in the row of its first rank.

    Other rows are 0.
    """
    found = np.zeros_like(values)
    for member in range(int(seats.members.max())):
        of = np.flatnonzero(seats.member == member)
        found[seats.leader[of]] += values[of]
    return found
