"""Thin ends: a small stage, then a large one without transfers beside its work, and in the backward a small one again.

A kernel that leaves multiprocessors to transfers is slower all the time it runs, not only during the transfers; a
kernel that leaves none nearly stops until the transfers are done (:class:`flexcp.cost.Contention`). So transfers that
are short compared with the work beside them cost much more than their own time, and with equal stages
(:mod:`flexcp.schedule.stages`) every slot has some. Here they are beside little work:

    slot 0        own work, first share          | inputs 1
    slot 1        work on the small stage 1      | inputs 2 and 3
    slot 2        work on the large stage 2      |
    slot 3        work on the small stage 3      | gradients of the keys of stages 1 and 2
    slot 4        own work, second share         | gradients of the keys of stage 3, results for moved queries

The forward has no gradients and no stage 3. How thin an end should be depends on how long its transfers take compared
with the work. Several thicknesses around that are tried, for each rank separately or the same for all ranks that read
keys. Own work is held back in one of three ways: in proportion to what travels at the two ends, as much as hides the
last transfers, or all but what hides the first. The time of each combination is computed with contention and over all
ranks together, each beginning when the rest of its layer is done. The fastest is used if it is clearly faster than
equal stages.

Thin ends are not used on a single node, whose links are fast; if keys are relayed, which needs slots of its own; if
keys are kept for the backward or tokens are assembled first; with latents or stages that a planner wishes for; if
nothing may be posted two slots ahead; or if the busiest rank hardly waits with equal stages.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.plan.program import Program
from flexcp.schedule.execution import Posting
from flexcp.schedule.routes import Needs
from flexcp.schedule.stages import MOST_STAGES, PARTS, ExchangeTimes, Peers, Stages, slots_of
from flexcp.schedule.work import Work

Ints = NDArray[np.int64]
SHARES = (700, 950, 1250, 1600)
"""Thicknesses of an end to try, per mille of t / (t + w).

Here t is the time of the transfers beside the end and w the time of the work on all inputs.
"""
LEAST, MOST = PARTS // 50, PARTS // 2
"""The thinnest and the thickest end, in ``PARTS``."""
WORTH_PERMILLE = 990
"""Thin ends are used if their time is at most this, per mille of that of equal stages."""
NO_GAIN_PERMILLE = 1005
"""Other stages are not tried if equal stages take at most this, per mille of what the busiest rank computes."""


def well_hidden(stages: Stages, work: Work, rest_of_layer: Ints) -> bool:
    """Return whether no other stages can be clearly faster than these.

    That is so if the slowest rank takes hardly longer than the busiest one computes. ``work`` is in nanoseconds, and
    ``rest_of_layer`` is how many nanoseconds each rank computes before its attention begins.
    """
    return stages.contended_ns * 1000 <= int((rest_of_layer + work.own + work.rest).max()) * NO_GAIN_PERMILLE


def contention_table(cost: CostModel, backward: bool) -> Ints:
    """Return the costs of contention for compiled loops, ``[across, margin, 3]``: (slow, alone, link), all per mille.

    ``across`` is 1 for transfers that only cross nodes. A margin is a number of multiprocessors left to transfers; the
    axis has one entry for each margin of the cost model. The three values are explained in
    :func:`flexcp.schedule.execution.overlapped_ns`.
    """
    ways = [cost.rows_beside(across) for across in (False, True)]
    return np.array([[(*row.compute(backward), row.link) for row in way] for way in ways], np.int64)


def early_posting(stages: Stages, program: Program) -> Posting | None:
    """Return when the stages of a program with thin ends are posted, or None if its stages are posted as usual.

    The third stage is posted two slots before the slot that waits for it, all others one.
    """
    if not stages.thin_ends or stages.borders.shape[1] != 4 or program.stages < 4:
        return None
    ahead = np.ones(program.stages, np.int64)
    ahead[3] = 2
    return Posting(ahead, np.arange(program.stages) - ahead)


def with_thin_ends(
    even: Stages,
    needs: Needs,
    work: Work,
    times: ExchangeTimes,
    peers: Peers,
    cluster: Cluster,
    cost: CostModel,
    backward: bool,
    rest_of_layer: Ints,
    may_be_thin: bool = True,
) -> Stages:
    """Return stages with thin ends if they are allowed and clearly faster, else the equal stages ``even``.

    The result has its time under contention in ``contended_ns``, and stages that were not chosen in ``others``.
    ``rest_of_layer`` is how many nanoseconds each rank computes before its attention begins: ranks with more tokens
    begin later.
    """
    if len(needs.keys.direct) == 0 and len(needs.q) == 0:
        return even._replace(contended_ns=int((rest_of_layer + work.own + work.rest).max()))
    from flexcp.schedule.compiled_contention import (  # compiled: Numba is not needed if nothing moves
        ACROSS,
        BOTH,
        INSIDE,
        thinnest,
        together_ns,
    )

    rows = contention_table(cost, backward)
    # Inputs from the same node and from other nodes are in all stages; there are at most MOST_STAGES + 2 slots.
    inside, across = (_has_peers(peers, crosses, cluster.ranks) for crosses in (0, 1))
    levels = np.where(inside & across, BOTH, np.where(inside, INSIDE, ACROSS))
    known = (rest_of_layer, np.tile(levels, (MOST_STAGES + 2, 1)), rows, peers.source, peers.senders)
    equal_ns = int(together_ns(*slots_of(even.number, work, times, cluster), *known, 2))
    even = even._replace(contended_ns=equal_ns)
    if (
        well_hidden(even, work, rest_of_layer)
        or not may_be_thin
        or len(needs.keys.relays)
        or len(needs.keys.direct) == 0
    ):
        return even
    reads = np.zeros(cluster.ranks, bool)
    reads[needs.keys.direct.rank] = True
    count = 3 if backward else 2
    number = np.where(reads, count, 1)
    rest = work.rest + (number - 1) * work.again - work.at_keys
    limits = np.array([PARTS, LEAST, MOST, count], np.int64)
    exchanges = (times.there, times.back, times.home)
    found = thinnest(work.own, rest, work.at_keys, *exchanges, reads, limits, np.array(SHARES, np.int64), *known)
    thin = Stages(number, found[2], even.ns, found[1], thin_ends=True, contended_ns=int(found[0]))
    if thin.contended_ns * 1000 > equal_ns * WORTH_PERMILLE:
        return even._replace(others=(thin,))
    return thin._replace(others=(even,))


def _has_peers(peers: Peers, crosses: int, ranks: int) -> NDArray[np.bool_]:
    """Return whether each rank exchanges messages with ranks of its own node (``crosses`` 0) or of other nodes (1)."""
    found = np.zeros(ranks, bool)
    for end in (peers.source, peers.target):
        found[end[peers.crosses == crosses]] = True
    return found
