"""The hypergraph of a batch: token blocks and tiles as vertices, what moves as nets.

Documents are cut into token blocks, and attention into tiles (mask, query block, key block, head group). Blocks and
tiles are vertices. A *net* joins a block with the tiles that read the same tokens of it; its weight is the bytes of
these tokens. A partition gives each vertex a rank. So the sum of ``weight x (ranks spanned - 1)`` is the volume of the
forward in bytes:

- keys: one net with their block, ``kv`` bytes;
- rows: one net with their block, ``q + o`` bytes, and one net of only the tiles, for the bytes that a partial output
  has more than a final one. (If the block's own rank computes none of the tiles, this counts one rank too few; our own
  search counts it correctly.)

If some tiles read only part of a block (at the edge of a window, or a sink), the block has a net for each set of tiles,
so volumes are exact to the token.

Blocks end where the initial placement is cut, and otherwise on a grid; tiles have the head groups of that placement. So
the initial placement *is* a partition of the hypergraph, with exactly its bytes and balance, and nothing is lost before
the search begins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import offsets, spread, united
from flexcp.arrays.tables import Table
from flexcp.arrays.totals import sums
from flexcp.batch import Batch
from flexcp.masks import K0, K1, Q0, Q1, area
from flexcp.plan.placement import Placement
from flexcp.planners.request import Refused, Request
from flexcp.shape import Kind, Shape

Ints = NDArray[np.int64]

DEFAULT_BLOCKS = 128
"""About how many blocks a batch has if the block size is not given."""
ROWS, KEYS = (Kind.Q, Kind.O), (Kind.KV,)
"""The kinds that move for the rows of a tile, and for its keys, in the forward."""
BACKWARD = {ROWS: (Kind.Q, Kind.DO, Kind.DQ), KEYS: (Kind.KV, Kind.DKV)}
"""For the kinds that move in the forward, the kinds that move in the backward."""
MOST_TILES = 1 << 24
"""The most tiles of a batch, including empty ones.

