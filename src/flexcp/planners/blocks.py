"""blocks: short and long documents packed together, moving only what is needed.

Rows with all their keys are packed first over nodes, then over the ranks of each node (:mod:`flexcp.planners.pack`), under a compute
and a token tolerance where the user gives them. Without a compute tolerance a row costs its attention *and* its share of the rest of the
layer, so that the step's time is balanced and not only attention's.

Tokens live where their rows are computed, unless counts must be evened out: then the ranks with too many keep computing some rows that
others keep. With a fixed layout the tokens stay put and only work moves.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from flexcp.plan import Placement, Regions, Runs
from flexcp.planners.layouts import (
    equalised,
    even_borders,
    is_scattered,
    row_regions,
    runs_of_maps,
    runs_of_ranges,
)
from flexcp.planners.pack import Bin, Item, Limits, RowLoads, level, pack
from flexcp.planners.request import Request

Ints = NDArray[np.int64]
DEFAULT_TOLERANCE = 0.02
SLACK_USED = 0.8


def blocks(request: Request) -> Placement:
    """Place a batch by packing row ranges."""
    if request.argument:
        raise ValueError(f"blocks takes no degree; got 'blocks:{request.argument}'")
    if request.layout is not None:
        return _fixed(request)
    batch, ranks = request.batch, request.ranks
    loads = RowLoads(batch, _row_price(request))
    limit = _load_limit(request, loads)
    rows = _row_limit(request)
    bins = _two_levels(request, loads, limit, rows)
    level(bins, loads, limit, _nodes(request))
    rank, start, stop = _ranges(request, bins)
    regions = row_regions(batch, request.shape.heads, rank, start, stop)
    if rows is not None:
        rank, start, stop = _evened(rank, start, stop, _row_limits(request, rows), _nodes(request))
    runs, pads = runs_of_ranges(rank, start, stop), 0
    if request.equal_tokens:
        runs, pads = equalised(runs, ranks, batch.tokens, request.pad_to)
    return _placement(request, pads, runs, regions)


def _fixed(request: Request) -> Placement:
    """Tokens stay where they are; rows leave the ranks that have too much work."""
    assert request.layout is not None
    runs = runs_of_maps(request.layout)
    loads = RowLoads(request.batch, 0)
    limit = _load_limit(request, loads)
    scattered = is_scattered(runs)
    if scattered:
        # Rows of scattered tokens are nobody's neighbours: place the work as if the layout were free.
        bins = _two_levels(request, loads, limit, None)
    else:
        bins = [Bin() for _ in range(request.ranks)]
        index, document, q0, q1 = request.batch.split_by_document(runs.start, runs.stop)
        for i, d, a, b in zip(index, document, q0, q1, strict=True):
            item = Item(int(d), int(a), int(b))
            bins[int(runs.rank[i])].add(item, loads.of(item))
    level(bins, loads, limit, _nodes(request))
    regions = row_regions(request.batch, request.shape.heads, *_ranges(request, bins))
    return _placement(request, 0, runs, regions, scattered)


def _two_levels(request: Request, loads: RowLoads, limit: int, rows: int | None) -> list[Bin]:
    """Items over nodes, then each node's items over its ranks."""
    cluster = request.cluster
    items = [Item(d, 0, int(n)) for d, n in enumerate(request.batch.lengths)]
    slack = limit - loads.total // request.ranks
    aim = loads.total // request.ranks + int(SLACK_USED * slack)
    per_node = cluster.ranks_per_node
    # Nodes are held closer to their mean than ranks, so that ranks keep their own slack.
    node_aim = loads.total // cluster.nodes + slack * per_node // 8
    node_limits = Limits(node_aim, rows and rows * per_node, node_aim)
    nodes = pack(items, loads, cluster.nodes, node_limits) if cluster.nodes > 1 else [Bin(items)]
    if cluster.nodes > 1:
        level(nodes, loads, node_aim, [0] * cluster.nodes)
    bins: list[Bin] = []
    for node in nodes:
        bins += pack(node.items, loads, per_node, Limits(limit, rows, aim))
    return bins


def _row_price(request: Request) -> int:
    """Load of a row besides its attention: nothing when the user balances compute and tokens apart."""
    if request.compute_tolerance is not None or request.equal_tokens:
        return 0
    return request.cost.pairs_per_token(request.shape) * sum(m.layers for m in request.batch.masks)


def _load_limit(request: Request, loads: RowLoads) -> int:
    tolerance = DEFAULT_TOLERANCE if request.compute_tolerance is None else request.compute_tolerance
    return max(math.ceil(loads.total / request.ranks), math.floor(loads.total * (1 + tolerance) / request.ranks))


def _row_limit(request: Request) -> int | None:
    """The most rows a rank may keep, or None."""
    mean = math.ceil(request.batch.tokens / request.ranks)
    if request.equal_tokens:
        return mean
    limits = []
    if request.token_tolerance is not None:
        limits.append(max(mean, math.floor(request.batch.tokens * (1 + request.token_tolerance) / request.ranks)))
    if request.max_tokens_per_rank is not None:
        limits.append(request.max_tokens_per_rank)
    return min(limits) if limits else None


def _row_limits(request: Request, rows: int) -> Ints:
    """Rows each rank may keep: exactly even counts for equal tokens, the limit otherwise."""
    if request.equal_tokens:
        return np.diff(even_borders(request.batch.tokens, request.ranks))
    return np.full(request.ranks, rows, np.int64)


def _nodes(request: Request) -> list[int]:
    return [request.cluster.node_of(r) for r in range(request.ranks)]


def _ranges(request: Request, bins: list[Bin]) -> tuple[Ints, Ints, Ints]:
    """The bins' items as (rank, start, stop) on the stream."""
    rows = [(r, i.document, i.first, i.last) for r, b in enumerate(bins) for i in b.items]
    rank, document, first, last = np.array(rows, np.int64).reshape(-1, 4).T
    begin = request.batch.starts[document]
    return rank, begin + first, begin + last


def _evened(rank: Ints, start: Ints, stop: Ints, limits: Ints, nodes: list[int]) -> tuple[Ints, Ints, Ints]:
    """Ownership moved, token by token, from ranks over their limit to ranks under it, inside the node first."""
    ranges = [
        [(int(a), int(b)) for r, a, b in zip(rank, start, stop, strict=True) if r == i] for i in range(len(limits))
    ]
    room = [int(m) - sum(b - a for a, b in mine) for m, mine in zip(limits, ranges, strict=True)]
    while min(room) < 0:
        donor = min(range(len(room)), key=lambda i: (room[i], i))
        taker = min((i for i in range(len(room)) if room[i] > 0), key=lambda i: (nodes[i] != nodes[donor], -room[i], i))
        a, b = max(ranges[donor], key=lambda r: (r[1] - r[0], -r[0]))
        amount = min(-room[donor], room[taker], b - a)
        ranges[donor].remove((a, b))
        if a + amount < b:
            ranges[donor].append((a + amount, b))
        ranges[taker].append((a, a + amount))
        room[donor] += amount
        room[taker] -= amount
    flat = np.array([(r, a, b) for r, mine in enumerate(ranges) for a, b in mine], np.int64).reshape(-1, 3)
    return flat[:, 0], flat[:, 1], flat[:, 2]


def _placement(request: Request, pads: int, runs: Runs, regions: Regions, scattered: bool = False) -> Placement:
    masks = request.batch.masks
    return Placement(request.batch, request.ranks, pads, runs, (regions,) * len(masks), assemble_own=scattered)
