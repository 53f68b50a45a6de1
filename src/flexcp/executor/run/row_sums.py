"""Row sums: the row runs of additions, so that one launch adds the gradients of all messages of a stage.

Several messages may bring gradients of the same rows. They must be added in a fixed order, and no two programs of a
launch may write the same row. So the target is cut where an addition begins or ends, and the parts that are added to
the same piece of the target form a *chain*: a single program reads the piece, adds all parts of the chain in their
order, and writes it. The sums have the same bits as if the messages were added one after the other, each in a launch of
its own, but there is one launch, and the target is read and written once.

A table of sums has one column for each part, with the parts of a chain side by side. Its rows are those of a table of
copies (:func:`flexcp.executor.run.row_moves._runs`) in elements, and the number of parts in the chain. Only the first
part of a chain has a number of rows; a program that begins with another part has none to write.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import spread

Ints = NDArray[np.int64]
PIECE_ELEMENTS = 2048
"""The most elements that one program writes; a longer row is a piece by itself."""


class Additions(NamedTuple):
    """Rows that are added to rows of a target, one entry for each stretch that ascends by one on both sides.

    ``pair`` is the pair of a source and a target tensor. In the source, row r begins at element ``first + r * step``;
    in the target at ``to + r * to_step``, counted from its row 0, where ``row`` is the first row and ``rows`` the
    number of rows. Each row has ``length`` elements.
    """

    pair: Ints
    first: Ints
    step: Ints
    row: Ints
    rows: Ints
    to: Ints
    to_step: Ints
    length: Ints

    def take(self, at: Ints) -> Additions:
        """Return the entries ``at``."""
        return Additions(*(column[at] for column in self))


def sum_runs(added: Additions) -> Ints:
    """Return the table of sums of additions, which are in the order in which they are done."""
    if len(added.pair) == 0:
        return np.zeros((8, 0), np.int64)
    added = _cut_by_columns(added)
    target = _numbered(added.pair, added.to, added.length)
    span = int((added.row + added.rows).max()) + 1  # one axis for all targets, on which different ones do not overlap
    low, high = target * span + added.row, target * span + added.row + added.rows
    borders = _borders(low, high, target, np.maximum(1, PIECE_ELEMENTS // added.length), span)
    begin, end = np.searchsorted(borders, low), np.searchsorted(borders, high)
    part, within = spread(end - begin)
    piece = begin[part] + within
    order = np.argsort(piece, kind="stable")
    part, piece = part[order], piece[order]
    skipped, rows = borders[piece] - low[part], borders[piece + 1] - borders[piece]
    found = added.take(part)
    source, to = found.first + skipped * found.step, found.to + (found.row + skipped) * found.to_step
    leads = np.append(True, piece[1:] != piece[:-1])
    begins = np.flatnonzero(leads)
    chain = np.zeros(len(piece), np.int64)
    chain[begins] = np.diff(np.append(begins, len(piece)))
    gapless = (found.step == found.length) & (found.to_step == found.length)
    joined = np.repeat(np.logical_and.reduceat(gapless, begins), chain[begins])  # rows without gaps: one long row
    length = np.where(joined, found.length * rows, found.length)
    written = np.where(leads, np.where(joined, 1, rows), 0)
    return np.stack([found.pair, source, to, length, written, found.step, found.to_step, chain])


def _cut_by_columns(added: Additions) -> Additions:
    """Cut additions so that two of them write the same elements of a row or different ones, but no overlapping ones.

    They overlap if two messages bring different but not disjoint heads of the same rows.
    """
    span = int((added.to + added.length).max()) + 1
    low, high = added.pair * span + added.to, added.pair * span + added.to + added.length
    borders = np.unique(np.concatenate([low, high]))
    begin, end = np.searchsorted(borders, low), np.searchsorted(borders, high)
    if np.all(end - begin == 1):
        return added
    part, within = spread(end - begin)
    at = begin[part] + within
    skipped = borders[at] - low[part]
    found = added.take(part)
    return found._replace(first=found.first + skipped, to=found.to + skipped, length=borders[at + 1] - borders[at])


def _numbered(*columns: Ints) -> Ints:
    """Return a number for each entry; equal for entries that are equal in all columns."""
    return np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1)


def _borders(low: Ints, high: Ints, target: Ints, most: Ints, span: int) -> Ints:
    """Return where targets are cut: where an addition begins or ends, and between these so that no piece is too long.

    Target t lies at ``t * span``; additions to the same ``target`` have the same ``most`` rows of a piece.
    """
    ends = np.unique(np.concatenate([low, high]))
    most_of = np.zeros(int(target.max()) + 1, np.int64)
    most_of[target] = most
    step = most_of[ends[:-1] // span]
    piece, within = spread(-(-np.diff(ends) // step))
    return np.append(ends[:-1][piece] + within * step[piece], ends[-1])
