"""blocks: pack row ranges of short and long documents onto ranks, and move only what is needed.

Ranges of rows with all their keys, the *items*, are packed (:mod:`flexcp.planners.blocks.pack`), first over nodes,
whose loads are kept close to their mean, then over the ranks of each node. Inside a node, ranks may form *teams* of G
ranks, where G divides the KV heads. Items are packed over teams first; items that are too large for one rank of a team
are split by heads over the team. The keys of a split item are received by the team once, and any rank of the team may
keep its rows, which evens out tokens at no cost. Each node takes the team size that moves the fewest bytes, counted
exactly.

Tolerances are always kept: what packing leaves above a limit is moved row by row, work and tokens separately (work in
whole grains where its limit is a default). Without tolerances, attention and tokens are both balanced as closely as
costs few bytes. Balancing their sum would not be enough: ranks that share documents wait for each other's keys and
gradients in every layer, so less attention on a rank cannot make up for more tokens (in predictions, balancing the sum
takes up to 1.5 times as long). ``tokens="priced"`` balances the sum. For equal tokens, rows are packed with a little
room; then rows move, with their work, until the numbers are even.

*Settings.* ``blocks:team=8+attention=150+tokens=3`` sets the number of ranks in a team, and how far a rank may be above
the mean attention and the mean number of tokens, per mille, if no tolerance is given. If attention is a small part of
the layer, balancing it more closely costs more transfers than it saves. Which settings are fastest depends on mask,
lengths and links: ``auto`` prices and simulates those of :func:`searched_settings`.

With a fixed layout the tokens stay where they are and only work moves.
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
"""How far above the mean load a node may be, as fractions: the tolerances that are tried."""
OF_TEAMS_PERMILLE = 300
"""With teams of several ranks, how far above the mean a node may be, per mille of what ``attention`` allows a rank.

Such teams split the load of their node evenly.
"""
FEW_DOCUMENTS, FEW_RANKS = 8192, 128
"""The most documents and ranks for which ``auto`` tries settings: with more, each takes too long."""
RETRIED_NODES = range(3, 7)
"""The numbers of nodes with which a second tolerance is tried unless an effort is given.

With two nodes this saves only 1 % (on packed web documents), with many it takes too long.
"""
SLACK_USED = 0.8
"""The part of the tolerance that packing aims to use."""
EQUAL_ROOM = 100
"""With equal tokens, packing may leave a rank with 1/100 too many rows, which are evened out afterwards."""


@dataclass(frozen=True)
class Settings:
    """How closely rows are packed; ``str`` writes the settings as ``blocks:`` takes them.

    ``team`` is the number of ranks in a team; without it, each node takes the size that moves the fewest bytes.
    ``attention`` and ``tokens`` are how far a rank may be above the mean attention and the mean number of tokens, per
    mille.
    """

    team: int | None = None
    attention: int = 20
    tokens: int = 10

    def __str__(self) -> str:
        return "+".join(f"{name}={value}" for name, value in asdict(self).items() if value is not None)


def blocks(request: Request) -> Placement:
    """Place a batch by packing row ranges; raise Refused if limits cannot be kept."""
    placement = pack_rows(request)
    check_tolerances(request, placement)
    return placement


def searched_settings(request: Request) -> dict[str, str]:
    """Return the settings that ``auto`` tries besides ``blocks`` itself, as arguments of ``blocks``.

    They are the keys; the value of each is the argument whose price says whether it is worth trying. There are none if
    tolerances are given, if the layout is fixed, on one node, where there is little to gain, or with many documents or
    ranks.
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
    """Return the placement of :func:`blocks` without checking the tolerances, for other planners to start from."""
    _check_settings(request)
    refuse_over_cap(request)
    return _free(request) if request.layout is None else _fixed(request)


