"""hdp: ByteScale's hybrid data parallelism, with long documents over just enough ranks and short ones whole.

`hdp:b` plans for b tokens per rank, the mean unless given. A document longer than b is placed zig-zag over just enough
neighbouring ranks. After these, short documents go whole to the rank that finishes first. A rank's time is estimated as
the (query, key) pairs of its documents plus the cost of their tokens in the rest of the layer, in the same unit. Only
keys of cut documents move.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.placement import Placement, Traffic
from flexcp.planners.published.ranges import document_area, joined, mean_tokens, placed, whole_number, zigzag
from flexcp.planners.request import Refused, Request

Ints = NDArray[np.int64]


def hdp(request: Request) -> Placement:
    """Place a batch as ByteScale does: long documents over just enough ranks, short ones whole on one rank."""
    budget = whole_number(request.argument, "hdp", "tokens a rank", 8192) or mean_tokens(request)
    batch = request.batch
    price = request.cost.pairs_per_token(request.shape) * sum(m.layers for m in batch.masks)
    load = document_area(batch) + price * batch.lengths
    ready = np.zeros(request.ranks, np.int64)
    ranges = []
    for document in np.argsort(-load, kind="stable"):
        # Cut documents come first, because they need neighbouring ranks that finish at the same time.
        if batch.lengths[document] > budget:
            degree = _enough(request, int(document), budget)
            first = _least_ready(ready, degree)
            ready[first : first + degree] = ready[first : first + degree].max() + -(-load[document] // degree)
            members = np.arange(first, first + degree, dtype=np.int64)
            one = slice(document, document + 1)
            ranges.append(zigzag(batch.starts[:-1][one], batch.lengths[one], members))
    whole = np.flatnonzero(batch.lengths <= budget)
    rank = _dealt_whole(load[whole], ready)
    ranges.append((rank, batch.starts[whole], batch.starts[whole + 1]))
    return placed(request, "hdp", joined(ranges), Traffic(relay=False))


def _enough(request: Request, document: int, budget: int) -> int:
    """Return how many ranks a document needs with ``budget`` tokens per rank; raise Refused if there are fewer."""
    length = int(request.batch.lengths[document])
    degree = -(-length // budget)
    if degree > request.ranks:
        raise Refused(
            f"document {document} has {length} tokens, more than {request.ranks} ranks of hdp:{budget}; raise the "
            "budget, or drop it for the mean"
        )
    return degree


def _least_ready(ready: Ints, degree: int) -> int:
    """Return the first of ``degree`` neighbouring ranks that are all free earliest; rank r is free at ``ready[r]``."""
    latest = np.lib.stride_tricks.sliding_window_view(ready, degree).max(axis=1)
    return int(latest.argmin())


def _dealt_whole(load: Ints, ready: Ints) -> Ints:
    """Return the rank of each document: heaviest first to the rank that finishes first.

    ``ready[rank]`` is when a rank finishes what it has already, in the unit of ``load``.
    """
    heap = [(int(time), rank) for rank, time in enumerate(ready)]
    heapq.heapify(heap)
    found = np.zeros(len(load), np.int64)
    for document in np.argsort(-load, kind="stable"):
        time, rank = heap[0]
        found[document] = rank
        heapq.heapreplace(heap, (time + int(load[document]), rank))
    return found
