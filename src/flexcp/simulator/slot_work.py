"""Slot work: how long every rank computes in every slot of a program.

In which slot work runs is the executor's rule (:mod:`flexcp.plan.slots`). Pairs are counted exactly, by cutting the
regions along what arrives in each stage; every pass over a region pays for its row tiles, every slot with work for the
start of a kernel (:mod:`flexcp.schedule.work` says the same in closed form).

That takes as many parts as regions see pieces. A ring has very many of both, and is counted by its rule instead
(:mod:`flexcp.simulator.ring_work`); the numbers are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.totals import sums
from flexcp.cost import CostModel
from flexcp.masks import shift
from flexcp.plan.plan import Plan
from flexcp.plan.program import Program, Transfers
from flexcp.plan.slots import held_slot, pass_inputs
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


class _Held(NamedTuple):
    """What ranks hold of one side, as :mod:`flexcp.simulator.compiled_cuts` reads it:
    segments, where each rank's begin, head ranges.

    Segments are stream ranges with the slot from which on they are there and their shelf. Shelf 0 is a rank's own
    tokens; what arrives together is on one.
    """

    segments: Ints
    first: Ints
    heads: Ints


@dataclass(frozen=True, eq=False)
class MaskWork:
    """What both directions of a mask count with, found when it is first asked for:
    its ring, or its regions cut by their slices.
    """

    plan: Plan
    mask: int

    @cached_property
    def ring(self) -> RingCounts | None:
        """What the positions of a ring see of each other; None where the placement is not that of a ring."""
        return count_ring(self.plan, self.mask)

    @cached_property
    def cuts(self) -> tuple[Ints, Ints, Ints]:
        """(region and slice of each non-empty cut, in stream coordinates; the table of regions
        that compiled loops read).
        """
        placement = self.plan.placement
        regions = placement.regions[self.mask]
        layer = placement.batch.masks[self.mask]
        index, slices = layer.cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
        begin = placement.batch.starts[regions.document[index]]
        tiles = self.plan.cost.row_tiles_work(regions.q1 - regions.q0)
        return index, shift(slices, begin, begin), np.stack([regions.rank, regions.h0, regions.h1, tiles])


def slot_work(
    plan: Plan, mask: int, backward: bool, shared: MaskWork | None = None, inputs: Transfers | None = None
) -> SlotWork:
    """The work of a mask's program in one direction; ``shared`` by both and :func:`pass_inputs`
    where they are at hand.
    """
    program, placement = plan.programs[mask][backward], plan.placement
    shared = shared or MaskWork(plan, mask)
    slots = find_slots(plan, mask, backward, shared.ring.seats, inputs) if shared.ring else None
    if shared.ring and slots:
        return SlotWork(*ring_slot_work(shared.ring, slots, program.stages))
    if placement.traffic.kind == "gather" and not placement.assemble_own:
        return _gathered(plan, mask, program)
    return cut_work(plan, mask, program, shared, inputs)


def cut_work(
    plan: Plan, mask: int, program: Program, shared: MaskWork | None = None, inputs: Transfers | None = None
) -> SlotWork:
    """The work of any program, with every region cut along what arrives."""
    from flexcp.simulator import compiled_cuts as loops  # compiled: only who simulates loads Numba

    shape, ranks, slots = plan.shape, plan.ranks, program.stages
    index, slices, table = (shared or MaskWork(plan, mask)).cuts
    if inputs is None:
        inputs = pass_inputs(plan, mask, program is plan.programs[mask][1])
    queries, keys = (_held(plan, program, inputs, kind) for kind in (Kind.Q, Kind.KV))
    shelves = 1 + max(int(held.segments[loops.SHELF].max(initial=0)) for held in (queries, keys))
    sizes = np.array([ranks, slots, shape.heads, shelves], np.int64)
    # Compiled for one layout in memory.
    held = [np.ascontiguousarray(x) for x in (*queries, *keys)]
    (pairs, tiles, own_pairs, own_tiles), kernels = loops.sum_parts(index, slices, table, *held, sizes)
    work = pairs + tiles
    if program.held:
        share, later = np.array(program.held, np.int64), held_slot(program, _last_inputs(inputs, ranks))
        for total, own in ((work, own_pairs + own_tiles), (pairs, own_pairs)):
            moved = own.sum(axis=1) * share // 1000
            total[:, program.own_stage] -= moved
            total[np.arange(ranks), later] += moved
        kernels[np.arange(ranks), later] += moved > 0
    return SlotWork(work, pairs, kernels)


def slot_ns(found: SlotWork, plan: Plan, cost: CostModel, backward: bool) -> Ints:
    """``[rank, slot]`` nanoseconds, with the start of each kernel."""
    ns = cost.attention_ns(found.work.T, plan.shape, plan.cluster, backward).T
    return np.asarray(ns + cost.kernel_ns * found.kernels)


# --- exactly ----------------------------------------------------------------------------------------------------------


def _held(plan: Plan, program: Program, inputs: Transfers, kind: Kind) -> _Held:
    """What ranks hold of queries or keys: their own tokens, and what arrives or was kept."""
    from flexcp.simulator.compiled_held import lay_segments  # compiled: only who simulates loads Numba

    placement = plan.placement
    which = np.flatnonzero(inputs.kind == kind)
    columns = (inputs.target, inputs.owner, inputs.start, inputs.stop, inputs.stage, inputs.h0, inputs.h1)
    *pieces, stage, h0, h1 = (column[which] for column in columns)
    heads, share = (plan.shape.heads, 1) if kind == Kind.Q else (plan.shape.kv_heads, plan.shape.queries_per_key)
    ranges, of = _numbered(np.append(h0 * (heads + 1) + h1, heads))
    shelves = _numbered(stage * len(ranges) + of[:-1])[1] + 1
    own_slot = -1 if placement.assemble_own else program.own_stage
    sizes = np.array([plan.ranks, len(ranges), of[-1], own_slot], np.int64)
    segments, first = lay_segments(*placement.kept, *pieces, stage, shelves, of[:-1], sizes)
    return _Held(segments, first, share * np.stack([ranges // (heads + 1), ranges % (heads + 1)], axis=1))


def _numbered(labels: Ints) -> tuple[Ints, Ints]:
    """(the labels there are, the number of each one's among them), for small labels."""
    found = np.flatnonzero(np.bincount(labels))
    number = np.zeros(int(labels.max(initial=0)) + 1, np.int64)
    number[found] = np.arange(len(found))
    return found, number[labels]


def _last_inputs(inputs: Transfers, ranks: int) -> Ints:
    """The stage of each rank's last input, 0 for a rank without any."""
    last = np.zeros(ranks, np.int64)
    np.maximum.at(last, inputs.target, inputs.stage)
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
    regions, pairs = regions.take(some), Pairs(*(column[some] for column in pairs[:3]))
    heads = regions.h1 - regions.h0
    own, rest, *_ = rank_work(placement, regions, pairs, plan.cost)
    counts = pairs.own, pairs.all - pairs.own
    own_pairs, rest_pairs = (sums(regions.rank, count * heads, plan.ranks) for count in counts)
    return (own, rest), (own_pairs, rest_pairs)
