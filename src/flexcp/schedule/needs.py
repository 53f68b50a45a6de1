"""Needs: the tokens of other ranks that each rank's regions read, exact to the token and the head.

A rank reads the rows and the keys of its regions' slices. What it does not keep itself is a *piece* of the rank that
keeps it, the owner. A piece is cut where the number of ranks that read its tokens changes between one and several,
because a result to which several ranks contribute travels as a partial result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.distinct import distinct
from flexcp.arrays.intervals import covered_once, overlaps, spread, united
from flexcp.arrays.tables import Table
from flexcp.masks import K0, K1, Q0, Q1
from flexcp.plan.placement import Placement, Regions
from flexcp.schedule.work import Cuts, Pairs
from flexcp.shape import Shape

Ints = NDArray[np.int64]


def needed_pieces(
    placement: Placement, shape: Shape, regions: Regions, cuts: Cuts, pairs: Pairs
) -> tuple[Pieces, Pieces]:
    """Return (query pieces, key pieces) that ranks read from others.

    If the placement assembles its own tokens (``assemble_own``), pieces that ranks read from themselves are included.
    """
    # If all rows and keys of a document's regions are on their own ranks, nothing of it moves; most are like that.
    travels = np.zeros(placement.batch.documents, bool)
    travels[regions.document[pairs.all > pairs.own]] = True
    away = travels[regions.document[cuts.region]]
    rows, keys = _reads(shape, regions, Cuts(*(column[away] for column in cuts)))
    return _pieces(placement, rows), _pieces(placement, keys)


class _Reads(NamedTuple):
    """Ranges of the stream that ranks read: ``rank`` reads tokens ``start..stop`` of head range ``head``.

    Head range h is the heads ``borders[h]`` to ``borders[h + 1]``. All ends are exclusive. The borders are all heads at
    which a read begins or ends.
    """

    rank: Ints
    head: Ints
    start: Ints
    stop: Ints
    borders: Ints


def _reads(shape: Shape, regions: Regions, cuts: Cuts) -> tuple[_Reads, _Reads]:
    """Return (rows, keys) that each rank's regions read, the rows in query heads and the keys in KV heads."""
    rank, h0, h1 = (column[cuts.region] for column in (regions.rank, regions.h0, regions.h1))
    g0, g1 = shape.kv_range(h0, h1)
    sides = []
    for low, high, count, first, last in ((h0, h1, shape.heads, Q0, Q1), (g0, g1, shape.kv_heads, K0, K1)):
        borders = distinct(np.concatenate([low, high, [0, count]]), count + 1)
        from_, to = np.searchsorted(borders, low), np.searchsorted(borders, high)
        item, within = spread(to - from_)
        start, stop = ((cuts.begin + cuts.slices[:, edge])[item] for edge in (first, last))
        sides.append(_Reads(rank[item], from_[item] + within, start, stop, borders))
    return sides[0], sides[1]


@dataclass(frozen=True, eq=False)
class Pieces(Table):
    """What ranks read of others: ``rank`` reads tokens ``start..stop`` and heads ``h0..h1`` of ``owner``.

    Ends are exclusive. Tokens are numbered by their place among the owner's tokens in stream order. ``partial`` is 1 if
    several ranks read these tokens and heads, so that the result of each is only a part of the sum, and 0 otherwise.
    """

    rank: Ints
    owner: Ints
    start: Ints
    stop: Ints
    h0: Ints
    h1: Ints
    partial: Ints

    @property
    def amount(self) -> Ints:
        """Tokens x heads of each piece."""
        return np.asarray((self.stop - self.start) * (self.h1 - self.h0))


def _pieces(placement: Placement, reads: _Reads) -> Pieces:
    """Return the reads as pieces, cut where the number of ranks that read changes between one and several."""
    heads = len(reads.borders)
    reader, start, stop = united(reads.rank * heads + reads.head, reads.start, reads.stop)
    rank, head = reader // heads, reader % heads
    label, first, last, once = covered_once(head, start, stop)
    span = placement.stream  # one axis for all head ranges, on which different ones touch but do not overlap
    base = head * span
    index, at = overlaps(base + start, base + stop, label * span + first, label * span + last)
    start, stop = np.maximum(start[index], first[at]), np.minimum(stop[index], last[at])
    rank, head, partial = rank[index], head[index], 1 - once[at].astype(np.int64)
    index, owner, start, stop = placement.owned_parts(start, stop)
    rank, head, partial = rank[index], head[index], partial[index]
    if not placement.assemble_own:
        away = rank != owner
        if not away.any():
            return Pieces.make(0, **dict.fromkeys(Pieces.names(), 0))
        rank, head, partial, owner, start, stop = (x[away] for x in (rank, head, partial, owner, start, stop))
    label = ((rank * heads + head) * placement.ranks + owner) * 2 + partial
    label, start, stop = united(label, start, stop)
    partial, owner = label % 2, label // 2 % placement.ranks
    rank, head = label // 2 // placement.ranks // heads, label // 2 // placement.ranks % heads
    return Pieces(*_join_heads(rank, owner, start, stop, head, partial, reads.borders))


def _join_heads(rank: Ints, owner: Ints, start: Ints, stop: Ints, head: Ints, partial: Ints, borders: Ints) -> Ints:
    """Return the columns of :class:`Pieces`, with pieces of the same tokens in adjacent head ranges joined.

    ``head`` is the number of a head range between two neighbours of ``borders``.
    """
    order = np.lexsort((head, partial, stop, start, owner, rank))
    columns = np.stack([rank, owner, start, stop, head, partial])[:, order]
    same = np.all(columns[[0, 1, 2, 3, 5], 1:] == columns[[0, 1, 2, 3, 5], :-1], axis=0)
    same &= columns[4, 1:] == columns[4, :-1] + 1
    first = np.concatenate([[True], ~same])[: columns.shape[1]]
    last = np.concatenate([~same, [True]])[: columns.shape[1]]
    found = columns[:, first]
    return np.stack([*found[:4], borders[found[4]], borders[columns[4, last] + 1], found[5]])
