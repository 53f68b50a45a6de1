"""blocks: short and long documents packed together, moving only what is needed.

Rows with all their keys are packed (:mod:`flexcp.planners.blocks.pack`) first over nodes, held close to their mean,
then over the ranks of each node. Inside a node there is a choice of *teams* of G ranks, G a divisor of the KV heads: a
team takes items as one bin, and splits those too large for one of its ranks by heads. A split item's keys reach the
team once, and its rows may be kept by any of the team, which levels tokens for free. Each node takes the team size that
moves the fewest bytes, counted exactly.

Tolerances hold by construction: what packing leaves over a limit is levelled row by row, work and tokens apart. Without
tolerances attention and tokens are balanced too, each as closely as costs few bytes: ranks that share documents wait
for each other's keys and gradients in every layer, so what a rank saves in attention cannot make up for what it has
more of in the rest (predicted, balancing the sum of both takes up to 1.5 times as long). ``tokens="priced"`` balances
that sum. Equal tokens are packed with a little room; then rows move on, with their work, until counts are even.

*Settings.* ``blocks:team=8+attention=150+tokens=3``: the ranks of a team, and by how many per mille a rank may be over
the mean of attention and of tokens where no tolerance is given. Where attention is a small part of the layer, a closer
balance of it moves more than it saves. Which settings are fastest depends on mask, lengths and links: ``auto`` prices
and simulates those of :func:`searched_settings`.

With a fixed layout the tokens stay put and only work moves.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import spread
from flexcp.plan.placement import Placement, Regions
from flexcp.planners.blocks.pack import (
    UNLIMITED,
    VIOLATION_WEIGHT,
    BinLimits,
    Placed,
    RowLoads,
    make_row_loads,
    pack,
    place_node,
)
from flexcp.planners.blocks.row_limits import even, level_rows, level_work
from flexcp.planners.request import Refused, Request, refuse_over_cap
from flexcp.planners.token_runs import (
    check_cap,
    check_tolerances,
    equalised,
    even_borders,
    is_scattered,
    runs_of_maps,
    runs_of_ranges,
)
from flexcp.shape import Kind

Ints = NDArray[np.int64]
NODE_TOLERANCES = (0.008, 0.02)
OF_TEAMS_PERMILLE = 300
"""With larger teams than one rank, which split evenly what their node has, nodes are held to this part of what
``attention`` allows a rank.
"""
FEW_DOCUMENTS, FEW_RANKS = 8192, 128
"""Documents and ranks up to which settings are searched: with more of them each takes long."""
RETRIED_NODES = range(3, 7)
"""Numbers of nodes for which a second tolerance is tried unless told: with two it saves 1 % (web packs),
with many it takes too long.
"""
SLACK_USED = 0.8
EQUAL_ROOM = 100
"""With equal tokens, packing may leave a rank this fraction (1/100) of its rows too many."""


@dataclass(frozen=True)
class Settings:
    """How closely rows are packed; see the module. Without a ``team`` every node takes the size that moves least."""

    team: int | None = None
    attention: int = 20
    tokens: int = 10

    def __str__(self) -> str:
        return "+".join(f"{name}={value}" for name, value in asdict(self).items() if value is not None)


def blocks(request: Request) -> Placement:
    """Place a batch by packing row ranges."""
    placement = pack_rows(request)
    check_tolerances(request, placement)
    return placement


def searched_settings(request: Request) -> dict[str, str]:
    """What ``auto`` asks for besides ``blocks`` by itself: arguments, each with the argument whose price says whether
    it is worth a look. None where the user set limits, where tokens are fixed, or on one node, where little is to gain.
    """
    given = (request.layout, request.compute_tolerance, request.token_tolerance)
    few = request.batch.documents <= FEW_DOCUMENTS and request.ranks <= FEW_RANKS
    if request.cluster.nodes == 1 or not few or any(x is not None for x in given):
        return {}
    alone = str(Settings(1, 150, 10))
    found = {alone: "", str(Settings(1, 150, 3)): alone}
    *_, largest = _possible_teams(request)
    if largest > 1:
        split = str(Settings(largest, 150, 3))
        found |= {split: "", str(Settings(largest, 20, 10)): split}
    return found


def pack_rows(request: Request) -> Placement:
    """The placement, before it is judged by the tolerances: what other planners may start from."""
    _check_settings(request)
    refuse_over_cap(request)
    return _free(request) if request.layout is None else _fixed(request)


def _free(request: Request) -> Placement:
    rows = _row_limit(request)
    loads = make_row_loads(request.batch, _grain(request), _row_price(request), _thin_price(request))
    limit, aim = _load_limits(request, loads)
    limits = BinLimits(limit, np.full(request.ranks, UNLIMITED) if rows is None else rows, aim, _is_firm(request))
    if request.equal_tokens:
        # Packing needs room to move; counts are made even afterwards.
        limits = replace(limits, rows=limits.rows + limits.rows // EQUAL_ROOM)
    work, kept = _best_shares(request, loads, limits)
    if request.equal_tokens:
        rows = np.diff(even_borders(request.batch.tokens, request.ranks))
        work, kept = even(loads, work, rows, limit, _key_bytes(request), _row_bytes(request))
    work = level_work(loads, work, limit, _nodes(request))
    # Where latents travel, queries cannot: tokens go where their work went.
    follow = request.shape.latent is not None and not request.equal_tokens and request.token_tolerance is None
    rank, start, stop = _stream(request, work[:, [0, 2, 3, 4]] if follow else kept)
    if rows is not None and not follow:
        rank, start, stop = level_rows(rank, start, stop, rows, _nodes(request))
    runs, pads = runs_of_ranges(rank, start, stop), 0
    if request.equal_tokens:
        runs, pads = equalised(runs, request.ranks, request.batch.tokens, request.pad_to)
    check_cap(runs, request.max_tokens_per_rank)
    regions = tuple(_regions(request, work, thin) for thin in loads.thin)
    return Placement(request.batch, request.ranks, pads, runs, regions)


def _best_shares(request: Request, loads: RowLoads, limits: BinLimits) -> tuple[Ints, Ints]:
    """(work, kept) over nodes with a few tolerances, then inside each; the one that moves least."""
    nodes, size = request.cluster.nodes, request.cluster.ranks_per_node
    if nodes == 1:
        tries = 1
    elif request.effort is None:
        tries = 2 if nodes in RETRIED_NODES else 1
    else:
        tries = max(1, min(len(NODE_TOLERANCES), request.effort // nodes))
    best: tuple[int, list[Placed]] | None = None
    known: dict[tuple[int, bytes], Placed] = {}
    for tolerance in _node_tolerances(request)[:tries]:
        placed = []
        for node, items in enumerate(_over_nodes(request, loads, limits, tolerance)):
            key = (node, items.tobytes())  # often the same with another tolerance
            if key not in known:
                known[key] = _node(request, loads, items, limits, node)
            placed.append(known[key])
        score = sum(_score(request, p) for p in placed)
        if best is None or score < best[0]:
            best = (score, placed)
    assert best is not None
    for node, found in enumerate(best[1]):
        found.work[:, 0] += node * size
        found.kept[:, 0] += node * size
    return np.concatenate([p.work for p in best[1]]), np.concatenate([p.kept for p in best[1]])


def _node_tolerances(request: Request) -> tuple[float, ...]:
    """Fractions over the mean to which nodes are held, to be tried in this order."""
    settings = _settings(request)
    if settings.team is None:
        return NODE_TOLERANCES
    return (settings.attention / 1000 * (OF_TEAMS_PERMILLE if settings.team > 1 else 1000) / 1000,)


def _over_nodes(request: Request, loads: RowLoads, limits: BinLimits, tolerance: float) -> list[Ints]:
    """Each node's items, its load within ``tolerance`` of the mean so that its ranks keep their own slack."""
    batch, nodes = request.batch, request.cluster.nodes
    everything = np.stack([np.arange(batch.documents), np.zeros(batch.documents, np.int64), batch.lengths], axis=1)
    if nodes == 1:
        return [everything]
    load = limits.load.reshape(nodes, -1).sum(axis=1)
    total, most = loads.total, max(1, int(load.sum()))
    mean = np.array([int(x) * total // most for x in load])
    tight = np.minimum(load, mean + (mean * tolerance).astype(np.int64))
    rows = limits.rows.reshape(nodes, -1).sum(axis=1)
    if rows[0] < UNLIMITED:
        share = -(-batch.tokens // nodes)
        rows = np.minimum(rows, share + (rows - share) // 2)
    found = pack(loads, everything, BinLimits(tight, rows, tight, limits.firm))
    order = np.argsort(found.bins, kind="stable")
    return np.split(found.items[order], np.searchsorted(found.bins[order], np.arange(1, nodes)))


def _node(request: Request, loads: RowLoads, items: Ints, limits: BinLimits, node: int) -> Placed:
    """The node's items to its ranks, by the team size that moves least."""
    size = request.cluster.ranks_per_node
    span = slice(node * size, (node + 1) * size)
    mine = replace(limits, load=limits.load[span], rows=limits.rows[span], aim=limits.aim[span])
    prices = _key_bytes(request), _row_bytes(request)
    placed = place_node(loads, items, mine, _team_sizes(request), *prices)
    return min(placed, key=lambda p: _score(request, p))


def _score(request: Request, placed: Placed) -> int:
    """Bytes moved, and a violation weighed as in packing: it will be levelled."""
    longest = int(request.batch.lengths.max())
    return placed.bytes + placed.violation * VIOLATION_WEIGHT * longest * _key_bytes(request) // 1_000_000


def _key_bytes(request: Request) -> int:
    """What a key moves, all its heads."""
    return int(request.shape.bytes_per_token_head()[Kind.KV, 0]) * request.shape.kv_heads


def _thin_price(request: Request) -> int:
    """How many keys move as many bytes as a row computed in part elsewhere: q out, a partial o back."""
    each = request.shape.bytes_per_token_head()
    return int(each[Kind.Q, 0] + each[Kind.O, 1]) * request.shape.heads // _key_bytes(request)


def _row_bytes(request: Request) -> int:
    """What a row computed elsewhere moves besides its keys: q out, o back."""
    each = request.shape.bytes_per_token_head()[:, 0]
    return int(each[Kind.Q] + each[Kind.O]) * request.shape.heads


def _team_sizes(request: Request) -> list[int]:
    """The team sizes to choose from."""
    team = _settings(request).team
    return _possible_teams(request) if team is None else [team]


def _possible_teams(request: Request) -> list[int]:
    """Teams that both the KV heads and a node's ranks divide into;
    heads are split evenly, which suits equal ranks and keys by heads.
    """
    if len(set(request.cluster.rank_speeds)) > 1 or request.shape.latent is not None:
        return [1]
    largest = math.gcd(request.shape.kv_heads, request.cluster.ranks_per_node)
    return sorted({1, largest})


def _settings(request: Request) -> Settings:
    """The settings of the request's argument."""
    parts = (part.partition("=") for part in request.argument.split("+") if part)
    return Settings(**{name: int(value) for name, _, value in parts})


def _check_settings(request: Request) -> None:
    """Refuse an argument that is no settings, or a team that does not suit heads and nodes."""
    example = "as in blocks:team=1+attention=150+tokens=3"
    for part in filter(None, request.argument.split("+")):
        name, _, value = part.partition("=")
        if name not in Settings.__dataclass_fields__:
            names = ", ".join(Settings.__dataclass_fields__)
            raise ValueError(f"blocks takes no degree but {names}, {example}; got 'blocks:{request.argument}'")
        if not value.isdecimal() or not 1 <= int(value) <= 1000:
            raise ValueError(f"{name} is a whole number from 1 to 1000, {example}; got 'blocks:{request.argument}'")
    team, possible = _settings(request).team, _possible_teams(request)
    if team is not None and team not in possible:
        raise Refused(
            f"teams of {team} do not suit {request.shape.kv_heads} KV heads and nodes of "
            f"{request.cluster.ranks_per_node} ranks; sizes that do: {possible}"
        )


def _fixed(request: Request) -> Placement:
    """Tokens stay where they are; rows leave the ranks that have too much work."""
    assert request.layout is not None
    runs = runs_of_maps(request.layout)
    check_cap(runs, request.max_tokens_per_rank)
    loads = make_row_loads(request.batch, _grain(request), 0, None)
    limit, aim = _load_limits(request, loads)
    scattered = is_scattered(runs)
    if scattered:
        # Rows of scattered tokens are nobody's neighbours: place the work as if the layout were free.
        limits = BinLimits(limit, np.full(request.ranks, UNLIMITED), aim)
        nodes = _over_nodes(request, loads, limits, NODE_TOLERANCES[0])
        size, parts = request.cluster.ranks_per_node, []
        for node, items in enumerate(nodes):
            span = slice(node * size, (node + 1) * size)
            found = pack(loads, items, BinLimits(limit[span], limits.rows[span], aim[span]))
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
    """Load of a row besides its attention: nothing where compute and tokens are balanced apart."""
    if not request.priced_tokens or request.compute_tolerance is not None:
        return 0
    return request.cost.pairs_per_token(request.shape)


def _load_limits(request: Request, loads: RowLoads) -> tuple[Ints, Ints]:
    """(most load, load to aim for) of each rank, by its speed."""
    given = request.compute_tolerance
    tolerance = _settings(request).attention / 1000 if given is None else given
    speeds = np.array(request.cluster.rank_speeds, np.int64)
    whole, total = int(speeds.sum()), loads.total
    mean = [-(-total * int(s) // whole) for s in speeds]
    most = [m + int(tolerance * m) for m in mean]
    aim = [m + int(SLACK_USED * tolerance * m) for m in mean]
    return np.array(most, np.int64), np.array(aim, np.int64)


def _is_firm(request: Request) -> bool:
    """Whether the user set a limit, or the balance is only ours."""
    given = (request.compute_tolerance, request.token_tolerance, request.max_tokens_per_rank)
    return request.equal_tokens or request.priced_tokens or any(limit is not None for limit in given)


def _row_limit(request: Request) -> Ints | None:
    """The most rows each rank may keep, or None."""
    ranks, tokens = request.ranks, request.batch.tokens
    mean = -(-tokens // ranks)
    if request.equal_tokens:
        return np.full(ranks, mean)
    limits = []
    if request.token_tolerance is not None:
        limits.append(np.full(ranks, max(mean, math.floor(tokens * (1 + request.token_tolerance) / ranks))))
    elif request.compute_tolerance is None and not request.priced_tokens:
        # By speed, because it is the rest of the layer that tokens take time in.
        speeds = request.cluster.rank_speeds
        share = [-(-tokens * s // sum(speeds)) for s in speeds]
        tolerance = _settings(request).tokens / 1000
        limits.append(np.array([n + int(n * tolerance) for n in share]))
    if request.max_tokens_per_rank is not None:
        cap = np.full(ranks, request.max_tokens_per_rank)
        # Slower ranks take more than their share where the cap leaves the fast ones no room.
        limits = [np.minimum(limit, cap) for limit in limits if int(np.minimum(limit, cap).sum()) >= tokens] or [cap]
    return limits[0] if limits else None


def _nodes(request: Request) -> Ints:
    return np.arange(request.ranks) // request.cluster.ranks_per_node


def _stream(request: Request, kept: Ints) -> tuple[Ints, Ints, Ints]:
    begin = request.batch.starts[kept[:, 1]]
    return kept[:, 0], begin + kept[:, 2], begin + kept[:, 3]
