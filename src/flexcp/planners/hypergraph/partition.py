"""Partitions of a hypergraph: which rank keeps each token block and computes each tile of attention.

A partition is made from a placement and can be turned back into one. The bytes that it moves and the loads of its ranks
follow from a few sums per net and rank, with which moves can be judged quickly.
(:mod:`flexcp.planners.hypergraph.model` explains blocks, tiles and nets.)
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import spread
from flexcp.arrays.totals import sums
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.plan.placement import Placement, Regions
from flexcp.planners.hypergraph.model import Tiling
from flexcp.planners.request import Request
from flexcp.planners.token_runs import equalised, runs_of_ranges

Ints = NDArray[np.int64]


class Partition:
    """Which rank keeps each block (``owner``) and computes each tile (``worker``), with sums for judging moves.

    ``counts[net, rank]`` is how many of the net's tiles the rank computes, ``reads`` whether it computes any, and
    ``readers[net]`` how many ranks do. ``loads`` and ``tokens`` are those of each rank.
    """

    def __init__(self, tiling: Tiling, placement: Placement) -> None:
        self.tiling = tiling
        kept = placement.kept
        self.owner = kept.rank[np.searchsorted(kept.stop, tiling.blocks.start, side="right")]
        self.worker = _workers(tiling, placement)
        self.count()

    def count(self) -> None:
        """Compute all sums from ``owner`` and ``worker``."""
        t = self.tiling
        flat = np.bincount(t.pins.net * t.ranks + self.worker[t.pins.tile], minlength=len(t.nets) * t.ranks)
        self.counts = flat.reshape(len(t.nets), t.ranks)
        self.reads = self.counts > 0
        self.readers = self.reads.sum(axis=1)
        self.loads = sums(self.worker, t.tiles.load, t.ranks)
        self.tokens = sums(self.owner, t.blocks.stop - t.blocks.start, t.ranks)

    def copy(self) -> Partition:
        """Return a copy that can be changed."""
        other = copy.copy(self)
        other.owner, other.worker = self.owner.copy(), self.worker.copy()
        other.count()
        return other

    def bytes(self) -> int:
        """Return the bytes that move in the forward of all layers."""
        nets, home = self.tiling.nets, self.owner[self.tiling.nets.block]
        away = self.readers - self.reads[np.arange(len(home)), home]
        return int((away * (nets.price + np.where(self.readers > 1, nets.extra, 0))).sum())

    def link_ns(self, cost: CostModel, cluster: Cluster) -> int:
        """Return the nanoseconds of all bytes, forward and backward, if one port carried them one after the other.

        Bytes that stay inside a node go at the speed inside nodes, the others at the speed between nodes.
        """
        nodes = np.arange(cluster.ranks) // cluster.ranks_per_node
        nets, home = self.tiling.nets, self.owner[self.tiling.nets.block]
        extra = np.where(self.readers > 1, nets.extra + nets.back_extra, 0)
        price = nets.price + nets.back_price + extra
        far = (self.reads & (nodes != nodes[home][:, None])).sum(axis=1)
        near = self.readers - self.reads[np.arange(len(home)), home] - far
        inside, between = (np.array([(readers * price).sum()]) for readers in (near, far))
        return int(cost.link_ns(inside, cluster.intra_mbps)[0] + cost.link_ns(between, cluster.inter_mbps)[0])


def _workers(tiling: Tiling, placement: Placement) -> Ints:
    """Return the rank of the region that contains each tile.

    Regions must end at borders of blocks and hold whole head groups.
    """
    tiles, wide = tiling.tiles, len(tiling.blocks) + 1
    worker = np.zeros(len(tiles), np.int64)
    order = tiles.strip * wide + tiles.keys
    strips = tiles.take(np.unique(tiles.strip, return_index=True)[1])
    for number, regions in enumerate(placement.regions):
        begin = placement.batch.starts[regions.document]
        row0, row1, key0, key1 = (
            np.searchsorted(tiling.blocks.start, begin + x) for x in (regions.q0, regions.q1, regions.k0, regions.k1)
        )
        mine = strips.take(strips.mask == number)
        first, last = np.searchsorted(mine.rows, row0), np.searchsorted(mine.rows, row1)
        region, within = spread(last - first)
        at = first[region] + within
        inside = (mine.h0[at] >= regions.h0[region]) & (mine.h0[at] < regions.h1[region])
        region, strip = region[inside], mine.strip[at[inside]]
        low, high = (np.searchsorted(order, strip * wide + key[region]) for key in (key0, key1))
        pick, within = spread(high - low)
        worker[low[pick] + within] = regions.rank[region[pick]]
    return worker


# --- back to a placement ----------------------------------------------------------------------------------------------


def placement_of(request: Request, before: Placement, partition: Partition) -> Placement:
    """Return the placement of a partition; with a fixed layout its runs are those of ``before``."""
    t = partition.tiling
    regions = tuple(_regions(partition, number) for number in range(len(t.batch.masks)))
    if request.layout is not None:
        return replace(before, regions=regions)
    runs, pads = runs_of_ranges(partition.owner, t.blocks.start, t.blocks.stop), 0
    if request.equal_tokens:
        runs, pads = equalised(runs, request.ranks, request.batch.tokens, request.pad_to)
    return Placement(request.batch, request.ranks, pads, runs, regions)


def _regions(partition: Partition, number: int) -> Regions:
    """Return the regions of mask ``number``: tiles joined along keys, then rows, then heads.

    There are no pairs between adjacent tiles of a strip, so a region extends to the keys of the next one, and the outer
    regions of a strip extend to the ends of the document.
    """
    t, mine = partition.tiling, partition.tiling.tiles.mask == number
    tiles, rank = t.tiles.take(mine), partition.worker[mine]
    new_strip = np.append(True, tiles.strip[1:] != tiles.strip[:-1])[: len(tiles)]
    first = np.flatnonzero(new_strip | np.append(True, rank[1:] != rank[:-1])[: len(tiles)])
    tiles, rank, opens = tiles.take(first), rank[first], new_strip[first]
    document = t.blocks.document[tiles.rows]
    begin = t.batch.starts[document]
    k0 = np.where(opens, 0, t.blocks.start[tiles.keys] - begin)
    closes = np.append(opens[1:], True)[: len(opens)]
    k1 = np.where(closes, t.batch.lengths[document], np.append(k0[1:], 0)[: len(k0)])
    q0, q1 = t.blocks.start[tiles.rows] - begin, t.blocks.stop[tiles.rows] - begin
    regions = Regions(rank, document, q0, q1, k0, k1, tiles.h0, tiles.h1)
    return _joined(_joined(regions, "q0", "q1"), "h0", "h1")


def _joined(regions: Regions, low: str, high: str) -> Regions:
    """Return the regions, with those joined that are adjacent in ``low..high`` and otherwise equal.

    ``low`` and ``high`` are the names of two columns.
    """
    if not len(regions):
        return regions
    others = [name for name in Regions.names() if name not in (low, high)]
    regions = regions.sorted_by(*others, low)
    same = getattr(regions, low)[1:] == getattr(regions, high)[:-1]
    for name in others:
        same &= getattr(regions, name)[1:] == getattr(regions, name)[:-1]
    last = getattr(regions, high)[np.append(~same, True)]
    return replace(regions.take(np.append(True, ~same)), **{high: last})
