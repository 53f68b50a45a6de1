"""Levelled: cut long tiles into parts, so that all GPU programs of a launch end at about the same time, as integers.

If whole tiles are dealt, the busiest program has some percent more work than the mean, because a tile is a large share
of a program's work. Here the busiest programs (*givers*) give the first blocks of a tile to the programs with the least
work (*receivers*). The parts of a tile are ordinary tiles with the same rows, and add to the same results. In a
backward they add in any order. In a forward they add one after the other: part n computes its blocks and then waits
until part n - 1 has added its results, which a counter in memory tells.

Parts come last in their programs. The items before them stay as they were dealt, in step with other programs, because
programs that walk the same keys at the same time share them through the L2 cache.

Waits are short and cannot deadlock. A receiver may have parts of several tiles, of which only the last one may wait: if
a tile is cut over several receivers, the part in the receiver that was filled last has the lowest number, because other
parts may follow it there. Receivers have the lowest program numbers, and the one that was filled last comes first. So a
part waits only for programs with lower numbers, which the device starts first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.kernels.cute.items import Ints
from flexcp.executor.kernels.tiles import TILE_PRICE, SegmentList

Table = NDArray[np.int32]
WORTH = 0.985
"""Tiles are cut only if the work of the busiest program shrinks to at most this fraction."""
SHORTEST = 2
"""The fewest blocks of a part of a tile."""
TURN_PRICE = 2
"""What it costs in a forward, in blocks, that a part of a tile adds its results after the part before it has."""


@dataclass(frozen=True)
class Given:
    """A part of a tile that one program gives to another: blocks ``begin <= b < end`` of an item.

    ``item`` is the item (a tile with a group of heads) that it is cut from, ``program`` the program that computes the
    part.
    """

    item: int
    program: int
    begin: int
    end: int


@dataclass(frozen=True)
class LevelledList:
    """The tables of a launch whose programs end at about the same time.

    ``parts`` has a row for every tile: its counter (-1: the tile is whole) and its *place*, which is twice its number
    among the parts, plus 1 for the last part. ``counters`` is the number of counters, two for each tile that was cut.
    """

    made: SegmentList
    parts: Table
    items: Table
    counters: int


def levelled(
    made: SegmentList, items: Table, groups: int, programs: int, block: int, descending: bool = False
) -> LevelledList:
    """Spread dealt items over up to ``programs`` programs, and cut tiles where that is worth it.

    ``items`` is a table ``[rounds + 1, programs used]`` from :func:`flexcp.executor.kernels.cute.items.dealt`, for
    tiles with ``groups`` groups of heads and blocks of ``block`` keys. ``descending`` says that kernels walk each
    segment from its last block to its first.
    """
    blocks = made.tiles[:, 3].astype(np.int64)
    of_item = np.where(items >= 0, blocks[np.maximum(items, 0) // groups], -TILE_PRICE)
    work = np.zeros(programs, np.int64)
    work[: items.shape[1]] = (of_item + TILE_PRICE).sum(axis=0)
    given = _give(work, _to_cut(items, of_item), 0 if descending else TURN_PRICE)
    whole = np.full((len(blocks), 2), -1, np.int32)
    return (
        _tables(made, whole, items, given, groups, block, descending) if given else LevelledList(made, whole, items, 0)
    )


def _to_cut(items: Table, of_item: Ints) -> list[tuple[int, int]]:
    """Return, for each program, the item that it would cut, and its blocks: the longest item, and the last of several.

    ``of_item`` has the blocks of every item of the table.
    """
    row = len(items) - 1 - of_item[::-1].argmax(axis=0)
    return [(int(items[r, p]), int(of_item[r, p])) for p, r in enumerate(row.tolist())]


def _give(work: Ints, cut: list[tuple[int, int]], turn: int) -> list[Given]:
    """Return the parts to give away so that the last program ends earliest; none if that is not worth it.

    ``work`` is the work of each program, in blocks. ``cut`` has for each program the item that it would cut, and its
    blocks. The parts of a tile end at about the same time, and then add their results one after the other, each for the
    price ``turn``. So a tile should be cut into few parts, even if that leaves the busiest program some more work.
    """
    order = np.argsort(work, kind="stable").tolist()
    sorted_work = work[order].tolist()
    low, most = -(-int(work.sum()) // len(work)), int(WORTH * sorted_work[-1])
    high = most
    possible: dict[int, list[Given]] = {}
    while low <= high:
        limit = (low + high) // 2
        found = _give_down_to(limit, order, sorted_work, cut)
        if found is None:
            low = limit + 1
        else:
            possible[limit], high = found, limit - 1
    for more in 2 ** np.arange(int(most - low).bit_length()) if turn else ():
        limit = min(low + int(more), most)
        if limit not in possible:
            found = _give_down_to(limit, order, sorted_work, cut)
            possible |= {} if found is None else {limit: found}
    ends = {limit: limit + turn * _most_of_one_tile(given) for limit, given in possible.items()}
    best = min(ends, key=lambda limit: (ends[limit], limit), default=None)
    return [] if best is None or ends[best] > most else possible[best]


def _most_of_one_tile(given: list[Given]) -> int:
    """Return how many parts are given away of the tile that is cut most often."""
    return max(Counter(x.item for x in given).values(), default=0)


def _give_down_to(limit: int, order: list[int], work: list[int], cut: list[tuple[int, int]]) -> list[Given] | None:
    """Return the parts to give away so that no program has more than ``limit`` work; None if that is impossible.

    ``order`` has the programs sorted by their work, least first, and ``work`` has their work in that order. ``cut`` has
    for each program the item that it would cut, and its blocks.
    """
    receiver, room = -1, 0
    found = []
    for giver in range(len(order) - 1, -1, -1):
        left = work[giver] - limit
        if left <= 0:
            break
        item, blocks = cut[order[giver]]
        if left > blocks - SHORTEST:
            return None
        begin = 0
        while left > 0:
            while room < SHORTEST:
                receiver += 1
                if work[receiver] >= limit:
                    return None
                room = limit - work[receiver] - TILE_PRICE
            # Leave at least SHORTEST blocks for the next part.
            size = left if left <= room else min(room, max(SHORTEST, left - SHORTEST))
            found.append(Given(item, order[receiver], begin, begin + size))
            begin, left, room = begin + size, left - size, room - size - TILE_PRICE
    return found


def _tables(
    made: SegmentList, whole: Table, items: Table, given: list[Given], groups: int, block: int, descending: bool
) -> LevelledList:
    """Return the tables of a launch in which the parts ``given`` are cut from their tiles.

    ``whole`` is the table of parts before cutting, in which all tiles are whole.
    """
    tiles: list[list[int]] = []
    segments: list[list[int]] = []
    parts: list[list[int]] = []
    added: dict[int, list[int]] = {}
    remainders: dict[int, int] = {}
    by_item: dict[int, list[Given]] = {}
    for x in given:
        by_item.setdefault(x.item, []).append(x)

    def part(item: int, begin: int, end: int, counter: int, place: int) -> int:
        row0, row1, segment, _ = made.tiles[item // groups].tolist()
        tiles.append([row0, row1, len(made.segments) - 1 + len(segments), end - begin])
        segments.extend(_cut(made, segment, begin, end, block, descending))
        parts.append([counter, place])
        return (len(whole) + len(tiles) - 1) * groups + item % groups

    for counter, (item, pieces) in enumerate(by_item.items()):
        for number, x in zip(range(len(pieces) - 1, -1, -1), pieces, strict=True):
            added.setdefault(x.program, []).append(part(item, x.begin, x.end, counter, 2 * number))
        end = int(made.tiles[item // groups, 3])
        remainders[item] = part(item, pieces[-1].end, end, counter, 2 * len(pieces) + 1)
    columns = [column[column >= 0].tolist() for column in items.T]
    lists = []
    for program in [*reversed(added), *(p for p in range(len(columns)) if p not in added)]:
        dealt = columns[program] if program < len(columns) else []
        kept = [x for x in dealt if x not in remainders]
        lists.append(kept + added.get(program, []) + [remainders[x] for x in dealt if x in remainders])
    table = np.full((max(map(len, lists)) + 1, len(lists)), -1, np.int32)
    for number, column in enumerate(lists):
        table[: len(column), number] = column
    cut = SegmentList(
        np.concatenate([made.tiles, np.array(tiles, np.int32)]),
        np.concatenate([made.segments[:-1], np.array([*segments, [0] * 8], np.int32)]),
    )
    return LevelledList(cut, np.concatenate([whole, np.array(parts, np.int32)]), table, 2 * len(by_item))


def _cut(made: SegmentList, segment: int, begin: int, end: int, block: int, descending: bool) -> Iterator[list[int]]:
    """Yield the segments of a tile's blocks ``begin <= b < end``, in the order in which they are walked.

    ``segment`` is the number of the tile's first segment.
    """
    at = 0
    while at < end:
        key, count, *rest = made.segments[segment].tolist()
        low, high = max(begin, at), min(end, at + count)
        if low < high:
            before = at + count - high if descending else low - at
            yield [key + before * block, high - low, *rest]
        at, segment = at + count, segment + 1
