"""Ranges: what published planners share. They deal stream ranges to ranks; rows are computed where they are kept."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from flexcp.batch import Batch
from flexcp.plan.placement import Placement, Regions, Traffic, Wishes
from flexcp.planners.request import Refused, Request, refuse_tolerances
from flexcp.planners.token_runs import (
    check_cap,
    equalised,
    is_scattered,
    row_regions,
    runs_of_maps,
    runs_of_ranges,
)

Ints = NDArray[np.int64]
Ranges = tuple[Ints, Ints, Ints]
"""Parallel columns: rank, start and stop on the stream."""
NEVER = np.iinfo(np.int64).max
MOST_MEETINGS = 1 << 25
"""Pairs of parts of one document on one rank, all ranks together: a schedule counts them one by one,
and each takes memory.
"""


def whole_number(text: str, name: str, what: str, example: int) -> int | None:
    """The number after a strategy's colon, None without one."""
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"{name} takes a number of {what} of at least 1, as in {name}:{example}; got '{name}:{text}'")
    return value


def refuse_tiny_parts(request: Request, name: str, size: int) -> None:
    """For parts so small that a document's many are more than a schedule can count."""
    longest = int(request.batch.lengths.max())
    parts = -(-longest // size)
    if parts * parts // request.ranks > MOST_MEETINGS:
        least = -(-longest // math.isqrt(MOST_MEETINGS * request.ranks))
        raise Refused(
            f"{name} would cut a document of {longest} tokens into {parts} parts of {size}; take at least {least} "
            f"tokens, as in {name}:{least}"
        )


def mean_tokens(request: Request) -> int:
    """Tokens of a rank if all had as many, rounded up."""
    return -(-request.batch.tokens // request.ranks)


def area(batch: Batch, start: Ints, stop: Ints) -> Ints:
    """Pairs of the rows in each stream range, each mask counted as often as layers use it."""
    index, document, q0, q1 = batch.split_by_document(start, stop)
    total = np.zeros(len(start), np.int64)
    np.add.at(total, index, batch.weighted_rows_area(document, q0, q1))
    return total


def document_area(batch: Batch) -> Ints:
    """Pairs of each document, each mask counted as often as layers use it."""
    return area(batch, batch.starts[:-1], batch.starts[1:])


def zigzag(start: Ints, length: Ints, ranks: Ints) -> Ranges:
    """Each sequence in twice as many parts as ranks; the i-th rank keeps the i-th part and the i-th from the end."""
    parts = 2 * len(ranks)
    borders = start[:, None] + length[:, None] * np.arange(parts + 1) // parts
    owner = np.concatenate([ranks, ranks[::-1]])
    return np.tile(owner, len(start)), borders[:, :-1].reshape(-1), borders[:, 1:].reshape(-1)


def best_fit(lengths: Ints, size: int) -> tuple[list[list[int]], list[int]]:
    """Best fit in decreasing order: (sequences, number of boxes) of each group;
    one longer than a box has as many as it needs.
    """
    groups: list[list[int]] = []
    least: list[int] = []
    room = np.zeros(len(lengths), np.int64)
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sequence])
        left = room[: len(groups)] - length
        if left.max(initial=-1) >= 0:
            group = int(np.where(left >= 0, left, NEVER).argmin())
        else:
            group = len(groups)
            groups.append([])
            least.append(-(-length // size))
            room[group] = least[group] * size
        groups[group].append(sequence)
        room[group] -= length
    return groups, least


def joined(ranges: list[Ranges]) -> Ranges:
    """Several as one."""
    rank, start, stop = (np.concatenate(column) for column in zip(*ranges, strict=True))
    return rank, start, stop


def regions_of(request: Request, ranges: Ranges) -> Regions:
    """All keys and heads of the rows in the ranges."""
    return row_regions(request.batch, request.shape.heads, *ranges)


def refuse_layout(request: Request, name: str) -> None:
    """For strategies that place tokens."""
    if request.layout is not None:
        raise Refused(f"{name} places tokens itself, so it cannot keep a fixed layout; use blocks, or layout='free'")


def placed(
    request: Request,
    name: str,
    ranges: Ranges,
    traffic: Traffic,
    note: str = "",
    wishes: Wishes = Wishes(),  # noqa: B008 - immutable
    any_layout: bool = False,
) -> Placement:
    """Rows computed where they are kept, or with ``any_layout`` away from where a fixed layout keeps them."""
    if not any_layout:
        refuse_layout(request, name)
    refuse_tolerances(request)
    runs, pads = runs_of_ranges(*ranges), 0
    if request.layout is not None:
        runs = runs_of_maps(request.layout)
    elif request.equal_tokens:
        runs, pads = equalised(runs, request.ranks, request.batch.tokens, request.pad_to)
    check_cap(runs, request.max_tokens_per_rank)
    regions = (regions_of(request, ranges),) * len(request.batch.masks)
    scattered = request.layout is not None and is_scattered(runs)
    return Placement(request.batch, request.ranks, pads, runs, regions, traffic, scattered, note, wishes)


def ring_groups(sizes: list[int]) -> Traffic:
    """Rings of neighbouring ranks, of these sizes one after the other."""
    first = np.concatenate([[0], np.cumsum(sizes)])[:-1].tolist()
    return Traffic("ring", tuple(tuple((rank,) for rank in range(a, a + n)) for a, n in zip(first, sizes, strict=True)))


def in_rings(request: Request, name: str, sizes: list[int], dealt: list[list[int]], note: str = "") -> Placement:
    """Each group's documents zig-zag over its ranks, neighbours from rank 0 on in the order of the groups;
    keys pass round.
    """
    batch, ranges, first = request.batch, [], 0
    for size, documents in zip(sizes, dealt, strict=True):
        members, mine = np.arange(first, first + size, dtype=np.int64), np.array(sorted(documents), np.int64)
        ranges.append(zigzag(batch.starts[mine], batch.lengths[mine], members))
        first += size
    return placed(request, name, joined(ranges), ring_groups(sizes), note)
