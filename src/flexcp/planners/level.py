"""Level: make limits hold by construction, at the price of moving rows.

What packing leaves over a limit is moved here, exactly: work from ranks with too much to ranks with room (the tokens stay), and tokens from ranks
that keep too many to ranks with room (the work stays). Both go on until no rank is over by more than one row, same node first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.planners.pack import Field

Ints = NDArray[np.int64]


def level_work(loads: Field, work: Ints, base: Ints, limit: Ints, nodes: Ints) -> Ints:
    """Rows ``[n, 4]`` (rank, document, first, last) moved until every rank's load, ``base`` included, is within ``limit``."""
    each = loads.load(work[:, 1], work[:, 2], work[:, 3]) if _on_grain(loads, work) else _loads(loads, work)
    total = base.copy()
    np.add.at(total, work[:, 0], each)
    if (total <= limit).all():
        return work
    rows, load = [tuple(r) for r in work.tolist()], each.tolist()
    while True:
        donor = int(np.argmax(total - limit))
        excess = int(total[donor] - limit[donor])
        takers = [i for i in range(len(limit)) if total[i] < limit[i]]
        mine = [i for i in range(len(rows)) if rows[i][0] == donor]
        if excess <= 0 or not takers or not mine:
            break
        taker = max(takers, key=lambda i: (nodes[i] == nodes[donor], limit[i] - total[i], -i))
        # The heaviest item gives its last rows: they carry the most load per row moved.
        at = max(mine, key=lambda i: (load[i], -i))
        _, document, first, last = rows[at]
        border = _border(loads, document, first, last, min(excess, int(limit[taker] - total[taker])))
        moved = _load(loads, document, border, last)
        if total[taker] + moved >= total[donor]:
            break  # one row is more than what is left to move
        rows.append((taker, document, border, last))
        load.append(moved)
        rows[at], load[at] = (donor, document, first, border), load[at] - moved
        total[donor] -= moved
        total[taker] += moved
    return np.array([r for r in rows if r[2] < r[3]], np.int64).reshape(-1, 4)


def _on_grain(loads: Field, work: Ints) -> bool:
    """Whether all rows are cut where the field's prefix is exact."""
    ends = loads.batch.lengths[work[:, 1]]
    cut = [(x % loads.grain == 0) | (x == ends) for x in (work[:, 2], work[:, 3])]
    return bool(cut[0].all() and cut[1].all())


def _loads(loads: Field, work: Ints) -> Ints:
    return np.array([_load(loads, *row[1:]) for row in work.tolist()], np.int64)


def _load(loads: Field, document: int, first: int, last: int) -> int:
    before = loads.before(document, np.array([first, last]))
    return int(before[1] - before[0])


def _border(loads: Field, document: int, first: int, last: int, amount: int) -> int:
    """Where to cut so that the rows behind carry at most ``amount``, but at least one row is behind."""
    low, high = first, last - 1
    end = int(loads.before(document, np.array([last]))[0])
    while low < high:
        probes = np.unique(np.linspace(low, high, 18).astype(np.int64))
        enough = end - loads.before(document, probes) <= amount
        if not enough.any():
            return high
        at = int(np.argmax(enough))
        high = int(probes[at])
        low = int(probes[at - 1]) + 1 if at else high
    return high


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
    while int(room.min()) < 0:
        donor = int(np.argmin(room))
        taker = max((i for i in range(len(room)) if room[i] > 0), key=lambda i: (nodes[i] == nodes[donor], room[i], -i))
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
