"""Token runs: turn what planners decide into the tables of a placement, and check its limits.

Planners decide which ranges of the stream each rank keeps or computes. The functions here turn such ranges into
:class:`~flexcp.plan.placement.Runs` (which rank keeps which tokens) and :class:`~flexcp.plan.placement.Regions` (which
rank computes which rows), add pads if every rank is to keep equally many tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import offsets, overlaps, united
from flexcp.arrays.totals import sums
from flexcp.batch import Batch
from flexcp.plan.placement import Placement, Regions, Runs
from flexcp.planners.request import Refused, Request
from flexcp.schedule.needs import needed_pieces
from flexcp.schedule.work import count_pairs, cut_regions

Ints = NDArray[np.int64]
SCATTERED_RUN = 32
"""Runs with fewer tokens than this on average may count as scattered (:func:`is_scattered`)."""


def even_borders(size: int, parts: int) -> Ints:
    """Return the borders of ``size`` items in ``parts`` even parts: 7 items in 3 parts give ``[0, 3, 5, 7]``.

    As in ``torch.tensor_split``, the first ``size % parts`` parts have one item more.
    """
    each, extra = divmod(size, parts)
    return offsets(np.where(np.arange(parts) < extra, each + 1, each))


def runs_of_maps(maps: Sequence[Ints]) -> Runs:
    """Return the runs of a layout; ``maps[rank]`` lists the stream indices of a rank's tokens in its local order.

    Neighbouring tokens with consecutive indices become one run, and runs stay in the order of the maps.
    """
    ranks, starts, stops = [], [], []
    for rank, index in enumerate(maps):
        if len(index) == 0:
            continue
        first = np.concatenate([[True], np.diff(index) != 1])
        last = np.concatenate([first[1:], [True]])
        ranks.append(np.full(int(first.sum()), rank, np.int64))
        starts.append(index[first])
        stops.append(index[last] + 1)
    return Runs(np.concatenate(ranks), np.concatenate(starts), np.concatenate(stops))


def is_scattered(runs: Runs) -> bool:
    """Return whether runs are so short that attention among a rank's own tokens would consist of very small parts.

    This is so if runs have fewer than ``SCATTERED_RUN`` tokens on average and there are more than four per rank.
    """
    return bool((runs.stop - runs.start).sum() < SCATTERED_RUN * len(runs) and len(runs) > 4 * (runs.rank.max() + 1))


def runs_of_ranges(rank: Ints, start: Ints, stop: Ints) -> Runs:
    """Return runs that keep the stream ranges ``start <= t < stop`` on their ranks.

    They are sorted by rank and stream position; ranges of a rank that touch are merged.
    """
    return Runs(*united(rank, start, stop))


def equalised(runs: Runs, ranks: int, tokens: int, pad_to: int) -> tuple[Runs, int]:
    """Return (runs with pads so that every rank keeps the same number of tokens, number of pads).

    ``tokens`` is the number of document tokens. Every rank keeps the largest number that any rank has, rounded up to a
    multiple of ``pad_to``. Pads come after the documents, both in the stream and in each rank's local order.
    """
    counts = np.zeros(ranks, np.int64)
    np.add.at(counts, runs.rank, runs.stop - runs.start)
    target = -(-int(counts.max()) // pad_to) * pad_to
    borders = tokens + offsets(target - counts)
    short = np.flatnonzero(target > counts)
    pads = Runs(short, borders[short], borders[short + 1])
    return Runs.join([runs, pads]).sorted_by("rank", "start"), int(borders[-1] - tokens)


def check_cap(runs: Runs, request: Request) -> None:
    """Raise Refused if a rank keeps more than ``request.max_tokens_per_rank`` tokens, including pads."""
    cap = request.max_tokens_per_rank
    tokens = np.zeros(int(runs.rank.max()) + 1, np.int64)
    np.add.at(tokens, runs.rank, runs.stop - runs.start)
    if cap is None or tokens.max() <= cap:
        return
    fullest = int(tokens.argmax())
    share = _tokens_of_documents(runs, fullest, request.batch)
    over = f"this strategy keeps {int(tokens.max())} tokens on rank {fullest}, over max_tokens_per_rank={cap}; "
    if request.layout is None and share.max() > cap:
        raise Refused(
            f"{over}document {int(share.argmax())} alone has {int(share.max())} tokens there, so micro-batches do not "
            "help: raise the cap, use a strategy that divides the document over more ranks (auto, blocks, or a static "
            "one with a larger degree), or cut the document"
        )
    raise Refused(f"{over}raise the cap, use blocks with a free layout, or cut the batch into micro-batches")


def _tokens_of_documents(runs: Runs, rank: int, batch: Batch) -> Ints:
    """Return how many tokens of each document a rank keeps."""
    mine = runs.rank == rank
    begin, end = runs.start[mine], runs.stop[mine]
    run, document = overlaps(begin, end, batch.starts[:-1], batch.starts[1:])
    kept = np.minimum(end[run], batch.starts[document + 1]) - np.maximum(begin[run], batch.starts[document])
    return sums(document, kept, batch.documents)


def check_tolerances(request: Request, placement: Placement) -> None:
    """Raise Refused if a placement exceeds the user's tolerances.

    A rank may have one token more than ``token_tolerance`` allows, and as much more work than ``compute_tolerance``
    allows as one row of the longest document that sees all its keys. The work allowed on a rank is in proportion to its
    speed. Tokens are not checked if the layout is fixed or every rank keeps equally many.
    """
    batch, ranks = request.batch, request.ranks
    if request.token_tolerance is not None and request.layout is None and not request.equal_tokens:
        most = max(math.ceil(batch.tokens / ranks), math.floor(batch.tokens * (1 + request.token_tolerance) / ranks))
        if placement.tokens.max() > most + 1:
            raise Refused(
                f"keeps {int(placement.tokens.max())} tokens on rank {int(placement.tokens.argmax())}, but "
                f"token_tolerance={request.token_tolerance:g} allows {most}; raise it"
            )
    if request.compute_tolerance is not None:
        work = placement.work_of_layers()
        total, speeds = int(work.sum()), request.cluster.rank_speeds
        row = int(batch.lengths.max()) * request.shape.heads * batch.layers
        allowed = [math.floor(total * s * (1 + request.compute_tolerance) / sum(speeds)) + row for s in speeds]
        over = work - np.array(allowed)
        if over.max() > 0:
            worst = int(over.argmax())
            raise Refused(
                f"computes {int(work[worst])} pairs x heads on rank {worst}, but "
                f"compute_tolerance={request.compute_tolerance:g} allows {allowed[worst]}; raise it"
            )


def check_queries_stay(request: Request, placement: Placement) -> None:
    """Raise Refused if latents travel instead of keys and the placement moves queries or splits heads."""
    if request.shape.latent is None:
        return
    for mask, regions in zip(placement.batch.masks, placement.regions, strict=True):
        cuts = cut_regions(placement, mask, regions)
        pairs = count_pairs(placement, regions, cuts)
        queries, _ = needed_pieces(placement, request.shape, regions, cuts, pairs)
        if np.any(queries.owner != queries.rank):
            raise Refused(
                "this strategy moves queries or splits heads in this batch, but latent attention computes all heads of "
                "a query where it is kept; use auto, blocks, groups, or a static method that moves only keys (dp, "
                "ring, zigzag, allgather)"
            )


def row_regions(batch: Batch, heads: int, rank: Ints, start: Ints, stop: Ints) -> Regions:
    """Return regions for the rows in stream ranges, each on its ``rank`` with all keys and all ``heads`` query heads.

    Ranges are half-open; those of a rank that touch are joined, and they are cut where a document ends.
    """
    return head_regions(batch, rank, start, stop, np.zeros(len(rank), np.int64), np.full(len(rank), heads, np.int64))


def head_regions(batch: Batch, rank: Ints, start: Ints, stop: Ints, h0: Ints, h1: Ints) -> Regions:
    """Return regions for the rows in stream ranges, each on its ``rank`` with all keys and heads ``h0 <= h < h1``.

    Heads are query heads. Ranges are half-open; those that touch and have the same rank and heads are joined, and they
    are cut where a document ends.
    """
    wide = int(h1.max()) + 1 if len(h1) else 1
    label, start, stop = united((rank * wide + h0) * wide + h1, start, stop)
    rank, h0, h1 = label // wide // wide, label // wide % wide, label % wide
    index, document, q0, q1 = batch.split_by_document(start, stop)
    return Regions.make(
        len(index),
        rank=rank[index],
        document=document,
        q0=q0,
        q1=q1,
        k0=0,
        k1=batch.lengths[document],
        h0=h0[index],
        h1=h1[index],
    )
