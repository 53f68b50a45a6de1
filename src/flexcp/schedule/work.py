"""Work: how many (query, key) pairs each rank computes, with the pairs of its own tokens counted separately.

Pairs are counted exactly. Every pass over a region (rows and keys of a document that one rank computes) also costs its
row tiles: one pass of the rows at home over the keys at home, and one of all rows for each stage or hop that brings
keys which the region reads.
:mod:`flexcp.schedule.rings` counts the hops of rings.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import overlaps, united
from flexcp.arrays.totals import sums
from flexcp.batch import LayerMask
from flexcp.clusters import Cluster
from flexcp.cost import TILE_ROWS, CostModel
from flexcp.masks import K0, K1, Q0, Q1, area, cut
from flexcp.plan.placement import Placement, Regions
from flexcp.shape import Shape

Ints = NDArray[np.int64]


class Cuts(NamedTuple):
    """The non-empty slices of a mask inside some regions: ``slices[i]`` lies in region number ``region[i]``.

    A slice (:mod:`flexcp.masks`) is in the coordinates of its document, which begins at token ``begin[i]`` of the
    stream.
    """

    region: Ints
    slices: Ints
    begin: Ints


def cut_regions(placement: Placement, mask: LayerMask, regions: Regions) -> Cuts:
    """Return the non-empty slices of a mask inside each of some regions."""
    region, slices = mask.cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
    return Cuts(region, slices, placement.batch.starts[regions.document[region]])


class Pairs(NamedTuple):
    """The (query, key) pairs of each region, of one query head: ``all`` of them, and the ``own`` ones.

    Own pairs are those whose row (query) and key are both at home: kept at the ring position of the region's rank;
    without rings, kept by that rank. ``hops`` is in how many hops of a ring the other keys arrive: 0 if all are at
    home, and at most 1 without rings. ``at_keys``, if counted, are the pairs whose key is at home but whose row is not,
    and ``own_tiles`` the row tiles of the rows at home; both are counted only if some rows are not at home.
    """

    all: Ints
    own: Ints
    hops: Ints
    at_keys: Ints | None = None
    own_tiles: Ints | None = None


class Work(NamedTuple):
    """The work of each rank, in (query, key) pairs x query heads or in nanoseconds, including row tiles.

    ``own`` is on rows and keys at home, ``rest`` is all other work, and ``again`` is what one more pass over the
    regions of ``rest`` costs. ``at_keys`` is the part of ``rest`` for which only queries arrive, without row tiles.
    """

    own: Ints
    rest: Ints
    again: Ints
    at_keys: Ints


class Homes(NamedTuple):
    """Where tokens are at home: ``position[rank]`` is a rank's position, and ``keeper`` keeps tokens ``start..stop``.

    The ranks of a ring position share their tokens; without rings every rank is a position of its own. The runs
    ``start`` to ``stop`` (exclusive) of the stream are sorted by the position that keeps them (``keeper``).
    """

    position: Ints
    keeper: Ints
    start: Ints
    stop: Ints


def homes_of(placement: Placement, position: Ints | None = None) -> Homes:
    """Return where the tokens of a placement are at home; ranks with the same ``position`` share their tokens.

    Without ``position``, every rank is a position of its own.
    """
    runs = placement.runs
    if position is None:
        position = np.arange(placement.ranks, dtype=np.int64)
    return Homes(position, *united(position[runs.rank], runs.start, runs.stop))


def count_pairs(placement: Placement, regions: Regions, cuts: Cuts, homes: Homes | None = None) -> Pairs:
    """Return the (query, key) pairs of each region, those of tokens at home counted separately.

    Without ``homes``, tokens are at home only on the rank that keeps them. If the placement assembles its own tokens
    (``assemble_own``), no pairs count as own.
    """
    count = len(regions)
    pairs = sums(cuts.region, area(cuts.slices), count)
    if placement.assemble_own:
        return Pairs(pairs, np.zeros_like(pairs), (pairs > 0).astype(np.int64))
    own, at_keys = _own_area(placement, regions, cuts, homes)
    at_home = sums(cuts.region, own, count)
    hops = (pairs > at_home).astype(np.int64)
    if at_keys is None:
        return Pairs(pairs, at_home, hops)
    return Pairs(pairs, at_home, hops, sums(cuts.region, at_keys, count) - at_home, _own_tiles(placement, regions))


def _own_tiles(placement: Placement, regions: Regions) -> Ints:
    """Return the row tiles of the rows of each region that its rank keeps."""
    _, keeper, start, stop = homes_of(placement)
    span = placement.stream
    base = regions.rank * span + placement.batch.starts[regions.document]
    region, run = overlaps(base + regions.q0, base + regions.q1, keeper * span + start, keeper * span + stop)
    first = np.maximum((base + regions.q0)[region], (keeper * span + start)[run])
    last = np.minimum((base + regions.q1)[region], (keeper * span + stop)[run])
    return sums(region, -(-(last - first) // TILE_ROWS), len(regions))


def _own_area(placement: Placement, regions: Regions, cuts: Cuts, homes: Homes | None) -> tuple[Ints, Ints | None]:
    """Return (pairs whose row and key are both at home, pairs whose key is at home), each for every slice of ``cuts``.

    The second result is None if ``homes`` are given or if all rows are at home.
    """
    position, keeper, start, stop = homes or homes_of(placement)
    span = placement.stream  # one axis for all positions, on which different ones touch but do not overlap
    axis_start, axis_stop = keeper * span + start, keeper * span + stop
    slices, begin = cuts.slices, cuts.begin
    base = position[regions.rank[cuts.region]] * span + begin
    item, run = overlaps(base + slices[:, Q0], base + slices[:, Q1], axis_start, axis_stop)
    rows = cut(slices[item], start[run] - begin[item], stop[run] - begin[item], 0, placement.stream)
    at, run = overlaps(base[item] + rows[:, K0], base[item] + rows[:, K1], axis_start, axis_stop)
    item = item[at]
    both = cut(rows[at], 0, placement.stream, start[run] - begin[item], stop[run] - begin[item])
    own = sums(item, area(both), len(slices))
    if homes is not None or int((rows[:, Q1] - rows[:, Q0]).sum()) == int((slices[:, Q1] - slices[:, Q0]).sum()):
        return own, None
    item, run = overlaps(base + slices[:, K0], base + slices[:, K1], axis_start, axis_stop)
    keys = cut(slices[item], 0, placement.stream, start[run] - begin[item], stop[run] - begin[item])
    return own, sums(item, area(keys), len(slices))


def rank_work(placement: Placement, regions: Regions, pairs: Pairs, cost: CostModel) -> Work:
    """Return the work of each rank in (query, key) pairs x query heads, from the pairs of its regions."""
    tiles = cost.row_tiles_work(regions.q1 - regions.q0)
    heads = regions.h1 - regions.h0
    own_tiles = tiles if pairs.own_tiles is None else pairs.own_tiles * cost.row_tile_pairs
    own = (pairs.own + np.where(pairs.all == 0, tiles, own_tiles * (pairs.own > 0))) * heads
    rest = (pairs.all - pairs.own + tiles * pairs.hops) * heads
    again = tiles * (pairs.hops > 0) * heads
    at_keys = np.zeros_like(own) if pairs.at_keys is None else pairs.at_keys * heads
    return Work(*(sums(regions.rank, amount, placement.ranks) for amount in (own, rest, again, at_keys)))


def pass_work_ns(
    placement: Placement,
    regions: Regions,
    pairs: Pairs,
    shape: Shape,
    cluster: Cluster,
    cost: CostModel,
    kernels: Ints | None = None,
) -> tuple[Work, Work]:
    """Return the forward and backward work of each rank in nanoseconds, including the start of each kernel.

    ``kernels[rank]`` is how many kernels a rank starts for its work on tokens of others, one each if not given; ranks
    without such work start none.
    """
    work = rank_work(placement, regions, pairs, cost)
    others = np.where(work.rest > 0, 1 if kernels is None else kernels, 0)
    found = []
    for backward in (False, True):
        own, rest, again, at_keys = (cost.attention_ns(amount, shape, cluster, backward) for amount in work)
        own, rest = own + cost.kernel_ns * (work.own > 0), rest + cost.kernel_ns * others
        found.append(Work(own, rest, again + cost.kernel_ns, at_keys))
    return found[0], found[1]
