"""dhp: the flexible groups of DHP (arXiv 2602.21788), in which a group of documents gets any number of ranks.

The paper's problem: split N ranks into disjoint groups and give every sequence a group, so that the slowest group is as
fast as possible and no group needs more memory than its ranks have. The number of ranks of a group is its degree. It is
solved in the paper's two stages, with its cost model:

1. *Packing* (memory-aware, best-fit decreasing): documents go into atomic groups in the order of their memory. A
   document that fits no group opens a new one with the least number of ranks that it needs, ``ceil(memory / E)``, where
   E is the memory of a rank; the room that is left is filled with shorter documents, best fit first.
2. *Degrees* (two-dimensional dynamic program): ``best[i][n]`` is the least time of the slowest of the first i groups on
   at most n ranks, which is the minimum over degrees d of ``max(best[i - 1][n - d], T_i(d))``.

The time T of a group is ``computation + communication - min(attention, communication)``: attention hides communication.
Computation is ``a1 x pairs + a2 x tokens`` over d, plus a start. The pairs are those of the actual mask, so the paper's
``eta`` of a vision span is part of them. Communication is ``a3 x tokens`` over the bandwidth of the group, plus a
start. The coefficients are those of the cost model, forward and backward together. A group inside a node has the node's
bandwidth. A rank alone has no communication.

Memory is counted in tokens: `dhp:8192` says how many a rank holds. Otherwise it is ``max_tokens_per_rank``. Without a
cap, several values are tried, from the least with which the groups fit the ranks to three times the mean, and the
fastest by this cost model is taken. Groups are rings of neighbouring ranks, in an order in which few of them cross
nodes. DHP's pool of communicators has no counterpart, because a group here is a part of the plan.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.placement import Placement
from flexcp.planners.published.ranges import (
    NEVER,
    best_fit,
    document_area,
    in_rings,
    mean_tokens,
    refuse_layout,
    whole_number,
)
from flexcp.planners.request import Refused, Request, refuse_tolerances
from flexcp.shape import Kind

Ints = NDArray[np.int64]
GROWTH = 32
"""If the tokens that a rank holds are not given, they grow from the mean by 1/32 at a time until the groups fit."""
MEMORY_EIGHTHS = (9, 10, 12, 16, 24)
"""Larger numbers of tokens per rank that are tried after that, in eighths of the mean."""


def dhp(request: Request) -> Placement:
    """Place a batch as DHP does: documents in groups, with numbers of ranks that make the slowest group fastest."""
    refuse_layout(request, "dhp")
    refuse_tolerances(request)
    _, groups, degrees = _fastest(request)
    largest_first = sorted(degrees, reverse=True)
    note = f"{len(groups)} groups of {', '.join(map(str, largest_first[:16]))}{', ...' * (len(groups) > 16)} ranks"
    free = request.ranks - sum(degrees)
    groups, degrees = groups + [[]] * free, degrees + [1] * free  # a rank without documents is a group of its own
    order = in_nodes(degrees, request.cluster.ranks_per_node)
    return in_rings(request, "dhp", [degrees[g] for g in order], [groups[g] for g in order], note)


def in_nodes(degrees: list[int], ranks_per_node: int) -> list[int]:
    """Return the groups in an order in which few of them cross nodes if they get neighbouring ranks.

    Groups larger than a node come first. Then each place takes the largest group that fits into the rest of its node,
    or the largest of all if none does.
    """
    left = sorted(range(len(degrees)), key=lambda group: -degrees[group])
    order, used = list[int](), 0
    while left:
        room = ranks_per_node - used % ranks_per_node
        fits = (group for group in left if degrees[group] <= room)
        group = left[0] if degrees[left[0]] > ranks_per_node else next(fits, left[0])
        left.remove(group)
        order.append(group)
        used += degrees[group]
    return order


def predicted_ns(request: Request) -> int:
    """Return the nanoseconds of the slowest group of :func:`dhp` for all layers of a step, by DHP's cost model."""
    return _fastest(request)[0]


def _fastest(request: Request) -> tuple[int, list[list[int]], list[int]]:
    """Return (nanoseconds of the slowest group, documents of each group, ranks of each) for the best budget.

    A budget is how many tokens a rank holds.
    """
    return min((_solved(request, budget) for budget in _budgets(request)), key=lambda found: found[0])


