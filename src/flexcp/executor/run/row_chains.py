"""Row chains: how one launch adds, or merges, the results of all messages of a stage.

Several messages may bring results of the same rows. They must be reduced in a fixed order, and no two programs of a
launch may write the same row. So targets are cut where what a message brings begins or ends, and the parts that belong
to the same piece of a target form a *chain*: a single program reads the piece, reduces all parts of the chain in their
order, and writes it. The results have the same bits as if messages were taken in one after the other, each by a launch
of its own, but there is one launch, and every target is read and written once.

Tables of row runs have one column for each part, with the parts of a chain side by side. The first part of a chain says
how many parts there are; a program that begins with another part finds 0 parts, and does nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import spread

Ints = NDArray[np.int64]


class Stretches(NamedTuple):
    """Rectangles of targets to which results are added or merged, in this order.

    ``target`` numbers the target tensors; ``row`` and ``column`` are where a rectangle begins.
    """

    target: Ints
    row: Ints
    rows: Ints
    column: Ints
    columns: Ints

    def take(self, at: Ints) -> Stretches:
        """Return the entries ``at``."""
        return Stretches(*(values[at] for values in self))


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
    whole, found = _cut_by_columns(found)
    target = _numbered(found.target, found.column, found.columns)
    span = int((found.row + found.rows).max(initial=0)) + 1  # one axis for all targets, on which they do not overlap
    low, high = target * span + found.row, target * span + found.row + found.rows
    borders = _borders(low, high, target, np.maximum(1, most // found.columns), span)
    begin, end = np.searchsorted(borders, low), np.searchsorted(borders, high)
    part, within = spread(end - begin)
    piece = begin[part] + within
    order = np.argsort(piece, kind="stable")
    part, piece = part[order], piece[order]
    begins = np.flatnonzero(np.append(True, piece[1:] != piece[:-1])[: len(piece)])
    parts = np.zeros(len(piece), np.int64)
    parts[begins] = np.diff(np.append(begins, len(piece)))
    rows = borders[piece + 1] - borders[piece]
    return Chains(whole[part], borders[piece] % span, rows, found.column[part], found.columns[part], parts)


def _cut_by_columns(found: Stretches) -> tuple[Ints, Stretches]:
    """Cut stretches so that two of them have the same columns or none in common; return (stretch, part of it).

    They overlap if two messages bring different heads of the same rows, some of them in both.
    """
    span = int((found.column + found.columns).max(initial=0)) + 1
    low, high = found.target * span + found.column, found.target * span + found.column + found.columns
    borders = np.unique(np.concatenate([low, high]))
    begin, end = np.searchsorted(borders, low), np.searchsorted(borders, high)
    stretch, within = spread(end - begin)
    at = begin[stretch] + within
    width = borders[at + 1] - borders[at]
    return stretch, found.take(stretch)._replace(column=borders[at] % span, columns=width)


def _numbered(*columns: Ints) -> Ints:
    """Return a number for each entry; equal for entries that are equal in all columns."""
    return np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1)


def _borders(low: Ints, high: Ints, target: Ints, most: Ints, span: int) -> Ints:
    """Return where targets are cut: where a stretch begins or ends, and between these so that no piece is too long.

    Target t lies at ``t * span``; stretches of the same ``target`` have the same ``most`` rows of a piece.
    """
    ends = np.unique(np.concatenate([low, high]))
    most_of = np.ones(int(target.max(initial=0)) + 1, np.int64)
    most_of[target] = most
    step = most_of[ends[:-1] // span]
    piece, within = spread(-(-np.diff(ends) // step))
    return np.append(ends[:-1][piece] + within * step[piece], ends[-1:])
