"""The static methods that users know, each with its own traffic.

| strategy      | tokens                                         | work                  | traffic                     |
| ------------- | ---------------------------------------------- | --------------------- | --------------------------- |
| `dp`          | documents whole, longest to the fewest tokens  | where the rows are    | none                        |
| `ring:d`      | every document in d consecutive parts          | where the rows are    | a group's keys round a ring |
| `zigzag:d`    | 2d parts, rank i keeps i and 2d-1-i            | where the rows are    | as `ring`                   |
| `allgather:d` | the packed stream in d parts                   | where the rows are    | all keys to all             |
| `ulysses:d`   | the packed stream in d parts                   | a head group per rank | q, k, v, o exchanged        |
| `usp:u,r`     | zig-zag over r ring positions, each in u parts | both                  | heads exchanged, keys round |

Without a degree, the group is all ranks. With one, ranks form groups of that size in order (so groups are inside nodes
if the degree divides a node). Documents are dealt to groups by tokens, or by load with ``@load``
(:mod:`flexcp.planners.static.dealing`). Documents may have any length and are not padded. With a fixed layout the
tokens stay where they are, and a strategy decides only about work and traffic; `dp`, strategies with a degree below all
ranks, and layouts of very short runs are then refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import offsets, spread, united
from flexcp.plan.placement import Placement, Regions, Runs, Traffic
from flexcp.planners.request import Refused, Request, refuse_tolerances
from flexcp.planners.static.dealing import BY_LOAD, dealt
from flexcp.planners.token_runs import (
    check_cap,
    equalised,
    even_borders,
    is_scattered,
    row_regions,
    runs_of_maps,
    runs_of_ranges,
)
from flexcp.shape import Shape

Ints = NDArray[np.int64]
Grid = tuple[tuple[int, ...], ...]
Ranges = tuple[Ints, Ints]
STATIC = ("dp", "ring", "zigzag", "allgather", "ulysses", "usp")
"""The names of the static methods."""


def dp(request: Request) -> Placement:
    """Place a batch with plain data parallelism: no document is cut, and nothing is sent."""
    if _degrees(request):
        raise ValueError(f"dp takes no degree; got 'dp:{request.argument}'")
    return _placed(request, [((r,),) for r in range(request.ranks)], "needed", _whole, "dp")


def ring(request: Request) -> Placement:
    """Place a batch in rings: every document in consecutive parts, one for each rank of a ring; keys travel round."""
    return _placed(request, _one_column_grids(request, "ring"), "ring", _consecutive, "ring")


def zigzag(request: Request) -> Placement:
    """Place a batch in rings of d ranks: every document in 2d parts, the i-th and the i-th from the end on rank i."""
    return _placed(request, _one_column_grids(request, "zigzag"), "ring", _zigzag, "zigzag")


def allgather(request: Request) -> Placement:
    """Place a batch with gathered keys: packed documents in equal parts, all keys of a group sent to all its ranks."""
    return _placed(request, _one_column_grids(request, "allgather"), "gather", _packed, "allgather")


def ulysses(request: Request) -> Placement:
    """Place a batch by heads: packed documents are kept in equal parts, and each rank of a group computes some heads.

    Raise Refused if the heads cannot be divided by the degree.
    """
    degree = _degree(request, "ulysses", splits_heads=True)
    _check_split(request.shape, degree, f"ulysses:{degree}")
    grids: list[Grid] = [(tuple(range(g, g + degree)),) for g in range(0, request.ranks, degree)]
    return _placed(request, grids, "ring", _packed, "ulysses")


def usp(request: Request) -> Placement:
    """Place a batch in grids of r rows of u ranks: heads are split inside a row, and rows form a zig-zag ring.

    Without ``usp:u,r``, u is the largest number that divides the KV heads and the ranks of a node, and the grid has all
    ranks. Raise Refused if groups do not divide the ranks, or u not the heads.
    """
    degrees = _degrees(request)
    if degrees:
        try:
            u, r = (int(x) for x in degrees.split(","))
        except ValueError:
            raise ValueError(f"usp takes two degrees, as in usp:4,2; got 'usp:{request.argument}'") from None
    else:
        u = math.gcd(request.shape.kv_heads, request.cluster.ranks_per_node)
        r = request.ranks // u
    if u < 1 or r < 1 or request.ranks % (u * r):
        raise Refused(
            f"usp:{u},{r} makes groups of {u * r} ranks, which must divide the {request.ranks} ranks there are"
        )
    _check_split(request.shape, u, f"usp:{u},{r}")
    grids = [
        tuple(tuple(base + i * u + j for j in range(u)) for i in range(r)) for base in range(0, request.ranks, u * r)
    ]
    return _placed(request, grids, "ring", _zigzag, "usp")


# --- how a group's documents are cut into ring positions --------------------------------------------------------------


def _whole(start: Ints, length: Ints, positions: int) -> list[Ranges]:
    """Return the ranges (starts, stops) of whole documents, for the only position of a group of one rank."""
    return [(start, start + length)]


def _consecutive(start: Ints, length: Ints, positions: int) -> list[Ranges]:
    """Return the ranges (starts, stops) of each ring position: consecutive parts of every document.

    Documents begin at ``start`` in the stream and have ``length`` tokens.
    """
    return [(start + length * i // positions, start + length * (i + 1) // positions) for i in range(positions)]


def _zigzag(start: Ints, length: Ints, positions: int) -> list[Ranges]:
    """Return the ranges (starts, stops) of each ring position: part i of every document and part i from its end."""
    parts = _consecutive(start, length, 2 * positions)
    pairs = [(parts[i], parts[2 * positions - 1 - i]) for i in range(positions)]
    return [(np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]])) for a, b in pairs]


def parts_of(strategy: str, positions: int) -> int:
    """Return into how many parts a strategy cuts each document; 1 if it does not cut documents one by one.

    The two middle parts of a zig-zag count separately, although one rank has both.
    """
    return {"ring": positions, "zigzag": 2 * positions, "usp": 2 * positions}.get(strategy, 1)


def _packed(start: Ints, length: Ints, positions: int) -> list[Ranges]:
    """Return the ranges (starts, stops) of each ring position: equal parts of the documents laid end to end."""
    return _evenly((start, start + length), positions)


def _evenly(ranges: Ranges, parts: int) -> list[Ranges]:
    """Cut ranges (starts, stops), taken in stream order, into ``parts`` parts with equal numbers of tokens."""
    order = np.argsort(ranges[0], kind="stable")
    start, stop = ranges[0][order], ranges[1][order]
    before = np.cumsum(stop - start) - (stop - start)
    borders = even_borders(int((stop - start).sum()), parts)
    found = []
    for low, high in pairwise(borders):
        a = np.maximum(start, start + (low - before))
        b = np.minimum(stop, start + (high - before))
        found.append((a[a < b], b[a < b]))
    return found


# --- groups, tokens, regions ------------------------------------------------------------------------------------------

Cutter = Callable[[Ints, Ints, int], list[Ranges]]
"""A function of the starts and lengths of documents and the number of ring positions: the ranges of each position."""


def _placed(request: Request, grids: list[Grid], traffic: str, cutter: Cutter, name: str) -> Placement:
    """Return the placement of a static method whose groups are ``grids`` of ranks, ``[ring position][head group]``.

    ``cutter`` divides the documents of a group over the ring positions (rows of its grid), and the tokens of a position
    are divided evenly over its ranks. All ranks of a position compute its rows, each for its head group. ``traffic`` is
    a kind of :class:`~flexcp.plan.placement.Traffic`. ``name`` is the strategy.
    """
    refuse_tolerances(request)
    batch = request.batch
    if request.layout is not None:
        if len(grids) > 1 or cutter is _whole:
            strategy = f"{name}:{_degrees(request)}" if _degrees(request) else name
            keeps = "whole on one rank" if cutter is _whole else f"inside groups of {request.ranks // len(grids)} ranks"
            raise Refused(
                f"{strategy} keeps documents {keeps}, but with a fixed layout all {request.ranks} ranks hold tokens of "
                'any document: use strategy="blocks", or layout="free"'
            )
        runs = runs_of_maps(request.layout)
        pads = 0
        if is_scattered(runs):
            raise Refused("this layout scatters tokens in runs too short for a static strategy's messages; use blocks")
    else:
        ranks, starts, stops = [], [], []
        parts = parts_of(name, len(grids[0]))
        for grid, mine in zip(grids, dealt(request, len(grids), parts), strict=True):
            rows = cutter(batch.starts[mine], batch.lengths[mine], len(grid))
            for row, ranges in zip(grid, rows, strict=True):
                for rank, (start, stop) in zip(row, _evenly(ranges, len(row)), strict=True):
                    ranks.append(np.full(len(start), rank, np.int64))
                    starts.append(start)
                    stops.append(stop)
        runs = runs_of_ranges(np.concatenate(ranks), np.concatenate(starts), np.concatenate(stops))
        pads = 0
        if request.equal_tokens:
            runs, pads = equalised(runs, request.ranks, batch.tokens, request.pad_to)
    check_cap(runs, request)
    split = len(grids[0][0])
    if split == 1:
        regions = row_regions(batch, request.shape.heads, runs.rank, runs.start, runs.stop)
    else:
        regions = _split_regions(request, [row for grid in grids for row in grid], runs)
    route = Traffic() if traffic == "needed" else Traffic(traffic, tuple(grids))
    return Placement(batch, request.ranks, pads, runs, (regions,) * len(batch.masks), route)


def _split_regions(request: Request, rows: list[tuple[int, ...]], runs: Runs) -> Regions:
    """Return regions in which the rows that the ranks of a grid row keep together are computed by all of them.

    Each rank has its share of the heads. ``rows`` are the ranks of each grid row.
    """
    row_of = np.zeros(request.ranks, np.int64)
    row_of[np.array(rows)] = np.arange(len(rows))[:, None]
    row, start, stop = united(row_of[runs.rank], runs.start, runs.stop)
    index, document, q0, q1 = request.batch.split_by_document(start, stop)
    counts, split = np.bincount(row[index], minlength=len(rows)), len(rows[0])
    member, within = spread(np.repeat(counts, split))
    at = offsets(counts)[member // split] + within
    heads = np.arange(split + 1) * request.shape.heads // split
    return Regions.make(
        len(at),
        rank=np.array(rows).reshape(-1)[member],
        document=document[at],
        q0=q0[at],
        q1=q1[at],
        k0=0,
        k1=request.batch.lengths[document[at]],
        h0=heads[:-1][member % split],
        h1=heads[1:][member % split],
    )


def _one_column_grids(request: Request, name: str) -> list[Grid]:
    """Return the groups of a method without head groups, as grids of one column: each rank is a ring position."""
    degree = _degree(request, name)
    return [tuple((r,) for r in range(g, g + degree)) for g in range(0, request.ranks, degree)]


def _degrees(request: Request) -> str:
    """Return the request's argument without ``@load``: the degrees as text, "" if none are given."""
    return request.argument.removesuffix(BY_LOAD)


