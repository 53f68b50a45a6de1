"""Row limits: made to hold by construction, at the price of moving rows.

For equal tokens rows first move with their work (:mod:`flexcp.planners.blocks.compiled_even`), which is cheap, as far as loads allow.

What packing leaves over a limit is moved here, exactly: work from ranks with too much to ranks with room (the tokens stay), and
tokens from ranks that keep too many to ranks with room (the work stays). Both go on until no rank is over by more than one row,
same node first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.planners.blocks.pack import RowLoads

Ints = NDArray[np.int64]


def level_work(loads: RowLoads, work: Ints, limit: Ints, nodes: Ints) -> Ints:
    """Rows ``[n, 5]`` (first rank, team size, document, first, last) moved until every rank's load is within ``limit``."""
    from flexcp.planners.blocks import compiled_level

    table = np.concatenate([work, np.zeros((4 * len(limit) + 64, 5), np.int64)])
    terms = (loads.row_price, loads.area_layers, loads.area_first, loads.area_slices, loads.shift)
    table = table[: compiled_level.level(table, len(work), limit, nodes, *terms)]
    return table[table[:, 3] < table[:, 4]]


def even(loads: RowLoads, work: Ints, targets: Ints, limit: Ints, key_bytes: int, row_bytes: int) -> tuple[Ints, Ints]:
    """(work, kept) in which rows have moved with their work until every rank keeps its target, where that is cheap."""
    from flexcp.planners.blocks import compiled_even, compiled_node

    work = compiled_even.even_rows(work, targets, limit, loads.ruler, key_bytes, row_bytes, loads.reads)
    return work, compiled_node.kept_rows(work, len(targets), targets)


def level_rows(rank: Ints, start: Ints, stop: Ints, limits: Ints, nodes: Ints) -> tuple[Ints, Ints, Ints]:
    """Stream ranges moved, token by token, from ranks over their limit to ranks under it."""
    counts = np.zeros(len(limits), np.int64)
    np.add.at(counts, rank, stop - start)
    room = limits - counts
    if (room >= 0).all():
        return rank, start, stop
    ranges: list[list[tuple[int, int]]] = [[] for _ in limits]
    for r, a, b in zip(rank.tolist(), start.tolist(), stop.tolist(), strict=True):
        ranges[r].append((a, b))
    wide = int(np.abs(room).max()) + 1
    while int(room.min()) < 0:
        donor = int(np.argmin(room))
        taker = int(np.argmax(np.where(room > 0, room + wide * (nodes == nodes[donor]), 0)))
        a, b = max(ranges[donor], key=lambda r: (r[1] - r[0], -r[0]))
        amount = int(min(-room[donor], room[taker], b - a))
        ranges[donor].remove((a, b))
        if a + amount < b:
            ranges[donor].append((a + amount, b))
        ranges[taker].append((a, a + amount))
        room[donor] += amount
        room[taker] -= amount
    flat = np.array([(r, a, b) for r, mine in enumerate(ranges) for a, b in mine], np.int64).reshape(-1, 3)
    return flat[:, 0], flat[:, 1], flat[:, 2]
