"""Dealing: which group of a static method gets which documents, if its degree makes several groups.

- *By tokens*, as Megatron-Core, DeepSpeed and torchtitan fill data-parallel ranks: documents go longest first to the
  group with the fewest tokens.
- *By load* (``ulysses:8@load``), as WLB-LLM and trainers for reinforcement learning do: documents go most expensive
  first to the group with the least work, attention and the rest of each layer together. Groups then keep different
  numbers of tokens, as far as ``max_tokens_per_rank`` allows. Attention is priced by pairs and by the tiles of 128 rows
  that a document has or is cut into, which are most of the cost of short documents. Communication is not part of the
  price, so if it takes most of the time, dealing by load can be slower than dealing by tokens.

The documents of each group are in stream order.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from flexcp.cost import TILE_ROWS
from flexcp.planners.request import Request
from flexcp.schedule.predict import document_work

Ints = NDArray[np.int64]
BY_LOAD = "@load"
"""The ending of the name or argument of a static method that deals by load."""


def deals_by_load(text: str) -> bool:
    """Return whether a strategy, given by its name or its argument, deals documents by load."""
    return text.endswith(BY_LOAD)


def method_of(name: str) -> str:
    """Return a strategy's name without its degree and its dealing: ``zigzag:4@load`` becomes ``zigzag``."""
    return name.partition("@")[0].partition(":")[0]


def dealt(request: Request, groups: int, parts: int) -> list[Ints]:
    """Return the documents of each of ``groups`` groups, dealt by tokens or by load as the request's argument says.

    ``parts`` is how many parts each document is cut into; it matters for loads and for the token cap.
    """
    lengths = request.batch.lengths
    if groups == 1 or not deals_by_load(request.argument):
        return deal(lengths, groups)
    # Lengths of parts are rounded, so each document counts as if all its parts were as long as the longest.
    most = -(-lengths // parts) * parts
    room = None if request.token_cap is None else request.token_cap * (request.ranks // groups)
    return _deal_largest_first(_loads(request, parts), most, groups, room)


def _loads(request: Request, parts: int) -> Ints:
    """Return the cost of each document over all layers in (query, key) pairs, if it is cut into ``parts`` parts.

    It includes the row tiles that cuts add, and the cost of tokens outside attention.
    """
    batch, shape, cost = request.batch, request.shape, request.cost
    tiles_of_cuts = np.maximum(np.minimum(batch.lengths, parts) - -(-batch.lengths // TILE_ROWS), 0)
    beside = tiles_of_cuts * cost.row_tile_pairs + batch.lengths * cost.pairs_per_token(shape)
    of_masks = zip(batch.masks, document_work(batch, shape, cost), strict=True)
    return np.asarray(sum(mask.layers * (work // shape.heads + beside) for mask, work in of_masks))


def deal(lengths: Ints, groups: int) -> list[Ints]:
    """Return the documents of each group, dealt by tokens: longest first to the group with the fewest tokens."""
    return _deal_largest_first(lengths, lengths, groups, None)


def _deal_largest_first(loads: Ints, tokens: Ints, groups: int, room: int | None) -> list[Ints]:
    """Return the documents of each group: the largest load goes first, to the least loaded group with room for it.

    A group may have at most ``room`` tokens, None for no limit. If no group has room, the document goes to the group
    with the fewest tokens.
    """
    # A group in the heap is one integer, load x groups + number, which is fast enough for a million documents.
    heap, kept = list(range(groups)), [0] * groups
    most = int(tokens.sum()) if room is None else room
    order = np.argsort(-loads, kind="stable")
    found = []
    for load, more in zip(loads[order].tolist(), tokens[order].tolist(), strict=True):
        group = heap[0] % groups
        found.append(group)
        if kept[group] + more <= most:
            heapq.heapreplace(heap, heap[0] + load * groups)
        else:  # rarely
            able = [each for each in heap if kept[each % groups] + more <= most]
            taker = min(able) if able else min(heap, key=lambda each: (kept[each % groups], each % groups))
            group = found[-1] = taker % groups
            heap[heap.index(taker)] += load * groups
            heapq.heapify(heap)
        kept[group] += more
    dealt_to = np.empty(len(loads), np.int64)
    dealt_to[order] = found
    by_group = np.argsort(dealt_to, kind="stable")
    return np.split(by_group, np.searchsorted(dealt_to[by_group], np.arange(1, groups)))
