"""Work: how many pairs each rank computes, those of its own tokens apart from the rest.

Pairs are counted exactly. Every pass over a region also pays for its row tiles: one over the keys at home, and one for each stage or
hop that brings keys it reads. For rings, what the ranks of one position keep is at home for all of them; :func:`hop_work` counts what each
hop brings.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import overlaps, united
from flexcp.arrays.totals import sums
from flexcp.batch import LayerMask
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.masks import K0, K1, Q0, Q1, area, cut
from flexcp.plan.placement import Placement, Regions
from flexcp.shape import Shape

Ints = NDArray[np.int64]
MOST_HOP_PARTS = 100_000
"""Parts that :func:`hop_work` counts: some 30 ms of planning."""


class Rings(NamedTuple):
    """Where each rank stands: its group's number of ring positions, labels of its position and its group, the rank its keys come from.

    Ranks of one position hold each other's keys before the ring turns. Without rings every rank is a position of its own. ``number`` is a
    position's in its ring: keys go from each to the next.
    """

    turn: bool
    positions: Ints
    position: Ints
    group: Ints
    number: Ints
    before: Ints


def rings_of(placement: Placement) -> Rings:
    """Where the ranks of a placement stand."""
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
    """The groups' grids as arrays ``[group, ring position, head group]``, one for each shape there is."""
    found: dict[tuple[int, int], list[tuple[tuple[int, ...], ...]]] = {}
    for grid in placement.traffic.groups:
        found.setdefault((len(grid), len(grid[0])), []).append(grid)
    return [np.array(grids, np.int64) for grids in found.values()]


class Pairs(NamedTuple):
    """Pairs of each region, those whose row and key are both kept at its ring position, and how often hops bring it more keys."""

    all: Ints
    own: Ints
    hops: Ints


class Work(NamedTuple):
    """Pairs x query heads of each rank, row tiles included: on keys of its own position, on all others, and one more pass over those."""

    own: Ints
    rest: Ints
    again: Ints


def count_pairs(placement: Placement, mask: LayerMask, regions: Regions, rings: Rings) -> Pairs:
    """The pairs of each region."""
    first, same = _same_rows(placement, regions, rings)
    if len(first) < len(regions):
        return Pairs(*(column[same] for column in _pairs_of_each(placement, mask, regions.take(first), rings)))
    return _pairs_of_each(placement, mask, regions, rings)


def _same_rows(placement: Placement, regions: Regions, rings: Rings) -> tuple[Ints, Ints]:
    """(one of each kind, kind of each region): regions of one ring position that differ only in their heads are a kind."""
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
    index, slices = mask.cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
    begin = placement.batch.starts[regions.document[index]]
    runs = united(rings.position[placement.runs.rank], placement.runs.start, placement.runs.stop)
    pairs = sums(index, area(slices), len(regions))
    own = np.zeros_like(pairs)
    if not placement.assemble_own:
        position = rings.position[regions.rank[index]]
        own = sums(index, _own_area(slices, begin, position, runs, placement.stream), len(regions))
    hops = (pairs > own).astype(np.int64)
    if rings.turn:
        np.maximum.at(hops, index, _runs_seen(slices, begin, runs) - (own > 0)[index])
        hops = np.where(pairs > own, np.minimum(hops, rings.positions[regions.rank] - 1), 0)
    return Pairs(pairs, own, hops)


def rank_work(placement: Placement, regions: Regions, pairs: Pairs, cost: CostModel) -> Work:
    """The work of each rank, from the pairs of its regions."""
    tiles = cost.row_tiles_work(regions.q1 - regions.q0)
    heads = regions.h1 - regions.h0
    own = (pairs.own + tiles * ((pairs.own > 0) | (pairs.all == 0))) * heads
    rest = (pairs.all - pairs.own + tiles * pairs.hops) * heads
    again = tiles * (pairs.hops > 0) * heads
    return Work(*(sums(regions.rank, amount, placement.ranks) for amount in (own, rest, again)))


def hop_work(placement: Placement, mask: LayerMask, regions: Regions, rings: Rings, cost: CostModel) -> Ints | None:
    """Pairs x query heads of each rank on the keys of each hop, ``[rank, hop]``, row tiles included; hop 0 is what its position keeps.

    None where counting would take too long: large rings cut regions into very many parts.
    """
    index, slices = mask.cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
    begin = placement.batch.starts[regions.document[index]]
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
    # A region's pass over what a hop brings, where it sees any of it.
    passes, of_pass = np.unique((index[item] * hops + hop)[pairs > 0], return_inverse=True)
    region, hop = passes // hops, passes % hops
    tiles = cost.row_tiles_work(regions.q1 - regions.q0)[region]
    work = (sums(of_pass, pairs[pairs > 0], len(passes)) + tiles) * (regions.h1 - regions.h0)[region]
    return sums(regions.rank[region] * hops + hop, work, placement.ranks * hops).reshape(-1, hops)


def _own_area(slices: Ints, begin: Ints, position: Ints, runs: tuple[Ints, Ints, Ints], stream: int) -> Ints:
    """Pairs of each slice whose row and key are both kept at ``position``."""
    keeper, start, stop = runs
    span = stream + 1  # one axis for all positions: those of different ones never meet
    axis_start, axis_stop = keeper * span + start, keeper * span + stop
    base = position * span + begin
    item, run = overlaps(base + slices[:, Q0], base + slices[:, Q1], axis_start, axis_stop)
    rows = cut(slices[item], start[run] - begin[item], stop[run] - begin[item], 0, stream)
    at, run = overlaps(base[item] + rows[:, K0], base[item] + rows[:, K1], axis_start, axis_stop)
    item = item[at]
    both = cut(rows[at], 0, stream, start[run] - begin[item], stop[run] - begin[item])
    return sums(item, area(both), len(slices))


def _runs_seen(slices: Ints, begin: Ints, runs: tuple[Ints, Ints, Ints]) -> Ints:
    """In how many runs the keys of each slice lie: at least as many as ring positions that hold them."""
    start, stop = np.sort(runs[1]), np.sort(runs[2])
    return np.searchsorted(start, begin + slices[:, K1]) - np.searchsorted(stop, begin + slices[:, K0], side="right")


def work_ns(work: Work, rings: Rings, shape: Shape, cluster: Cluster, cost: CostModel, backward: bool) -> Work:
    """The work in nanoseconds, with the start of each kernel."""
    own, rest, again = (cost.attention_ns(amount, shape, cluster, backward) for amount in work)
    kernels = np.where(work.rest > 0, np.maximum(rings.positions - 1, 1), 0)
    return Work(own + cost.kernel_ns * (work.own > 0), rest + cost.kernel_ns * kernels, again + cost.kernel_ns)
