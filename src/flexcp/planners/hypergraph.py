"""hypergraph: DCP's placement by hypergraph partitioning, with both balances kept, started from what ``blocks`` finds.

*Hypergraph.* Documents are cut into token blocks, attention into tiles (mask, query block, key block, head group). Blocks and tiles are
vertices. A *net* joins a block with the tiles that read the same tokens of it, and weighs what those tokens cost to move. So the sum of
``weight x (ranks spanned - 1)`` is the forward volume:

- keys: one net with their block, ``kv`` bytes;
- rows: one net with their block, ``q + o`` bytes, and one of the tiles alone, for what a partial output costs more than a final one (once
  too few where the block's home computes none of it; our own search counts that too).

A block that some tiles read only in part (a window's edge, a sink) has a net for each set of tiles: volumes are exact to the token.

*Cuts.* Blocks end where the placement we start from cuts, and elsewhere on a grid; tiles have its head groups. So that placement *is* a
partition of the hypergraph, with exactly its bytes and balance, and nothing is lost before the search begins.

*Search.* Rounds, each from the best placement so far (the first goes straight to the second step):

1. Mt-KaHyPar improves the partition by a V-cycle over nodes, then by one over the ranks of each node. It knows one weight: a share of
   tokens plus a share of compute, mixed differently from round to round.
2. *repair*: while a rank is over its compute or its tokens, the bundle (a tile, a strip of tiles, a block, blocks with their work) that
   takes most violation away for its bytes moves elsewhere. Where bundles are too large, blocks are cut finer.
3. *climb*: bundles that save bytes and fit both limits move, or two of them change places, until none is left.

A placement is taken when it moves fewer bytes, is no further over a limit than ``blocks``'s own and needs no more time on the links,
forward and backward together. So the answer never moves more bytes than ``blocks`` at the same tolerances.

Tolerances are 0.1 each unless given. ``hypergraph:1024`` sets the tokens of a block; without it a batch has about 128 blocks. Effort
counts rounds.

No clock is read, and Mt-KaHyPar runs a deterministic preset on one thread with a seed (its others do not repeat themselves). But it is
compiled C++ with floating point inside, and cannot promise the same plan on every machine: such a plan is planned once and shared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.batch import Batch
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.intervals import offsets, spread, united
from flexcp.masks import K0, K1, Q0, Q1, area
from flexcp.pieces import Kind, Shape
from flexcp.plan import Placement, Regions
from flexcp.planners.blocks import blocks
from flexcp.planners.layouts import equalised, even_borders, is_scattered, runs_of_ranges
from flexcp.planners.request import Request
from flexcp.tables import Table

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

DEFAULT_BLOCKS = 128
DEFAULT_TOLERANCE = 0.1
FEWEST_ROUNDS, MOST_ROUNDS = 2, 6
ROUND_CELLS = 240_000
"""Between those, as many rounds as make this many tiles x ranks."""
TOKEN_SHARES = ((1, 1), (1, 2), (2, 1))
"""What all tokens and all compute weigh in the partitioner's one weight, round by round."""
QUALITY_VERTICES = 2_000
"""Up to this many vertices are worth the partitioner's better and slower preset."""
VIOLATION_WEIGHT = 2
"""A rank that is over a limit by its mean weighs as much as this many times all bytes."""
REPAIRS = 4
"""Moves for each rank that repair may take."""
FINER = 5
"""How often repair is tried, each time with finer cuts."""
SWEEPS = 8
EXCHANGES = 8
"""Exchanges tried for each rank in one sweep."""
MILLION = 1_000_000
FORBIDDEN = 1 << 62
CHUNK = 1 << 20
"""Numbers in one temporary array."""
SCALE = 1 << 28
"""What all parts may hold together, of the partitioner's 32 bits."""
ROWS, KEYS = (Kind.Q, Kind.O), (Kind.KV,)
BACKWARD = {ROWS: (Kind.Q, Kind.DO, Kind.DQ), KEYS: (Kind.KV, Kind.DKV)}
"""What moves in the backward for what moves in the forward."""
NO_CUTS = np.zeros(0, np.int64)


def hypergraph(request: Request) -> Placement:
    """Place a batch by partitioning its hypergraph of token blocks and tiles."""
    size = _block_size(request)
    _partitioner()
    request = replace(
        request,
        argument="",
        compute_tolerance=DEFAULT_TOLERANCE if request.compute_tolerance is None else request.compute_tolerance,
        token_tolerance=DEFAULT_TOLERANCE if request.token_tolerance is None else request.token_tolerance,
    )
    start = blocks(replace(request, effort=None))
    if start.assemble_own or (request.layout is not None and is_scattered(start.runs)):
        raise ValueError("this layout scatters tokens in runs too short for token blocks; use blocks")
    first = best = _candidate(request, start, size)
    limits = _limits(request, first)
    for number in range(_rounds(request, first)):
        placement = _round(request, best, size, limits, number)
        if placement is None:
            continue
        found = _candidate(request, placement, size)
        if found.bytes < best.bytes and found.link_ns <= first.link_ns and found.within(limits):
            best = found
    note = f"{best.bytes} bytes forward where blocks moves {first.bytes}; {len(first.partition.owner)} token blocks"
    return replace(best.placement, note=note)


def _block_size(request: Request) -> int | None:
    """Tokens of a block, None for the default."""
    if not request.argument:
        return None
    try:
        size = int(request.argument)
    except ValueError:
        size = 0
    if size < 1:
        raise ValueError(
            f"hypergraph takes the tokens of a block, as in hypergraph:1024; got 'hypergraph:{request.argument}'"
        )
    return size