Each takes some hundred bytes while tiles are made (an estimate, not measured).
"""
NO_CUTS = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Blocks(Table):
    """Token blocks: ranges ``start <= t < stop`` of the stream, each inside one document."""

    start: Ints
    stop: Ints
    document: Ints


@dataclass(frozen=True, eq=False)
class Tiles(Table):
    """Tiles in which the mask allows at least one (query, key) pair.

    ``rows`` and ``keys`` are the numbers of the query block and the key block, ``h0 <= h < h1`` the query heads.
    ``strip`` is the same number for all tiles of a mask, query block and head group. ``load`` is pairs x query heads x
    layers.
    """

    mask: Ints
    rows: Ints
    keys: Ints
    h0: Ints
    h1: Ints
    strip: Ints
    load: Ints


@dataclass(frozen=True, eq=False)
class Nets(Table):
    """Sets of tokens of a block that are read by the same tiles.

    ``price`` is the bytes for each rank that reads them and does not keep them; ``extra`` is how many more bytes that
    is if several ranks read them, because outputs are then partial. ``back_price`` and ``back_extra`` are the same for
    the backward. All are for all layers.
    """

    block: Ints
    price: Ints
    extra: Ints
    back_price: Ints
    back_extra: Ints


@dataclass(frozen=True, eq=False)
class Pins(Table):
    """Which tiles are in which net: one row for each pair of a net and a tile."""

    net: Ints
    tile: Ints


@dataclass(frozen=True, eq=False)
class Tiling:
    """The hypergraph of a batch; tiles are sorted by strip, then keys; pins by net."""

    batch: Batch
    ranks: int
    blocks: Blocks
    tiles: Tiles
    nets: Nets
    pins: Pins


def make_tiling(request: Request, placement: Placement, size: int | None, cuts: Ints = NO_CUTS) -> Tiling:
    """Return the hypergraph of the request's batch.

    Blocks are cut where ``placement`` is cut, at the stream positions ``cuts``, and otherwise every ``size`` tokens.
    Without a size, there are about ``DEFAULT_BLOCKS`` blocks. Raise Refused if there would be too many tiles.
    """
    batch = request.batch
    borders = _default_borders(placement, cuts) if size is None else _borders(placement, size, cuts)
    grid = Blocks(borders[:-1], borders[1:], batch.document_of(borders[:-1]))
    groups = _head_groups(placement, request.shape)
    _refuse_small_blocks(batch, grid, groups)
    found = [_mask_tiling(request, grid, groups, number) for number in range(len(batch.masks))]
    tiles, nets = Tiles.join([f[0] for f in found]), Nets.join([f[1] for f in found])
    tile_at, net_at = (offsets(np.array([len(f[i]) for f in found])) for i in (0, 1))
    order = np.lexsort((tiles.keys, tiles.strip))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    pins = [Pins(f[2].net + net_at[i], place[f[2].tile + tile_at[i]]) for i, f in enumerate(found)]
    return Tiling(batch, request.ranks, grid, tiles.take(order), nets, Pins.join(pins).sorted_by("net"))


def _refuse_small_blocks(batch: Batch, grid: Blocks, groups: _HeadGroups) -> None:
    """Raise Refused if blocks are so small that their tiles would not fit in memory."""
    blocks = np.bincount(grid.document, minlength=batch.documents)
    tiles = int((blocks * blocks * np.diff(groups.first)).sum()) * len(batch.masks)
    if tiles > MOST_TILES:
        size = batch.tokens // len(grid)
        least = size * (math.isqrt(tiles // MOST_TILES) + 1)
        raise Refused(
            f"blocks of {size} tokens make {tiles} tiles of rows, keys and heads in documents of up to "
            f"{int(batch.lengths.max())} tokens, more than {MOST_TILES}; take blocks of {least} tokens, the number "
            "after the strategy's colon"
        )


def _default_borders(placement: Placement, cuts: Ints) -> Ints:
    """Return the borders of blocks on the finest grid that gives about ``DEFAULT_BLOCKS`` blocks."""
    tokens, documents = placement.batch.tokens, placement.batch.documents
    size = max(1, -(-tokens // DEFAULT_BLOCKS))
    while len(found := _borders(placement, size, cuts)) > DEFAULT_BLOCKS + documents and size < tokens:
        size += -(-size // 8)
    return found


def _borders(placement: Placement, size: int, cuts: Ints) -> Ints:
    """Return the borders of blocks in the stream.

    These are the ends of documents, the cuts of the placement, ``cuts``, and a grid of ``size`` tokens where they leave
    room.
    """
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
    """Head groups of all documents: document d has ``first[d]:first[d + 1]``, with query heads ``h0 <= h < h1``.

    No document has more than ``most`` groups.
    """

    first: Ints
    h0: Ints
    h1: Ints
    most: int


def _head_groups(placement: Placement, shape: Shape) -> _HeadGroups:
    """Return the head groups of each document: its query heads, cut where any of its regions cuts them."""
    documents = np.arange(placement.batch.documents)
    owner = np.concatenate([documents, *(r.document for r in placement.regions)])
    head = np.concatenate([np.zeros_like(documents), *(r.h0 for r in placement.regions)])
    label = np.unique(owner * shape.heads + head)
    owner, h0 = label // shape.heads, label % shape.heads
    last = np.append(owner[1:] != owner[:-1], True)
    h1 = np.where(last, shape.heads, np.append(h0[1:], 0))
    first = offsets(np.bincount(owner, minlength=len(documents)))
    return _HeadGroups(first, h0, h1, int(np.diff(first).max()))


def _mask_tiling(request: Request, grid: Blocks, groups: _HeadGroups, number: int) -> tuple[Tiles, Nets, Pins]:
    """Return the tiles, nets and pins of mask ``number``.

    A pair of blocks ``grid`` with pairs of the mask is one tile for each head group of its document.
    """
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
    load = sums(of, area(slices), len(full))[pair] * (h1 - h0) * mask.layers
    tiles = Tiles(np.full(len(pair), number), rows[pair], keys[pair], h0, h1, strip, load)
    sides = []
    for block, first_column, last_column, kinds in ((rows, Q0, Q1, ROWS), (keys, K0, K1, KEYS)):
        found = _same_readers(block, of, slices[:, first_column], slices[:, last_column])
        sides.append(_by_heads(request.shape, kinds, mask.layers, groups, document, *found, offsets(count)))
    (row_nets, row_pins), (key_nets, key_pins) = sides
    key_pins = replace(key_pins, net=key_pins.net + len(row_nets))
    return tiles, Nets.join([row_nets, key_nets]), Pins.join([row_pins, key_pins])


def _same_readers(block: Ints, tile: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the sets of tokens of blocks that are read by the same tiles.

    The results are the block and the number of tokens of each set, then (set, tile) for each member. ``block`` is the
    block of each tile; ``tile``, ``start`` and ``stop`` list the ranges of it that tiles read. The ranges cut a block
    into intervals, and intervals with the same tiles are one set. Sets of tiles are compared by sums of random labels.
    """
    tile, start, stop = united(tile, start, stop)
    wide = int(stop.max(initial=0)) + 1
    start, stop = block[tile] * wide + start, block[tile] * wide + stop
    edges = np.unique(np.concatenate([start, stop]))
    low = np.searchsorted(edges, start)
    read, within = spread(np.searchsorted(edges, stop) - low)
    interval, tile = low[read] + within, tile[read]
    labels = np.random.default_rng(0).integers(1, 1 << 62, len(block))
    signature = sums(interval, labels[tile], len(edges))
    used = np.unique(interval)
    order = used[np.lexsort((signature[used], edges[used] // wide))]
    differs = (edges[order[1:]] // wide != edges[order[:-1]] // wide) | (signature[order[1:]] != signature[order[:-1]])
    number = np.cumsum(np.append(0, differs))[: len(order)]
    shown = order[np.append(True, differs)[: len(order)]]
    tokens = sums(number, edges[order + 1] - edges[order], len(shown))
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
) -> tuple[Nets, Pins]:
    """Return the nets and pins of one side (``ROWS`` or ``KEYS``): a net for each set of tokens and head group.

    ``block``, ``tokens``, ``member_set`` and ``member_tile`` are the result of :func:`_same_readers`; ``document`` is
    the document of each block, and ``tile_first`` the first tile of each pair of blocks.
    """
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
    pins = Pins(offsets(count)[member_set[pin]] + group, tile_first[member_tile[pin]] + group)
    prices = [moved * price for final, partial in (forward, backward) for price in (final, partial - final)]
    return Nets(block[of], *prices), pins
