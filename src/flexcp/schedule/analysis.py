"""Analysis: for each mask, what the ranks of a placement compute, read and move, and in how many stages.

This is for placements whose ``traffic.kind`` is ``"needed"`` (ranks receive exactly what they read). Making a plan
(:mod:`flexcp.schedule.transfers`) and predicting its time (:mod:`flexcp.schedule.predict`) both begin with this
analysis, so a prediction is about the plan that would be made. The steps, in this order:

- the (query, key) pairs of every rank (:mod:`~flexcp.schedule.work`)
- the pieces that it reads from others (:mod:`~flexcp.schedule.needs`)
- the way these pieces travel (:mod:`~flexcp.schedule.routes`)
- whether keys are kept for the backward
- for each direction, the bytes that move (:mod:`~flexcp.schedule.flows`) and the stages that hide them: equal stages
  (:mod:`~flexcp.schedule.stages`), stages with thin ends (:mod:`~flexcp.schedule.thin_ends`), a stage inside nodes
  first (:mod:`~flexcp.schedule.inside_first`), or all inputs posted first (:mod:`~flexcp.schedule.inputs_first`).

Keys (and their values) are kept for whole masks, in the order of masks: a mask's keys are kept only if what every rank
receives in all layers of the mask fits into the memory that is left. So all ranks decide the same. If a placement's
tokens are so scattered that they must be assembled first (``assemble_own``), keys always travel again.

Keys that are relayed inside a node cross nodes only once, but the relay needs a stage of its own. If a placement may
relay, it is analysed with and without relays, as if keys travelled again in the backward, and relays are used if the
time under contention is clearly shorter with them (contention: transfers slow down the work beside them).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.plan.placement import Placement, Regions
from flexcp.schedule.flows import Moves, needed_moves
from flexcp.schedule.inputs_first import inputs_first
from flexcp.schedule.inside_first import inside_first, node_times, node_work
from flexcp.schedule.needs import needed_pieces
from flexcp.schedule.routes import Needs, kept_bytes, route_keys
from flexcp.schedule.stages import (
    MANY_PEERS,
    PARTS,
    Stages,
    choose_stages,
    exchange_times,
    faster_way,
    find_peers,
    worth_simulating,
)
from flexcp.schedule.thin_ends import well_hidden, with_thin_ends
from flexcp.schedule.work import Cuts, Pairs, Work, count_pairs, cut_regions, pass_work_ns
from flexcp.shape import Shape

FLATTERED_PERMILLE = 1012
"""Stages with ``inside_first`` are chosen if their time is at most this, per mille of the time of the other stages.

It is above 1000 because predictions flatter the other stages: these have transfers inside nodes beside most of their
work, and the event simulator finds them this much slower than predicted here.
"""
FLATTERED_GRADIENTS_PERMILLE = 1060
"""A backward whose inputs are all posted first is chosen up to this time, per mille of the time of other stages.

Predictions flatter the others: there ranks wait for each other's gradients more often than predicted here.
"""
FLATTERED_RELAYS_PERMILLE = 1100
"""Keys are relayed if their time without relays is more than this, per mille of their time with relays.

