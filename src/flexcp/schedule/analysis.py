"""Analysis: what a placement with needed traffic computes, reads, moves and in how many stages, mask by mask.

Whoever writes such a placement's transfers (:mod:`flexcp.schedule.transfers`) and whoever predicts how long it takes
(:mod:`flexcp.schedule.predict`) begin here, so a prediction is one of the plan that would be made. The order is that of the modules: the
pairs of every rank (:mod:`~flexcp.schedule.work`), the pieces it reads of others (:mod:`~flexcp.schedule.needs`), the way they travel
(:mod:`~flexcp.schedule.routes`), whether keys are kept for the backward, and for each direction the bytes (:mod:`~flexcp.schedule.flows`)
and the stages that hide them (:mod:`~flexcp.schedule.stages`).

Keys are kept mask by mask, in order, all or nothing: only when what every rank receives in all of a mask's layers fits what is left. All
ranks find the same answer. Tokens so scattered that they are assembled always travel again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.plan.placement import Placement
from flexcp.schedule.flows import Moves, needed_moves
from flexcp.schedule.needs import needed_pieces
from flexcp.schedule.routes import Needs, kept_bytes, route_keys
from flexcp.schedule.stages import Stages, choose_stages
from flexcp.schedule.work import Work, count_pairs, cut_regions, pass_work_ns
from flexcp.shape import Shape


class PassAnalysis(NamedTuple):
    """One direction: the work of each rank in nanoseconds, what moves, and in which stages."""

    work: Work
    moves: Moves
    stages: Stages


class MaskAnalysis(NamedTuple):
    """One mask: what ranks read of others, whether they keep the keys of it for the backward, both directions."""

    needs: Needs
    keys_kept: bool
    forward: PassAnalysis
    backward: PassAnalysis


def analyse(
    placement: Placement, shape: Shape, cluster: Cluster, cost: CostModel, keep_kv: int = 0
) -> list[MaskAnalysis]:
    """The analysis of every mask; a rank may keep ``keep_kv`` bytes of received keys for the backward, all layers together."""
    relay = placement.traffic.relay and not placement.assemble_own
    left = np.full(placement.ranks, 0 if placement.assemble_own else keep_kv, np.int64)
    found = []
    for mask, regions in zip(placement.batch.masks, placement.regions, strict=True):
        cuts = cut_regions(placement, mask, regions)
        pairs = count_pairs(placement, regions, cuts)
        work = pass_work_ns(placement, regions, pairs, shape, cluster, cost)
        q, keys = needed_pieces(placement, shape, regions, cuts, pairs)
        needs = Needs(q, route_keys(keys, shape, cluster, relay))
        keys_kept = False
        if left.any():
            spent = mask.layers * kept_bytes(needs.keys, shape, cluster)
            keys_kept = bool(spent.any() and (spent <= left).all())
            left = left - spent * keys_kept
        moves = needed_moves(shape, needs, keys_kept)
        first = choose_stages(placement, needs, work[0], moves[0], cluster, cost)
        second = choose_stages(placement, needs, work[1], moves[1], cluster, cost, first if keys_kept else None)
        forward, backward = PassAnalysis(work[0], moves[0], first), PassAnalysis(work[1], moves[1], second)
        found.append(MaskAnalysis(needs, keys_kept, forward, backward))
    return found
