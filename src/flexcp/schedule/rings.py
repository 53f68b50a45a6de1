"""Rings: the place of each rank in the groups of a static method, and the work that each hop of a ring brings.

A group is a grid ``[ring position][head group]`` of ranks. What the ranks of one ring position keep is at home on all
of them. Work on the keys of other positions comes hop by hop: :func:`count_static_pairs` counts its pairs and how many
hops bring some, and :func:`hop_work` counts it for every hop separately, for masks under which hops differ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import overlaps
from flexcp.arrays.totals import sums
from flexcp.batch import LayerMask
from flexcp.cost import CostModel
from flexcp.masks import K0, K1, area, cut
from flexcp.plan.placement import Placement, Regions
from flexcp.schedule.work import Cuts, Homes, Pairs, count_pairs, cut_regions, homes_of

Ints = NDArray[np.int64]
MOST_HOP_PARTS = 100_000
"""The most parts that :func:`hop_work` counts; counting so many takes about 30 ms."""


class Rings(NamedTuple):
    """The place of each rank in the groups of a static method.

    ``positions`` is the number of ring positions in its group, ``position`` and ``group`` are labels of its position
    and its group (their first ranks), ``number`` is the place of its position in the ring, and ``before`` is the rank
    that its keys come from. Keys go from each position to the next. Ranks of one position have each other's keys before
    the ring turns. If there are no rings, ``turn`` is False and every rank is a position of its own.
    """

    turn: bool
    positions: Ints
    position: Ints
    group: Ints
    number: Ints
    before: Ints


def rings_of(placement: Placement) -> Rings:
    """Return the place of each rank of a placement in its groups."""
    alone = np.arange(placement.ranks, dtype=np.int64)
    if placement.traffic.kind != "ring":
        return Rings(False, np.ones_like(alone), alone, alone, np.zeros_like(alone), alone)
    positions, position, group = np.ones_like(alone), alone.copy(), alone.copy()
    number, before = np.zeros_like(alone), alone.copy()
    for ranks in grids_by_shape(placement):
        positions[ranks] = ranks.shape[1]
        position[ranks] = ranks[:, :, :1]
        group[ranks] = ranks[:, :1, :1]
        number[ranks] = np.arange(ranks.shape[1])[:, None]
        before[ranks] = np.roll(ranks, 1, axis=1)
    return Rings(True, positions, position, group, number, before)


def grids_by_shape(placement: Placement) -> list[Ints]:
    """Return the groups' grids of ranks, ``[group, ring position, head group]``, one array for each shape of grid."""
    found: dict[tuple[int, int], list[tuple[tuple[int, ...], ...]]] = {}
    for grid in placement.traffic.groups:
        found.setdefault((len(grid), len(grid[0])), []).append(grid)
    return [np.array(grids, np.int64) for grids in found.values()]


def count_static_pairs(placement: Placement, mask: LayerMask, regions: Regions, rings: Rings) -> Pairs:
    """Return the (query, key) pairs of each region of a mask under a static method.

    Regions that differ only in their rank and heads are counted once.
    """
    first, same = _same_rows(placement, regions, rings)
    if len(first) < len(regions):
        found = _pairs_of_each(placement, mask, regions.take(first), rings)
        return Pairs(found.all[same], found.own[same], found.hops[same])
    return _pairs_of_each(placement, mask, regions, rings)


def _same_rows(placement: Placement, regions: Regions, rings: Rings) -> tuple[Ints, Ints]:
    """Return (one region of each kind, the kind of each region).

    Regions of one ring position that differ only in their rank and heads are of the same kind.
    """
    everyone = np.arange(len(regions), dtype=np.int64)
    if np.all(rings.position == np.arange(placement.ranks)):
        return everyone, everyone
    label = (
        rings.position[regions.rank] * (placement.stream + 1) + placement.batch.starts[regions.document] + regions.q0
    )
    _, first, same = np.unique(label, return_index=True, return_inverse=True)
    alike = all(np.array_equal(c, c[first][same]) for c in (regions.q1, regions.k0, regions.k1))
    return (first, same) if alike else (everyone, everyone)


def _pairs_of_each(placement: Placement, mask: LayerMask, regions: Regions, rings: Rings) -> Pairs:
    """Return the (query, key) pairs of each region, counted region by region."""
    cuts = cut_regions(placement, mask, regions)
    homes = homes_of(placement, rings.position)
    pairs = count_pairs(placement, regions, cuts, homes)
    if not rings.turn:
        return pairs
    hops = pairs.hops.copy()
    np.maximum.at(hops, cuts.region, _runs_seen(cuts, homes) - (pairs.own > 0)[cuts.region])
    hops = np.where(pairs.all > pairs.own, np.minimum(hops, rings.positions[regions.rank] - 1), 0)
    return pairs._replace(hops=hops)


def _runs_seen(cuts: Cuts, homes: Homes) -> Ints:
    """Return in how many runs of ``homes`` the keys of each slice lie.

    This is at least the number of ring positions that keep these keys.
    """
    start, stop = np.sort(homes.start), np.sort(homes.stop)
    first, last = cuts.begin + cuts.slices[:, K0], cuts.begin + cuts.slices[:, K1]
    return np.searchsorted(start, last) - np.searchsorted(stop, first, side="right")


def hop_work(placement: Placement, mask: LayerMask, regions: Regions, rings: Rings, cost: CostModel) -> Ints | None:
    """Return the work of each rank on the keys of each hop, ``[rank, hop]``, in (query, key) pairs x query heads.

    Row tiles are included. Hop 0 is what the rank's own ring position keeps. Return None if counting would take too
    long: large rings cut regions into very many parts.
    """
    index, slices, begin = cut_regions(placement, mask, regions)
    order = np.argsort(placement.runs.start)
    start, stop, keeper = (column[order] for column in (placement.runs.start, placement.runs.stop, placement.runs.rank))
    first, last = begin + slices[:, K0], begin + slices[:, K1]
    if int((np.searchsorted(start, last) - np.searchsorted(stop, first, side="right")).sum()) > MOST_HOP_PARTS:
        return None
    item, run = overlaps(first, last, start, stop)
    pairs = area(cut(slices[item], 0, placement.stream, start[run] - begin[item], stop[run] - begin[item]))
    worker = regions.rank[index[item]]
    hop = (rings.number[worker] - rings.number[keeper[run]]) % rings.positions[worker]
    hops = int(rings.positions.max())
    # A region passes once over the keys of each hop of which it sees any.
    passes, of_pass = np.unique((index[item] * hops + hop)[pairs > 0], return_inverse=True)
    region, hop = passes // hops, passes % hops
    tiles = cost.row_tiles_work(regions.q1 - regions.q0)[region]
    work = (sums(of_pass, pairs[pairs > 0], len(passes)) + tiles) * (regions.h1 - regions.h0)[region]
    return sums(regions.rank[region] * hops + hop, work, placement.ranks * hops).reshape(-1, hops)