It is above 1000 because predictions flatter relays: these couple the ranks of a node in every stage, and the event
simulator finds passes with relays this much slower than predicted here, compared with passes without them.
"""


class PassAnalysis(NamedTuple):
    """One direction of a mask: the work of each rank in nanoseconds, what moves, and the stages in which it moves."""

    work: Work
    moves: Moves
    stages: Stages


class MaskAnalysis(NamedTuple):
    """The analysis of one mask: what ranks read from others, whether they keep it, and both directions.

    If ``keys_kept``, ranks keep received keys and values from the forward to the backward, so that they do not travel
    again.
    """

    needs: Needs
    keys_kept: bool
    forward: PassAnalysis
    backward: PassAnalysis


def analyse(
    placement: Placement, shape: Shape, cluster: Cluster, cost: CostModel, keep_kv: int = 0, most_ahead: int = 2
) -> list[MaskAnalysis]:
    """Return the analysis of every mask of the batch, in order; ``placement.traffic.kind`` must be ``"needed"``.

    ``keep_kv`` is how many bytes of received keys and values a rank may keep for the backward, over all layers.
    ``most_ahead`` is the most slots by which the messages of a stage may be posted before the slot that waits for them;
    if it is more than 1, all inputs may be posted in the first slot.
    """
    relay = placement.traffic.relay and not placement.assemble_own
    left = np.full(placement.ranks, 0 if placement.assemble_own else keep_kv, np.int64)
    found = []
    for mask, regions in zip(placement.batch.masks, placement.regions, strict=True):
        cuts = cut_regions(placement, mask, regions)
        pairs = count_pairs(placement, regions, cuts)
        work = pass_work_ns(placement, regions, pairs, shape, cluster, cost)
        q, keys = needed_pieces(placement, shape, regions, cuts, pairs)
        known = (placement, shape, cluster, cost, most_ahead, (regions, cuts, pairs))
        one = _staged(Needs(q, route_keys(keys, shape, cluster, relay)), work, False, *known)
        if len(one.needs.keys.relays):
            straight = _staged(Needs(q, route_keys(keys, shape, cluster, False)), work, False, *known)
            if _contended_ns(straight) * 1000 <= _contended_ns(one) * FLATTERED_RELAYS_PERMILLE:
                one = straight
        if left.any():
            spent = mask.layers * kept_bytes(one.needs.keys, shape, cluster)
            if spent.any() and (spent <= left).all():
                left = left - spent
                one = _staged(one.needs, work, True, *known)
        found.append(one)
    return found


def _staged(
    needs: Needs,
    work: tuple[Work, Work],
    keys_kept: bool,
    placement: Placement,
    shape: Shape,
    cluster: Cluster,
    cost: CostModel,
    most_ahead: int,
    counted: tuple[Regions, Cuts, Pairs],
) -> MaskAnalysis:
    """Return the analysis of a mask for given routes (``needs``): what moves, and the stages that hide it.

    ``work`` is the work of the forward and the backward in nanoseconds. ``keys_kept`` says that received keys and
    values are kept for the backward. ``most_ahead`` is as in :func:`analyse`; ``counted`` are the mask's regions, their
    slices and the counts of their (query, key) pairs.
    """
    moves = needed_moves(shape, needs, keys_kept)
    # Latents travel before all work (flexcp.schedule.execution), and on one node links are so fast that equal stages
    # are good enough.
    other_ways = shape.latent is None and cluster.nodes > 1 and placement.wishes.divisions is None
    may_be_early = most_ahead > 1 and other_ways
    other_ways = other_ways and not keys_kept and not placement.assemble_own
    of_nodes = node_work(needs, placement, *counted, cluster, cost) if other_ways else None
    rest_of_layer = np.zeros_like(placement.tokens)
    if not cost.attention_alone(shape):  # otherwise all ranks begin attention together
        rest_of_layer = cost.linear_ns(placement.tokens, shape, cluster) // 3
    passes: list[PassAnalysis] = []
    for backward in (False, True):
        kept = passes[0].stages if keys_kept and backward else None
        times, peers = exchange_times(moves[backward], cluster, cost), find_peers(moves[backward], cluster)
        stages = choose_stages(placement, needs, work[backward], times, peers, cluster, kept)
        if cluster.nodes > 1 and not keys_kept and not placement.assemble_own:
            before = rest_of_layer * (1 + backward)
            known = (cluster, cost, backward, before)
            thin = may_be_early and (of_nodes is None or len(peers.source) <= MANY_PEERS)
            stages = with_thin_ends(stages, needs, work[backward], times, peers, *known, thin)
            if of_nodes is not None and not well_hidden(stages, work[backward], before):
                found = node_times(of_nodes, moves[backward], shape, cluster, cost, backward)
                if of_nodes.inside:
                    another = inside_first(found, work[backward], peers, cost, backward, before)
                    stages = faster_way(stages, another, FLATTERED_PERMILLE)
                if may_be_early and (of_nodes.near < PARTS).any():
                    up_to = FLATTERED_GRADIENTS_PERMILLE if backward else 1000
                    stages = faster_way(stages, inputs_first(found, work[backward], peers, *known), up_to)
        passes.append(PassAnalysis(work[backward], moves[backward], stages))
    return MaskAnalysis(needs, keys_kept, *passes)


def in_other_stages(masks: list[MaskAnalysis], backward: bool) -> list[MaskAnalysis] | None:
    """Return the analysis of all masks with the stages of one direction replaced, where other stages might be faster.

    Return None if there is no such mask. Other stages are those that :func:`flexcp.schedule.stages.worth_simulating`
    finds; masks for which it finds none stay as they are.
    """
    passes = [found.backward if backward else found.forward for found in masks]
    others = [worth_simulating(one.stages) for one in passes]
    if not any(others):
        return None
    found = []
    for mask, one, other in zip(masks, passes, others, strict=True):
        cut = one._replace(stages=other) if other else one
        found.append(mask._replace(backward=cut) if backward else mask._replace(forward=cut))
    return found


def _contended_ns(found: MaskAnalysis) -> int:
    """Return the nanoseconds of the slowest rank under contention, forward plus backward."""
    return found.forward.stages.contended_ns + found.backward.stages.contended_ns
