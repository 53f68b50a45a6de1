"""Tiles: cut slices into the tables of a GPU kernel's work list, on the host and ahead of time, as integers.

A *tile* is a range of rows that one GPU program computes, with all keys that these rows see. No row is in two tiles of
a list, so one program owns the results of a row (unless long tiles are split: :func:`split`, :func:`segment_list`). The
keys of a tile are given by *entries*, one for each slice that overlaps the tile. A program walks each entry from its
first key in blocks of ``block`` keys:

    k0 ........ full0 ........ full1 ........ k1        rows q0..q1 of the tile see key k when lo <= k - q <= hi
      edge blocks   clear blocks   edge blocks

Every row of the tile sees all keys of a *clear* block, which needs no mask. *Edge* blocks are cut by the band, by the
entry's rows, or by its last key. Tiles are sorted longest first, so that a launch does not end with a long one.

Rows are cut where a slice begins or ends. Adjacent ranges that together fit into a tile are joined, because a
half-empty tile costs as much as a full one. If the rows of a longer range are no multiple of the tile height, the odd
rows form a tile at that end of the range whose rows see fewer keys.

A *compact* list suits trees, whose slices are many and short. Slices with adjacent keys share an entry where their rows
and bands allow it, and rows are cut into full tiles, whatever slices begin in them, if that saves more than additional
edge blocks cost.

For dk and dv the roles are exchanged, and tiles are ranges of keys: the same functions are called with
:func:`transposed` slices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp import masks
from flexcp.arrays.intervals import offsets, overlaps, spread
from flexcp.masks import HI, K0, K1, LO, Q0, Q1

Ints = NDArray[np.int64]

TILE_COLUMNS = 4  # first row, last row + 1, first entry, last entry + 1
ENTRY_COLUMNS = 8  # k0, full0, full1, k1, lo, hi, q0, q1
TILE_PRICE, EDGE_PRICE = 3, 0.4
"""About what a tile costs besides its blocks, and an edge block more than a clear one, in clear blocks on an H200."""
NO_BORDERS: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True)
class TileList:
    """Tiles and their entries, as int32 tables whose columns are named at ``TILE_COLUMNS`` and ``ENTRY_COLUMNS``.

    ``rows`` is the number of rows that the tiles cover, ``clear_blocks`` and ``edge_blocks`` are the blocks of keys
    without and with a mask in all tiles, and ``longest`` is the number of blocks of the longest tile.
    """

    tiles: NDArray[np.int32]
    entries: NDArray[np.int32]
    rows: int
    clear_blocks: int
    edge_blocks: int
    longest: int

    @property
    def blocks(self) -> int:
        """The number of blocks of all tiles, with and without a mask."""
        return self.clear_blocks + self.edge_blocks


def tile_list(
    slices: Ints,
    height: int,
    block: int,
    odd_clear: bool = True,
    borders: Ints = NO_BORDERS,
    compact: bool = False,
) -> TileList:
    """Cut slices into tiles of at most ``height`` rows, with keys in blocks of ``block``.

    No tile has rows on both sides of one of ``borders``. Without ``odd_clear``, tiles of fewer than ``height`` rows
    have only edge blocks, for kernels that must mask the missing rows. With ``compact``, slices with adjacent keys
    share an entry, and short slices share tiles. Raises ValueError if row numbers do not fit into int32.
    """
    slices = masks.trim(slices.reshape(-1, 6))
    slices = slices[~masks.is_empty(slices)]
    if len(slices) and int(slices[:, [Q1, K1]].max()) >= 1 << 31:
        raise ValueError(f"a work list counts rows in int32; got row {int(slices[:, [Q1, K1]].max())}")
    start, stop = _tiles(slices, height, borders)
    least = 0 if odd_clear else height
    made = _cut(slices, start, stop, block, least, compact)
    if compact:
        start, stop = _full_tiles(slices, height, borders)
        if len(start) < len(made.tiles):
            made = min(made, _cut(slices, start, stop, block, least, compact), key=_price)
    return made


def _cut(slices: Ints, start: Ints, stop: Ints, block: int, least: int, compact: bool) -> TileList:
    """Return the list of the tiles ``start <= row < stop``; only tiles of at least ``least`` rows have clear blocks.

    With ``compact``, slices with adjacent keys share an entry.
    """
    which, tile = overlaps(slices[:, Q0], slices[:, Q1], start, stop)
    parts = _clipped(slices[which], start[tile], stop[tile])
    order = np.lexsort((parts[:, K0], tile))
    parts, tile = parts[order], tile[order]
    if compact:
        parts, tile = _joined_keys(parts, tile)
    entries = _entries(parts, start[tile], stop[tile], block, least)
    clear = (entries[:, 2] - entries[:, 1]) // block
    edge = (entries[:, 1] - entries[:, 0]) // block - (entries[:, 2] - entries[:, 3]) // block
    at = offsets(np.bincount(tile, minlength=len(start)).astype(np.int64))
    blocks = np.bincount(tile, weights=clear + edge, minlength=len(start))
    longest = np.argsort(-blocks, kind="stable")
    tiles = np.stack([start, stop, at[:-1], at[1:]], axis=1)[longest]
    counts = (int((stop - start).sum()), int(clear.sum()), int(edge.sum()), int(blocks.max(initial=0)))
    return TileList(tiles.astype(np.int32), entries.astype(np.int32), *counts)


def _price(made: TileList) -> float:
    """Return about how long a kernel takes for a list, in clear blocks."""
    return made.blocks + EDGE_PRICE * made.edge_blocks + TILE_PRICE * len(made.tiles)


def useful(slices: Ints, made: TileList, pairs_per_block: int) -> float:
    """Return the fraction of the (query, key) pairs in all blocks of a list that attend, that is, are in the slices.

    ``pairs_per_block`` is the number of pairs in a block, hidden ones included.
    """
    return float(masks.area(slices).sum()) / max(1, made.blocks * pairs_per_block)


def transposed(slices: Ints) -> Ints:
    """Return slices of the same pairs with queries and keys exchanged."""
    slices = slices.reshape(-1, 6)
    swapped = slices[:, [K0, K1, Q0, Q1, HI, LO]]
    swapped[:, [LO, HI]] *= -1
    return swapped


def _tiles(slices: Ints, height: int, borders: Ints) -> tuple[Ints, Ints]:
    """Return the first row of each tile, and the last row + 1 of each, ascending; tiles begin with a slice."""
    at, seen = _ranges(slices, borders)
    start, stop = _joined(at[:-1][seen], at[1:][seen], height, set(borders.tolist()))
    # The odd rows of a range are a tile at the end whose row sees fewer keys.
    odd_first = (_keys_of(slices, start) < _keys_of(slices, stop - 1)) & ((stop - start) % height > 0)
    counts = -(-(stop - start) // height)
    run, number = spread(counts)
    first = np.where(odd_first, stop - counts * height, start)[run] + number * height
    return np.maximum(first, start[run]), np.minimum(first + height, stop[run])


def _ranges(slices: Ints, borders: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return where slices begin or end and where borders are, ascending, and whether a slice has the rows up to the
    next such place.
    """
    at = np.unique(np.concatenate([slices[:, Q0], slices[:, Q1], borders]))
    # Slices that begin at each place minus those that end there: the running sum counts slices over the rows up to the
    # next place.
    change = np.bincount(np.searchsorted(at, slices[:, Q0]), minlength=len(at))
    change -= np.bincount(np.searchsorted(at, slices[:, Q1]), minlength=len(at))
    return at, np.cumsum(change)[:-1] > 0


