"""Tiles of the Hopper kernel: how it cuts a work list into launches, as integers.

Nothing here needs a GPU, so the work of a launch can be counted on any machine. A launch has one persistent program for
each multiprocessor. Its *items* are pairs of a tile and a group of heads. Longest tiles come first, and each group
takes ``turn`` tiles before the next group's turn. Program p of n takes the items p, 2n - 1 - p, 2n + p, ... (*zigzag*).
A forward is one launch over tiles of queries. A backward is one launch over tiles of keys (dk and dv; long tiles are
split) and one over tiles of queries (dq).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.kernels.tiles import NO_BORDERS, SegmentList, TileList, segment_list, tile_list, transposed

Ints = NDArray[np.int64]
TILE = 128
"""Packed query rows (a token and a head each) of a tile: 64 for each of two warp groups."""
BLOCK = 128
"""Keys of a block in the forward, and of a tile in the backward."""
QUERIES = 64
"""Packed queries of a block in the backward."""
BEYOND_L2 = 128 << 20
"""The most bytes that programs can share through the L2 cache."""
TURN_GAIN = 1.1
"""The largest factor by which the busiest program may get more work for the sake of the L2 cache."""
PARTS, SHORTEST_PART = 6, 32
"""For dk and dv: about how many parts of tiles a multiprocessor gets, and the fewest blocks of a part."""


def packed_heads(share: int) -> int:
    """Return how many of the ``share`` query heads of a KV head are in one tile.

    It is the largest power of two that divides ``share``, at most ``TILE // 2``.
    """
    return min(share & -share, TILE // 2)


def query_tiles(slices: Ints, share: int, borders: Ints = NO_BORDERS, compact: bool = False) -> TileList:
    """Return tiles of packed query rows (a token and a head each), for ``share`` query heads per KV head.

    No tile has rows on both sides of one of ``borders``. ``compact`` is that of
    :func:`flexcp.executor.kernels.tiles.tile_list`.
    """
    return tile_list(slices, TILE // packed_heads(share), BLOCK, borders=borders, compact=compact)


def key_tiles(slices: Ints, share: int) -> TileList:
    """Return tiles of keys with blocks of packed query rows, for ``share`` query heads per KV head."""
    return tile_list(transposed(slices), BLOCK, QUERIES // packed_heads(share), odd_clear=False)


def longest_part(
    made: TileList, kv_heads: int, share: int, units: int, parts: int = PARTS, shortest: int = SHORTEST_PART
) -> int:
    """Return the most blocks that a tile of keys may have before it is split, on ``units`` multiprocessors.

    A multiprocessor then gets about ``parts`` parts of tiles. The result is at least ``shortest``.
    """
    blocks = made.blocks * kv_heads * (share // packed_heads(share))
    return max(shortest, blocks // (units * parts))


def tiles_in_turn(blocks: Ints, row_bytes: int, groups: int, kv_heads: int, programs: int) -> int:
    """Return how many tiles a group of heads takes before the next group's turn: 1, or the number of programs.

    ``blocks`` are the blocks of each tile, and a key and its value are ``row_bytes``. Programs that run at the same
    time walk the keys in step and share them through the L2 cache. With one tile per turn they walk the keys of all KV
    heads at once. If the keys of the longest tile are too many for the L2, it is better to walk one KV head at a time:
    on an H200 with a full mask, 65,536 tokens and 8 KV heads (256 MiB) the forward rose from 504 to 562 TFLOP/s, and dq
    fell from 184 to 164 ms. At 16,384 tokens (64 MiB) it costs the forward 5 %. Nothing between was measured.

    The result is 1 if long turns would leave the long tiles to few programs, because each group begins with its longest
    tiles: causal blockwise with 65,536 tokens ran at 188 TFLOP/s that way, and at 357 with half the tokens.
    """
    if int(blocks.max(initial=0)) * BLOCK * row_bytes * kv_heads <= BEYOND_L2:
        return 1
    alone, together = (int(loads(blocks, groups, turn, programs).max()) for turn in (programs, 1))
    return programs if alone <= TURN_GAIN * together else 1


def loads(of_tile: Ints, groups: int, turn: int, programs: int) -> Ints:
    """Return the work of each of ``programs`` programs, if ``of_tile`` is the work of each tile for one group of heads.

    There are ``groups`` groups of heads, which take ``turn`` tiles in turn; the items are dealt in a zigzag.
    """
    item = np.arange(len(of_tile) * groups)
    first = item // (turn * groups) * turn
    width = np.minimum(turn, len(of_tile) - first)
    tile = first + (item - first * groups) % width
    lap, place = item // programs, item % programs
    program = np.where(lap % 2 == 0, place, programs - 1 - place)
    return np.bincount(program, weights=of_tile[tile], minlength=programs).astype(np.int64)


def launches(slices: Ints, heads: int, kv_heads: int, row_bytes: int, units: int, backward: bool) -> list[Ints]:
    """Return the work of each launch of a direction, dk and dv before dq.

    The work of a launch is a table ``[program, 3]``: blocks without a mask, blocks with one, and tiles. ``row_bytes``
    are the bytes of a key and its value, ``units`` is the number of multiprocessors.
    """
    share = heads // kv_heads
    queries = segment_list(query_tiles(slices, share), BLOCK)
    if not len(queries.tiles):
        return []
    groups = heads // packed_heads(share)
    programs = min(units, len(queries.tiles) * groups)
    turn = tiles_in_turn(queries.tiles[:, 3].astype(np.int64), row_bytes, groups, kv_heads, programs)
    found = [_counts(queries, groups, turn, programs)]
    if backward:
        made = key_tiles(slices, share)
        keys = segment_list(made, QUERIES // packed_heads(share), longest_part(made, kv_heads, share, units))
        counts = _counts(keys, kv_heads, 1, min(units, len(keys.tiles) * kv_heads))
        # Query heads that are not packed together walk a tile's blocks one after the other.
        counts[:, :2] *= share // packed_heads(share)
        found.insert(0, counts)
    return found


def _counts(made: SegmentList, groups: int, turn: int, programs: int) -> Ints:
    """Return ``[program, 3]``: blocks without a mask, blocks with one, and tiles of each program."""
    first, blocks = made.tiles[:, 2].astype(np.int64), made.tiles[:, 3].astype(np.int64)
    # The segments of a tile are adjacent, and end where those of the next tile begin.
    order = np.argsort(first)
    end = np.empty_like(first)
    end[order] = np.append(first[order][1:], len(made.segments) - 1)
    masked = np.append(0, np.cumsum(made.segments[:, 1].astype(np.int64) * made.segments[:, 2]))
    edge = masked[end] - masked[first]
    columns = (blocks - edge, edge, np.ones_like(edge))
    return np.stack([loads(column, groups, turn, programs) for column in columns], axis=1)
