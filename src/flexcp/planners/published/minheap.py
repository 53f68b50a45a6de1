"""minheap: how MagiAttention's dispatch solver distributes chunks to ranks by default ("min-heap").

`minheap:c` distributes chunks of c tokens, 1,024 unless given: the chunk with the largest area ((query, key) pairs of
its rows) goes first, to the rank with the least area among those that still have room. Numbers of chunks differ by at
most one (MagiAttention pads the stream so that they are equal). Chunks may span documents. Keys come directly from
their owners. With `minheap:c,relay`, keys that several ranks of a node read cross to the node once and are passed on
inside, as in MagiAttention's native group collectives (from version 1.1 on).
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.placement import Placement, Traffic
from flexcp.planners.published.ranges import area, placed, refuse_tiny_parts, whole_number
from flexcp.planners.request import Request

Ints = NDArray[np.int64]
CHUNK = 1024
"""The tokens of a chunk unless given."""
RELAY = "relay"


def minheap(request: Request) -> Placement:
    """Place a batch as MagiAttention does: chunks of the stream, equally many on every rank, balanced in work."""
    number, comma, word = request.argument.partition(",")
    if comma and word != RELAY:
        raise ValueError(
            f"after a chunk's tokens minheap takes only {RELAY!r}, as in minheap:1024,{RELAY}; got "
            f"'minheap:{request.argument}'"
        )
    chunk = whole_number(number, "minheap", "tokens in a chunk", 512) or CHUNK
    refuse_tiny_parts(request, "minheap", chunk)
    tokens = request.batch.tokens
    start = np.arange(0, tokens, chunk, dtype=np.int64)
    stop = np.minimum(start + chunk, tokens)
    rank = _dealt_equally(area(request.batch, start, stop), request.ranks)
    return placed(request, "minheap", (rank, start, stop), Traffic(relay=word == RELAY))


def _dealt_equally(area: Ints, ranks: int) -> Ints:
    """Return the rank of each chunk: the largest area first, to the rank with the least area that has room.

    A rank has room as long as numbers of chunks differ by at most one in the end.
    """
    each, extra = divmod(len(area), ranks)
    heap = [(0, r) for r in range(ranks)]
    count = [0] * ranks
    found = np.zeros(len(area), np.int64)
    for chunk in np.argsort(-area, kind="stable"):
        load, rank = heapq.heappop(heap)
        while count[rank] == each and extra == 0:
            load, rank = heapq.heappop(heap)
        extra -= count[rank] == each
        count[rank] += 1
        found[chunk] = rank
        if count[rank] <= each:
            heapq.heappush(heap, (load + int(area[chunk]), rank))
    return found
