"""Row chains: how one launch adds, or merges, the results of all messages of a stage.

Several messages may bring results of the same rows. They must be reduced in a fixed order, and no two programs of a
launch may write the same numbers. So targets are cut where what a message brings begins or ends, and the parts that
belong to the same piece of a target form a *chain*: a single program (in a merge, one for a few heads) reads the piece,
reduces all parts of the chain in their order, and writes it. Sums have the same bits as if messages were taken in one
after the other, each by a launch of its own, but there is one launch, and every target is read and written once.

Tables of row runs have one column for each part, with the parts of a chain side by side. The first part of a chain says
how many parts there are; a program that begins with another part finds 0 parts, and does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.distinct import distinct
from flexcp.arrays.intervals import cut_apart, spread
from flexcp.arrays.tables import Table

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stretches(Table):
    """Rectangles of targets to which results are added or merged, in this order.

    ``target`` numbers the target tensors; ``row`` and ``column`` are where a rectangle begins.
    """

    target: Ints
    row: Ints
    rows: Ints
    column: Ints
    columns: Ints


class Chains(NamedTuple):
    """Parts of stretches, chain by chain.

    ``stretch`` is the stretch of a part; ``row`` and ``column`` are where the part begins in its target. ``parts`` is
    the number of parts in the chain that begins with a part, or 0 if it is not the first one.
    """

    stretch: Ints
    row: Ints
    rows: Ints
    column: Ints
    columns: Ints
    parts: Ints


def find_chains(found: Stretches, most: int) -> Chains:
    """Cut stretches into chains of parts with at most ``most`` rows x columns; a longer row is a part by itself."""
    # Messages may bring different heads of the same rows, some of them in both.
    whole, column, stop = cut_apart(found.target, found.column, found.column + found.columns)
    found, columns = found.take(whole), stop - column
    strip = found.target * (int(stop.max(initial=0)) + 1) + column  # parts of the same columns of a target
    strip = np.searchsorted(distinct(strip), strip)
    span = int((found.row + found.rows).max(initial=0)) + 1  # one axis for all strips, on which they do not overlap
    low, high = strip * span + found.row, strip * span + found.row + found.rows
    borders = _borders(low, high, strip, np.maximum(1, most // columns), span)
    begin, end = np.searchsorted(borders, low), np.searchsorted(borders, high)
    part, within = spread(end - begin)
    piece = begin[part] + within
    order = np.argsort(piece, kind="stable")
    part, piece = part[order], piece[order]
    begins = np.flatnonzero(np.append(True, piece[1:] != piece[:-1])[: len(piece)])
    parts = np.zeros(len(piece), np.int64)
    parts[begins] = np.diff(np.append(begins, len(piece)))
    rows = borders[piece + 1] - borders[piece]
    return Chains(whole[part], borders[piece] % span, rows, column[part], columns[part], parts)


def _borders(low: Ints, high: Ints, strip: Ints, most: Ints, span: int) -> Ints:
    """Return where targets are cut: where a stretch begins or ends, and between these so that no piece is too long.

    Strip s of a target lies at ``s * span``; stretches of the same ``strip`` have the same ``most`` rows of a piece.
    """
    ends = distinct(np.concatenate([low, high]))
    most_of = np.ones(int(strip.max(initial=0)) + 1, np.int64)
    most_of[strip] = most
    step = most_of[ends[:-1] // span]
    piece, within = spread(-(-np.diff(ends) // step))
    return np.append(ends[:-1][piece] + within * step[piece], ends[-1:])
