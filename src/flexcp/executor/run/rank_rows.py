"""Rank rows: which tokens of the stream are on a rank, in which order,
and where they stand in their documents. Integers; no tensor.

``local_stream`` is the coordinate every per-token tensor of a rank hangs on: computed from the plan alone, for any
rank, so that each side of a move knows what the other sends without asking.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import spread
from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan
from flexcp.plan.positions import token_positions

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RankRows:
    """Of each local row the stream token (-1 for a pad) and the position in its document (0 for a pad); and local rows
    in stream order, None when they already are.
    """

    tokens: Ints
    positions: Ints | None
    """None where the batch's masks disagree about positions, which whoever asks is told then."""
    order: Ints | None


def local_stream(placement: Placement, rank: int) -> Ints:
    """The stream token of each of a rank's rows, in local order; pads lie beyond the batch's tokens."""
    runs = placement.runs.take(placement.runs.rank == rank)
    index, within = spread(runs.stop - runs.start)
    return runs.start[index] + within


def row_positions(plan: Plan, stream: Ints) -> Ints:
    """The positions of a rank's rows, by their stream tokens."""
    batch = plan.batch
    places = token_positions(batch, np.minimum(stream, batch.tokens - 1))
    return np.where(stream < batch.tokens, places, 0)


def stream_order(stream: Ints) -> Ints | None:
    """Local rows in stream order, by their stream tokens; None when they already are."""
    order = np.argsort(stream, kind="stable")
    return None if np.array_equal(order, np.arange(len(order))) else order


def rank_rows(plan: Plan, rank: int) -> RankRows:
    """The rows of a rank."""
    stream = local_stream(plan.placement, rank)
    try:
        positions = row_positions(plan, stream)
    except ValueError:
        positions = None
    return RankRows(np.where(stream < plan.batch.tokens, stream, -1), positions, stream_order(stream))
