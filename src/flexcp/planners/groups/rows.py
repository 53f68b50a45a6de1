"""Rows of pieces: which rows a rank or a team works on, which rank keeps them, and the resulting placement.

A *piece* is the part of a document from token ``lo`` to ``hi``, for the ``size`` ranks from ``first`` on, as if all
tokens had the same load. For each document that is cut, the actual rows are chosen in the first of three ways that
gives every piece its share of the load. Consecutive rows read the fewest keys; a zig-zag pairs light rows with heavy
ones; if neither is even, consecutive rows are divided by load instead of by tokens.

A rank keeps the rows that it works on alone. The rows of a team are kept by its ranks, in proportions that even out
tokens, or evenly if tokens cost less than their exchange. Documents of a team are laid end to end over its ranks, and
those that several teams share are spread over all of them. If a rank then keeps more than it may, its last rows are
kept by others, first by ranks of its own node. If there are teams, the work stays where it was, and queries and results
travel; otherwise the work goes with the rows, so that only keys travel. So all limits that can be met are met.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import overlaps, spread
from flexcp.arrays.tables import Table
from flexcp.arrays.totals import sums
from flexcp.batch import Batch
from flexcp.plan.placement import Placement, Regions, Runs
from flexcp.planners.groups.key_regions import SharedRows, key_regions
from flexcp.planners.groups.priced_documents import PricedDocuments
from flexcp.planners.request import Request
from flexcp.planners.token_runs import equalised, head_regions, row_regions, runs_of_ranges

Ints = NDArray[np.int64]
CLOSE_TO_EVEN = 64
"""An excess of 1/64 of an even share is accepted, in the load of chosen rows and for pads; cost models err by more."""


@dataclass(frozen=True, eq=False)
class Pieces(Table):
    """Parts of documents and their ranks, sorted by document and token.

    The ``size`` ranks from ``first`` on share as much of the load of ``document`` as its tokens ``lo <= t < hi`` would
    have if all tokens had the same load.
    """

    first: Ints
    size: Ints
    document: Ints
    lo: Ints
    hi: Ints


@dataclass(frozen=True, eq=False)
class Ranges(Table):
    """Half-open ranges of the stream, each with the number of the piece that it belongs to."""

    piece: Ints
    start: Ints
    stop: Ints


def place_pieces(request: Request, priced: PricedDocuments, pieces: Pieces, by_keys: bool = False) -> Placement:
    """Return the placement of pieces that contain every document exactly once.

    With ``by_keys``, the ranks of a team divide the keys of their rows, as in
    :mod:`flexcp.planners.groups.key_regions`; otherwise they divide the heads.
    """
    batch, ranks = request.batch, request.ranks
    ranges = _rows(batch, priced, pieces)
    kept = _kept(request, priced, pieces, ranges)
    kept = _within_limit(request, priced, *kept)
    runs, pads, heads = runs_of_ranges(*kept), 0, request.shape.heads
    if request.equal_tokens:
        runs, pads = equalised(runs, ranks, batch.tokens, request.pad_to)
    if int(pieces.size.max()) == 1:
        regions = row_regions(batch, heads, *kept)
    elif by_keys:
        return Placement(batch, ranks, pads, runs, _regions_by_keys(request, pieces, ranges, runs))
    else:
        index, member = spread(pieces.size[ranges.piece])
        size, first = pieces.size[ranges.piece[index]], pieces.first[ranges.piece[index]]
        h0, h1 = member * heads // size, (member + 1) * heads // size
        regions = head_regions(batch, first + member, ranges.start[index], ranges.stop[index], h0, h1)
    return Placement(batch, ranks, pads, runs, (regions,) * len(batch.masks))


def _regions_by_keys(request: Request, pieces: Pieces, ranges: Ranges, runs: Runs) -> tuple[Regions, ...]:
    """Return the regions of each mask if teams divide keys; pieces of a single rank have all keys of their rows."""
    batch, shape = request.batch, request.shape
    alone = pieces.size[ranges.piece] == 1
    single = ranges.take(alone)
    rows = row_regions(batch, shape.heads, pieces.first[single.piece], single.start, single.stop)
    teams = ranges.take(~alone).sorted_by("piece", "start")
    piece, of = np.unique(teams.piece, return_inverse=True)
    shared = SharedRows(of, teams.start, teams.stop, pieces.document[piece], pieces.first[piece])
    members = pieces.first[piece][:, None] + np.arange(int(pieces.size.max()))
    speeds = np.array(request.cluster.rank_speeds, np.int64)[members]
    return tuple(
        Regions.join([rows, key_regions(batch, mask, shared, runs, speeds, shape)]).sorted_by("rank", "document", "q0")
        for mask in batch.masks
    )


# --- which rows -------------------------------------------------------------------------------------------------------


def _rows(batch: Batch, priced: PricedDocuments, pieces: Pieces) -> Ranges:
    """Return the rows of all pieces, as ranges of the stream; the module docstring says how they are chosen."""
    number = np.arange(len(pieces), dtype=np.int64)
    whole = pieces.hi - pieces.lo == batch.lengths[pieces.document]
    found = [(number[whole], pieces.lo[whole], pieces.hi[whole])]
    left = number[~whole]
    for cut in (_consecutive, _zigzag):
        if len(left):
            mine = pieces.take(left)
            first, last = cut(batch, mine)
            uneven = _uneven(batch, priced, mine, first, last)
            even = np.repeat(~uneven, len(first) // len(mine))
            found.append((np.repeat(left[~uneven], len(first) // len(mine)), first[even], last[even]))
            left = left[uneven]
    if len(left):
        found.append((left, *_by_load(batch, priced, pieces.take(left))))
    piece, first, last = (np.concatenate(column) for column in zip(*found, strict=True))
    begin = batch.starts[pieces.document[piece]]
    real = first < last
    return Ranges(piece[real], (begin + first)[real], (begin + last)[real])


def _consecutive(batch: Batch, pieces: Pieces) -> tuple[Ints, Ints]:
    """Return (first, last) row of each piece: the rows ``lo <= r < hi``."""
    return pieces.lo, pieces.hi


def _zigzag(batch: Batch, pieces: Pieces) -> tuple[Ints, Ints]:
    """Return (first, last) rows of each piece, two half-open ranges each: at the front and the back of the document."""
    lo, hi, length = pieces.lo, pieces.hi, batch.lengths[pieces.document]
    first = np.stack([lo // 2, length - (hi - hi // 2)], axis=1).reshape(-1)
    last = np.stack([hi // 2, length - (lo - lo // 2)], axis=1).reshape(-1)
    return first, last


def _by_load(batch: Batch, priced: PricedDocuments, pieces: Pieces) -> tuple[Ints, Ints]:
    """Return (first, last) row of each piece, last exclusive: consecutive rows with the load its tokens stand for."""
    document, length = pieces.document, batch.lengths[pieces.document]

    def load_before(row: Ints) -> Ints:
        return batch.weighted_rows_area(document, np.zeros_like(row), row) + priced.row * row

    each = load_before(length) // length

    def row_at(tokens: Ints) -> Ints:
        """Return the first row before which lies the load of this many average tokens."""
        low, high = np.zeros_like(length), length
        while np.any(low < high):
            middle = (low + high) // 2
            enough = load_before(middle) >= each * tokens
            low, high = np.where(enough, low, np.minimum(middle + 1, high)), np.where(enough, middle, high)
        return np.where(tokens == length, length, low)

    return row_at(pieces.lo), row_at(pieces.hi)


def _uneven(batch: Batch, priced: PricedDocuments, pieces: Pieces, first: Ints, last: Ints) -> NDArray[np.bool_]:
    """Return which pieces belong to a document of which some piece has clearly more load than its tokens stand for.

    ``first`` and ``last`` (exclusive) are the rows of the pieces, the same number of ranges for each.
    """
    document = np.repeat(pieces.document, len(first) // len(pieces))
    area = batch.weighted_rows_area(document, first, last).reshape(len(pieces), -1).sum(axis=1)
    starts = np.flatnonzero(np.diff(pieces.document, prepend=-1))
    count = np.diff(np.append(starts, len(pieces)))
    whole, length = np.repeat(np.add.reduceat(area, starts), count), batch.lengths[pieces.document]
    mean_load = (whole + priced.row * length) // np.repeat(count, count)
    over = (area - whole // length * (pieces.hi - pieces.lo)) * CLOSE_TO_EVEN > mean_load
    return np.repeat(np.logical_or.reduceat(over, starts), count)


# --- who keeps them ---------------------------------------------------------------------------------------------------


def _kept(request: Request, priced: PricedDocuments, pieces: Pieces, ranges: Ranges) -> tuple[Ints, Ints, Ints]:
    """Return (rank, start, stop) of the stream ranges that ranks keep, before any limit is applied."""
    alone = pieces.size[ranges.piece] == 1
    rank = pieces.first[ranges.piece[alone]]
    found = [(rank, ranges.start[alone], ranges.stop[alone])]
    if not alone.all():
        held = sums(rank, ranges.stop[alone] - ranges.start[alone], request.ranks)
        size = int(pieces.size.max())
        if priced.linear <= priced.exchange[size] * size:
            held = np.zeros_like(held)
        found += _kept_by_teams(pieces, ranges.take(~alone), size, held)
    rank, start, stop = (np.concatenate(column) for column in zip(*found, strict=True))
    real = start < stop
    return rank[real], start[real], stop[real]


def _kept_by_teams(pieces: Pieces, split: Ranges, size: int, held: Ints) -> list[tuple[Ints, Ints, Ints]]:
    """Return (rank, start, stop) of the stream ranges ``split``, which teams of ``size`` ranks keep.

    ``held`` are the tokens that ranks have already. Documents of a team are laid end to end over its ranks: a rank that
    keeps more of a document can compute more before anything arrives. Documents that other teams share are spread over
    all ranks instead, so that all of them send what crosses nodes.
    """
    team, tokens = pieces.first[split.piece], split.stop - split.start
    shared = np.bincount(pieces.document)[pieces.document[split.piece]] > 1
    given, in_shared = (sums(team[some], tokens[some], len(held)) for some in (slice(None), shared))
    # In the row of each team's first rank: the cumulative shares of its ranks in all tokens of the team.
    shares = np.zeros((len(held), size + 1), np.int64)
    for begin in np.unique(team).tolist():
        shares[begin, 1:] = np.cumsum(tokens_to_level(held[begin : begin + size], int(given[begin])))
    whole = np.maximum(given, 1)[:, None]
    spread_out = _spread_over_teams(split.take(shared), team[shared], shares, whole)
    laid = _laid_over_teams(split.take(~shared), team[~shared], shares - shares * in_shared[:, None] // whole)
    return [spread_out, laid]


def _spread_over_teams(split: Ranges, team: Ints, shares: Ints, whole: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (rank, start, stop) of ranges of which each rank of a range's team keeps its share, ``shares / whole``."""
    tokens = split.stop - split.start
    borders = split.start[:, None] + tokens[:, None] * shares[team] // whole[team]
    rank = team[:, None] + np.arange(shares.shape[1] - 1)
    return rank.reshape(-1), borders[:, :-1].reshape(-1), borders[:, 1:].reshape(-1)


