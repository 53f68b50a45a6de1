"""Items: decide which GPU program of a launch computes which tile for which heads, and in which order, as integers.

A launch has one persistent program for each multiprocessor. An *item* is a tile with one group of heads, numbered
``tile * groups + group``. Items are put in an order that suits the L2 cache and are then dealt in rounds of one item
per program: in each round the longest item goes to the program with the least work so far. So all programs end at about
the same time, and programs that run at the same time read neighbouring data.

The forward kernel reads *records*: a record has everything that is needed to begin an item, so that one read suffices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.kernels.tiles import TILE_PRICE, SegmentList

Ints = NDArray[np.int64]
RECORD = 12
"""Integers of a record: a multiple of 4, because they are read in words of 16 bytes."""
ADDED_KEY_PRICE = 5e-4
"""What it costs to add up and round the gradients of one key of one head, as a number of blocks.

It is estimated from the bytes moved.
"""


ROW_PRICE, SAVED = 0.08, 0.1
"""What a row costs that a backward reads and adds to once more, in blocks, and the fraction of a list's blocks that
another order of its tiles must save.

The price is by bytes: the queries of a group, the output's gradient and dq, from memory and back.
"""


def in_turns(tiles: int, groups: int, turn: int) -> Ints:
    """Return all items (``tile * groups + group``) in the order of the tiles.

    Each group of heads takes ``turn`` tiles before the next group's turn.
    """
    item: Ints = np.arange(tiles * groups)
    first = item // (turn * groups) * turn
    within = item - first * groups
    width = np.minimum(turn, tiles - first)
    order: Ints = (first + within % width) * groups + within // width
    return order


def group_by_group(order: Ints, groups: int) -> Ints:
    """Return all items (``tile * groups + group``), one group of heads after the other.

    Each group has the tiles in the given order.
    """
    return (order[None, :] * groups + np.arange(groups)[:, None]).reshape(-1)


def tiles_together(made: SegmentList, block: int, at_once: int) -> Ints:
    """Return the order in which tiles of keys are dealt, if about ``at_once`` of them run at the same time.

    A tile walks its queries in blocks of ``block``, from the last to the first (``made`` is a descending list), reads
    their rows and adds to them. Dealing the longest tiles first leaves the least to balance at the end. But the longest
    tiles of many short documents are of different documents, whose rows are then read from memory again for each of
    their tiles. In the order of the keys most are read once. That order is taken if the rows it saves, added up over
    all rounds of ``at_once`` tiles, are worth it.
    """
    begin = made.tiles[:, 2].astype(np.int64)
    after = np.append(np.sort(begin), len(made.segments) - 1)
    last = after[np.searchsorted(after, begin) + 1] - 1
    low = made.segments[last, 0].astype(np.int64)
    high = made.segments[begin, 0].astype(np.int64) + made.segments[begin, 1] * block
    by_length: Ints = np.arange(len(begin))
    by_keys: Ints = np.lexsort((-high, made.tiles[:, 0]))
    touched = [_touched(low[order], high[order], at_once) for order in (by_length, by_keys)]
    saved = ROW_PRICE * (touched[0] - touched[1])
    return by_keys if saved > SAVED * int(made.tiles[:, 3].sum()) else by_length


def _touched(low: Ints, high: Ints, at_once: int) -> int:
    """Return how many numbers are in the ranges ``low <= x < high`` of each ``at_once`` in turn, summed over turns."""
    turn = np.arange(len(low)) // at_once * (int(high.max(initial=0)) + 1)
    order = np.argsort(low + turn, kind="stable")
    low, high = (low + turn)[order], (high + turn)[order]
    reached = np.maximum.accumulate(np.concatenate([np.zeros(1, np.int64), high]))[:-1]
    return int(np.maximum(0, high - np.maximum(low, reached)).sum())


def longest_program(table: NDArray[np.int32], blocks: Ints, groups: int) -> int:
    """Return the work of the busiest program of a table from :func:`dealt`, in blocks.

    ``blocks`` is the number of blocks of each tile.
    """
    work = np.where(table >= 0, blocks[np.maximum(table, 0) // groups] + TILE_PRICE, 0).sum(axis=0)
    return int(work.max(initial=0))


def dealt(items: Ints, blocks: Ints, groups: int, programs: int) -> NDArray[np.int32]:
    """Deal items to programs and return a table ``[rounds + 1, programs]`` of items.

    -1 means no item, and the last row is all -1. ``blocks`` is the number of blocks of each tile.
    """
    price = blocks[items // groups] + TILE_PRICE
    rounds = -(-len(items) // programs)
    table = np.full((rounds + 1, programs), -1, np.int32)
    work = np.zeros(programs, np.int64)
    for number in range(rounds):
        part = slice(number * programs, (number + 1) * programs)
        longest = np.argsort(-price[part], kind="stable")
        least = np.argsort(work, kind="stable")[: len(longest)]
        table[number, least] = items[part][longest]
        work[least] += price[part][longest]
    return table


def inside(tiles: NDArray[np.int32], runs: Ints) -> NDArray[np.bool_]:
    """Return for each tile whether it lies within one of the ranges of rows (``[n, 2]``, ascending)."""
    if not len(runs):
        return np.zeros(len(tiles), np.bool_)
    run = np.searchsorted(runs[:, 0], tiles[:, 0], side="right") - 1
    found: NDArray[np.bool_] = (run >= 0) & (tiles[:, 1] <= runs[run, 1])
    return found


def records(
    items: NDArray[np.int32],
    made: SegmentList,
    groups: int,
    parts: NDArray[np.int32] | None = None,
    begins: Ints | None = None,
    finishes: Ints | None = None,
) -> NDArray[np.int32]:
    """Return a record for every item of a table from :func:`dealt`, ``[rounds + 1, programs, 12]``.

    A record has: first row (-1: no item), last row + 1, first segment, number of blocks; first key, blocks and mask of
    the first segment; the group of heads; counter and place of a part of a tile (``parts``, see
    :mod:`flexcp.executor.kernels.cute.levelled`); 1 if the item is the last to add to rows that the list ``finishes``;
    1 if it is the first to add to rows that the list ``begins``.
    """
    tile = np.maximum(items, 0) // groups
    found = np.full((*items.shape, RECORD), -1, np.int32)
    found[..., :4] = made.tiles[tile]
    found[..., 4:7] = made.segments[found[..., 2], :3]
    found[..., 7] = items % groups
    if parts is not None:
        found[..., 8:10] = parts[tile]
    found[..., 10:] = 0
    for column, rows, of_part in ((10, finishes, 1), (11, begins, 0)):
        if rows is not None:
            chosen = inside(made.tiles, rows)
            if parts is not None:
                place = parts[:, 1]
                chosen &= (parts[:, 0] < 0) | (place % 2 == 1 if of_part else place // 2 == 0)
            found[..., column] = chosen[tile]
    found[items < 0] = -1
    return found
