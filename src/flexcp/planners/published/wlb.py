"""wlb: WLB-LLM's choice between per-document and per-sequence sharding.

Which of the two has the faster slowest rank, where every fragment of a document on a rank costs one empty tile of the
kernel besides its area. All keys go to all ranks. Its delay of outlier documents changes which documents are in a step,
and is not here.
"""

from __future__ import annotations

import numpy as np

from flexcp.cost import TILE_ROWS
from flexcp.plan.placement import Placement, Traffic
from flexcp.planners.published.ranges import Ranges, placed, regions_of, zigzag
from flexcp.planners.request import Request


def wlb(request: Request) -> Placement:
    """WLB-LLM: zig-zag per document or per sequence, whichever predicts the faster slowest rank."""
    if request.argument:
        raise ValueError(f"wlb takes no argument; got 'wlb:{request.argument}'")
    batch, ranks = request.batch, np.arange(request.ranks, dtype=np.int64)
    per_document = zigzag(batch.starts[:-1], batch.lengths, ranks)
    stream = np.array([batch.tokens], np.int64)
    per_sequence = zigzag(np.zeros(1, np.int64), stream, ranks)
    costs = [_slowest(request, ranges) for ranges in (per_document, per_sequence)]
    chosen, ranges = ("document", per_document) if costs[0] < costs[1] else ("sequence", per_sequence)
    note = f"sharded per {chosen}: the slowest rank computes {costs[0]} pairs per document, {costs[1]} per sequence"
    return placed(request, "wlb", ranges, Traffic("gather", (tuple((int(r),) for r in ranks),)), note)


def _slowest(request: Request, ranges: Ranges) -> int:
    """Pairs of the slowest rank; every fragment pays one empty tile of the kernel."""
    regions = regions_of(request, ranges)
    layers = sum(m.layers for m in request.batch.masks)
    fragments = request.batch.weighted_rows_area(regions.document, regions.q0, regions.q1) + layers * TILE_ROWS**2
    total = np.zeros(request.ranks, np.int64)
    np.add.at(total, regions.rank, fragments)
    return int(total.max())