def _free(request: Request) -> Placement:
    """Return the placement if the layout is free: the planner places the tokens."""
    rows = _row_limit(request)
    loads = make_row_loads(request.batch, _grain(request), _row_price(request), _thin_price(request))
    limit, aim = _load_limits(request, loads)
    limits = BinLimits(limit, np.full(request.ranks, UNLIMITED) if rows is None else rows, aim, _is_firm(request))
    if request.equal_tokens:
        # Packing needs some room; the numbers of rows are made equal afterwards.
        limits = replace(limits, rows=limits.rows + limits.rows // EQUAL_ROOM)
    work, kept = _best_shares(request, loads, limits)
    if request.equal_tokens:
        rows = np.diff(even_borders(request.batch.tokens, request.ranks))
        work, kept = even(loads, work, rows, limit, _key_bytes(request), _row_bytes(request))
    work = level_work(loads, work, limit, _nodes(request), _level_grain(request))
    # If latents travel, queries cannot, so tokens move with their work.
    follow = request.shape.latent is not None and not request.equal_tokens and request.token_tolerance is None
    rank, start, stop = _stream(request, work[:, [0, 2, 3, 4]] if follow else kept)
    if rows is not None and not follow:
        rank, start, stop = level_rows(rank, start, stop, rows, _nodes(request))
    runs, pads = runs_of_ranges(rank, start, stop), 0
    if request.equal_tokens:
        runs, pads = equalised(runs, request.ranks, request.batch.tokens, request.pad_to)
    check_cap(runs, request)
    regions = tuple(_regions(request, work, thin) for thin in loads.thin)
    return Placement(request.batch, request.ranks, pads, runs, regions)


def _best_shares(request: Request, loads: RowLoads, limits: BinLimits) -> tuple[Ints, Ints]:
    """Return (work, kept) of all ranks: items packed over nodes with each of a few tolerances, then inside each node.

    Of the tolerances, the one with which the fewest bytes move is taken; the effort says how many are tried. The tables
    are those of :mod:`flexcp.planners.blocks.compiled_node`.
    """
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
            key = (node, items.tobytes())  # other tolerances often give the same items
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
    """Return how far above the mean load nodes may be, as fractions to be tried in this order."""
    settings = _settings(request)
    if settings.team is None:
        return NODE_TOLERANCES
    return (settings.attention / 1000 * (OF_TEAMS_PERMILLE if settings.team > 1 else 1000) / 1000,)


def _over_nodes(request: Request, loads: RowLoads, limits: BinLimits, tolerance: float) -> list[Ints]:
    """Return the items ``[n, 3]`` (document, first row, last row) of each node.

    The load of a node is at most ``tolerance`` above the mean if possible, so that its ranks keep some slack.
    """
    batch, nodes, size = request.batch, request.cluster.nodes, request.cluster.ranks_per_node
    everything = np.stack([np.arange(batch.documents), np.zeros(batch.documents, np.int64), batch.lengths], axis=1)
    if nodes == 1:
        return [everything]
    load = limits.load.reshape(nodes, size).sum(axis=1)
    total, most = loads.total, max(1, int(load.sum()))
    mean = np.array([int(x) * total // most for x in load])
    tight = np.minimum(load, mean + (mean * tolerance).astype(np.int64))
    rows = limits.rows.reshape(nodes, size).sum(axis=1)
    if rows[0] < UNLIMITED:
        share = -(-batch.tokens // nodes)
        rows = np.minimum(rows, share + (rows - share) // 2)
    found = pack(loads, everything, BinLimits(tight, rows, tight, limits.firm))
    order = np.argsort(found.bins, kind="stable")
    return np.split(found.items[order], np.searchsorted(found.bins[order], np.arange(1, nodes)))


def _node(request: Request, loads: RowLoads, items: Ints, limits: BinLimits, node: int) -> Placed:
    """Return a node's items on its ranks, with the team size that moves the fewest bytes."""
    size = request.cluster.ranks_per_node
    span = slice(node * size, (node + 1) * size)
    mine = replace(limits, load=limits.load[span], rows=limits.rows[span], aim=limits.aim[span])
    prices = _key_bytes(request), _row_bytes(request)
    placed = place_node(loads, items, mine, _team_sizes(request), *prices)
    return min(placed, key=lambda p: _score(request, p))


def _score(request: Request, placed: Placed) -> int:
    """Return the bytes that are moved, plus a price in bytes for exceeding limits, because rows will have to move."""
    longest = int(request.batch.lengths.max())
    return placed.bytes + placed.violation * VIOLATION_WEIGHT * longest * _key_bytes(request) // 1_000_000


def _key_bytes(request: Request) -> int:
    """Return the bytes of a token's key and value with all KV heads (or of its latent)."""
    return int(request.shape.bytes_per_token_head()[Kind.KV, 0]) * request.shape.kv_heads


def _thin_price(request: Request) -> int:
    """Return how many keys have as many bytes as a row whose attention another rank computes in part.

    For such a row q travels there and a partial o back.
    """
    each = request.shape.bytes_per_token_head()
    return int(each[Kind.Q, 0] + each[Kind.O, 1]) * request.shape.heads // _key_bytes(request)


def _row_bytes(request: Request) -> int:
    """Return the bytes of a row that is computed on another rank, besides its keys: q there, o back, all heads."""
    each = request.shape.bytes_per_token_head()[:, 0]
    return int(each[Kind.Q] + each[Kind.O]) * request.shape.heads


def _team_sizes(request: Request) -> list[int]:
    """Return the team sizes to try: the one of the settings, or all that are possible."""
    team = _settings(request).team
    return _possible_teams(request) if team is None else [team]


def _possible_teams(request: Request) -> list[int]:
    """Return the possible team sizes: 1, and the largest that divides both the KV heads and the ranks of a node.

    Heads are split evenly, so only 1 is possible if ranks have different speeds, or if latents travel, which have no
    heads.
    """
    if len(set(request.cluster.rank_speeds)) > 1 or request.shape.latent is not None:
        return [1]
    largest = math.gcd(request.shape.kv_heads, request.cluster.ranks_per_node)
    return sorted({1, largest})


def _settings(request: Request) -> Settings:
    """Return the settings in the request's argument, which must have been checked."""
    parts = (part.partition("=") for part in request.argument.split("+") if part)
    return Settings(**{name: int(value) for name, _, value in parts})


def _check_settings(request: Request) -> None:
    """Raise ValueError for an argument that is not settings, Refused for a team that does not suit heads and nodes."""
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
    """Return the placement if the layout is fixed: tokens stay, and ranks with too much work pass rows on."""
    assert request.layout is not None
    runs = runs_of_maps(request.layout)
    check_cap(runs, request)
    loads = make_row_loads(request.batch, _grain(request), 0, None)
    limit, aim = _load_limits(request, loads)
    scattered = is_scattered(runs)
    if scattered:
        # Scattered tokens have few adjacent rows on their rank, so the work is placed as if the layout were free.
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
    work = level_work(loads, work, limit, _nodes(request), _level_grain(request))
    regions = _regions(request, work, request.batch.lengths)
    return Placement(
        request.batch, request.ranks, 0, runs, (regions,) * len(request.batch.masks), assemble_own=scattered
    )


def _regions(request: Request, work: Ints, thin: Ints) -> Regions:
    """Return the regions of a work table (first rank, team size, document, first row, last row).

    Rows have all their keys, and each rank of a team has its share of the heads. Thin rows (from row ``thin[document]``
    on) are divided by keys instead: each rank computes them with the keys of its own rows.
    """
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
    """Return the grain in rows: packing cuts documents at multiples of it.

    It is a power of two, at most 64, and small compared with the rows of a rank.
    """
    rows = request.batch.tokens // request.ranks
    return 1 << min(6, max(0, (rows // 80).bit_length() - 1))


def _level_grain(request: Request) -> int:
    """Return the grain in rows at which work is cut that packing left above a limit: a tolerance is kept to the row."""
    return _grain(request) if request.compute_tolerance is None else 1


def _row_price(request: Request) -> int:
    """Return the load of a row besides its attention, in pairs of one layer.

    It is 0 if compute and tokens are balanced separately.
    """
    if not request.priced_tokens or request.compute_tolerance is not None:
        return 0
    return request.cost.pairs_per_token(request.shape)


def _load_limits(request: Request, loads: RowLoads) -> tuple[Ints, Ints]:
    """Return (largest load, load to aim for) of each rank, in proportion to its speed."""
    given = request.compute_tolerance
    tolerance = _settings(request).attention / 1000 if given is None else given
    speeds = np.array(request.cluster.rank_speeds, np.int64)
    whole, total = int(speeds.sum()), loads.total
    mean = [-(-total * int(s) // whole) for s in speeds]
    most = [m + int(tolerance * m) for m in mean]
    aim = [m + int(SLACK_USED * tolerance * m) for m in mean]
    return np.array(most, np.int64), np.array(aim, np.int64)


def _is_firm(request: Request) -> bool:
    """Return whether the limits come from the user and not only from defaults."""
    given = (request.compute_tolerance, request.token_tolerance, request.max_tokens_per_rank)
    return request.equal_tokens or request.priced_tokens or any(limit is not None for limit in given)


def _row_limit(request: Request) -> Ints | None:
    """Return the most rows that each rank may keep, or None for no limit."""
    ranks, tokens = request.ranks, request.batch.tokens
    mean = -(-tokens // ranks)
    if request.equal_tokens:
        return np.full(ranks, mean)
    limits = []
    if request.token_tolerance is not None:
        limits.append(np.full(ranks, max(mean, math.floor(tokens * (1 + request.token_tolerance) / ranks))))
    elif request.compute_tolerance is None and not request.priced_tokens:
        # In proportion to speeds, because tokens cost time in the rest of the layer.
        speeds = request.cluster.rank_speeds
        share = [-(-tokens * s // sum(speeds)) for s in speeds]
        tolerance = _settings(request).tokens / 1000
        limits.append(np.array([n + int(n * tolerance) for n in share]))
    if request.max_tokens_per_rank is not None:
        cap = np.full(ranks, request.max_tokens_per_rank)
        # If limits by speed do not have room for all tokens under the cap, only the cap counts.
        limits = [np.minimum(limit, cap) for limit in limits if int(np.minimum(limit, cap).sum()) >= tokens] or [cap]
    return limits[0] if limits else None


def _nodes(request: Request) -> Ints:
    """Return the node of each rank."""
    return np.arange(request.ranks) // request.cluster.ranks_per_node


def _stream(request: Request, kept: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (rank, start, stop) in the stream for a table of kept rows (rank, document, first row, last row)."""
    begin = request.batch.starts[kept[:, 1]]
    return kept[:, 0], begin + kept[:, 2], begin + kept[:, 3]
