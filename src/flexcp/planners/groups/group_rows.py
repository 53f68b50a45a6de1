"""Group rows: those that groups keep, from how many tokens of each cut document every rank gets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.tables import Table
from flexcp.planners.groups.priced_documents import CLOSE_TO_BEST, UNLIMITED, PricedDocuments
from flexcp.planners.request import Request

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Ranks that share documents: ``whole[i]`` stay on ``ranks[i]``; of the ``cut`` ones' tokens ``share[i]`` go there.

    ``time`` is T; ``exposed`` the part of it in which ranks wait for communication.
    """

    ranks: tuple[int, ...]
    documents: list[int]
    whole: list[list[int]]
    cut: list[int]
    share: list[int]
    exposed: int
    time: int


Rows = tuple[Ints, Ints, Ints, Ints]
"""Parallel columns: rank, document of the batch, first row, last row."""


def stream_ranges(request: Request, work: PricedDocuments, found: list[Group]) -> tuple[Ints, Ints, Ints]:
    """(rank, start, stop) of everything the groups keep, on the stream."""
    pairs = [(r, d) for group in found for r, mine in zip(group.ranks, group.whole, strict=True) for d in mine]
    whole = np.array(pairs, np.int64).reshape(-1, 2)
    document = work.document[whole[:, 1]]
    rows = (whole[:, 0], document, np.zeros_like(document), work.batch.lengths[document])
    rank, document, first, last = _joined_rows([rows, *_cut_rows(request, work, _shares(work, found))])
    begin = work.batch.starts[document]
    return rank, begin + first, begin + last


def _joined_rows(parts: list[Rows]) -> Rows:
    rank, document, first, last = (np.concatenate(column) for column in zip(*parts, strict=True))
    return rank, document, first, last


def _cut_rows(request: Request, work: PricedDocuments, shares: Shares) -> list[Rows]:
    """The rows of all shares, each document in the first of three ways that gives every rank its share of the load.

    Consecutive rows read the fewest keys; a zig-zag pairs light rows with heavy ones; and where neither is even, rows are counted by load
    instead of by tokens, unless token counts matter.
    """
    found: list[Rows] = []
    for cut in (_consecutive, _zigzag):
        if not len(shares):
            return found
        rows = cut(work, shares)
        uneven = _uneven(work, shares, rows)
        even_rows = np.repeat(~uneven, len(rows[0]) // len(shares))
        rank, document, first, last = (column[even_rows] for column in rows)
        found.append((rank, document, first, last))
        shares = shares.take(uneven)
    counts_matter = work.cap < UNLIMITED or request.equal_tokens
    return [*found, _zigzag(work, shares) if counts_matter else _by_load(work, shares)]


@dataclass(frozen=True, eq=False)
class Shares(Table):
    """How many tokens of a cut document a rank keeps, document by document in the order of ranks; ``before`` is what others have before."""

    rank: Ints
    document: Ints
    tokens: Ints
    before: Ints


def _shares(work: PricedDocuments, found: list[Group]) -> Shares:
    """Every cut document of a group in the proportions of the group's shares, exact in the sum."""
    rows: list[tuple[int, int, int, int]] = []
    for group in found:
        left = list(group.share)
        for document in group.cut:
            length, total = work.tokens[document], sum(left)
            mine = [length * x // total for x in left]
            missing = length - sum(mine)
            for i in sorted(range(len(left)), key=lambda i: mine[i] - left[i]):  # most room first
                given = min(missing, 1, left[i] - mine[i])
                mine[i] += given
                missing -= given
            left = [x - y for x, y in zip(left, mine, strict=True)]
            before = 0
            for rank, tokens in zip(group.ranks, mine, strict=True):
                rows.append((rank, int(work.document[document]), tokens, before))
                before += tokens
    return Shares(*np.array(rows, np.int64).reshape(-1, 4).T)


def _consecutive(work: PricedDocuments, shares: Shares) -> Rows:
    return shares.rank, shares.document, shares.before, shares.before + shares.tokens


def _zigzag(work: PricedDocuments, shares: Shares) -> Rows:
    """Each share as one part from the front and one from the back of its document, next to each other in the table."""
    before, after, length = shares.before, shares.before + shares.tokens, work.batch.lengths[shares.document]
    first = np.stack([before // 2, length - (after - after // 2)], axis=1).reshape(-1)
    last = np.stack([after // 2, length - (before - before // 2)], axis=1).reshape(-1)
    return np.repeat(shares.rank, 2), np.repeat(shares.document, 2), first, last


def _by_load(work: PricedDocuments, shares: Shares) -> Rows:
    """Each share as consecutive rows whose load is to the document's as its tokens are."""
    document, length = shares.document, work.batch.lengths[shares.document]

    def load_before(row: Ints) -> Ints:
        return work.batch.weighted_rows_area(document, np.zeros_like(row), row) + work.prices.row * row

    each = load_before(length) // length

    def row_at(tokens: Ints) -> Ints:
        """The first row before which lies the load of so many average tokens."""
        low, high = np.zeros_like(length), length
        while np.any(low < high):
            middle = (low + high) // 2
            enough = load_before(middle) >= each * tokens
            low, high = np.where(enough, low, np.minimum(middle + 1, high)), np.where(enough, middle, high)
        return np.where(tokens == length, length, low)

    return shares.rank, document, row_at(shares.before), row_at(shares.before + shares.tokens)


def _uneven(work: PricedDocuments, shares: Shares, rows: Rows) -> NDArray[np.bool_]:
    """Which shares belong to a document of which some rank gets clearly more load than its tokens stand for."""
    _, document, first, last = rows
    area = work.batch.weighted_rows_area(document, first, last).reshape(len(shares), -1).sum(axis=1)
    starts = np.flatnonzero(np.diff(shares.document, prepend=-1))
    ranks = np.diff(np.append(starts, len(shares)))
    whole, length = np.repeat(np.add.reduceat(area, starts), ranks), work.batch.lengths[shares.document]
    mean_load = (whole + work.prices.row * length) // np.repeat(ranks, ranks)
    over = (area - whole // length * shares.tokens) * CLOSE_TO_BEST > mean_load
    return np.repeat(np.logical_or.reduceat(over, starts), ranks)
