"""Row limits: move rows until every rank keeps its limits.

For equal tokens, rows first move together with their work (:mod:`flexcp.planners.blocks.compiled_even`), which costs
little, as far as loads allow.

What is then still above a limit is moved: work from ranks with too much to ranks with room (the tokens stay), and
tokens from ranks that keep too many to ranks with room (the work stays). Ranks of the same node are preferred. Limits
that the user gave are kept to the row. Under default limits work is cut at multiples of a grain of rows: a few rows
with many keys would take a kernel much longer than they save.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.planners.blocks.pack import RowLoads

Ints = NDArray[np.int64]


def level_work(loads: RowLoads, work: Ints, limit: Ints, nodes: Ints, grain: int = 1) -> Ints:
    """Return the work table, with rows moved until every rank's load is within ``limit``, or above it by a row.

    Its columns are (first rank, team size, document, first row, last row), last exclusive; ``nodes`` is the node of
    each rank. Documents are cut at multiples of ``grain`` rows; with more than 1, ranks may stay above their limit.
    """
    from flexcp.planners.blocks import compiled_level

    table = np.concatenate([work, np.zeros((4 * len(limit) + 64, 5), np.int64)])
    terms = (loads.row_price, loads.area_layers, loads.area_first, loads.area_slices, loads.shift)
    table = table[: compiled_level.level(table, len(work), limit, nodes, grain, *terms)]
    return table[table[:, 3] < table[:, 4]]


def even(loads: RowLoads, work: Ints, targets: Ints, limit: Ints, key_bytes: int, row_bytes: int) -> tuple[Ints, Ints]:
    """Return the (work, kept) tables after rows moved, with their work, until every rank keeps its target of rows.

    Rows stay where moving them would cost too much or bring a rank's load above ``limit``. ``key_bytes`` and
    ``row_bytes`` are the bytes of a key and of a row's q and o.
    """
    from flexcp.planners.blocks import compiled_even, compiled_node

    work = compiled_even.even_rows(work, targets, limit, loads.ruler, key_bytes, row_bytes, loads.reads)
    return work, compiled_node.kept_rows(work, len(targets), targets)


def level_rows(rank: Ints, start: Ints, stop: Ints, limits: Ints, nodes: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (rank, start, stop) of the stream ranges that ranks keep, with none above its limit of tokens.

    Tokens move from ranks above their limit to others, first to ranks of the same node (``nodes[rank]``).
    """
    from flexcp.planners.blocks import compiled_level

    counts = np.zeros(len(limits), np.int64)
    np.add.at(counts, rank, stop - start)
    room = limits - counts
    if (room >= 0).all():
        return rank, start, stop
    order = np.argsort(start, kind="stable")
    kept = np.zeros((len(rank) + 2 * len(limits), 3), np.int64)
    kept[: len(rank)] = np.stack([rank, start, stop], axis=1)[order]
    found = kept[: compiled_level.level_rows(kept, len(rank), room, nodes)]
    return found[:, 0], found[:, 1], found[:, 2]