def _full_tiles(slices: Ints, height: int, borders: Ints) -> tuple[Ints, Ints]:
    """Return tiles of ``height`` rows wherever there are so many, whatever slices begin or end inside them."""
    at, seen = _ranges(slices, borders)
    start, stop = at[:-1][seen], at[1:][seen]
    if not len(start):
        return start, stop
    begins = np.concatenate([[True], (start[1:] != stop[:-1]) | np.isin(start[1:], borders)])
    start, stop = start[begins], stop[np.append(begins[1:], True)]
    run, number = spread(-(-(stop - start) // height))
    first = start[run] + number * height
    return first, np.minimum(first + height, stop[run])


def _joined(start: Ints, stop: Ints, height: int, borders: set[int]) -> tuple[Ints, Ints]:
    """Join adjacent ranges of rows that together have at most ``height`` rows, unless a border is between them."""
    runs: list[list[int]] = []
    for a, b in zip(start.tolist(), stop.tolist(), strict=True):
        if runs and runs[-1][1] == a and b - runs[-1][0] <= height and a not in borders:
            runs[-1][1] = b
        else:
            runs.append([a, b])
    table = np.array(runs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _keys_of(slices: Ints, rows: Ints) -> Ints:
    """Return how many keys each row sees (``rows`` ascending)."""
    which, row = overlaps(slices[:, Q0], slices[:, Q1], rows, rows + 1)
    q, s = rows[row], slices[which]
    keys = np.minimum(s[:, K1], q + s[:, HI] + 1) - np.maximum(s[:, K0], q + s[:, LO])
    return np.bincount(row, weights=keys, minlength=len(rows)).astype(np.int64)


def _clipped(slices: Ints, start: Ints, stop: Ints) -> Ints:
    """Return the part of each slice in the rows of its tile (``start <= row < stop``), with the slice's band."""
    q0, q1 = np.maximum(slices[:, Q0], start), np.minimum(slices[:, Q1], stop)
    lo, hi = slices[:, LO], slices[:, HI]
    k0, k1 = np.maximum(slices[:, K0], q0 + lo), np.minimum(slices[:, K1], q1 + hi)
    return np.stack([q0, q1, k0, k1, lo, hi], axis=1)


def _joined_keys(parts: Ints, tile: Ints) -> tuple[Ints, Ints]:
    """Join parts of a tile that have the same rows and adjacent keys, where one band describes both.

    Blocks of keys begin anew with every entry, so that a branch of a tree and the branch that it continues, whose keys
    follow each other, would otherwise be walked in more blocks than their keys fill. Takes and returns parts sorted by
    tile and first key, and the tile of each.
    """
    if not len(parts):
        return parts, tile
    before, after = parts[:-1], parts[1:]
    together = (tile[1:] == tile[:-1]) & (before[:, K1] == after[:, K0])
    together &= (before[:, Q0] == after[:, Q0]) & (before[:, Q1] == after[:, Q1])
    # The joined part has the lower limit of the first part and the upper limit of the last. So the upper limit of the
    # first and the lower limit of the second must hide nothing, and their other limits nothing of each other's keys.
    first_row, last_row, border = after[:, Q0], after[:, Q1] - 1, after[:, K0]
    together &= (first_row + before[:, HI] >= border - 1) & (last_row + after[:, LO] <= border)
    together &= (first_row + after[:, HI] >= border - 1) & (last_row + before[:, LO] <= border)
    begins = np.flatnonzero(np.concatenate([[True], ~together]))
    ends = np.append(begins[1:], len(parts)) - 1
    joined = parts[begins]
    joined[:, [K1, HI]] = parts[ends][:, [K1, HI]]
    return joined, tile[begins]


def _entries(slices: Ints, start: Ints, stop: Ints, block: int, least: int) -> Ints:
    """Return slices that lie in the rows of their tiles (``start <= row < stop``) as ``ENTRY_COLUMNS``.

    Only tiles of at least ``least`` rows have clear blocks.
    """
    q0, q1, k0, k1, lo, hi = slices.T
    # All rows see the keys from the lower limit of the last row to the upper limit of the first row.
    full0 = k0 - (k0 - np.maximum(k0, q1 - 1 + lo)) // block * block
    full1 = k0 + (np.minimum(k1, q0 + hi + 1) - k0) // block * block
    none = (full0 >= full1) | (q0 > start) | (q1 < stop) | (stop - start < least)
    full0, full1 = np.where(none, k0, full0), np.where(none, k0, full1)
    return np.stack([k0, full0, full1, k1, lo, hi, q0, q1], axis=1)


@dataclass(frozen=True)
class SegmentList:
    """A tile list for kernels that walk all blocks of a tile in one loop.

    Entries are cut into *segments*, ranges of blocks that all need a mask or all do not. Columns of ``tiles``: first
    row, last row + 1, first segment, number of blocks. Columns of ``segments``: first key, number of blocks, whether
    they need the mask, lo, hi, end of the slice's keys, q0, q1. The table of segments ends with a row of zeros, so that
    a kernel may read one segment ahead.
    """

    tiles: NDArray[np.int32]
    segments: NDArray[np.int32]


def segment_list(made: TileList, block: int, longest: int | None = None, descending: bool = False) -> SegmentList:
    """Cut the entries of a tile list, whose keys are in blocks of ``block``, into segments.

    A tile of more than ``longest`` blocks becomes several tiles with the same rows, for kernels that add their results
    to memory. With ``descending`` a tile's last segment comes first, for kernels that walk from the last block to the
    first.
    """
    k0, full0, full1, k1, lo, hi, q0, q1 = made.entries.astype(np.int64).T
    starts = np.stack([k0, full0, full1], axis=1)
    counts = np.stack([full0 - k0, full1 - full0, k1 - full1 + block - 1], axis=1) // block
    masked = np.broadcast_to(np.array([1, 0, 1]), counts.shape)
    rest = [np.broadcast_to(x[:, None], counts.shape) for x in (lo, hi, k1, q0, q1)]
    table = np.stack([starts, counts, masked, *rest], axis=-1)[counts > 0]
    # Number all blocks in the order of the table: then a tile, or a part of one, is an interval of these numbers.
    total = offsets(counts.sum(axis=1))
    tiles = made.tiles.astype(np.int64)
    begin, size = total[tiles[:, 2]], total[tiles[:, 3]] - total[tiles[:, 2]]
    parts = np.ones(len(tiles), np.int64) if longest is None else -(-size // longest)
    tile, number = spread(parts)
    each = -(-size // np.maximum(parts, 1))[tile]
    first = begin[tile] + np.minimum(number * each, size[tile])
    last = np.minimum(first + each, (begin + size)[tile])
    order = np.argsort(first, kind="stable")
    at = offsets(table[:, 1])
    segment, part = overlaps(at[:-1], at[1:], first[order], last[order])
    if descending:
        turned = np.lexsort((-segment, part))
        segment, part = segment[turned], part[turned]
    cut = table[segment]
    cut[:, 0] += (np.maximum(first[order][part], at[segment]) - at[segment]) * block
    cut[:, 1] = np.minimum(last[order][part], at[segment + 1]) - np.maximum(first[order][part], at[segment])
    where = offsets(np.bincount(part, minlength=len(order)).astype(np.int64))[:-1]
    rows = tiles[tile[order]]
    out = np.stack([rows[:, 0], rows[:, 1], where, (last - first)[order]], axis=1)
    out = out[np.argsort(-out[:, 3], kind="stable")]
    segments = np.concatenate([cut, np.zeros((1, 8), np.int64)])
    return SegmentList(out.astype(np.int32), segments.astype(np.int32))


def split(made: TileList, block: int, longest: int) -> TileList:
    """Split tiles of more than ``longest`` blocks into several with the same rows; a block has ``block`` keys.

    This is for kernels that add their results to memory. Rows that are in several tiles count several times in
    ``rows``.
    """
    entries, tiles = made.entries.astype(np.int64), made.tiles.astype(np.int64)
    total = offsets(-((entries[:, 0] - entries[:, 3]) // block))
    begin, size = total[tiles[:, 2]], total[tiles[:, 3]] - total[tiles[:, 2]]
    parts = np.maximum(1, -(-size // longest))
    tile, number = spread(parts)
    each = (-(-size // parts))[tile]
    first = begin[tile] + np.minimum(number * each, size[tile])
    last = np.minimum(first + each, (begin + size)[tile])
    tile, first, last = (x[last > first] for x in (tile, first, last))
    order = np.argsort(first, kind="stable")
    entry, part = overlaps(total[:-1], total[1:], first[order], last[order])
    cut = entries[entry]
    k0, full0, full1, k1 = cut[:, :4].T
    start = k0 + (np.maximum(first[order][part], total[entry]) - total[entry]) * block
    end = k0 + (np.minimum(last[order][part], total[entry + 1]) - total[entry]) * block
    clear0, clear1 = np.clip(full0, start, end), np.clip(full1, start, end)
    none = clear0 >= clear1
    cut[:, :4] = np.stack(
        [start, np.where(none, start, clear0), np.where(none, start, clear1), np.minimum(end, k1)], axis=1
    )
    at = offsets(np.bincount(part, minlength=len(order)).astype(np.int64))
    rows = tiles[tile[order]]
    out = np.stack([rows[:, 0], rows[:, 1], at[:-1], at[1:]], axis=1)
    out = out[np.argsort(-(last - first)[order], kind="stable")]
    covered, most = int((out[:, 1] - out[:, 0]).sum()), int((last - first).max(initial=0))
    return TileList(out.astype(np.int32), cut.astype(np.int32), covered, made.clear_blocks, made.edge_blocks, most)
