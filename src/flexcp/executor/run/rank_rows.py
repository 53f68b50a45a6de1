"""Rank rows: which stream tokens a rank keeps, in which order, and their positions in their documents, as integers.

The stream is the batch's documents laid end to end. :func:`local_stream` maps the rows of a rank's per-token tensors to
stream tokens. It is computed from the plan alone, for any rank, so both sides of a transfer know what the other sends.
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
    """The rows of one rank, in the order of its per-token tensors."""

    tokens: Ints
    """The stream token of each row, -1 for a pad."""
    positions: Ints | None
    """The position of each row in its document, 0 for a pad; None if the batch's masks disagree about positions.

    A step with None raises when it is asked for positions.
    """
    order: Ints | None
    """The row numbers sorted by stream token; None if the rows are in that order already."""


def local_stream(placement: Placement, rank: int) -> Ints:
    """Return the stream token of each of a rank's rows, in local order; pads have numbers beyond the batch's tokens."""
    runs = placement.runs.take(placement.runs.rank == rank)
    index, within = spread(runs.stop - runs.start)
    return runs.start[index] + within


def row_positions(plan: Plan, stream: Ints) -> Ints:
    """Return the position in its document of each row, given the rows' stream tokens; 0 for pads."""
    batch = plan.batch
    places = token_positions(batch, np.minimum(stream, batch.tokens - 1))
    return np.where(stream < batch.tokens, places, 0)


def stream_order(stream: Ints) -> Ints | None:
    """Return the row numbers sorted by stream token, or None if the rows are in that order already."""
    order = np.argsort(stream, kind="stable")
    return None if np.array_equal(order, np.arange(len(order))) else order


def rank_rows(plan: Plan, rank: int) -> RankRows:
    """Derive the rows of a rank from the plan, with their stream tokens, positions and order."""
    stream = local_stream(plan.placement, rank)
    try:
        positions = row_positions(plan, stream)
    except ValueError:
        positions = None
    return RankRows(np.where(stream < plan.batch.tokens, stream, -1), positions, stream_order(stream))