def _laid_over_teams(split: Ranges, team: Ints, shares: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (rank, start, stop) of ranges that are laid end to end over the ranks of their teams.

    ``shares`` are cumulative tokens, in the row of each team's first rank.
    """
    order = np.argsort(team, kind="stable")
    split, team = split.take(order), team[order]
    # One axis for all teams, on which ranges follow each other, and so do the ranks that keep them.
    stop = np.cumsum(split.stop - split.start)
    start = stop - (split.stop - split.start)
    teams, first = np.unique(team, return_index=True)
    borders = start[first][:, None] + shares[teams]
    rank = (teams[:, None] + np.arange(shares.shape[1] - 1)).reshape(-1)
    low, high = borders[:, :-1].reshape(-1), borders[:, 1:].reshape(-1)
    piece, keeper = overlaps(start, stop, low, high)
    shift = (split.start - start)[piece]
    return (
        rank[keeper],
        np.maximum(start[piece], low[keeper]) + shift,
        np.minimum(stop[piece], high[keeper]) + shift,
    )


def tokens_to_level(held: Ints, tokens: int) -> Ints:
    """Return how many of ``tokens`` each rank gets so that ranks end up with numbers as equal as possible.

    ``held`` are the tokens that ranks have already. The compiled twin is ``water`` of
    :mod:`flexcp.planners.blocks.compiled_node`.
    """
    order = np.argsort(held, kind="stable")
    before = np.cumsum(held[order])
    takers = int(np.sum(held[order] * np.arange(1, len(held) + 1) - before < tokens))
    level, extra = divmod(tokens + int(before[takers - 1]), takers)
    found = np.zeros_like(held)
    found[order[:takers]] = level - held[order[:takers]] + (np.arange(takers) < extra)
    return found


def _limit(request: Request, priced: PricedDocuments) -> int | None:
    """Return the most document tokens a rank may keep, None for no limit.

    It is the token cap; with equal tokens it is also limited by what pads may cost.
    """
    cap = request.token_cap
    if not request.equal_tokens:
        return cap
    even = -(-request.batch.tokens // request.ranks)
    spare = int(priced.load.sum()) // (request.ranks * CLOSE_TO_EVEN * max(1, priced.linear))
    limit = -(-(even + spare) // request.pad_to) * request.pad_to
    return limit if cap is None else min(cap, limit)


def _within_limit(
    request: Request, priced: PricedDocuments, rank: Ints, start: Ints, stop: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return the stream ranges that ranks keep, after ranks above the limit gave their last ranges to other ranks.

    Ranks of the same node take first.
    """
    limit = _limit(request, priced)
    counts = sums(rank, stop - start, request.ranks)
    if limit is None or int(counts.max()) <= limit:
        return rank, start, stop
    owners, starts, stops = rank.tolist(), start.tolist(), stop.tolist()
    of_rank: dict[int, list[int]] = {}
    for at, owner in enumerate(owners):
        of_rank.setdefault(owner, []).append(at)
    room = (limit - counts).tolist()
    per_node = request.cluster.ranks_per_node
    for full in np.flatnonzero(counts > limit).tolist():
        node = full // per_node
        near = sorted(range(request.ranks), key=lambda r: (r // per_node != node, (r - full) % request.ranks))
        helpers = iter([r for r in near if room[r] > 0])
        helper = next(helpers)
        while room[full] < 0:
            at = of_rank[full].pop()
            while room[full] < 0 and starts[at] < stops[at]:
                if not room[helper]:
                    helper = next(helpers)
                moved = min(-room[full], room[helper], stops[at] - starts[at])
                owners.append(helper)
                starts.append(stops[at] - moved)
                stops.append(stops[at])
                stops[at] -= moved
                room[full] += moved
                room[helper] -= moved
    found = np.array([owners, starts, stops], np.int64)
    found = found[:, found[1] < found[2]]
    return found[0], found[1], found[2]
