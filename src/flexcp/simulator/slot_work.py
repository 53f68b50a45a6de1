"""Slot work: how long every rank computes in every slot of a program.

The same rule as the executor's: work of a region runs in the slot where the later of its queries and keys arrives, what is at home in the
program's own slot, but for the share of own work that the plan holds back until the slot after the last inputs. Pairs are counted
exactly, by cutting the regions along what arrives in each stage; every pass over a region pays for its row tiles, every slot with work for
the start of a kernel (:mod:`flexcp.work` says the same in closed form).

Rings of many ranks would be cut into too many parts. Beyond ``MOST_PARTS`` a ring's work on others' keys is spread evenly over its hops,
which is exact for zig-zag under a causal mask.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.cost import CostModel
from flexcp.intervals import overlaps
from flexcp.masks import K0, K1, Q0, Q1, area, is_empty, shift, trim
from flexcp.pieces import Kind
from flexcp.plan import Placement, Plan, Program, Transfers, sums
from flexcp.work import count_pairs, rank_work, rings_of

Ints = NDArray[np.int64]
MOST_PARTS = 4_000_000


class SlotWork(NamedTuple):
    """``[rank, slot]``: pairs x query heads with the price of row tiles, the same without it, kernels started.

    ``exact`` is False where a ring was spread.
    """

    work: Ints
    pairs: Ints
    kernels: Ints
    exact: bool


class _Segments(NamedTuple):
    """What each rank holds of one side: stream ranges with a head range and the slot in which they are there."""

    rank: Ints
    start: Ints
    stop: Ints
    h0: Ints
    h1: Ints
    slot: Ints


class _Parts(NamedTuple):
    """Slices of regions (in stream coordinates) for query heads ``h0..h1``; the slots in which their queries and keys are there."""

    region: Ints
    slices: Ints
    h0: Ints
    h1: Ints
    q_slot: Ints
    k_slot: Ints


def slot_work(plan: Plan, mask: int, backward: bool) -> SlotWork:
    """The work of a mask's program in one direction."""
    program, placement = plan.programs[mask][backward], plan.placement
    if placement.traffic.kind == "ring" and _ring_parts(placement, mask, program) > MOST_PARTS:
        return _spread_ring(plan, mask, program)
    return _summed(plan, mask, program, _parts(plan, mask, program))


def slot_ns(found: SlotWork, plan: Plan, cost: CostModel, backward: bool) -> Ints:
    """``[rank, slot]`` nanoseconds, with the start of each kernel."""
    shape, cluster = plan.shape, plan.cluster
    columns = [cost.attention_ns(found.work[:, s], shape, cluster, backward) for s in range(found.work.shape[1])]
    return np.stack(columns, axis=1) + cost.kernel_ns * found.kernels


# --- exactly -----------------------------------------------------------------------------------------------------------


def _parts(plan: Plan, mask: int, program: Program) -> _Parts:
    """The regions cut by what arrives when."""
    placement, share = plan.placement, plan.shape.queries_per_key
    regions = placement.regions[mask]
    index, slices = placement.batch.masks[mask].cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
    begin = placement.batch.starts[regions.document[index]]
    now = np.zeros_like(index)
    parts = _Parts(index, shift(slices, begin, begin), regions.h0[index], regions.h1[index], now, now)
    for kind, each in ((Kind.Q, 1), (Kind.KV, share)):
        parts = _cut(parts, regions.rank, _held(plan, mask, program, kind), kind, each, placement.stream)
    return parts


