"""wlb: WLB-LLM's choice between sharding per document and per sequence.

Either way each rank gets a zig-zag pair of parts, of each document or of the whole packed stream. The way whose slowest
rank is faster is taken; every fragment of a document on a rank costs its (query, key) pairs and those of one tile of
the kernel. All keys go to all ranks. WLB-LLM's delay of outlier documents, which changes which documents are in a
step, is left out.
"""

from __future__ import annotations

import numpy as np

from flexcp.cost import TILE_ROWS
from flexcp.plan.placement import Placement, Traffic
from flexcp.planners.published.ranges import Ranges, placed, regions_of, zigzag
from flexcp.planners.request import Request


def wlb(request: Request) -> Placement:
    """Place a batch as WLB-LLM does: zig-zag per document or per stream, whichever has the faster slowest rank."""
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
    """Return the cost of the slowest rank over all layers, in (query, key) pairs.

    Every fragment of a document costs its own pairs and those of one kernel tile (128 x 128) in each layer.
    """
    regions = regions_of(request, ranges)
    layers = sum(m.layers for m in request.batch.masks)
    fragments = request.batch.weighted_rows_area(regions.document, regions.q0, regions.q1) + layers * TILE_ROWS**2
    total = np.zeros(request.ranks, np.int64)
    np.add.at(total, regions.rank, fragments)
    return int(total.max())
