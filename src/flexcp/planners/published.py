"""What a user would otherwise pick, as strategies: four published ways of dealing, on our tables, so that everyone can compare.

| strategy       | from                     | tokens                                                   | traffic                          |
| -------------- | ------------------------ | -------------------------------------------------------- | -------------------------------- |
| `minheap:c`    | MagiAttention's default  | chunks of c tokens of the packed stream, as many a rank  | exactly the keys that are read   |
| `pow2:b`       | Megatron's dynamic CP    | documents zig-zag in groups of a power of two of ranks   | all keys of a group round a ring |
| `hdp:b`        | ByteScale                | long documents over ceil(n / b) ranks, short ones whole  | exactly the keys that are read   |
| `wlb`          | WLB-LLM                  | zig-zag of each document, or of the stream if that wins  | all keys to all                  |

They are the *dealing* of these systems, not their kernels, schedulers or loaders. Where a system runs several micro-batches after one
another, one plan is one of them. None of them knows tolerances, rank speeds or nodes (keys come straight from their owners, unless a
relay is asked for), and `max_tokens_per_rank` is only checked.

- `minheap`: c is 1,024 unless given. Longest processing time by area among the ranks that still have room; counts differ by one chunk at
  most (MagiAttention pads the stream so that they do not). Chunks may span documents. With `minheap:c,relay` keys that several ranks of a
  node read cross to it once and are passed on inside, as by MagiAttention's native group collectives (from version 1.1 on).
- `pow2`: a document of n tokens needs the smallest power of two d with n / d <= b; b is the mean of tokens a rank unless given. Longest
  first: a new group of that size while ranks are free, then the group of that size with the least sum of n^2 / d, then of any larger size
  (Megatron would leave those documents to the next micro-batch). Ranks left empty double the most loaded of the smallest groups. Groups
  are laid out largest first, so each starts at a multiple of its size. With ranks that are no power of two the largest group is the
  largest power of two below, and smaller ones fill the rest.
- `hdp`: b as in `pow2`. A document longer than b goes zig-zag over just enough neighbouring ranks, then short ones whole to the rank that
  is ready first; time is area plus the linear price of tokens. Only keys of cut documents move.
- `wlb`: which of the two has the faster slowest rank, where every fragment of a document on a rank costs one empty tile of the kernel
  besides its area.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flexcp.batch import Batch
from flexcp.cost import TILE_ROWS
from flexcp.plan.placement import Placement, Regions, Traffic
from flexcp.planners.request import Refused, Request, refuse_tolerances
from flexcp.planners.token_runs import check_cap, equalised, row_regions, runs_of_ranges

Ints = NDArray[np.int64]
Ranges = tuple[Ints, Ints, Ints]
"""Parallel columns: rank, start and stop on the stream."""
CHUNK = 1024
RELAY = "relay"


def minheap(request: Request) -> Placement:
    """MagiAttention: chunks of the stream, equally many on every rank, dealt by area."""
    number, comma, word = request.argument.partition(",")
    if comma and word != RELAY:
        raise ValueError(
            f"after a chunk's tokens minheap takes only {RELAY!r}, as in minheap:1024,{RELAY}; got 'minheap:{request.argument}'"
        )
    chunk = _argument(replace(request, argument=number), "minheap", "tokens in a chunk", 512) or CHUNK
    tokens = request.batch.tokens
    start = np.arange(0, tokens, chunk, dtype=np.int64)
    stop = np.minimum(start + chunk, tokens)
    rank = _dealt_equally(_area(request.batch, start, stop), request.ranks)
    return _placement(request, "minheap", (rank, start, stop), Traffic(relay=word == RELAY))


def pow2(request: Request) -> Placement:
    """Megatron: every document in a group of a power of two of ranks."""
    lengths, starts = request.batch.lengths, request.batch.starts
    sizes, dealt = _pow2_groups(lengths, _pow2_degrees(request), request.ranks)
    ranges, groups = [], []
    first = 0
    for size, documents in zip(sizes, dealt, strict=True):
        members = np.arange(first, first + size, dtype=np.int64)
        mine = np.array(sorted(documents), np.int64)
        ranges.append(_zigzag(starts[mine], lengths[mine], members))
        groups.append(tuple((int(r),) for r in members))
        first += size
    return _placement(request, "pow2", _joined(ranges), Traffic("ring", tuple(groups)))


def hdp(request: Request) -> Placement:
    """ByteScale: long documents over just enough ranks, short ones whole, so that ranks are ready together."""
    budget = _argument(request, "hdp", "tokens a rank", 8192) or _mean_tokens(request)
    batch = request.batch
    load = _area(batch, batch.starts[:-1], batch.starts[1:]) + _linear_price(request) * batch.lengths
    ready = np.zeros(request.ranks, np.int64)
    ranges = []
    for document in np.argsort(-load, kind="stable"):
        # Cut ones first: they need neighbours that are ready together.
        if batch.lengths[document] > budget:
            degree = _enough(request, int(document), budget)
            first = _least_ready(ready, degree)
            ready[first : first + degree] = ready[first : first + degree].max() + -(-load[document] // degree)
            members = np.arange(first, first + degree, dtype=np.int64)
            one = slice(document, document + 1)
            ranges.append(_zigzag(batch.starts[:-1][one], batch.lengths[one], members))
    whole = np.flatnonzero(batch.lengths <= budget)
    rank = _dealt_whole(load[whole], ready)
    ranges.append((rank, batch.starts[whole], batch.starts[whole + 1]))
    return _placement(request, "hdp", _joined(ranges), Traffic(relay=False))


def wlb(request: Request) -> Placement:
    """WLB-LLM: zig-zag per document or per sequence, whichever predicts the faster slowest rank."""
    if request.argument:
        raise ValueError(f"wlb takes no argument; got 'wlb:{request.argument}'")
    batch, ranks = request.batch, np.arange(request.ranks, dtype=np.int64)
    per_document = _zigzag(batch.starts[:-1], batch.lengths, ranks)
    stream = np.array([batch.tokens], np.int64)
    per_sequence = _zigzag(np.zeros(1, np.int64), stream, ranks)
    costs = [_slowest(request, ranges) for ranges in (per_document, per_sequence)]
    chosen, ranges = ("document", per_document) if costs[0] < costs[1] else ("sequence", per_sequence)
    note = f"sharded per {chosen}: the slowest rank computes {costs[0]} pairs per document, {costs[1]} per sequence"
    return _placement(request, "wlb", ranges, Traffic("gather", (tuple((int(r),) for r in ranks),)), note)


# --- minheap ----------------------------------------------------------------------------------------------------------


def _dealt_equally(area: Ints, ranks: int) -> Ints:
    """The rank of each chunk: heaviest first to the rank with the least area among those that may take one more."""
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


# --- pow2 -------------------------------------------------------------------------------------------------------------


def _pow2_degrees(request: Request) -> list[int]:
    """The power of two each document needs."""
    budget = _argument(request, "pow2", "tokens a rank", 8192)
    largest = 1 << (request.ranks.bit_length() - 1)
    found = []
    for document, length in enumerate(request.batch.lengths.tolist()):
        degree = 1 << (-(-length // (budget or _mean_tokens(request))) - 1).bit_length()
        if degree > largest and budget is not None:
            raise Refused(
                f"document {document} has {length} tokens, more than the largest group of {largest} ranks holds with pow2:{budget}; "
                "raise the budget, or drop it for the mean"
            )
        found.append(min(degree, largest))
    return found


def _pow2_groups(lengths: Ints, degrees: list[int], ranks: int) -> tuple[list[int], list[list[int]]]:
    """(size, documents) of each group, largest first."""
    sizes: list[int] = []
    dealt: list[list[int]] = []
    squares: list[int] = []  # sum of n^2 of each group; its load is that over its size
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


# --- hdp --------------------------------------------------------------------------------------------------------------


def _enough(request: Request, document: int, budget: int) -> int:
    """Just enough ranks for a document."""
    length = int(request.batch.lengths[document])
    degree = -(-length // budget)
    if degree > request.ranks:
        raise Refused(
            f"document {document} has {length} tokens, more than {request.ranks} ranks of hdp:{budget}; raise the budget, "
            "or drop it for the mean"
        )
    return degree


def _least_ready(ready: Ints, degree: int) -> int:
    """The first of ``degree`` neighbouring ranks of which the last to be ready is ready earliest."""
    latest = np.lib.stride_tricks.sliding_window_view(ready, degree).max(axis=1)
    return int(latest.argmin())


def _dealt_whole(load: Ints, ready: Ints) -> Ints:
    """The rank of each document: heaviest first to the rank that is ready first."""
    heap = [(int(time), rank) for rank, time in enumerate(ready)]
    heapq.heapify(heap)
    found = np.zeros(len(load), np.int64)
    for document in np.argsort(-load, kind="stable"):
        time, rank = heap[0]
        found[document] = rank
        heapq.heapreplace(heap, (time + int(load[document]), rank))
    return found


# --- wlb --------------------------------------------------------------------------------------------------------------


def _slowest(request: Request, ranges: Ranges) -> int:
    """Pairs of the slowest rank; every fragment pays one empty tile of the kernel."""
    regions = _regions(request, ranges)
    layers = sum(m.layers for m in request.batch.masks)
    fragments = request.batch.weighted_rows_area(regions.document, regions.q0, regions.q1) + layers * TILE_ROWS**2
    total = np.zeros(request.ranks, np.int64)
    np.add.at(total, regions.rank, fragments)
    return int(total.max())


# --- shared -----------------------------------------------------------------------------------------------------------


def _argument(request: Request, name: str, what: str, example: int) -> int | None:
    """The number after the colon, None without one."""
    if not request.argument:
        return None
    try:
        value = int(request.argument)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(
            f"{name} takes a number of {what} of at least 1, as in {name}:{example}; got '{name}:{request.argument}'"
        )
    return value


def _mean_tokens(request: Request) -> int:
    return -(-request.batch.tokens // request.ranks)


def _linear_price(request: Request) -> int:
    return request.cost.pairs_per_token(request.shape) * sum(m.layers for m in request.batch.masks)


def _area(batch: Batch, start: Ints, stop: Ints) -> Ints:
    """Pairs of the rows in each stream range, each mask counted as often as layers use it."""
    index, document, q0, q1 = batch.split_by_document(start, stop)
    total = np.zeros(len(start), np.int64)
    np.add.at(total, index, batch.weighted_rows_area(document, q0, q1))
    return total


def _zigzag(start: Ints, length: Ints, ranks: Ints) -> Ranges:
    """Each sequence in twice as many parts as ranks; the i-th rank keeps the i-th part and the i-th from the end."""
    parts = 2 * len(ranks)
    borders = start[:, None] + length[:, None] * np.arange(parts + 1) // parts
    owner = np.concatenate([ranks, ranks[::-1]])
    return np.tile(owner, len(start)), borders[:, :-1].reshape(-1), borders[:, 1:].reshape(-1)


def _joined(ranges: list[Ranges]) -> Ranges:
    rank, start, stop = (np.concatenate(column) for column in zip(*ranges, strict=True))
    return rank, start, stop


def _regions(request: Request, ranges: Ranges) -> Regions:
    return row_regions(request.batch, request.shape.heads, *ranges)


def _placement(request: Request, name: str, ranges: Ranges, traffic: Traffic, note: str = "") -> Placement:
    """Rows computed where they are kept."""
    if request.layout is not None:
        raise Refused(f"{name} places tokens itself, so it cannot keep a fixed layout; use blocks, or layout='free'")
    refuse_tolerances(request)
    runs, pads = runs_of_ranges(*ranges), 0
    if request.equal_tokens:
        runs, pads = equalised(runs, request.ranks, request.batch.tokens, request.pad_to)
    check_cap(runs, request.max_tokens_per_rank)
    regions = (_regions(request, ranges),) * len(request.batch.masks)
    return Placement(request.batch, request.ranks, pads, runs, regions, traffic, note=note)