@cache
def _partitioner() -> Any:
    """Mt-KaHyPar on one thread: an optional package, initialised once in a process."""
    try:
        import mtkahypar
    except ImportError:
        raise ValueError(
            "strategy hypergraph needs the Mt-KaHyPar partitioner: pip install flexcp[hypergraph], or use blocks"
        ) from None
    return mtkahypar.initialize(1, False)


def _rounds(request: Request, first: _Candidate) -> int:
    """How many rounds: the effort, or what a hypergraph of this size is worth."""
    if request.ranks == 1 or first.bytes == 0:
        return 0
    if request.effort is not None:
        return request.effort
    cells = len(first.partition.worker) * request.ranks
    return max(FEWEST_ROUNDS, min(MOST_ROUNDS, ROUND_CELLS // cells))


def _round(request: Request, best: _Candidate, size: int | None, limits: _Limits, number: int) -> Placement | None:
    """Partition (not in round 0), repair and climb, from the best placement so far; None when repair fails."""
    partition, weight = best.partition.copy(), VIOLATION_WEIGHT * best.bytes
    search = _Search(partition, limits)
    if number:
        _partition_nodes(search, number)
    for _ in range(FINER):
        if search.repair(weight):
            search.climb()
            return _placement(request, best.placement, partition, limits)
        placement = _placement(request, best.placement, partition, limits)
        partition = _Partition(_tiling(request, placement, size, search.cuts()), placement)
        search = _Search(partition, limits)
    return None


# --- limits and candidates -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A placement as a partition of its own hypergraph, with its exact forward bytes and its time on links."""

    placement: Placement
    partition: _Partition
    bytes: int
    link_ns: int

    def within(self, limits: _Limits) -> bool:
        """Whether no rank has too much work or too many tokens."""
        return bool((self.partition.loads <= limits.loads).all() and (self.partition.tokens <= limits.tokens).all())


def _candidate(request: Request, placement: Placement, size: int | None) -> _Candidate:
    partition = _Partition(_tiling(request, placement, size, NO_CUTS), placement)
    return _Candidate(placement, partition, partition.bytes(), partition.link_ns(request.cost, request.cluster))


@dataclass(frozen=True, eq=False)
class _Limits:
    """The most load and tokens of each rank, its node, and whether tokens may move."""

    loads: Ints
    tokens: Ints
    nodes: Ints
    free: bool


def _limits(request: Request, first: _Candidate) -> _Limits:
    """Limits by the tolerances, and as far beyond them as ``blocks`` had to go."""
    batch, ranks, speeds = request.batch, request.ranks, request.cluster.rank_speeds
    assert request.compute_tolerance is not None and request.token_tolerance is not None
    have = first.partition.loads.tolist()
    means = [-(-sum(have) * speed // sum(speeds)) for speed in speeds]
    most = [mean + int(request.compute_tolerance * mean) for mean in means]
    over = max([Fraction(1), *(Fraction(load, limit) for load, limit in zip(have, most, strict=True) if limit)])
    if request.equal_tokens:
        tokens = np.diff(even_borders(batch.tokens, ranks))
    else:
        even = max(-(-batch.tokens // ranks), math.floor(batch.tokens * (1 + request.token_tolerance) / ranks))
        cap = request.max_tokens_per_rank
        tokens = np.full(ranks, even if cap is None else min(even, cap), np.int64)
    return _Limits(
        np.array([int(limit * over) for limit in most], np.int64),
        np.maximum(tokens, first.partition.tokens),
        np.arange(ranks) // request.cluster.ranks_per_node,
        request.layout is None,
    )


# --- the hypergraph ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Blocks(Table):
    """Token blocks: ranges of the stream inside one document."""

    start: Ints
    stop: Ints
    document: Ints


@dataclass(frozen=True, eq=False)
class _Tiles(Table):
    """Tiles with a non-empty mask.

    ``rows`` and ``keys`` are blocks, ``strip`` numbers a mask's query block and head group, ``load`` is pairs x query heads x layers.
    """

    mask: Ints
    rows: Ints
    keys: Ints
    h0: Ints
    h1: Ints
    strip: Ints
    load: Ints


@dataclass(frozen=True, eq=False)
class _Nets(Table):
    """Tokens of a block that the same tiles read.

    ``price`` is what they cost each rank that reads them away from home, ``extra`` what that costs more when several ranks read them;
    ``back_price`` and ``back_extra`` are the same in the backward.
    """

    block: Ints
    price: Ints
    extra: Ints
    back_price: Ints
    back_extra: Ints


@dataclass(frozen=True, eq=False)
class _Pins(Table):
    """Which tiles are in which net."""

    net: Ints
    tile: Ints


@dataclass(frozen=True, eq=False)
class _Tiling:
    """The hypergraph of a batch. Tiles are sorted by strip, then keys; pins by net."""

    batch: Batch
    ranks: int
    blocks: _Blocks
    tiles: _Tiles
    nets: _Nets
    pins: _Pins


def _tiling(request: Request, placement: Placement, size: int | None, cuts: Ints) -> _Tiling:
    """The hypergraph, cut where ``placement`` cuts, at ``cuts``, and elsewhere every ``size`` tokens."""
    batch = request.batch
    borders = _default_borders(placement, cuts) if size is None else _borders(placement, size, cuts)
    grid = _Blocks(borders[:-1], borders[1:], batch.document_of(borders[:-1]))
    groups = _head_groups(placement, request.shape)
    found = [_mask_tiling(request, grid, groups, number) for number in range(len(batch.masks))]
    tiles, nets = _Tiles.join([f[0] for f in found]), _Nets.join([f[1] for f in found])
    tile_at, net_at = (offsets(np.array([len(f[i]) for f in found])) for i in (0, 1))
    order = np.lexsort((tiles.keys, tiles.strip))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    pins = [_Pins(f[2].net + net_at[i], place[f[2].tile + tile_at[i]]) for i, f in enumerate(found)]
    return _Tiling(batch, request.ranks, grid, tiles.take(order), nets, _Pins.join(pins).sorted_by("net"))


def _default_borders(placement: Placement, cuts: Ints) -> Ints:
    """The finest grid with about the default number of blocks in all."""
    tokens, documents = placement.batch.tokens, placement.batch.documents
    size = max(1, -(-tokens // DEFAULT_BLOCKS))
    while len(found := _borders(placement, size, cuts)) > DEFAULT_BLOCKS + documents and size < tokens:
        size += -(-size // 8)
    return found


def _borders(placement: Placement, size: int, cuts: Ints) -> Ints:
    """Stream positions of block borders: documents, the placement's cuts and others, and a grid where those leave room."""
    batch = placement.batch
    found = [batch.starts, placement.runs.start, placement.runs.stop, cuts]
    for regions in placement.regions:
        begin = batch.starts[regions.document]
        found += [begin + x for x in (regions.q0, regions.q1, regions.k0, regions.k1)]
    fixed = np.unique(np.minimum(np.concatenate(found), batch.tokens))
    document, within = spread((batch.lengths - 1) // size)
    grid = batch.starts[document] + (within + 1) * size
    after = np.searchsorted(fixed, grid, side="right")
    clear = (2 * (grid - fixed[after - 1]) >= size) & (2 * (fixed[after] - grid) >= size)
    return np.union1d(fixed, grid[clear])


@dataclass(frozen=True, eq=False)
class _HeadGroups:
    """Head groups of all documents: those of document d are ``first[d]:first[d + 1]``; none has more than ``most``."""

    first: Ints
    h0: Ints
    h1: Ints
    most: int


def _head_groups(placement: Placement, shape: Shape) -> _HeadGroups:
    """Each document's query heads, cut where any of its regions cuts them."""
    documents = np.arange(placement.batch.documents)
    owner = np.concatenate([documents, *(r.document for r in placement.regions)])
    head = np.concatenate([np.zeros_like(documents), *(r.h0 for r in placement.regions)])
    label = np.unique(owner * shape.heads + head)
    owner, h0 = label // shape.heads, label % shape.heads
    last = np.append(owner[1:] != owner[:-1], True)
    h1 = np.where(last, shape.heads, np.append(h0[1:], 0))
    first = offsets(np.bincount(owner, minlength=len(documents)))
    return _HeadGroups(first, h0, h1, int(np.diff(first).max()))


def _mask_tiling(request: Request, grid: _Blocks, groups: _HeadGroups, number: int) -> tuple[_Tiles, _Nets, _Pins]:
    """Tiles, nets and pins of one mask. A pair of blocks is one tile for each head group of its document."""
    batch, mask, document = request.batch, request.batch.masks[number], grid.document
    first = offsets(np.bincount(document, minlength=batch.documents))
    rows, within = spread(np.diff(first)[document])
    keys = first[document[rows]] + within
    begin = batch.starts[document]
    low, high = grid.start - begin, grid.stop - begin
    index, slices = mask.cuts(document[rows], low[rows], high[rows], low[keys], high[keys])
    full, of = np.unique(index, return_inverse=True)
    rows, keys, of = rows[full], keys[full], of.reshape(-1)
    count = np.diff(groups.first)[document[rows]]
    pair, group = spread(count)
    at = groups.first[document[rows[pair]]] + group
    h0, h1 = groups.h0[at], groups.h1[at]
    strip = (number * len(grid) + rows[pair]) * groups.most + group
    load = _sums(of, area(slices), len(full))[pair] * (h1 - h0) * mask.layers
    tiles = _Tiles(np.full(len(pair), number), rows[pair], keys[pair], h0, h1, strip, load)
    sides = []
    for block, first_column, last_column, kinds in ((rows, Q0, Q1, ROWS), (keys, K0, K1, KEYS)):
        found = _same_readers(block, of, slices[:, first_column], slices[:, last_column])
        sides.append(_by_heads(request.shape, kinds, mask.layers, groups, document, *found, offsets(count)))
    (row_nets, row_pins), (key_nets, key_pins) = sides
    key_pins = replace(key_pins, net=key_pins.net + len(row_nets))
    return tiles, _Nets.join([row_nets, key_nets]), _Pins.join([row_pins, key_pins])


def _same_readers(block: Ints, tile: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Tokens of a block that the same tiles read: (block, tokens) of each such set, and its members (set, tile).

    ``block`` is each tile's; the rest lists what tiles read of it. Reads cut a block into intervals, and intervals with the same tiles
    are one set; tiles are compared by sums of random labels.
    """
    tile, start, stop = united(tile, start, stop)
    wide = int(stop.max(initial=0)) + 1
    start, stop = block[tile] * wide + start, block[tile] * wide + stop
    edges = np.unique(np.concatenate([start, stop]))
    low = np.searchsorted(edges, start)
    read, within = spread(np.searchsorted(edges, stop) - low)
    interval, tile = low[read] + within, tile[read]
    labels = np.random.default_rng(0).integers(1, 1 << 62, len(block))
    signature = _sums(interval, labels[tile], len(edges))
    used = np.unique(interval)
    order = used[np.lexsort((signature[used], edges[used] // wide))]
    differs = (edges[order[1:]] // wide != edges[order[:-1]] // wide) | (signature[order[1:]] != signature[order[:-1]])
    number = np.cumsum(np.append(0, differs))[: len(order)]
    shown = order[np.append(True, differs)[: len(order)]]
    tokens = _sums(number, edges[order + 1] - edges[order], len(shown))
    name = np.full(len(edges), -1, np.int64)
    name[shown] = np.arange(len(shown))
    member = name[interval] >= 0
    return edges[shown] // wide, tokens, name[interval[member]], tile[member]


def _by_heads(
    shape: Shape,
    kinds: tuple[Kind, ...],
    layers: int,
    groups: _HeadGroups,
    document: Ints,
    block: Ints,
    tokens: Ints,
    member_set: Ints,
    member_tile: Ints,
    tile_first: Ints,
) -> tuple[_Nets, _Pins]:
    """A net for each set of tokens and head group of its document."""
    count = np.diff(groups.first)[document[block]]
    of, group = spread(count)
    at = groups.first[document[block[of]]] + group
    h0, h1 = groups.h0[at], groups.h1[at]
    if kinds is KEYS:
        h0, h1 = shape.kv_range(h0, h1)
    each = shape.bytes_per_token_head()
    forward, backward = (each[list(k)].sum(axis=0) for k in (kinds, BACKWARD[kinds]))
    moved = tokens[of] * (h1 - h0) * layers
    pin, group = spread(count[member_set])
    pins = _Pins(offsets(count)[member_set[pin]] + group, tile_first[member_tile[pin]] + group)
    prices = [moved * price for final, partial in (forward, backward) for price in (final, partial - final)]
    return _Nets(block[of], *prices), pins


# --- partitions ----------------------------------------------------------------------------------------------------------


class _Partition:
    """Who keeps each block (``owner``) and computes each tile (``worker``), with the sums that make moves cheap to judge.

    ``counts[net, rank]`` is how many of the net's tiles the rank computes, ``reads`` whether any, ``readers[net]`` by how many ranks.
    """

    def __init__(self, tiling: _Tiling, placement: Placement) -> None:
        self.tiling = tiling
        kept = placement.kept
        self.owner = kept.rank[np.searchsorted(kept.stop, tiling.blocks.start, side="right")]
        self.worker = _workers(tiling, placement)
        self.count()

    def count(self) -> None:
        """All sums from owners and workers."""
        t = self.tiling
        flat = np.bincount(t.pins.net * t.ranks + self.worker[t.pins.tile], minlength=len(t.nets) * t.ranks)
        self.counts = flat.reshape(len(t.nets), t.ranks)
        self.reads = self.counts > 0
        self.readers = self.reads.sum(axis=1)
        self.loads = _sums(self.worker, t.tiles.load, t.ranks)
        self.tokens = _sums(self.owner, t.blocks.stop - t.blocks.start, t.ranks)

    def copy(self) -> _Partition:
        """The same partition, to be changed."""
        other = copy.copy(self)
        other.owner, other.worker = self.owner.copy(), self.worker.copy()
        other.count()
        return other

    def bytes(self) -> int:
        """Forward bytes of all layers."""
        nets, home = self.tiling.nets, self.owner[self.tiling.nets.block]
        away = self.readers - self.reads[np.arange(len(home)), home]
        return int((away * (nets.price + np.where(self.readers > 1, nets.extra, 0))).sum())

    def link_ns(self, cost: CostModel, cluster: Cluster) -> int:
        """Time of all bytes, forward and backward, through one port inside a node and one between nodes."""
        nodes = np.arange(cluster.ranks) // cluster.ranks_per_node
        nets, home = self.tiling.nets, self.owner[self.tiling.nets.block]
        extra = np.where(self.readers > 1, nets.extra + nets.back_extra, 0)
        price = nets.price + nets.back_price + extra
        far = (self.reads & (nodes != nodes[home][:, None])).sum(axis=1)
        near = self.readers - self.reads[np.arange(len(home)), home] - far
        inside, between = (np.array([(readers * price).sum()]) for readers in (near, far))
        return int(cost.link_ns(inside, cluster.intra_mbps)[0] + cost.link_ns(between, cluster.inter_mbps)[0])


def _workers(tiling: _Tiling, placement: Placement) -> Ints:
    """The rank of the region each tile lies in. Regions end at block borders and hold whole head groups."""
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


# --- moves ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Bundles:
    """What may move together: tiles of one rank, blocks it keeps, or both.

    Bundle i leaves rank ``source[i]`` with its ``load[i]`` and ``tokens[i]``. Its blocks and tiles are those whose label is
    ``name[i]``; what is in no bundle has label -1. Its nets are ``net[first[i]:first[i + 1]]``, with ``count`` of its tiles in each (none
    where only a block's move matters).
    """

    block_label: Ints
    tile_label: Ints
    name: Ints
    source: Ints
    load: Ints
    tokens: Ints
    first: Ints
    net: Ints
    count: Ints

    def take(self, index: Ints) -> _Bundles:
        """The bundles at ``index``."""
        size = np.diff(self.first)[index]
        each, within = spread(size)
        at = self.first[index][each] + within
        columns = {name: getattr(self, name)[index] for name in ("name", "source", "load", "tokens")}
        return replace(self, **columns, first=offsets(size), net=self.net[at], count=self.count[at])


class _Search:
    """Repair and climb: bundles that move between ranks within limits."""

    def __init__(self, partition: _Partition, limits: _Limits) -> None:
        self.partition, self.limits = partition, limits
        t = partition.tiling
        self.most_load, self.most_tokens = limits.loads, limits.tokens
        self.mean_load = max(1, int(t.tiles.load.sum()) // t.ranks)
        self.mean_tokens = max(1, t.batch.tokens // t.ranks)
        self.block_nets = np.argsort(t.nets.block, kind="stable")
        self.block_first = np.searchsorted(t.nets.block[self.block_nets], np.arange(len(t.blocks) + 1))
        heads = int(t.tiles.h1.max(initial=1))
        self.column = (t.tiles.mask * len(t.blocks) + t.tiles.keys) * heads + t.tiles.h0
        self.share = (t.tiles.mask * t.batch.documents + t.blocks.document[t.tiles.rows]) * heads + t.tiles.h0

    # -- repair

    def repair(self, weight: int) -> bool:
        """Move bundles off the rank that is most over, each the best for its bytes; whether none is over in the end."""
        p = self.partition
        for _ in range(REPAIRS * p.tiling.ranks):
            now = self._violation(p.loads, p.tokens, self.most_load, self.most_tokens)
            worst = int(np.argmax(now))
            if now[worst] == 0:
                return True
            options = [self._relief(bundles, worst, now, weight) for bundles in self._kinds(worst)]
            score, bundles, target = min(options, key=lambda option: option[0])
            if score >= 0:
                return False
            self._move(bundles, target)
        return False

    def _relief(self, bundles: _Bundles, rank: int, now: Ints, weight: int) -> tuple[int, _Bundles, int]:
        """(score, bundle, target) of the best move off ``rank``: bytes added, and violation taken away by its weight."""
        p, most_load, most_tokens = self.partition, self.most_load, self.most_tokens
        left = self._violation(
            p.loads[rank] - bundles.load, p.tokens[rank] - bundles.tokens, most_load[rank], most_tokens[rank]
        )
        load, tokens = p.loads + bundles.load[:, None], p.tokens + bundles.tokens[:, None]
        change = self._violation(load, tokens, most_load, most_tokens) - now + (left - now[rank])[:, None]
        change[:, rank] = 0
        useful = np.flatnonzero((change < 0).any(axis=1))
        if not len(useful):
            return FORBIDDEN, bundles, rank
        chosen, change = bundles.take(useful), change[useful]
        score = self._changes(chosen) + change * max(1, weight // MILLION)
        score[change >= 0] = FORBIDDEN
        at, target = divmod(int(np.argmin(score)), p.tiling.ranks)
        return int(score[at, target]), chosen.take(np.array([at])), target

    def _violation(self, load: Ints, tokens: Ints, most_load: Ints, most_tokens: Ints) -> Ints:
        """How far loads and tokens are over, in millionths of the mean (up to eight means), linear plus ten times quadratic."""
        x = _millionths(load - most_load, self.mean_load)
        y = _millionths(tokens - most_tokens, self.mean_tokens)
        return np.asarray(x + x * x // 100_000 + y + y * y // 100_000)

    def cuts(self) -> Ints:
        """Where blocks of ranks that are still over would be cut, so that there are bundles of the size of the excess."""
        p, t, found = self.partition, self.partition.tiling, [NO_CUTS]
        size = t.blocks.stop - t.blocks.start
        for rank in range(t.ranks):
            excess = int(p.loads[rank] - self.most_load[rank])
            if excess > 0:
                mine = t.tiles.take(p.worker == rank)
                _, at, of = np.unique(mine.strip, return_index=True, return_inverse=True)
                block, load = mine.rows[at], _sums(of.reshape(-1), mine.load, len(at))
                rows = np.ceil(size[block] * (excess / np.maximum(load, 1))).astype(np.int64)
                found.append((t.blocks.stop[block] - rows)[rows < size[block]])
            excess = int(p.tokens[rank] - self.most_tokens[rank])
            if excess > 0:
                large = (p.owner == rank) & (size > excess)
                found += [t.blocks.start[large] + excess, t.blocks.stop[large] - excess]
        return np.unique(np.concatenate(found))

    # -- climb

    def climb(self) -> None:
        """Move or exchange bundles that save bytes and fit where they go, until none is left."""
        for _ in range(SWEEPS):
            moved = [self._climb(bundles) for bundles in self._kinds(None)]
            if not any(moved) and not self._exchange():
                return

    def _climb(self, bundles: _Bundles) -> bool:
        """Move the bundles that save bytes, those that save most first; whether any did."""
        change = self._allowed(bundles).min(axis=1, initial=0)
        moved = False
        for i in np.argsort(change, kind="stable")[: np.count_nonzero(change)]:
            one = bundles.take(np.array([i]))
            if not self._whole(one):
                continue
            now = self._allowed(one)[0]
            target = int(np.argmin(now))
            if now[target] < 0:
                self._move(one, target)
                moved = True
        return moved

    def _exchange(self) -> bool:
        """Exchange bundles of two ranks where that saves bytes and both still fit; whether any were.

        Pairs are found by what either move alone would change, and judged by what both do. Columns and single tiles are left out.
        """
        kinds = list(self._kinds(None))[:-2]
        change = np.concatenate([self._changes(bundles) for bundles in kinds])
        kind = np.repeat(np.arange(len(kinds)), [len(bundles.name) for bundles in kinds])
        place = np.concatenate([np.arange(len(bundles.name)) for bundles in kinds])
        source, load, tokens = (np.concatenate([getattr(b, c) for b in kinds]) for c in ("source", "load", "tokens"))
        p, moved = self.partition, False
        for rank in range(p.tiling.ranks):
            mine, other = np.flatnonzero(source == rank), np.flatnonzero(source > rank)
            if not len(mine) or not len(other):
                continue
            total = change[mine][:, source[other]] + change[other, rank]
            for amount, now, most in ((load, p.loads, self.most_load), (tokens, p.tokens, self.most_tokens)):
                got = amount[other] - amount[mine][:, None]
                total[(got > 0) & (now[rank] + got > most[rank])] = 0
                total[(got < 0) & (now[source[other]] - got > most[source[other]])] = 0
            partner = np.argmin(total, axis=0)
            saved = total[partner, np.arange(len(other))]
            for at in np.argsort(saved, kind="stable")[: min(EXCHANGES, np.count_nonzero(saved < 0))]:
                pair = mine[partner[at]], other[at]
                one, two = (kinds[kind[i]].take(place[[i]]) for i in pair)
                moved |= self._swap(one, two)
        return moved

    def _swap(self, one: _Bundles, two: _Bundles) -> bool:
        """Exchange two bundles if that saves bytes within limits."""
        p, a, b = self.partition, int(one.source[0]), int(two.source[0])
        if not self._whole(one) or not self._whole(two):
            return False
        for now, most, out, back in (
            (p.loads, self.most_load, int(one.load[0]), int(two.load[0])),
            (p.tokens, self.most_tokens, int(one.tokens[0]), int(two.tokens[0])),
        ):
            if (back > out and now[a] + back - out > most[a]) or (out > back and now[b] + out - back > most[b]):
                return False
        change = self._changes(one)[0, b]
        self._move(one, b)
        change += self._changes(two)[0, a]
        if change >= 0:
            self._move(replace(one, source=two.source), a)
            return False
        self._move(two, a)
        return True

    # -- bundles

    def _kinds(self, rank: int | None) -> Iterator[_Bundles]:
        """Bundles of every kind, of all ranks or of one (then without single tiles)."""
        p, t = self.partition, self.partition.tiling
        tiles = np.ones(len(p.worker), bool) if rank is None else p.worker == rank
        kept = np.ones(len(p.owner), bool) if rank is None else p.owner == rank
        no_block, no_tile = np.full(len(p.owner), -1, np.int64), np.full(len(p.worker), -1, np.int64)
        if self.limits.free:
            # A block; a block and a run of blocks with what is computed at home; all of a document.
            block, rows, document = np.arange(len(p.owner)), t.tiles.rows, t.blocks.document
            border = (document[1:] != document[:-1]) | (p.owner[1:] != p.owner[:-1])
            run = np.append(0, np.cumsum(border))
            home = tiles & (p.owner[rows] == p.worker)
            yield self.bundles(np.where(kept, block, -1), no_tile)
            yield self.bundles(np.where(kept, block, -1), np.where(home, rows, -1))
            yield self.bundles(np.where(kept, run, -1), np.where(home, run[rows], -1))
            label = document * t.ranks
            yield self.bundles(np.where(kept, label + p.owner, -1), np.where(tiles, label[rows] + p.worker, -1))
        for group in (self.share, t.tiles.strip, self.column):
            yield self.bundles(no_block, np.where(tiles, group * t.ranks + p.worker, -1))
        if rank is None:
            yield self.bundles(no_block, np.arange(len(p.worker)))

    def bundles(self, block_label: Ints, tile_label: Ints) -> _Bundles:
        """The bundles that labels describe."""
        p, t = self.partition, self.partition.tiling
        in_blocks, in_tiles = np.flatnonzero(block_label >= 0), np.flatnonzero(tile_label >= 0)
        name = np.unique(np.concatenate([block_label[in_blocks], tile_label[in_tiles]]))
        of_block, of_tile = (np.searchsorted(name, label) for label in (block_label, tile_label))
        source = np.zeros(len(name), np.int64)
        source[of_block[in_blocks]] = p.owner[in_blocks]
        source[of_tile[in_tiles]] = p.worker[in_tiles]
        pins = t.pins.take(tile_label[t.pins.tile] >= 0)
        index, within = spread(np.diff(self.block_first)[in_blocks])
        at_home = self.block_nets[self.block_first[in_blocks[index]] + within]
        nets = max(1, len(t.nets))
        touched = of_tile[pins.tile] * nets + pins.net
        followed = of_block[in_blocks[index]] * nets + at_home
        found, place = np.unique(np.concatenate([touched, followed]), return_inverse=True)
        return _Bundles(
            block_label,
            tile_label,
            name,
            source,
            load=_sums(of_tile[in_tiles], t.tiles.load[in_tiles], len(name)),
            tokens=_sums(of_block[in_blocks], (t.blocks.stop - t.blocks.start)[in_blocks], len(name)),
            first=np.searchsorted(found // nets, np.arange(len(name) + 1)),
            net=found % nets,
            count=np.bincount(place.reshape(-1)[: len(touched)], minlength=len(found)),
        )

    def _whole(self, one: _Bundles) -> bool:
        """Whether a bundle is still all on its source."""
        p = self.partition
        tiles, kept = p.worker[one.tile_label == one.name], p.owner[one.block_label == one.name]
        return bool((tiles == one.source).all() and (kept == one.source).all())

    def _allowed(self, bundles: _Bundles) -> Ints:
        """Bytes that moving each bundle to each rank would add; forbidden where it does not fit."""
        p, load, tokens = self.partition, bundles.load[:, None], bundles.tokens[:, None]
        over = (load > 0) & (p.loads + load > self.most_load)
        over |= (tokens > 0) & (p.tokens + tokens > self.most_tokens)
        return np.where(over, FORBIDDEN, self._changes(bundles))

    def _changes(self, bundles: _Bundles) -> Ints:
        """Bytes that moving each bundle to each rank would add."""
        ranks, bundle_count = self.partition.tiling.ranks, len(bundles.name)
        total = np.zeros((bundle_count, ranks), np.int64)
        low = 0
        while low < bundle_count:
            most = bundles.first[low] + CHUNK // ranks
            high = max(low + 1, int(np.searchsorted(bundles.first, most, side="right")) - 1)
            total[low:high] = self._changes_between(bundles, low, high)
            low = high
        return total

    def _changes_between(self, bundles: _Bundles, low: int, high: int) -> Ints:
        p, t, first = self.partition, self.partition.tiling, bundles.first[low : high + 1]
        net, count = bundles.net[first[0] : first[-1]], bundles.count[first[0] : first[-1]]
        of = np.repeat(np.arange(low, high), np.diff(first))
        source, home = bundles.source[of], p.owner[t.nets.block[net]]
        price, extra = t.nets.price[net], t.nets.extra[net]
        readers, reads = p.readers[net], p.reads[net]
        at_home = reads[np.arange(len(net)), home]
        moves, follows = count > 0, bundles.block_label[t.nets.block[net]] == bundles.name[of]
        leaves = moves & (p.counts[net, source] == count)
        left = readers - leaves

        def cost(readers: Ints, home_reads: Ints | Bools) -> Ints:
            return np.asarray((readers - home_reads) * (price + np.where(readers > 1, extra, 0)))

        # A target either reads these tokens already or begins to; it is their new home when their block follows.
        stays = at_home & ~(leaves & (home == source))
        old = cost(left, np.where(follows, 1, stays))
        new = cost(left + moves, np.where(follows, moves, stays))
        after = np.where(reads, old[:, None], new[:, None])
        arrives = np.flatnonzero(moves & ~follows & ~at_home)
        after[arrives, home[arrives]] = cost(left + 1, moves)[arrives]
        after -= cost(readers, at_home)[:, None]
        change = np.zeros((high - low, t.ranks), np.int64)
        filled = np.flatnonzero(np.diff(first))
        if len(filled):
            change[filled] = np.add.reduceat(after, first[filled] - first[0], axis=0)
        change[np.arange(high - low), bundles.source[low:high]] = 0
        return change

    def _move(self, one: _Bundles, target: int) -> None:
        """Move a single bundle."""
        p, source = self.partition, int(one.source[0])
        p.counts[one.net, source] -= one.count
        p.counts[one.net, target] += one.count
        p.reads[one.net] = p.counts[one.net] > 0
        p.readers[one.net] = p.reads[one.net].sum(axis=1)
        p.worker[one.tile_label == one.name] = target
        p.owner[one.block_label == one.name] = target
        for sums, amount in ((p.loads, one.load[0]), (p.tokens, one.tokens[0])):
            sums[source] -= amount
            sums[target] += amount


# --- Mt-KaHyPar ----------------------------------------------------------------------------------------------------------


def _partition_nodes(search: _Search, seed: int) -> None:
    """A V-cycle over nodes, then one over the ranks of each node."""
    p, nodes = search.partition, search.limits.nodes
    if nodes[-1] > 0:
        _settle(search, *_vcycle(search, nodes, seed))
    for node in range(int(nodes[-1]) + 1):
        ranks = np.flatnonzero(nodes == node)
        if len(ranks) > 1:
            owner, worker = _vcycle(search, np.where(nodes == node, np.arange(len(nodes)) - ranks[0], -1), seed)
            p.owner = np.where(owner >= 0, ranks[owner], p.owner)
            p.worker = np.where(worker >= 0, ranks[worker], p.worker)
            p.count()


def _vcycle(search: _Search, part_of: Ints, seed: int) -> tuple[Ints, Ints]:
    """The parts of blocks and tiles after Mt-KaHyPar has improved those they are in; -1 for what is in none.

    ``part_of`` is the part of each rank. Tokens that may not move are one vertex per part, so heavy that no part can hold two.
    """
    p, t = search.partition, search.partition.tiling
    parts, count = int(part_of.max()) + 1, len(t.blocks)
    part = np.concatenate([part_of[p.owner], part_of[p.worker]])
    vertex, movable = np.full(len(part), -1, np.int64), part >= 0
    held = 0 if search.limits.free else parts
    if held:
        vertex[:count], movable[:count] = part[:count], False
    vertex[movable] = held + np.arange(np.count_nonzero(movable))
    nets, prices = _net_lists(t, vertex, parts)
    if nets:
        weights, most = _weights(search, part_of, movable, (0, 1) if held else TOKEN_SHARES[seed % len(TOKEN_SHARES)])
        heavy = max(most) + 1 if held else 0
        start = [*range(held), *part[movable].tolist()]
        found = _improved(nets, prices, [heavy] * held + weights, [m + heavy for m in most], start, seed)
        if not held:
            part[movable] = found
        elif len(np.unique(found[:held])) == held:
            # Parts are named after the tokens they hold.
            part[movable] = np.argsort(found[:held])[found[held:]]
    return part[:count], part[count:]


def _weights(search: _Search, part_of: Ints, movable: Bools, shares: tuple[int, int]) -> tuple[list[int], list[int]]:
    """One weight for movable vertices, and the most of it each part may hold: shares of tokens and of compute."""
    t, (token_share, load_share) = search.partition.tiling, shares
    tokens, load = token_share / search.mean_tokens, load_share / search.mean_load
    weights = np.concatenate([(t.blocks.stop - t.blocks.start) * tokens, t.tiles.load * load])[movable]
    most = search.most_tokens * tokens + search.most_load * load
    limits = np.array([most[part_of == part].sum() for part in range(int(part_of.max()) + 1)])
    # What is over already must have its place: the partitioner refuses limits that cannot hold all.
    limits *= max(1.0, weights.sum() / limits.sum())
    scale = SCALE / limits.sum()
    return (weights * scale).astype(np.int64).tolist(), np.ceil(limits * scale).astype(np.int64).tolist()


def _improved(
    nets: list[list[int]], prices: list[int], weights: list[int], most: list[int], part: list[int], seed: int
) -> Ints:
    """The part of each vertex after one V-cycle from ``part``; a part holds at most its ``most`` of the weights."""
    import mtkahypar

    presets, partitioner = mtkahypar.PresetType, _partitioner()
    few = len(weights) <= QUALITY_VERTICES
    mtkahypar.set_seed(seed)
    context = partitioner.context_from_preset(presets.DETERMINISTIC_QUALITY if few else presets.DETERMINISTIC)
    context.logging = False
    context.set_partitioning_parameters(len(most), 0.0, mtkahypar.Objective.KM1)
    context.set_individual_target_block_weights(most)
    graph = partitioner.create_hypergraph(context, len(weights), len(nets), nets, weights, prices)
    partitioned = graph.create_partitioned_hypergraph(context, len(most), part)
    partitioned.improve_partition(context, 1)
    return np.array(partitioned.get_partition(), np.int64)


def _net_lists(t: _Tiling, vertex: Ints, parts: int) -> tuple[list[list[int]], list[int]]:
    """The nets among vertices (-1 is none) as Mt-KaHyPar takes them, and prices that fit its 32 bits.

    A net without its block, for the extra price, follows those with their blocks.
    """
    count, tile = len(t.nets), len(t.blocks) + t.pins.tile
    dear = t.nets.extra[t.pins.net] > 0
    net = np.concatenate([np.arange(count), t.pins.net, count + t.pins.net[dear]])
    pin = vertex[np.concatenate([t.nets.block, tile, tile[dear]])]
    net, pin = net[pin >= 0], pin[pin >= 0]
    pin = pin[np.argsort(net, kind="stable")]
    size = np.bincount(net, minlength=2 * count)
    several = np.flatnonzero(size > 1)
    if not len(several):
        return [], []
    pin = pin[np.repeat(size > 1, size)]
    price = np.concatenate([t.nets.price, t.nets.extra])[several]
    price = price // int(np.gcd.reduce(price))
    shift = max(0, (int(price.sum()) * parts).bit_length() - 30)
    lists = [pins.tolist() for pins in np.split(pin, np.cumsum(size[several])[:-1])]
    return lists, np.maximum(price >> shift, 1).tolist()


def _settle(search: _Search, owner: Ints, worker: Ints) -> None:
    """Give what changed its node a rank there: strips one that has most of what they read, blocks one that reads most of them."""
    p, t, nodes = search.partition, search.partition.tiling, search.limits.nodes
    changed = worker != nodes[p.worker]
    if changed.any():
        label = np.where(changed, t.tiles.strip * (nodes[-1] + 1) + worker, -1)
        bundles = search.bundles(np.full(len(owner), -1, np.int64), label)
        rank = _nearest(search, bundles, bundles.name % (nodes[-1] + 1))
        p.worker[changed] = rank[np.searchsorted(bundles.name, label[changed])]
        p.count()
    changed = owner != nodes[p.owner]
    if changed.any():
        bundles = search.bundles(np.where(changed, np.arange(len(owner)), -1), np.full(len(worker), -1, np.int64))
        p.owner[changed] = _nearest(search, bundles, owner[changed])
        p.count()


def _nearest(search: _Search, bundles: _Bundles, node: Ints) -> Ints:
    """For each bundle the rank of its node that has most of its nets, the least loaded among equals."""
    p, t, nodes = search.partition, search.partition.tiling, search.limits.nodes
    of = np.repeat(np.arange(len(node)), np.diff(bundles.first))
    has = p.reads[bundles.net] | (p.owner[t.nets.block[bundles.net]][:, None] == np.arange(t.ranks))
    worth = np.zeros((len(node), t.ranks), np.int64)
    np.add.at(worth, of, has * t.nets.price[bundles.net][:, None])
    worth[node[:, None] != nodes] = -1
    order = np.argsort(p.loads, kind="stable")
    return np.asarray(order[np.argmax(worth[:, order], axis=1)])


# --- back to a placement -------------------------------------------------------------------------------------------------


def _placement(request: Request, before: Placement, partition: _Partition, limits: _Limits) -> Placement:
    """Runs and regions of a partition."""
    t = partition.tiling
    regions = tuple(_regions(partition, number) for number in range(len(t.batch.masks)))
    if not limits.free:
        return replace(before, regions=regions)
    runs, pads = runs_of_ranges(partition.owner, t.blocks.start, t.blocks.stop), 0
    if request.equal_tokens:
        runs, pads = equalised(runs, request.ranks, request.batch.tokens, request.pad_to)
    return Placement(request.batch, request.ranks, pads, runs, regions)


def _regions(partition: _Partition, number: int) -> Regions:
    """Tiles of one mask joined along keys, then rows, then heads.

    Between neighbouring tiles of a strip there is nothing to compute, so a region reaches to the next one's keys, and the outer ones of a
    strip to the document's ends.
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
    """Regions that differ only in touching ranges ``low..high`` become one."""
    if not len(regions):
        return regions
    others = [name for name in Regions.names() if name not in (low, high)]
    regions = regions.sorted_by(*others, low)
    same = getattr(regions, low)[1:] == getattr(regions, high)[:-1]
    for name in others:
        same &= getattr(regions, name)[1:] == getattr(regions, name)[:-1]
    last = getattr(regions, high)[np.append(~same, True)]
    return replace(regions.take(np.append(True, ~same)), **{high: last})


def _millionths(over: Ints, mean: int) -> Ints:
    """Excess in millionths of the mean, rounded up, from 0 to eight means."""
    shift = max(0, mean.bit_length() - 40)
    scaled = (np.clip(over, 0, 8 * mean) + (1 << shift) - 1) >> shift
    return np.asarray(-(-scaled * MILLION // (mean >> shift)))


def _sums(index: Ints, values: Ints, size: int) -> Ints:
    """Integer sums of ``values`` by ``index``, exact beyond 2**53."""
    total = np.zeros(size, np.int64)
    np.add.at(total, index, values)
    return total