def _budgets(request: Request) -> list[int]:
    """Return the numbers of tokens per rank to try: the one that is given, or several if none is.

    Raise Refused if the groups need more ranks than there are with the given one.
    """
    told = whole_number(request.argument, "dhp", "tokens a rank", 8192)
    if told is not None or request.token_cap is not None:
        budget = told or request.token_cap or 1
        need = sum(best_fit(request.batch.lengths, budget)[1])
        if need > request.ranks:
            limit = f"dhp:{told}" if told else f"max_tokens_per_rank={request.max_tokens_per_rank}"
            raise Refused(
                f"groups of documents need {need} ranks with {limit}, and there are {request.ranks}; raise it, "
                "or cut the batch into micro-batches"
            )
        return [budget]
    mean = mean_tokens(request)
    least = mean
    while sum(best_fit(request.batch.lengths, least)[1]) > request.ranks:
        least += -(-least // GROWTH)
    more = [mean * eighths // 8 for eighths in MEMORY_EIGHTHS if mean * eighths // 8 > least]
    return [least, *(each for each in more if sum(best_fit(request.batch.lengths, each)[1]) <= request.ranks)]


def _solved(request: Request, budget: int) -> tuple[int, list[list[int]], list[int]]:
    """Return (nanoseconds of the slowest group, documents of each group, ranks of each group) for one budget.

    ``budget`` is how many tokens a rank holds.
    """
    groups, least = best_fit(request.batch.lengths, budget)
    times = _times(request, groups)
    degrees = least_slowest(times, least, request.ranks)
    return int(times[np.arange(len(groups)), np.array(degrees) - 1].max()), groups, degrees


# --- degrees ----------------------------------------------------------------------------------------------------------


def least_slowest(times: Ints, least: list[int], ranks: int) -> list[int]:
    """Return the degree (number of ranks) of each group with which the slowest group is fastest.

    ``times[group, d - 1]`` is the time of a group on d ranks, ``least`` the least degree of each group. The degrees add
    up to at most ``ranks``.
    """
    best = np.zeros(ranks + 1, np.int64)  # least time of the groups so far, by the most ranks that they may use
    taken = np.zeros((len(least), ranks + 1), np.int64)
    for group, fewest in enumerate(least):
        found = np.full(ranks + 1, NEVER)
        for degree in range(fewest, ranks + 1):
            slowest = np.maximum(best[: ranks + 1 - degree], times[group, degree - 1])
            better = slowest < found[degree:]
            found[degree:][better] = slowest[better]
            taken[group, degree:][better] = degree
        best = found
    degrees, left = [], ranks
    for group in reversed(range(len(least))):
        degrees.append(int(taken[group, left]))
        left -= degrees[-1]
    return degrees[::-1]


def _times(request: Request, groups: list[list[int]]) -> Ints:
    """Return the nanoseconds of each group on d ranks for all layers of a step, ``[group, d - 1]``."""
    batch, shape, cost = request.batch, request.shape, request.cost
    cluster = replace(request.cluster, speeds=())
    layers = sum(mask.layers for mask in batch.masks)
    pairs, tokens = (
        np.array([int(of[group].sum()) for group in groups], np.int64)
        for of in (document_area(batch) + layers * cost.row_tiles_work(batch.lengths), batch.lengths)
    )
    attention, linear = (
        sum(cost.attention_ns(pairs * shape.heads, shape, cluster, way) for way in (False, True)),
        layers * cost.linear_ns(tokens, shape, cluster),
    )
    each = shape.bytes_per_token_head()
    moved = tokens * layers * shape.kv_heads * int(2 * each[Kind.KV, 0] + each[Kind.DKV, 1])
    degree = np.arange(1, request.ranks + 1)
    alone, inside = degree == 1, degree <= cluster.ranks_per_node
    links = [cost.link_ns(moved, mbps)[:, None] for mbps in (cluster.intra_mbps, cluster.inter_mbps)]
    communication = np.where(alone, 0, np.where(inside, *links) + 2 * layers * cluster.latency_ns)
    attention = -(-np.asarray(attention)[:, None] // degree)
    computation = attention + -(-linear[:, None] // degree) + 2 * layers * cost.kernel_ns
    return np.asarray(computation + communication - np.minimum(attention, communication))