def _degree(request: Request, name: str, splits_heads: bool = False) -> int:
    """Return the degree (ranks of a group) that the argument gives, or the number of all ranks.

    Raise ValueError if it is no number, Refused if it does not divide the ranks; the message then lists the degrees
    that would be accepted. ``name`` is the strategy, and ``splits_heads`` tells whether the degree must also divide
    heads, which is left to :func:`_check_split`.
    """
    if not _degrees(request):
        return request.ranks
    try:
        degree = int(_degrees(request))
    except ValueError:
        raise ValueError(f"{name} takes a degree, as in {name}:4; got '{name}:{request.argument}'") from None
    if degree < 1 or request.ranks % degree:
        shape = request.shape
        fits = [d for d in range(1, request.ranks + 1) if request.ranks % d == 0]
        if splits_heads:
            fits = [d for d in fits if shape.divides_over(d)]
        if request.layout is not None:  # then groups of fewer ranks are refused
            fits = [d for d in fits if d == request.ranks]
        also = f" and split {shape.heads} query and {shape.kv_heads} KV heads" if splits_heads else ""
        out = f"degrees that do{also}: {fits}" if fits else "use blocks"
        raise Refused(f"{name}:{degree} does not divide the {request.ranks} ranks into groups; {out}")
    return degree


def _check_split(shape: Shape, split: int, name: str) -> None:
    """Raise Refused if heads cannot be split into ``split`` groups; ``name`` is the strategy, for the message."""
    if shape.heads % split:
        raise Refused(
            f"{name} splits {shape.heads} query heads over {split} ranks, which does not divide; "
            "use a divisor of the heads, usp, or a strategy that moves keys (zigzag, blocks)"
        )
    if not shape.divides_over(split):
        raise Refused(
            f"{name} splits {shape.kv_heads} KV heads over {split} ranks; one must divide the other. "
            "Use usp, or a strategy that moves keys (zigzag, blocks)"
        )
