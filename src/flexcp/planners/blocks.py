"""blocks: short and long documents packed together, moving only what is needed.

Rows with all their keys are packed (:mod:`flexcp.planners.pack`) first over nodes, held close to their mean, then over the
ranks of each node. Inside a node there is a choice of *teams* of G ranks, G a divisor of the KV heads: a team takes items as one
bin, and splits those too large for one of its ranks by heads. A split item's keys reach the team once, and its rows may be kept by
any of the team, which levels tokens for free. Each node takes the team size that moves the fewest bytes.

Tolerances hold by construction: what packing leaves over a limit is levelled row by row, work and tokens apart. Without a compute
tolerance a row's load is its attention *and* its share of the rest of the layer, so that the step's time is balanced and not only
attention's.

With a fixed layout the tokens stay put and only work moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexcp.intervals import spread
from flexcp.pieces import Kind
from flexcp.plan import Placement, Regions
from flexcp.planners.layouts import (
    check_cap,
    equalised,
    even_borders,
    is_scattered,
    runs_of_maps,
    runs_of_ranges,
)
from flexcp.planners.level import level_rows, level_work
from flexcp.planners.pack import Field, Limits, Packed, make_field, pack
from flexcp.planners.request import Request

Ints = NDArray[np.int64]
DEFAULT_TOLERANCE = 0.02
NODE_TOLERANCES = (0.008, 0.016, 0.02)
DEFAULT_EFFORT = 12
"""Placements of a node that are tried in all; more nodes get fewer each."""
SLACK_USED = 0.8
UNLIMITED = 1 << 40


@dataclass
class Shares:
    """The placement in the making.

    ``work`` rows are (first rank, team size, document, first, last): a team of one computes whole items, a larger one splits them by
    heads. ``kept`` rows are (rank, document, first, last).
    """

    work: list[Ints] = field(default_factory=list)
    kept: list[Ints] = field(default_factory=list)


def blocks(request: Request) -> Placement:
    """Place a batch by packing row ranges."""
    if request.argument:
        raise ValueError(f"blocks takes no degree; got 'blocks:{request.argument}'")
    return _free(request) if request.layout is None else _fixed(request)


def _free(request: Request) -> Placement:
    rows = _row_limit(request)
    loads = make_field(request.batch, _grain(request), _row_price(request), split_thin=True)
    limit, aim = _load_limits(request, loads)
    limits = Limits(limit, np.full(request.ranks, UNLIMITED if rows is None else rows), aim)
    shares = _best_shares(request, loads, limits)
    work = level_work(loads, np.concatenate(shares.work), limit, _nodes(request))
    rank, start, stop = _stream(request, np.concatenate(shares.kept))
    if rows is not None:
        rank, start, stop = level_rows(rank, start, stop, _rows_allowed(request, rows), _nodes(request))
    runs, pads = runs_of_ranges(rank, start, stop), 0
    if request.equal_tokens:
        runs, pads = equalised(runs, request.ranks, request.batch.tokens, request.pad_to)
    check_cap(runs, request.max_tokens_per_rank)
    regions = tuple(_regions(request, work, thin) for thin in loads.thin)
    return Placement(request.batch, request.ranks, pads, runs, regions)


def _best_shares(request: Request, loads: Field, limits: Limits) -> Shares:
    """Over nodes with a few tolerances, then inside each; the one that moves least."""
    nodes = request.cluster.nodes
    effort = DEFAULT_EFFORT if request.effort is None else request.effort
    tries = 1 if nodes == 1 else max(1, min(len(NODE_TOLERANCES), effort // nodes))
    best: tuple[int, list[_Option]] | None = None
    for tolerance in NODE_TOLERANCES[:tries]:
        options = [
            _node(request, loads, items, limits, node)
            for node, items in enumerate(_over_nodes(request, loads, limits, tolerance))
        ]
        score = sum(_score(request, o.keys, o.violation) for o in options)
        if best is None or score < best[0]:
            best = (score, options)
    assert best is not None
    shares, size = Shares(), request.cluster.ranks_per_node
    for node, option in enumerate(best[1]):
        for rank, part in enumerate(option.whole, node * size):
            shares.work.append(_led_by(part, rank, 1))
            shares.kept.append(_led_by(part, rank))
        for start, team, part, owners in option.split:
            shares.work.append(_led_by(part, node * size + start, team))
            shares.kept += [_led_by(rows, node * size + start + i) for i, rows in enumerate(owners)]
    return shares


def _over_nodes(request: Request, loads: Field, limits: Limits, tolerance: float) -> list[Ints]:
    """Each node's items, its load within ``tolerance`` of the mean so that its ranks keep their own slack."""
    batch, nodes = request.batch, request.cluster.nodes
    everything = np.stack([np.arange(batch.documents), np.zeros(batch.documents, np.int64), batch.lengths], axis=1)
    if nodes == 1:
        return [everything]
    load = limits.load.reshape(nodes, -1).sum(axis=1)
    mean = np.array([int(x) * loads.total // max(1, int(load.sum())) for x in load])
    tight = np.minimum(load, mean + (mean * tolerance).astype(np.int64))
    rows = limits.rows.reshape(nodes, -1).sum(axis=1)
    if rows[0] < UNLIMITED:
        share = -(-batch.tokens // nodes)
        rows = np.minimum(rows, share + (rows - share) // 2)
    found = pack(loads, everything, Limits(tight, rows, tight))
    return [found.items[found.bins == n] for n in range(nodes)]


def _node(request: Request, loads: Field, items: Ints, limits: Limits, node: int) -> _Option:
    """The node's items to its ranks, by the team size that moves least."""
    size = request.cluster.ranks_per_node
    span = slice(node * size, (node + 1) * size)
    mine = Limits(limits.load[span], limits.rows[span], limits.aim[span])
    options = [_teams(request, loads, items, mine, team) for team in _team_sizes(request)]
    return min(options, key=lambda o: _score(request, o.keys, o.violation))


@dataclass(frozen=True)
class _Option:
    """A node's placement: whole items per rank; (first rank, team size, split items, rows kept by each) per team; its cost."""

    whole: list[Ints]
    split: list[tuple[int, int, Ints, list[Ints]]]
    keys: int
    violation: int


def _teams(request: Request, loads: Field, items: Ints, limits: Limits, team: int) -> _Option:
    """Items over teams of ``team`` ranks, then inside each team."""
    size = len(limits.load)
    if team == 1:
        found = pack(loads, items, limits)
        return _Option([found.items[found.bins == r] for r in range(size)], [], found.keys, found.violation)
    count = size // team
    joint = Limits(*(x.reshape(count, team).sum(axis=1) for x in (limits.load, limits.rows, limits.aim)))
    over = pack(loads, items, joint) if count > 1 else Packed(items, np.zeros(len(items), np.int64), 0, 0)
    whole: list[Ints] = []
    split, keys, violation = [], 0, 0
    for t in range(count):
        part = slice(t * team, (t + 1) * team)
        own = Limits(limits.load[part], limits.rows[part], limits.aim[part])
        inside, parted, owners, cost, over_by = _inside_team(request, loads, over.items[over.bins == t], own)
        whole += inside
        if len(parted):
            split.append((t * team, team, parted, owners))
        keys, violation = keys + cost, max(violation, over_by)
    return _Option(whole, split, keys, violation)


def _score(request: Request, keys: int, violation: int) -> int:
    """Keys moved, and a violation weighed as in packing: it will be levelled."""
    return keys + violation * 8 * int(request.batch.lengths.max()) // 1_000_000


def _inside_team(
    request: Request, loads: Field, items: Ints, limits: Limits
) -> tuple[list[Ints], Ints, list[Ints], int, int]:
    """Whole items per rank, items split by heads, the rows of those each rank keeps, key equivalents moved, violation."""
    from flexcp.planners import loops

    team = len(limits.load)
    load = loads.load(items[:, 0], items[:, 1], items[:, 2])
    exchange = _exchange_keys(request, items[:, 2] - items[:, 1], team)
    costly = loops.keys_alone(items, loads.slices, loads.slice_first) > exchange
    parted = load > int(limits.aim.min())
    while True:
        # The team fetches the keys of a split document anyway: exchanging other rows' heads may be cheaper than their keys.
        parted |= costly & np.isin(items[:, 0], items[parted, 0])
        share = int(load[parted].sum()) // team
        rest = np.flatnonzero(~parted)
        room = Limits(limits.load - share, limits.rows, np.maximum(limits.aim - share, 1))
        found = pack(loads, items[rest], room)
        totals = np.zeros(team, np.int64)
        np.add.at(totals, found.bins, loads.load(*found.items.T))
        if (totals <= room.load).all() or not len(rest):
            break
        # A rank is over: the largest item it got from outside the split ones joins them.
        worst = found.items[found.bins == int(np.argmax(totals - room.load))]
        if not len(worst):
            break
        heaviest = worst[int(np.argmax(loads.load(*worst.T)))]
        parted |= (items[:, 0] == heaviest[0]) & (items[:, 1] <= heaviest[1]) & (items[:, 2] >= heaviest[2])
    whole = [found.items[found.bins == r] for r in range(team)]
    kept = np.array([int((w[:, 2] - w[:, 1]).sum()) for w in whole])
    owners = _dealt_rows(items[parted], _water(kept, int((items[parted, 2] - items[parted, 1]).sum())))
    keys = found.keys + _team_keys(request, loads, items[parted], team)
    rows = kept + np.array([int((o[:, 2] - o[:, 1]).sum()) for o in owners])
    over = max(
        (totals - room.load).max() / max(1.0, limits.aim.mean()),
        (rows - limits.rows).max() / max(1.0, rows.mean()),
        0.0,
    )
    return whole, items[parted], owners, keys, int(over * 1_000_000)


def _team_keys(request: Request, loads: Field, items: Ints, team: int) -> int:
    """What splitting ``items`` by heads moves, as an equivalent number of keys: their keys once, and their rows' exchange."""
    if not len(items):
        return 0
    from flexcp.planners import loops

    table = np.zeros((len(items), 5), np.int64)
    table[:, :3] = items
    keys = int(loops.total_cost(table, len(items), 1, loads.slices, loads.slice_first))
    return keys + int(_exchange_keys(request, items[:, 2] - items[:, 1], team).sum())


def _exchange_keys(request: Request, rows: Ints, team: int) -> Ints:
    """What exchanging the heads of ``rows`` inside a team moves (q, kv out, o back), as an equivalent number of keys."""
    shape = request.shape
    each = shape.bytes_per_token_head()[:, 0]
    row = int((each[Kind.Q] + each[Kind.O]) * shape.heads + each[Kind.KV] * shape.kv_heads)
    return rows * row * (team - 1) // (team * int(each[Kind.KV]) * shape.kv_heads)


def _water(kept: Ints, rows: int) -> Ints:
    """How many of ``rows`` each rank takes so that counts end up as level as possible."""
    order = np.argsort(kept, kind="stable")
    level = kept[order]
    for count in range(len(kept), 0, -1):
        surface = (rows + int(level[:count].sum())) // count
        if surface >= level[count - 1]:
            break
    added = np.zeros(len(kept), np.int64)
    added[order[:count]] = surface - level[:count]
    added[order[: rows - int(added.sum())]] += 1
    return added


def _dealt_rows(items: Ints, counts: Ints) -> list[Ints]:
    """The items' rows, in order, cut so that rank i gets ``counts[i]``."""
    before = np.cumsum(items[:, 2] - items[:, 1]) - (items[:, 2] - items[:, 1])
    found, low = [], 0
    for count in counts:
        a = np.maximum(items[:, 1], items[:, 1] + low - before)
        b = np.minimum(items[:, 2], items[:, 1] + low + int(count) - before)
        found.append(np.stack([items[:, 0], a, b], axis=1)[a < b])
        low += int(count)
    return found


def _team_sizes(request: Request) -> list[int]:
    """Teams that both the KV heads and the ranks of a node divide into."""
    largest = math.gcd(request.shape.kv_heads, request.cluster.ranks_per_node)
    return sorted({1, largest})


def _fixed(request: Request) -> Placement:
    """Tokens stay where they are; rows leave the ranks that have too much work."""
    assert request.layout is not None
    runs = runs_of_maps(request.layout)
    check_cap(runs, request.max_tokens_per_rank)
    loads = make_field(request.batch, _grain(request), 0, split_thin=False)
    limit, aim = _load_limits(request, loads)
    scattered = is_scattered(runs)
    if scattered:
        # Rows of scattered tokens are nobody's neighbours: place the work as if the layout were free.
        limits = Limits(limit, np.full(request.ranks, UNLIMITED), aim)
        nodes = _over_nodes(request, loads, limits, NODE_TOLERANCES[0])
        size, parts = request.cluster.ranks_per_node, []
        for node, items in enumerate(nodes):
            span = slice(node * size, (node + 1) * size)
            found = pack(loads, items, Limits(limit[span], limits.rows[span], aim[span]))
            team = np.ones((len(found.bins), 1), np.int64)
            parts.append(np.concatenate([found.bins[:, None] + node * size, team, found.items], axis=1))
        work = np.concatenate(parts)
    else:
        index, document, q0, q1 = request.batch.split_by_document(runs.start, runs.stop)
        work = np.stack([runs.rank[index], np.ones(len(index), np.int64), document, q0, q1], axis=1)
    work = level_work(loads, work, limit, _nodes(request))
    regions = _regions(request, work, request.batch.lengths)
    return Placement(
        request.batch, request.ranks, 0, runs, (regions,) * len(request.batch.masks), assemble_own=scattered
    )


def _regions(request: Request, work: Ints, thin: Ints) -> Regions:
    """Rows with all their keys, each rank of a team its share of the heads; thin rows by the keys each part holds."""
    heads = request.shape.heads
    item, member = spread(work[:, 1])
    rank, team, document, lo, hi = work[item].T
    length, begin = request.batch.lengths[document], thin[document]
    common = {
        "document": document,
        "rank": rank + member,
        "h0": member * heads // team,
        "h1": (member + 1) * heads // team,
    }
    found = Regions.make(len(item), q0=lo, q1=np.minimum(hi, begin), k0=0, k1=length, **common)
    if (begin < length).any():
        by_keys = Regions.make(len(item), q0=begin, q1=length, k0=lo, k1=hi, **common)
        found = Regions.join([found, by_keys])
    return found.take(found.q0 < found.q1)


def _grain(request: Request) -> int:
    """Rows per cut: a power of two well below what a tolerance of a rank's rows is."""
    rows = request.batch.tokens // request.ranks
    return 1 << min(6, max(0, (rows // 80).bit_length() - 1))


def _row_price(request: Request) -> int:
    """Load of a row besides its attention: nothing when the user balances compute and tokens apart."""
    if request.compute_tolerance is not None or request.equal_tokens:
        return 0
    return request.cost.pairs_per_token(request.shape)


def _load_limits(request: Request, loads: Field) -> tuple[Ints, Ints]:
    """(most load, load to aim for) of each rank, by its speed."""
    tolerance = DEFAULT_TOLERANCE if request.compute_tolerance is None else request.compute_tolerance
    speeds = np.array(getattr(request.cluster, "speeds", ()) or [1000] * request.ranks, np.int64)
    whole = int(speeds.sum())
    mean = [-(-loads.total * int(s) // whole) for s in speeds]
    most = [m + int(tolerance * m) for m in mean]
    aim = [m + int(SLACK_USED * tolerance * m) for m in mean]
    return np.array(most, np.int64), np.array(aim, np.int64)


def _row_limit(request: Request) -> int | None:
    """The most rows a rank may keep, or None."""
    mean = -(-request.batch.tokens // request.ranks)
    if request.equal_tokens:
        return mean
    limits = []
    if request.token_tolerance is not None:
        limits.append(max(mean, math.floor(request.batch.tokens * (1 + request.token_tolerance) / request.ranks)))
    if request.max_tokens_per_rank is not None:
        limits.append(request.max_tokens_per_rank)
    return min(limits) if limits else None


def _rows_allowed(request: Request, rows: int) -> Ints:
    """Rows each rank may keep: exactly even counts for equal tokens, the limit otherwise."""
    if request.equal_tokens:
        return np.diff(even_borders(request.batch.tokens, request.ranks))
    return np.full(request.ranks, rows, np.int64)


def _nodes(request: Request) -> Ints:
    return np.arange(request.ranks) // request.cluster.ranks_per_node


def _led_by(items: Ints, *values: int) -> Ints:
    """The items' columns behind constant ones."""
    return np.concatenate([np.full((len(items), len(values)), values, np.int64), items], axis=1)


def _stream(request: Request, kept: Ints) -> tuple[Ints, Ints, Ints]:
    begin = request.batch.starts[kept[:, 1]]
    return kept[:, 0], begin + kept[:, 2], begin + kept[:, 3]
