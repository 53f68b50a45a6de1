"""Slot work: how long every rank computes in every slot of a program.

In which slot work runs is the executor's rule (:mod:`flexcp.plan.slots`). Pairs are counted exactly, by cutting the regions along what
arrives in each stage; every pass over a region pays for its row tiles, every slot with work for the start of a kernel
(:mod:`flexcp.schedule.work` says the same in closed form).

That takes as many parts as regions see pieces. A ring has very many of both, and is counted by its rule instead
(:mod:`flexcp.simulator.ring_work`); the numbers are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import overlaps
from flexcp.arrays.totals import sums
from flexcp.cost import CostModel
from flexcp.masks import K0, K1, Q0, Q1, area, is_empty, shift, trim
from flexcp.plan.plan import Plan
from flexcp.plan.program import Program
from flexcp.plan.slots import held_slot, pass_inputs, work_slot
from flexcp.schedule.rings import count_static_pairs, rings_of
from flexcp.schedule.work import Pairs, rank_work
from flexcp.shape import Kind
from flexcp.simulator.ring_counts import RingCounts, count_ring
from flexcp.simulator.ring_work import find_slots, ring_slot_work

Ints = NDArray[np.int64]


class SlotWork(NamedTuple):
    """``[rank, slot]``: pairs x query heads with the price of row tiles, the same without it, kernels started."""

    work: Ints
    pairs: Ints
    kernels: Ints


class _Segments(NamedTuple):
    """What each rank holds of one side: stream ranges with a head range, the slot from which on they are there, and their shelf.

    Shelf 0 is a rank's own tokens; what arrives together is on one.
    """

    rank: Ints
    start: Ints
    stop: Ints
    h0: Ints
    h1: Ints
    slot: Ints
    shelf: Ints


class _Parts(NamedTuple):
    """Slices of regions (in stream coordinates) for query heads ``h0..h1``; the slot in which they can run, shelves of queries and keys."""

    region: Ints
    slices: Ints
    h0: Ints
    h1: Ints
    slot: Ints
    q_shelf: Ints
    k_shelf: Ints


def slot_work(plan: Plan, mask: int, backward: bool, ring: RingCounts | None = None) -> SlotWork:
    """The work of a mask's program in one direction; ``ring`` is :func:`count_ring` of that mask, where it is at hand."""
    program, placement = plan.programs[mask][backward], plan.placement
    ring = ring or count_ring(plan, mask)
    slots = find_slots(plan, mask, backward, ring.seats) if ring else None
    if ring and slots:
        return SlotWork(*ring_slot_work(ring, slots, program.stages))
    if placement.traffic.kind == "gather" and not placement.assemble_own:
        return _gathered(plan, mask, program)
    return cut_work(plan, mask, program)


def cut_work(plan: Plan, mask: int, program: Program) -> SlotWork:
    """The work of any program, with every region cut along what arrives."""
    return _summed(plan, mask, program, _parts(plan, mask, program))


def slot_ns(found: SlotWork, plan: Plan, cost: CostModel, backward: bool) -> Ints:
    """``[rank, slot]`` nanoseconds, with the start of each kernel."""
    ns = cost.attention_ns(found.work.T, plan.shape, plan.cluster, backward).T
    return np.asarray(ns + cost.kernel_ns * found.kernels)


# --- exactly -----------------------------------------------------------------------------------------------------------


def _parts(plan: Plan, mask: int, program: Program) -> _Parts:
    """The regions cut by what arrives when."""
    placement, share = plan.placement, plan.shape.queries_per_key
    regions = placement.regions[mask]
    index, slices = placement.batch.masks[mask].cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
    begin = placement.batch.starts[regions.document[index]]
    now = np.zeros_like(index)
    parts = _Parts(index, shift(slices, begin, begin), regions.h0[index], regions.h1[index], now, now, now)
    for kind, each in ((Kind.Q, 1), (Kind.KV, share)):
        parts = _cut(parts, regions.rank, _held(plan, mask, program, kind), kind, each, placement.stream)
    return parts


def _held(plan: Plan, mask: int, program: Program, kind: Kind) -> _Segments:
    """What ranks hold of queries or keys: their own tokens, and what arrives or was kept."""
    placement, t = plan.placement, pass_inputs(plan, mask, program is plan.programs[mask][1])
    kept = placement.kept
    t = t.take(t.kind == kind)
    # Pieces name tokens in kept order: one axis for all owners, on which runs lie in order.
    span = placement.stream + 1
    order = np.lexsort((kept.local, kept.rank))
    start, stop, owner, local = (column[order] for column in kept)
    base = owner * span + local
    piece, run = overlaps(t.owner * span + t.start, t.owner * span + t.stop, base, base + stop - start)
    first = np.maximum(t.start[piece], local[run]) - local[run] + start[run]
    last = np.minimum(t.stop[piece], local[run] + (stop - start)[run]) - local[run] + start[run]
    stage = t.stage[piece]
    h0, h1, heads = t.h0[piece], t.h1[piece], plan.shape.heads + 1
    shelf = 1 + (stage * heads + h0) * heads + h1
    arrived = (t.target[piece], first, last, h0, h1, stage, shelf)
    if placement.assemble_own:
        return _Segments(*arrived)
    everything = plan.shape.heads if kind == Kind.Q else plan.shape.kv_heads
    count = len(kept.rank)
    numbers = (_full(count, x) for x in (0, everything, program.own_stage, 0))
    own = (kept.rank, kept.start, kept.stop, *numbers)
    return _Segments(*(np.concatenate(pair) for pair in zip(own, arrived, strict=True)))


