"""The numbers of a plan that a report draws, few enough to be part of one page.

A plan can have many cuts (zig-zag over 64 ranks cuts every document into 128 parts), and a page should stay under 3 MB.
The longest documents are therefore given exactly until a budget of rows is spent, which covers all documents of most
plans. For the others the page has only place and length, and says so. Bytes are listed for pairs of ranks, or for pairs
of nodes if too many pairs of ranks exchange something.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.tables import Table
from flexcp.arrays.totals import sums
from flexcp.masks import UNBOUNDED
from flexcp.plan.plan import Plan
from flexcp.report.plan_time import PlanTime

Ints = NDArray[np.int64]
MOST_ROWS = 8_000
"""The most runs (ranges of tokens kept by a rank), and the most regions of one mask, that a page holds."""
MOST_PAIRS = 20_000
"""The most pairs of ranks with traffic, for one mask and direction, that a page lists."""


def plan_data(plan: Plan, time: PlanTime) -> dict[str, Any]:
    """Return the numbers that a page draws for one plan, as JSON values; ``time`` are the times that it shows."""
    batch, placement = plan.batch, plan.placement
    drawn = drawn_documents(plan)
    whole = len(drawn) == batch.documents
    runs = placement.runs if whole else _runs_of(plan, drawn)
    return {
        "ranks": plan.ranks,
        "perNode": plan.cluster.ranks_per_node,
        "lengths": batch.lengths.tolist(),
        "pads": placement.pads,
        "drawn": drawn.tolist(),
        "runs": _columns(runs, "rank", "start", "stop"),
        "masks": [
            {
                "name": mask.name,
                "layers": mask.layers,
                "slices": _slices(plan, m, drawn),
                "regions": _columns(
                    regions.take(np.isin(regions.document, drawn)),
                    *("rank", "document", "q0", "q1", "k0", "k1", "h0", "h1"),
                ),
                "bytes": [traffic(plan, m, backward) for backward in (False, True)],
            }
            for m, (mask, regions) in enumerate(zip(batch.masks, placement.regions, strict=True))
        ],
        "time": {
            "attention": time.attention_ns.tolist(),
            "exposed": time.exposed_ns.tolist(),
            "linear": time.linear_ns.tolist(),
        },
    }


def drawn_documents(plan: Plan) -> Ints:
    """Return the documents that are drawn exactly, ascending: the longest ones within ``MOST_ROWS``, at least one."""
    batch, placement = plan.batch, plan.placement
    documents, count = batch.split_by_document(placement.runs.start, placement.runs.stop)[1], batch.documents
    rows = np.maximum.reduce(
        [sums(found, np.ones_like(found), count) for found in (documents, *(r.document for r in placement.regions))]
    )
    order = np.argsort(-batch.lengths, kind="stable")
    fits = int(np.searchsorted(np.cumsum(rows[order]), MOST_ROWS, side="right"))
    return np.sort(order[: max(1, fits)])


def traffic(plan: Plan, mask: int, backward: bool) -> dict[str, Any]:
    """Return the bytes of one layer as columns ``source``, ``target`` and ``bytes``, between ranks or nodes (``unit``).

    ``mask`` is the mask's index in the plan. Nodes replace ranks if there are more than ``MOST_PAIRS`` pairs of ranks.
    """
    matrix = plan.bytes(backward, mask)
    unit = "rank"
    if np.count_nonzero(matrix) > MOST_PAIRS:
        size = plan.cluster.ranks_per_node
        matrix = matrix.reshape(plan.cluster.nodes, size, plan.cluster.nodes, size).sum(axis=(1, 3))
        unit = "node"
    source, target = np.nonzero(matrix)
    return {
        "unit": unit,
        "source": source.tolist(),
        "target": target.tolist(),
        "bytes": matrix[source, target].tolist(),
    }


def _columns(table: Table, *names: str) -> dict[str, list[int]]:
    return {name: getattr(table, name).tolist() for name in names}


def _runs_of(plan: Plan, drawn: Ints) -> Table:
    runs = plan.placement.runs
    index, document, _, _ = plan.batch.split_by_document(runs.start, runs.stop)
    return runs.take(np.unique(index[np.isin(document, drawn)]))


def _slices(plan: Plan, mask: int, drawn: Ints) -> dict[str, list[int]]:
    """Return the slices of the drawn documents; unlimited bands are clipped to the longest document."""
    layer = plan.batch.masks[mask]
    index, at = layer.of_documents(drawn)
    rows = layer.slices[at]
    limit = int(plan.batch.lengths.max())
    assert limit < UNBOUNDED
    band = np.clip(rows[:, 4:6], -limit, limit)
    names = ("q0", "q1", "k0", "k1")
    return {
        "document": drawn[index].tolist(),
        **{name: rows[:, column].tolist() for column, name in enumerate(names)},
        "lo": band[:, 0].tolist(),
        "hi": band[:, 1].tolist(),
    }
