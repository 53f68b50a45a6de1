"""Loops of a team: which of its items stay whole on one rank, and which are split by heads over the team (compiled).

A team is some ranks of one node, and an item is a document or a part of one
(:mod:`flexcp.planners.groups.compiled_dealing`). A split item gives every rank the same attention, whichever rank keeps
its rows, and its rows can even out tokens. But its queries, keys and results are exchanged. So only as many items are
split as are needed to make the team even: first those that other teams share, then the heaviest.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.compiled_sort import stable_order
from flexcp.arrays.jit import compiled
from flexcp.planners.groups.compiled_dealing import ATTENTION, HI, HUGE, LO, PACE, SHARED, spread_evenly

MOST_TRIED = 24
"""The most numbers of split items that are tried, at growing distances."""


@compiled
def split_by_heads(items, pace, linear, exchange, slack):
    """Return the rank of each item in its team, counted from 0, or the size of the team if the item is split.

    ``pace`` is the speed of each rank relative to the mean. ``linear`` is the cost of a token besides attention and
    ``exchange`` the cost of a split token, both in the unit of loads
    (:class:`flexcp.planners.groups.priced_documents.PricedDocuments`). 1/``slack`` is how far above the mean attention
    a rank may be.
    """
    size, n = len(pace), len(items)
    keys, tokens = np.empty(n, np.int64), 0
    for i in range(n):
        # Shared items come first; they are always split.
        keys[i] = -HUGE if items[i, SHARED] == 1 else -items[i, ATTENTION]
        tokens += items[i, HI] - items[i, LO]
    order = stable_order(keys)
    count = 0
    while count < n and items[order[count], SHARED] == 1:
        count += 1
    best, least = np.full(n, size, np.int64), HUGE
    shared, step, fastest = count, 0, 0
    for r in range(size):
        fastest = max(fastest, pace[r])
    while step < MOST_TRIED and count <= n:
        split_attention, split_tokens, whole_attention = 0, 0, 0
        for i in order[:count]:
            split_attention += items[i, ATTENTION]
            split_tokens += items[i, HI] - items[i, LO]
        # Every rank gets the same attention of split items, so slower ranks finish it later than the fastest.
        behind = np.zeros(size, np.int64)
        for r in range(size):
            behind[r] = split_attention // size * (fastest - pace[r]) // PACE
        mine = order[count:]
        where = spread_evenly(items, mine, pace, behind, tokens)
        has, kept = np.zeros(size, np.int64), np.zeros(size, np.int64)
        for at in range(len(mine)):
            has[where[at]] += items[mine[at], ATTENTION]
            kept[where[at]] += items[mine[at], HI] - items[mine[at], LO]
            whole_attention += items[mine[at], ATTENTION]
        latest, most = 0, -(-tokens // size)
        for r in range(size):
            latest = max(latest, (split_attention // size + has[r]) * PACE // pace[r])
            most = max(most, kept[r])
        time = latest + linear * most + exchange * split_tokens
        if time < least:
            least = time
            best = np.full(n, size, np.int64)
            for at in range(len(mine)):
                best[mine[at]] = where[at]
        even = (split_attention + whole_attention) // size
        if count == n or (latest <= even + even // slack and most * size <= tokens + size):
            break
        step += 1
        count = min(n, max(count + 1, shared + (count - shared) * 5 // 4))
    return best
