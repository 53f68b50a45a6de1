"""pow2: Megatron-Core's dynamic context parallelism, with groups of a power of two of ranks.

`pow2:b`: a document of n tokens needs the smallest power of two d with n / d <= b; b is the mean of tokens per rank
unless given. Documents go longest first to a new group of that size while ranks are free, then to the group of that
size with the least sum of n^2 / d, then to one of any larger size (Megatron would leave these documents to the next
micro-batch). If ranks are left, the most loaded of the smallest groups is doubled, as long as possible. Groups are
placed largest first, so each starts at a multiple of its size. If the number of ranks is not a power of two, the
largest group is the largest power of two below it, and smaller groups fill the rest. Ranks that no group can use stay
empty.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.placement import Placement
from flexcp.planners.published.ranges import in_rings, mean_tokens, whole_number
from flexcp.planners.request import Refused, Request

Ints = NDArray[np.int64]


def pow2(request: Request) -> Placement:
    """Place a batch as Megatron does: every document in a group of ranks whose size is a power of two."""
    return in_rings(request, "pow2", *_groups(request.batch.lengths, _degrees(request), request.ranks))


def _degrees(request: Request) -> list[int]:
    """Return how many ranks each document needs: a power of two, at most the largest that the ranks allow.

    Raise Refused if a document needs more with the tokens per rank that the request's argument gives.
    """
    budget = whole_number(request.argument, "pow2", "tokens a rank", 8192)
    largest = 1 << (request.ranks.bit_length() - 1)
    found = []
    for document, length in enumerate(request.batch.lengths.tolist()):
        degree = 1 << (-(-length // (budget or mean_tokens(request))) - 1).bit_length()
        if degree > largest and budget is not None:
            raise Refused(
                f"document {document} has {length} tokens, more than the largest group of {largest} ranks holds with "
                f"pow2:{budget}; raise the budget, or drop it for the mean"
            )
        found.append(min(degree, largest))
    return found


def _groups(lengths: Ints, degrees: list[int], ranks: int) -> tuple[list[int], list[list[int]]]:
    """Return (sizes, documents) of the groups, the largest first; ``degrees`` is how many ranks each document needs.

    Ranks that are left over are groups of one rank without documents.
    """
    sizes: list[int] = []
    dealt: list[list[int]] = []
    squares: list[int] = []  # sum of n^2 of each group; its load is this sum divided by its size
    free = ranks
    for document in np.argsort(-lengths, kind="stable").tolist():
        degree = degrees[document]
        if free >= degree:
            sizes.append(degree)
            dealt.append([])
            squares.append(0)
            free -= degree
            group = len(sizes) - 1
        else:
            same = [g for g, size in enumerate(sizes) if size == degree]
            larger = [g for g, size in enumerate(sizes) if size > degree]
            group = min(same or larger, key=lambda g: (squares[g] // sizes[g], g))
        dealt[group].append(document)
        squares[group] += int(lengths[document]) ** 2
    while free >= min(sizes):
        smallest = [g for g, size in enumerate(sizes) if size == min(sizes)]
        group = max(smallest, key=lambda g: (squares[g], -g))
        free -= sizes[group]
        sizes[group] *= 2
    order = sorted(range(len(sizes)), key=lambda g: -sizes[g])
    return [sizes[g] for g in order] + [1] * free, [dealt[g] for g in order] + [[]] * free
