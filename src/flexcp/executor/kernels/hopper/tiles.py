"""How the Hopper kernel cuts a work list into launches. Integers only:
what a launch will do can be counted on any machine.

A launch is one persistent program for each multiprocessor. Its *items* are tiles x groups of heads in a row, ``turn``
tiles of each group before the next group's, longest tiles first; program p of n takes the items p, 2n - 1 - p, 2n + p,
... (zigzag). A forward is one launch over tiles of queries; a backward is one over tiles of keys (dk and dv, long ones
split) and one over tiles of queries (dq).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.kernels.tiles import NO_BORDERS, SegmentList, TileList, segment_list, tile_list, transposed

Ints = NDArray[np.int64]
TILE = 128
"""Packed query rows of a tile: two warp groups of 64."""
BLOCK = 128
"""Keys of a block of the forward, and of a tile of the backward."""
QUERIES = 64
"""Packed queries of a block of the backward."""
BEYOND_L2 = 128 << 20
"""Bytes of keys and values that programs can no longer share through the L2."""
TURN_GAIN = 1.1
"""How much longer the busiest program may take for the sake of the L2."""
PARTS, SHORTEST_PART = 6, 32
"""dk and dv: split tiles of keys until a multiprocessor gets about so many, but none into parts of fewer blocks."""


def packed_heads(share: int) -> int:
    """Query heads of a KV head in one tile: the power of two in their number."""
    return min(share & -share, TILE // 2)


def query_tiles(slices: Ints, share: int, borders: Ints = NO_BORDERS) -> TileList:
    """Tiles of packed query rows, none on both sides of one of ``borders``."""
    return tile_list(slices, TILE // packed_heads(share), BLOCK, borders=borders)


def key_tiles(slices: Ints, share: int) -> TileList:
    """Tiles of keys against blocks of packed query rows."""
    return tile_list(transposed(slices), BLOCK, QUERIES // packed_heads(share), odd_clear=False)


def longest_part(
    made: TileList, kv_heads: int, share: int, units: int, parts: int = PARTS, shortest: int = SHORTEST_PART
) -> int:
    """Blocks of a tile of keys above which it is split, on so many multiprocessors."""
    blocks = made.blocks * kv_heads * (share // packed_heads(share))
    return max(shortest, blocks // (units * parts))


def tiles_in_turn(blocks: Ints, row_bytes: int, groups: int, kv_heads: int, programs: int) -> int:
    """How many tiles a group of heads takes before the next group's turn: 1, or as many as programs run at a time.

    Programs that run together walk the keys (a key and its value are ``row_bytes``) of every KV head in step, and share
    them through the L2. With one tile a turn they walk all KV heads at once. Where the longest tile's are too much for
    the L2, all walk the keys of one KV head. On an H200, full, 65,536 tokens, 8 KV heads (256 MiB): forward from 504 to
    562 TFLOP/s, dq from 184 to 164 ms. At 16,384 tokens (64 MiB) it costs the forward 5 %. Nothing between was
    measured.

    Not where it leaves the long tiles to few programs: each group's begin with its longest. Causal blockwise, 65,536
    tokens, ran at 188 TFLOP/s that way and at 357 with half the tokens.
    """
    if int(blocks.max(initial=0)) * BLOCK * row_bytes * kv_heads <= BEYOND_L2:
        return 1
    alone, together = (int(loads(blocks, groups, turn, programs).max()) for turn in (programs, 1))
    return programs if alone <= TURN_GAIN * together else 1


def loads(of_tile: Ints, groups: int, turn: int, programs: int) -> Ints:
    """What each program gets, where a tile is worth ``of_tile``."""
    item = np.arange(len(of_tile) * groups)
    first = item // (turn * groups) * turn
    width = np.minimum(turn, len(of_tile) - first)
    tile = first + (item - first * groups) % width
    lap, place = item // programs, item % programs
    program = np.where(lap % 2 == 0, place, programs - 1 - place)
    return np.bincount(program, weights=of_tile[tile], minlength=programs).astype(np.int64)


def launches(slices: Ints, heads: int, kv_heads: int, row_bytes: int, units: int, backward: bool) -> list[Ints]:
    """For each launch of a direction, dk and dv first: ``[program, 3]`` blocks without a mask, blocks with one,
    and tiles.
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
        # Query heads that are not packed together pass over a tile's keys one behind the other.
        counts[:, :2] *= share // packed_heads(share)
        found.insert(0, counts)
    return found


def _counts(made: SegmentList, groups: int, turn: int, programs: int) -> Ints:
    first, blocks = made.tiles[:, 2].astype(np.int64), made.tiles[:, 3].astype(np.int64)
    # A tile's segments lie together, up to where the next tile's begin.
    order = np.argsort(first)
    end = np.empty_like(first)
    end[order] = np.append(first[order][1:], len(made.segments) - 1)
    masked = np.append(0, np.cumsum(made.segments[:, 1].astype(np.int64) * made.segments[:, 2]))
    edge = masked[end] - masked[first]
    columns = (blocks - edge, edge, np.ones_like(edge))
    return np.stack([loads(column, groups, turn, programs) for column in columns], axis=1)
