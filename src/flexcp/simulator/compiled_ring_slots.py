"""Loops of ring work: find from the transfers the slot in which the keys of each ring position arrive (compiled).

``seat`` has the rows of :class:`flexcp.simulator.ring_counts.Seats`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.jit import compiled
from flexcp.simulator.compiled_ring_runs import GROUP, LEADER, NUMBER

Ints = NDArray[np.int64]
QUERIES, KEYS = range(2)


@compiled
def find_ring_slots(
    stage: Ints,
    target: Ints,
    owner: Ints,
    start: Ints,
    stop: Ints,
    h0: Ints,
    h1: Ints,
    is_keys: Ints,
    tokens: Ints,
    seat: Ints,
    heads: Ints,
    stages: int,
) -> tuple[Ints, Ints, bool]:
    """Return (``hop[rank, position]``, ``home[rank]``, whether the inputs are those of a ring).

    ``hop`` is the stage in which a rank receives the keys of another position, or -1 if it receives none; ``home`` is
    the stage in which it receives queries and keys of its own position, or 0. The columns ``stage`` to ``is_keys`` are
    the inputs of a pass, and ``tokens[rank]`` is how many tokens a rank keeps. ``heads[QUERIES or KEYS, 0 or 1, rank]``
    are the first head that each rank must receive and the end (exclusive). In a ring, all that a rank receives of one
    position comes in one stage, each stage brings the keys of at most one other position, and these stages come after
    the one of the own position.
    """
    ranks = seat.shape[1]
    hop, home = np.full((ranks, seat[NUMBER].max() + 1), -1, np.int64), np.zeros(ranks, np.int64)
    there = np.zeros((2, ranks, ranks), np.uint8)
    for i in range(len(stage)):
        side, to, of = is_keys[i], target[i], owner[i]
        whole = start[i] == 0 and stop[i] == tokens[of] and h0[i] == heads[side, 0, to] and h1[i] == heads[side, 1, to]
        if not whole or there[side, to, of] == 1:
            return hop, home, False
        there[side, to, of] = 1
        if side == QUERIES:
            home[to] = stage[i]
        elif seat[LEADER, to] != seat[LEADER, of]:
            hop[to, seat[NUMBER, of]] = stage[i]
    for i in range(len(stage)):
        side, to, of = is_keys[i], target[i], owner[i]
        near = side == QUERIES or seat[LEADER, to] == seat[LEADER, of]
        if stage[i] != (home[to] if near else hop[to, seat[NUMBER, of]]):
            return hop, home, False
    used = np.full(stages, -1, np.int64)  # the last rank that receives a hop in each stage
    for to in range(ranks):
        for of in range(ranks):
            keeps = tokens[of] > 0 and to != of
            queries, keys = seat[LEADER, to] == seat[LEADER, of], seat[GROUP, to] == seat[GROUP, of]
            if there[QUERIES, to, of] != (keeps and queries) or there[KEYS, to, of] != (keeps and keys):
                return hop, home, False
        for position in range(hop.shape[1]):
            slot = hop[to, position]
            if slot >= 0:
                if slot <= home[to] or used[slot] == to:
                    return hop, home, False
                used[slot] = to
    return hop, home, True


@compiled
def lay_hops(hop: Ints, leader: Ints, of_position: Ints, of_rank: Ints, tiles: Ints, stages: int) -> Ints:
    """Return ``[count, rank, slot]`` of the work on the keys that hops bring; counts are pairs, row tiles and kernels.

    ``hop[rank, position]`` is the slot in which keys arrive (-1: none). ``of_position[leader, position]`` and
    ``of_rank[rank, position]`` are the pairs of a whole position's rows and of one rank's rows with the keys of each
    position; ``tiles[leader, position]`` are row tiles. A rank computes all rows of its position: one kernel takes the
    queries that it keeps, another the queries that it received.
    """
    ranks, positions = hop.shape
    found = np.zeros((3, ranks, stages), np.int64)
    for r in range(ranks):
        for p in range(positions):
            slot, all_rows, kept = hop[r, p], of_position[leader[r], p], of_rank[r, p]
            if slot >= 0:
                found[0, r, slot], found[1, r, slot] = all_rows, tiles[leader[r], p]
                found[2, r, slot] = (1 if kept > 0 else 0) + (1 if all_rows > kept else 0)
    return found
