"""Token runs: which rank keeps which tokens, as runs, and the regions of planners that compute rows where they are
kept.

Planners work with ranges of the stream per rank. The functions here turn such ranges into
:class:`~flexcp.plan.placement.Runs`, add pads if equal tokens are asked for, and read layouts that a user already has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import offsets, united
from flexcp.batch import Batch
from flexcp.plan.placement import Placement, Regions, Runs
from flexcp.plan.user_layouts import user_layout as user_layout
from flexcp.planners.request import Refused, Request

Ints = NDArray[np.int64]
SCATTERED_RUN = 32
"""If the runs of own tokens are shorter than this on average, own tokens are put in stream order together with received
ones.
"""


def even_borders(size: int, parts: int) -> Ints:
    """Return the borders of ``size`` items in even parts, as in ``tensor_split``: the first ``size % parts`` are one
    longer.
    """
    each, extra = divmod(size, parts)
    return offsets(np.where(np.arange(parts) < extra, each + 1, each))


def runs_of_maps(maps: Sequence[Ints]) -> Runs:
    """Return the runs of index maps (one per rank), in the order of the maps."""
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
    """Return whether runs are so short that work on own tokens alone would consist of very small parts."""
    return bool((runs.stop - runs.start).sum() < SCATTERED_RUN * len(runs) and len(runs) > 4 * (runs.rank.max() + 1))


def runs_of_ranges(rank: Ints, start: Ints, stop: Ints) -> Runs:
    """Return the runs of stream ranges: those of each rank in stream order, merged where they touch."""
    return Runs(*united(rank, start, stop))


def equalised(runs: Runs, ranks: int, tokens: int, pad_to: int) -> tuple[Runs, int]:
    """Return (runs with pads so that every rank keeps the same number of tokens, number of pads).

    Every rank keeps the largest number that any rank has, rounded up to a multiple of ``pad_to``. Pads come after the
    documents, both in the stream and in each rank's local order.
    """
    counts = np.zeros(ranks, np.int64)
    np.add.at(counts, runs.rank, runs.stop - runs.start)
    target = -(-int(counts.max()) // pad_to) * pad_to
    borders = tokens + offsets(target - counts)
    short = np.flatnonzero(target > counts)
    pads = Runs(short, borders[short], borders[short + 1])
    return Runs.join([runs, pads]).sorted_by("rank", "start"), int(borders[-1] - tokens)


def check_cap(runs: Runs, cap: int | None) -> None:
    """Raise Refused if a rank keeps more than ``cap`` tokens, including pads."""
    tokens = np.zeros(int(runs.rank.max()) + 1, np.int64)
    np.add.at(tokens, runs.rank, runs.stop - runs.start)
    if cap is not None and tokens.max() > cap:
        raise Refused(
            f"this strategy keeps {int(tokens.max())} tokens on rank {int(tokens.argmax())}, over "
            f"max_tokens_per_rank={cap}; "
            "raise the cap, use blocks with a free layout, or cut the batch into micro-batches"
        )


def check_tolerances(request: Request, placement: Placement) -> None:
    """Raise Refused if a placement exceeds the user's tolerances by more than a token or a row of the longest document.

    Ranks of different speeds should have work in proportion to them. If the layout is fixed or tokens are equal, only
    the work is checked.
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
        layers = sum(m.layers for m in batch.masks)
        work = np.array([m.layers * placement.work(i) for i, m in enumerate(batch.masks)]).sum(axis=0)
        total, speeds = int(work.sum()), request.cluster.rank_speeds
        row = int(batch.lengths.max()) * request.shape.heads * layers
        allowed = [math.floor(total * s * (1 + request.compute_tolerance) / sum(speeds)) + row for s in speeds]
        over = work - np.array(allowed)
        if over.max() > 0:
            worst = int(over.argmax())
            raise Refused(
                f"computes {int(work[worst])} pairs x heads on rank {worst}, but "
                f"compute_tolerance={request.compute_tolerance:g} allows {allowed[worst]}; raise it"
            )


def row_regions(batch: Batch, heads: int, rank: Ints, start: Ints, stop: Ints) -> Regions:
    """Return regions with all keys and heads of the rows in stream ranges, computed by the given ranks."""
    return head_regions(batch, rank, start, stop, np.zeros(len(rank), np.int64), np.full(len(rank), heads, np.int64))


def head_regions(batch: Batch, rank: Ints, start: Ints, stop: Ints, h0: Ints, h1: Ints) -> Regions:
    """Return regions with all keys of the rows in stream ranges, for query heads ``h0..h1``; adjacent ranges are
    joined.
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
