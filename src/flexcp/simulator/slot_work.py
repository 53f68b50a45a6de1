"""Slot work: how much every rank computes in every slot of a program.

In slot s a rank waits for the messages of stage s, posts messages of later stages, and computes. The slot in which work
runs is given by the executor's rule (:mod:`flexcp.plan.slots`). (Query, key) pairs are counted exactly, by cutting the
regions along what arrives in each stage. Every pass over a region costs its row tiles (a pass over a rank's own keys
those of its own rows), and every kernel costs its start. :mod:`flexcp.schedule.work` computes the same in closed form.

This makes as many parts as there are combinations of regions and the pieces they see. A ring has very many, so it is
counted by position instead (:mod:`flexcp.simulator.ring_work`); the numbers are the same.
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
    """What ranks compute, in tables ``[rank, slot]``: ``pairs`` is (query, key) pairs x query heads.

    ``work`` is the same including row tiles, and ``kernels`` the number of kernels started.
    """

    work: Ints
    pairs: Ints
    kernels: Ints


class _Held(NamedTuple):
    """What ranks hold of queries or keys, as :mod:`flexcp.simulator.compiled_cuts` reads it.

    ``segments`` are ranges of the stream, each with the slot from which on it is there and with its shelf. Shelf 0 has
    a rank's own tokens; pieces that arrive in one stage for the same heads share a shelf. ``first`` is the first
    segment of each head range and rank, ``heads`` are the query heads of each head range.
    """

    segments: Ints
    first: Ints
    heads: Ints


@dataclass(frozen=True, eq=False)
class MaskWork:
    """What counting needs in both directions of a mask: its ring, or its regions cut by their slices.

    Each is computed when it is first used.
    """

    plan: Plan
    mask: int

    @cached_property
    def ring(self) -> RingCounts | None:
        """The pairs between the positions of a ring, or None if the placement is not that of a ring."""
        return count_ring(self.plan, self.mask)

    @cached_property
    def cuts(self) -> tuple[Ints, Ints, Ints]:
        """(Region of each cut, its slice in stream coordinates, the table of regions that compiled loops read).

        A cut is the non-empty intersection of a region and a slice of the mask. The table has the rows rank, first
        head, end of heads, price of all row tiles, first row of the stream, and end of rows.
        """
        placement = self.plan.placement
        regions = placement.regions[self.mask]
        layer = placement.batch.masks[self.mask]
        index, slices = layer.cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
        starts = placement.batch.starts
        begin = starts[regions.document[index]]
        tiles = self.plan.cost.row_tiles_work(regions.q1 - regions.q0)
        rows = (starts[regions.document] + column for column in (regions.q0, regions.q1))
        return index, shift(slices, begin, begin), np.stack([regions.rank, regions.h0, regions.h1, tiles, *rows])


def slot_work(
    plan: Plan, mask: int, backward: bool, shared: MaskWork | None = None, inputs: Transfers | None = None
) -> SlotWork:
    """Return the work of a mask's program in one direction, in every slot of every rank.

    ``shared`` (for both directions of the mask) and ``inputs`` (:func:`flexcp.plan.slots.pass_inputs`) are computed if
    the caller does not have them.
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
    """Return the work of any program, counted by cutting every region along what arrives.

    ``shared`` and ``inputs`` are as in :func:`slot_work`.
    """
    from flexcp.simulator import compiled_cuts as loops  # compiled: only simulations need Numba

    shape, ranks, slots = plan.shape, plan.ranks, program.stages
    index, slices, table = (shared or MaskWork(plan, mask)).cuts
    if inputs is None:
        inputs = pass_inputs(plan, mask, program is plan.programs[mask][1])
    queries, keys = (_held(plan, program, inputs, kind) for kind in (Kind.Q, Kind.KV))
    shelves = 1 + max(int(held.segments[loops.SHELF].max(initial=0)) for held in (queries, keys))
    sizes = np.array([ranks, slots, shape.heads, shelves, plan.cost.row_tile_pairs], np.int64)
    # Contiguous, so that the loop is compiled for one memory layout only.
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
    """Return the time of every slot in nanoseconds, ``[rank, slot]``, including the start of each kernel."""
    ns = cost.attention_ns(found.work.T, plan.shape, plan.cluster, backward).T
    return np.asarray(ns + cost.kernel_ns * found.kernels)


# --- regions cut along what arrives -----------------------------------------------------------------------------------


def _held(plan: Plan, program: Program, inputs: Transfers, kind: Kind) -> _Held:
    """Return what ranks hold of queries or keys (``kind``): their own tokens, and pieces that arrive or were kept."""
    from flexcp.simulator.compiled_held import lay_segments  # compiled: only simulations need Numba

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
    """Return (the distinct labels in ascending order, the number of each among them); labels are small integers."""
    found = np.flatnonzero(np.bincount(labels))
    number = np.zeros(int(labels.max(initial=0)) + 1, np.int64)
    number[found] = np.arange(len(found))
    return found, number[labels]


def _last_inputs(inputs: Transfers, ranks: int) -> Ints:
    """Return the stage of each rank's last input, 0 for a rank without inputs."""
    last = np.zeros(ranks, np.int64)
    np.maximum.at(last, inputs.target, inputs.stage)
    return last


# --- a gather -------------------------------------------------------------------------------------------------------


def _gathered(plan: Plan, mask: int, program: Program) -> SlotWork:
    """Return the work of a gather: own work in slot 0, all other work in slot 1.

    A gather brings all other keys in one stage.
    """
    found = []
    for columns in _own_and_rest(plan, mask):
        total = np.zeros((plan.ranks, program.stages), np.int64)
        total[:, : len(columns)] = np.stack(columns[: program.stages], axis=1)
        found.append(total)
    return SlotWork(found[0], found[1], (found[1] > 0).astype(np.int64))


def _own_and_rest(plan: Plan, mask: int) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """Return ((own work, other work), (own pairs, other pairs)) of each rank.

    All are in (query, key) pairs x query heads; work includes row tiles. Own work is on the rank's own rows and keys.
    """
    placement = plan.placement
    regions = placement.regions[mask]
    pairs = count_static_pairs(placement, placement.batch.masks[mask], regions, rings_of(placement))
    # Regions without pairs cost nothing here, although ``rank_work`` counts their row tiles.
    some = pairs.all > 0
    regions, pairs = regions.take(some), Pairs(*(column[some] for column in pairs[:3]))
    heads = regions.h1 - regions.h0
    own, rest, *_ = rank_work(placement, regions, pairs, plan.cost)
    counts = pairs.own, pairs.all - pairs.own
    own_pairs, rest_pairs = (sums(regions.rank, count * heads, plan.ranks) for count in counts)
    return (own, rest), (own_pairs, rest_pairs)
