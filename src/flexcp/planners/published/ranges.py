"""Ranges: steps that published planners share. They give stream ranges to ranks.

Rows are computed where they are kept.
"""

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
"""Columns (rank, start, stop): the tokens ``start <= t < stop`` of the stream go to a rank."""
NEVER = np.iinfo(np.int64).max
"""A number larger than any time or length."""
MOST_MEETINGS = 1 << 25
"""The most pairs of parts of one document on one rank, over all ranks.

Scheduling counts such pairs one by one, and each takes memory.
"""


def whole_number(text: str, name: str, what: str, example: int) -> int | None:
    """Return the number after a strategy's colon, or None if ``text`` is empty; raise ValueError for no number >= 1.

    ``name``, ``what`` and ``example`` are for the message: the strategy, what the number counts, and a good value.
    """
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
    """Raise Refused if parts of ``size`` tokens cut the longest document into more parts than can be scheduled.

    ``name`` is the strategy, for the message.
    """
    longest = int(request.batch.lengths.max())
    parts = -(-longest // size)
    if parts * parts // request.ranks > MOST_MEETINGS:
        least = -(-longest // math.isqrt(MOST_MEETINGS * request.ranks))
        raise Refused(
            f"{name} would cut a document of {longest} tokens into {parts} parts of {size}; take at least {least} "
            f"tokens, as in {name}:{least}"
        )


def mean_tokens(request: Request) -> int:
    """Return the mean number of tokens per rank, rounded up."""
    return -(-request.batch.tokens // request.ranks)


def area(batch: Batch, start: Ints, stop: Ints) -> Ints:
    """Return the (query, key) pairs of the rows in each stream range ``start <= t < stop``, summed over all layers."""
    index, document, q0, q1 = batch.split_by_document(start, stop)
    total = np.zeros(len(start), np.int64)
    np.add.at(total, index, batch.weighted_rows_area(document, q0, q1))
    return total


def document_area(batch: Batch) -> Ints:
    """Return the (query, key) pairs of each document, summed over all layers."""
    return area(batch, batch.starts[:-1], batch.starts[1:])


def zigzag(start: Ints, length: Ints, ranks: Ints) -> Ranges:
    """Cut each sequence into twice as many parts as ranks; the i-th part and the i-th from the end go to ``ranks[i]``.

    Sequences begin at ``start`` in the stream and have ``length`` tokens. Some ranges may be empty.
    """
    parts = 2 * len(ranks)
    borders = start[:, None] + length[:, None] * np.arange(parts + 1) // parts
    owner = np.concatenate([ranks, ranks[::-1]])
    return np.tile(owner, len(start)), borders[:, :-1].reshape(-1), borders[:, 1:].reshape(-1)


def best_fit(lengths: Ints, size: int) -> tuple[list[list[int]], list[int]]:
    """Pack sequences into groups by best fit, the longest first; return (sequences of each group, boxes of each group).

    A box holds ``size`` tokens. A group has as many boxes as its first sequence needs, and takes later ones that still
    fit.
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
    """Return several tables of ranges as one table."""
    rank, start, stop = (np.concatenate(column) for column in zip(*ranges, strict=True))
    return rank, start, stop


def regions_of(request: Request, ranges: Ranges) -> Regions:
    """Return regions in which each rank computes the rows of its ranges with all keys and heads."""
    return row_regions(request.batch, request.shape.heads, *ranges)


def refuse_layout(request: Request, name: str) -> None:
    """Raise Refused if the request has a fixed layout; for strategies that place tokens themselves."""
    if request.layout is not None:
        raise Refused(f"{name} places tokens itself, so it cannot keep a fixed layout; use blocks, or layout='free'")


def placed(
    request: Request,
    name: str,
    ranges: Ranges,
    traffic: Traffic,
    note: str = "",
    wishes: Wishes = Wishes(),
    any_layout: bool = False,
) -> Placement:
    """Return a placement in which each rank keeps and computes the rows of its ranges.

    With ``any_layout``, a fixed layout is allowed: rows are computed on the ranks of ``ranges`` and kept where the
    layout has them. Otherwise raise Refused for a fixed layout, and in any case for tolerances or a rank with too many
    tokens. ``name`` is the strategy, for messages; ``note`` and ``wishes`` become those of the placement.
    """
    if not any_layout:
        refuse_layout(request, name)
    refuse_tolerances(request)
    runs, pads = runs_of_ranges(*ranges), 0
    if request.layout is not None:
        runs = runs_of_maps(request.layout)
    elif request.equal_tokens:
        runs, pads = equalised(runs, request.ranks, request.batch.tokens, request.pad_to)
    check_cap(runs, request)
    regions = (regions_of(request, ranges),) * len(request.batch.masks)
    scattered = request.layout is not None and is_scattered(runs)
    return Placement(request.batch, request.ranks, pads, runs, regions, traffic, scattered, note, wishes)


def ring_groups(sizes: list[int]) -> Traffic:
    """Return traffic in rings of neighbouring ranks: the first ``sizes[0]`` ranks, then ``sizes[1]``, and so on."""
    first = np.concatenate([[0], np.cumsum(sizes)])[:-1].tolist()
    return Traffic("ring", tuple(tuple((rank,) for rank in range(a, a + n)) for a, n in zip(first, sizes, strict=True)))


def in_rings(request: Request, name: str, sizes: list[int], dealt: list[list[int]], note: str = "") -> Placement:
    """Return the placement of groups as rings: the documents of each group zig-zag over its ranks, keys travel round.

    Groups are neighbouring ranks, from rank 0 on; ``sizes`` are their numbers of ranks, ``dealt`` the documents of
    each.
    """
    batch, ranges, first = request.batch, [], 0
    for size, documents in zip(sizes, dealt, strict=True):
        members, mine = np.arange(first, first + size, dtype=np.int64), np.array(sorted(documents), np.int64)
        ranges.append(zigzag(batch.starts[mine], batch.lengths[mine], members))
        first += size
    return placed(request, name, joined(ranges), ring_groups(sizes), note)