def _held(plan: Plan, mask: int, program: Program, kind: Kind) -> _Segments:
    """What ranks hold of queries or keys: their own tokens, and what arrives or was kept."""
    placement, t = plan.placement, plan.inputs(mask, program is plan.programs[mask][1])
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
    arrived = (t.target[piece], first, last, t.h0[piece], t.h1[piece], t.stage[piece])
    if placement.assemble_own:
        return _Segments(*arrived)
    everything = plan.shape.heads if kind == Kind.Q else plan.shape.kv_heads
    count = len(kept.rank)
    own = (kept.rank, kept.start, kept.stop, _full(count, 0), _full(count, everything), _full(count, program.own_stage))
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
        index, slot = chosen[index[keep]], held.slot[of][segment[keep]]
        slots = (slot, parts.k_slot[index]) if kind == Kind.Q else (parts.q_slot[index], slot)
        found.append(_Parts(parts.region[index], inside[keep], low[index], high[index], *slots))
    return _Parts(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _summed(plan: Plan, mask: int, program: Program, parts: _Parts) -> SlotWork:
    """Pairs, row tiles and kernels by rank and slot; a share of the own work waits."""
    ranks, slots = plan.ranks, program.stages
    regions = plan.placement.regions[mask]
    slot = np.maximum(parts.q_slot, parts.k_slot)
    # A pass is a region in a slot for some heads: its row tiles count once.
    heads = parts.h1 - parts.h0
    pass_heads = plan.shape.heads + 1
    _, first, of = np.unique(
        (parts.region * slots + slot) * pass_heads + parts.h0, return_index=True, return_inverse=True
    )
    pairs = sums(of, area(parts.slices) * heads, len(first))
    region, slot, heads = parts.region[first], slot[first], heads[first]
    tiles = plan.cost.row_tiles_work((regions.q1 - regions.q0)[region]) * heads
    at = regions.rank[region] * slots + slot
    kernels = _kernels(plan, mask, slots, parts)
    found = []
    for amount in (pairs + tiles, pairs):
        total = sums(at, amount, ranks * slots).reshape(ranks, slots)
        found.append(total)
    if program.held:
        inputs = plan.inputs(mask, program is plan.programs[mask][1])
        later = _slot_after_inputs(inputs, program.keys_kept, ranks, slots)
        share = np.array(program.held, np.int64)
        kernels[np.arange(ranks), later] += (found[1][:, 0] > 0) & (share > 0)
        own = [total[:, 0] for total in found]
        if program.keys_kept:  # work on kept keys is in the first slot too, and does not wait
            counted = count_pairs(plan.placement, plan.batch.masks[mask], regions, rings_of(plan.placement))
            own[0] = np.minimum(own[0], rank_work(plan.placement, regions, counted, plan.cost).own)
            own[1] = sums(regions.rank, counted.own * (regions.h1 - regions.h0), ranks)
        for total, amount in zip(found, own, strict=True):
            moved = amount * share // 1000
            total[:, 0] -= moved
            total[np.arange(ranks), later] += moved
    return SlotWork(found[0], found[1], kernels, True)


def _kernels(plan: Plan, mask: int, slots: int, parts: _Parts) -> Ints:
    """Launches: one for each pair of a query and a key shelf and head range that have work together, as in the executor."""
    rank = plan.placement.regions[mask].rank[parts.region]
    heads = plan.shape.heads + 1
    shelves = (parts.q_slot * slots + parts.k_slot) * heads**2 + parts.h0 * heads + parts.h1
    launch = np.unique(rank * (slots**2 * heads**2) + shelves)
    rank, shelves = np.divmod(launch, slots**2 * heads**2)
    slot = np.maximum(shelves // heads**2 // slots, shelves // heads**2 % slots)
    return sums(rank * slots + slot, np.ones_like(rank), plan.ranks * slots).reshape(plan.ranks, slots)


def _slot_after_inputs(inputs: Transfers, keys_kept: bool, ranks: int, slots: int) -> Ints:
    """The slot in which held work runs."""
    last = np.full(ranks, 0 if keys_kept else 1, np.int64)
    np.maximum.at(last, inputs.target, inputs.stage)
    return np.minimum(last + 1, slots - 1)


# --- a ring of many ----------------------------------------------------------------------------------------------------


def _ring_parts(placement: Placement, mask: int, program: Program) -> int:
    """About how many parts the exact way would make: what arrives, run by run, and regions against the runs of their documents."""
    runs = np.bincount(placement.runs.rank, minlength=placement.ranks)
    t = program.transfers
    arriving = int(runs[t.owner[t.kind == Kind.KV]].sum())
    document = placement.batch.document_of(placement.runs.start[placement.runs.start < placement.batch.tokens])
    of_document = np.bincount(document, minlength=placement.batch.documents)
    return arriving + int(of_document[placement.regions[mask].document].sum()) // 2


def _spread_ring(plan: Plan, mask: int, program: Program) -> SlotWork:
    placement = plan.placement
    rings = rings_of(placement)
    regions = placement.regions[mask]
    pairs = count_pairs(placement, placement.batch.masks[mask], regions, rings)
    heads = regions.h1 - regions.h0
    own, rest, _ = rank_work(placement, regions, pairs, plan.cost)
    own_pairs = sums(regions.rank, pairs.own * heads, plan.ranks)
    rest_pairs = sums(regions.rank, (pairs.all - pairs.own) * heads, plan.ranks)
    split = np.array([len(grid[0]) for grid in placement.traffic.groups for row in grid for _ in row], np.int64)
    ranks = np.array([rank for grid in placement.traffic.groups for row in grid for rank in row], np.int64)
    first = np.zeros(plan.ranks, np.int64)
    first[ranks] = (split > 1).astype(np.int64)  # heads are exchanged before anything can run
    slot = np.arange(program.stages, dtype=np.int64)
    hop = slot[None, :] - first[:, None]
    hops = np.maximum(rings.positions - 1, 1)[:, None]
    turning = (hop >= 1) & (hop <= hops) & (rings.positions > 1)[:, None]

    def placed(own: Ints, rest: Ints) -> Ints:
        each = np.where(turning, rest[:, None] * hop // hops - rest[:, None] * (hop - 1) // hops, 0)
        return np.where(hop == 0, own[:, None] + np.where(rings.positions == 1, rest, 0)[:, None], each)

    work = placed(own, rest)
    return SlotWork(work, placed(own_pairs, rest_pairs), (work > 0).astype(np.int64), False)
