"""Items: which program of a launch computes which tile for which heads, and in which order. Integers only; no tensor.

A launch is one persistent program for each multiprocessor. An *item* is a tile with one group of heads,
``tile * groups + group``. Items come in an order that suits the L2, and are dealt in rounds of one item a program: in
each round the longest item goes to the program with the least work so far. So programs end together, and what they
compute at the same time lies together.

A kernel reads *records*: of every item all that is needed to begin with it, so that one read does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.kernels.tiles import SegmentList

Ints = NDArray[np.int64]
RECORD = 12
"""Numbers of a record: words of 16 bytes."""
TILE_PRICE = 3
"""What beginning and ending a tile costs, in blocks."""
ADDED_KEY_PRICE = 5e-4
"""What adding up and rounding the gradients of one key of one head costs, in blocks, by a count of the bytes that move.
"""


def in_turns(tiles: int, groups: int, turn: int) -> Ints:
    """Items in the order of the tiles, ``turn`` tiles of each group of heads before the next group's."""
    item: Ints = np.arange(tiles * groups)
    first = item // (turn * groups) * turn
    within = item - first * groups
    width = np.minimum(turn, tiles - first)
    order: Ints = (first + within % width) * groups + within // width
    return order


def group_by_group(order: Ints, groups: int) -> Ints:
    """Items of one group of heads after the other, each with the tiles in the given order."""
    return (order[None, :] * groups + np.arange(groups)[:, None]).reshape(-1)


def longest_program(table: NDArray[np.int32], blocks: Ints, groups: int) -> int:
    """What the busiest program of a dealt table has to do, in blocks."""
    work = np.where(table >= 0, blocks[np.maximum(table, 0) // groups] + TILE_PRICE, 0).sum(axis=0)
    return int(work.max(initial=0))


def dealt(items: Ints, blocks: Ints, groups: int, programs: int) -> NDArray[np.int32]:
    """``[rounds + 1, programs]`` items, -1 where a program has none and in the last row.
    ``blocks`` are those of each tile.
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
    """Which tiles lie in one of the runs of rows (``[n, 2]``, ascending)."""
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
    """``[rounds + 1, programs, 12]``: of every item first row (-1: no item), last row + 1, first segment, blocks, then
    the first segment's first key, blocks and mask, the group of heads, of ``parts`` (:mod:`levelled`) counter and
    place, 1 where the item is the last to add to rows that this list ``finishes``, and 1 where it is the first to add
    to rows that it ``begins``.
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