def _full(count: int, value: int) -> Ints:
    return np.full(count, value, np.int64)


def _cut(parts: _Parts, rank_of: Ints, held: _Segments, kind: Kind, share: int, stream: int) -> _Parts:
    """The parts cut along one side by what their ranks hold, head range by head range."""
    first, last = (Q0, Q1) if kind == Kind.Q else (K0, K1)
    span = stream + 1
    found: list[_Parts] = [_Parts(*(column[:0] for column in parts))]
    for h0, h1 in np.unique(np.stack([held.h0, held.h1]), axis=1).T.tolist():
        of = np.flatnonzero((held.h0 == h0) & (held.h1 == h1))
        of = of[np.lexsort((held.start[of], held.rank[of]))]
        low, high = np.maximum(parts.h0, h0 * share), np.minimum(parts.h1, h1 * share)
        chosen = np.flatnonzero(low < high)
        slices, base = parts.slices[chosen], rank_of[parts.region[chosen]] * span
        at = held.rank[of] * span
        index, segment = overlaps(
            base + slices[:, first], base + slices[:, last], at + held.start[of], at + held.stop[of]
        )
        inside = slices[index]
        inside[:, first] = np.maximum(inside[:, first], held.start[of][segment])
        inside[:, last] = np.minimum(inside[:, last], held.stop[of][segment])
        inside = trim(inside)
        keep = ~is_empty(inside)
        index, segment = chosen[index[keep]], of[segment[keep]]
        slot, shelf = work_slot(parts.slot[index], held.slot[segment]), held.shelf[segment]
        shelves = (shelf, parts.k_shelf[index]) if kind == Kind.Q else (parts.q_shelf[index], shelf)
        found.append(_Parts(parts.region[index], inside[keep], low[index], high[index], slot, *shelves))
    return _Parts(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _summed(plan: Plan, mask: int, program: Program, parts: _Parts) -> SlotWork:
    """Pairs, row tiles and kernels by rank and slot; a share of the own work waits."""
    ranks, slots = plan.ranks, program.stages
    regions = plan.placement.regions[mask]
    own = (parts.q_shelf == 0) & (parts.k_shelf == 0)
    # A pass is a region in a slot (own work apart) for some heads: its row tiles count once.
    key = ((parts.region * slots + parts.slot) * 2 + own) * (plan.shape.heads + 1) + parts.h0
    _, first, of = np.unique(key, return_index=True, return_inverse=True)
    heads = parts.h1 - parts.h0
    pairs = sums(of, area(parts.slices) * heads, len(first))
    region = parts.region[first]
    tiles = plan.cost.row_tiles_work((regions.q1 - regions.q0)[region]) * heads[first]
    rank = regions.rank[region]
    at = rank * slots + parts.slot[first]
    kernels = _kernels(plan, mask, slots, parts)
    found = []
    for amount in (pairs + tiles, pairs):
        total = sums(at, amount, ranks * slots).reshape(ranks, slots)
        if program.held:
            moved = sums(rank, amount * own[first], ranks) * np.array(program.held, np.int64) // 1000
            later = held_slot(program, _last_inputs(plan, mask, program))
            total[:, program.own_stage] -= moved
            total[np.arange(ranks), later] += moved
        found.append(total)
    if program.held:
        kernels[np.arange(ranks), later] += moved > 0
    return SlotWork(found[0], found[1], kernels)


def _kernels(plan: Plan, mask: int, slots: int, parts: _Parts) -> Ints:
    """Launches: one for each pair of a query and a key shelf and head range that have work together, as in the executor."""
    rank = plan.placement.regions[mask].rank[parts.region]
    launch = np.unique(np.stack([rank, parts.slot, parts.q_shelf, parts.k_shelf, parts.h0, parts.h1]), axis=1)
    at = launch[0] * slots + launch[1]
    return sums(at, np.ones_like(at), plan.ranks * slots).reshape(plan.ranks, slots)


def _last_inputs(plan: Plan, mask: int, program: Program) -> Ints:
    """The stage of each rank's last input, 0 for a rank without any."""
    t = pass_inputs(plan, mask, program is plan.programs[mask][1])
    last = np.zeros(plan.ranks, np.int64)
    np.maximum.at(last, t.target, t.stage)
    return last


# --- a gather -------------------------------------------------------------------------------------------------------


def _gathered(plan: Plan, mask: int, program: Program) -> SlotWork:
    """All other keys come in one stage, so own work and the rest are all there is to count."""
    found = []
    for columns in _own_and_rest(plan, mask):
        total = np.zeros((plan.ranks, program.stages), np.int64)
        total[:, : len(columns)] = np.stack(columns[: program.stages], axis=1)
        found.append(total)
    return SlotWork(found[0], found[1], (found[1] > 0).astype(np.int64))


def _own_and_rest(plan: Plan, mask: int) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """Work of each rank on keys at home and on others, with row tiles and without."""
    placement = plan.placement
    regions = placement.regions[mask]
    pairs = count_static_pairs(placement, placement.batch.masks[mask], regions, rings_of(placement))
    # A region without a pair is no work.
    some = pairs.all > 0
    regions, pairs = regions.take(some), Pairs(*(column[some] for column in pairs))
    heads = regions.h1 - regions.h0
    own, rest, _ = rank_work(placement, regions, pairs, plan.cost)
    counts = pairs.own, pairs.all - pairs.own
    own_pairs, rest_pairs = (sums(regions.rank, count * heads, plan.ranks) for count in counts)
    return (own, rest), (own_pairs, rest_pairs)
