"""groups: every document on as few ranks as it needs: one rank, a team that splits its heads,
or several that share its rows.

Flexible groups (FCP's second system, DHP in its first version) taken further: a document that needs no cut stays whole
on one rank, groups have any integer size, and inside a node a document may be split by heads instead of rows, which
moves less where there are KV heads enough.

*How.* From the largest units down to ranks, each step a compiled loop:

1. Nodes (:func:`~flexcp.planners.groups.compiled_dealing.deal`). A document that is more than a node can do in time has
   a group of nodes, the fewest that can, and is cut by rows in equal parts over it. All others stay whole, heaviest
   first to the group that is then ready first. What is left uneven is levelled by cutting borders: the latest node
   gives part of a short document to the earliest. So only what must cross nodes does.
2. Teams of a node, by the same loop: a document on one team, or by rows over several.
3. Ranks of a team (:func:`~flexcp.planners.groups.compiled_team.split_by_heads`). Documents stay whole on one rank,
   except for those that are cut above and for the heaviest ones, as many as it takes until attention is even: these are
   split by heads over the whole team, and any of its ranks may keep their rows. In teams of one rank, step 2 has
   already found the rank.

Groups are level by *load*, attention and the rest of the layer together. Ranks inside a group are level in attention
and in tokens, because they wait for each other's keys in every layer: one that has less attention cannot make up for
more tokens.

*Settings.* ``groups:team=8+slack=12+long=poured``: the ranks of a team; how many per cent a unit may be over the mean
before documents are cut for it (less cutting is faster where links are slow); and what happens where the groups of long
documents together need more units than there are. ``whole`` lets each have fewer and takes longer, ``poured`` lays them
end to end, so that neighbours share a unit. With ``split=all`` a team splits every document, which moves more and
leaves all its ranks with the same work. Settings that are not given are searched, but for the last: the one with the
least predicted time, copies included, is taken (:mod:`flexcp.planners.price`), teams of one rank only where keys have
too few heads for larger ones, because the prediction flatters what moves by rows. Which settings are fastest events
tell better: ``auto`` asks for :func:`all_groupings` of each of :func:`team_sizes`. A placement takes a few
milliseconds.

The token cap is never broken, and with equal tokens pads cost at most 1/64 of the step:
:mod:`flexcp.planners.groups.rows`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.placement import Placement
from flexcp.planners.groups.priced_documents import PricedDocuments, price_documents
from flexcp.planners.groups.rows import Pieces, place_pieces
from flexcp.planners.price import price_ns
from flexcp.planners.request import Refused, Request, refuse_over_cap, refuse_tolerances
from flexcp.shape import Shape

Ints = NDArray[np.int64]
SLACKS = (2, 12, 25)
"""Per cent over the mean that are tried."""
FEW_RANKS = 4
"""How many ranks the heaviest document may need where teams of one rank are tried besides larger ones."""
WORDS = {"long": ("whole", "poured"), "split": ("few", "all")}
"""What settings can say that are no numbers."""


@dataclass(frozen=True)
class Settings:
    """What can be said of a search; see the module."""

    team: int = 1
    slack: int = SLACKS[0]
    long: str = "whole"
    split: str = "few"

    def __str__(self) -> str:
        return "+".join(f"{name}={value}" for name, value in asdict(self).items())


def groups(request: Request) -> Placement:
    """Place a batch in flexible groups; settings that the request does not give are those
    of the least predicted time.
    """
    found = all_groupings(request)
    return found[0] if len(found) == 1 else min(found, key=lambda placement: price_ns(request, placement))


def all_groupings(request: Request) -> list[Placement]:
    """The placements of all settings that the request leaves open, each once."""
    if request.layout is not None:
        raise Refused("groups places tokens itself, so it cannot keep a fixed layout; use blocks, or layout='free'")
    refuse_tolerances(request)
    refuse_over_cap(request)
    tried = _settings(request)
    priced = price_documents(request, sorted({each.team for each in tried}))
    found: list[Placement] = []
    seen: list[Pieces] = []
    for each in tried:
        pieces = _pieces(request, priced, each)
        if not any(_same(pieces, other) for other in seen):
            seen.append(pieces)
            placement = place_pieces(request, priced, pieces)
            found.append(replace(placement, note=_note(placement, each)))
    return found


def _same(a: Pieces, b: Pieces) -> bool:
    return len(a) == len(b) and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in a.names())


# --- settings ---------------------------------------------------------------------------------------------------------


def _settings(request: Request) -> list[Settings]:
    """The settings to try: all that the request's argument leaves open, but for ``split``."""
    given = _given(request)
    teams = [int(given["team"])] if "team" in given else team_sizes(request)
    slacks = (int(given["slack"]),) if "slack" in given else _slacks(request)
    longs = (given["long"],) if "long" in given else WORDS["long"]
    split = given.get("split", Settings.split)
    # Where all ranks are one team nothing is dealt to units.
    return [
        Settings(*each, split)
        for each in product(teams, slacks, longs)
        if each[0] < request.ranks or each[2] == longs[0]
    ]


def _slacks(request: Request) -> tuple[int, ...]:
    """Slacks worth trying: the largest pays for exchanges that are dear against the work, not against whole layers."""
    attention_alone = request.cost.pairs_per_token(request.shape) <= 1
    return SLACKS if attention_alone or request.cluster.nodes == 1 else SLACKS[:-1]


def _given(request: Request) -> dict[str, str]:
    """The argument's settings, checked."""
    found: dict[str, str] = {}
    example = "as in groups:team=8+slack=2+long=whole"
    for part in filter(None, request.argument.split("+")):
        name, _, value = part.partition("=")
        if name not in Settings.__dataclass_fields__:
            raise ValueError(
                f"groups takes {', '.join(Settings.__dataclass_fields__)}, {example}, and finds the sizes of groups "
                f"itself; got 'groups:{request.argument}'"
            )
        if name in WORDS and value not in WORDS[name]:
            raise ValueError(f"{name} is {' or '.join(WORDS[name])}, {example}; got 'groups:{request.argument}'")
        if name not in WORDS and (not value.isdecimal() or not 1 <= int(value) <= 1000):
            raise ValueError(f"{name} is a whole number from 1 to 1000, {example}; got 'groups:{request.argument}'")
        found[name] = value
    if "team" in found and int(found["team"]) not in _possible_teams(request):
        raise Refused(
            f"teams of {found['team']} do not suit {request.shape.heads} query heads, {request.shape.kv_heads} KV "
            f"heads and nodes of {request.cluster.ranks_per_node} ranks; sizes that do: {_possible_teams(request)}"
        )
    return found


def _possible_teams(request: Request) -> list[int]:
    """Sizes that divide a node and the heads; one rank where latents travel, because queries then cannot."""
    node, shape = request.cluster.ranks_per_node, request.shape
    if shape.latent is not None:
        return [1]
    return [u for u in range(1, node + 1) if node % u == 0 and _divides_heads(shape, u)]


def _divides_heads(shape: Shape, team: int) -> bool:
    keys = shape.kv_heads
    return shape.heads % team == 0 and (keys % team == 0 or team % keys == 0)


def team_sizes(request: Request) -> list[int]:
    """Sizes worth trying: the largest for which every rank has KV heads of its own, and unless that is a node,
    one rank and the largest.

    A rank of a larger team moves less, as long as nobody else needs its KV heads. Where speeds differ one rank is tried
    too: heads cannot be shared by speed, rows can.
    """
    possible, cluster = _possible_teams(request), request.cluster
    own_keys = max(u for u in possible if request.shape.kv_heads % u == 0)
    if own_keys == cluster.ranks_per_node and len(set(cluster.rank_speeds)) == 1:
        return [own_keys]
    return sorted({1, own_keys, possible[-1]})


def searched_settings(request: Request) -> list[str]:
    """What ``auto`` asks for, as arguments: the sizes above with all settings, and over several nodes one rank as well.

    Documents that need few ranks move least by rows. A document that needs many moves more than in teams.
    """
    likely = team_sizes(request)
    found = [f"team={team}" for team in likely]
    if request.cluster.nodes > 1 and 1 not in likely:
        load = price_documents(request, []).load
        if int(load.max()) * request.ranks <= FEW_RANKS * int(load.sum()):
            found.append(f"team=1+slack={SLACKS[0]}")
    return found


# --- the search -------------------------------------------------------------------------------------------------------


def _pieces(request: Request, priced: PricedDocuments, settings: Settings) -> Pieces:
    """Every document on ranks and teams."""
    from flexcp.planners.groups.compiled_dealing import BIN, COLUMNS, DOC, HI, LO, deal
    from flexcp.planners.groups.compiled_team import split_by_heads

    cluster, team = request.cluster, settings.team
    speeds = np.array(cluster.rank_speeds, np.int64)
    slack, poured = max(1, 100 // settings.slack), settings.long == "poured"

    def dealt(items: Ints, ranks: Ints, size: int) -> list[Ints]:
        """The items of each unit of ``size`` of these ranks."""
        if len(ranks) == size:
            return [items]
        room = 0 if request.token_cap is None else request.token_cap * size
        table = deal(items, _pace(ranks.reshape(-1, size).sum(axis=1)), slack, poured, room)
        table = table[np.argsort(table[:, BIN], kind="stable")]
        return np.split(table, np.searchsorted(table[:, BIN], np.arange(1, len(ranks) // size)))

    items = np.zeros((request.batch.documents, COLUMNS), np.int64)
    items[:, DOC] = np.arange(request.batch.documents)
    items[:, HI] = request.batch.lengths
    items[:, HI + 1], items[:, HI + 2] = priced.load, priced.attention
    found: list[tuple[Ints, Ints, Ints]] = []
    for node, of_node in enumerate(dealt(items, speeds, cluster.ranks_per_node)):
        begin = node * cluster.ranks_per_node
        mine = speeds[begin : begin + cluster.ranks_per_node]
        for number, of_team in enumerate(dealt(of_node, mine, team)):
            first = np.full(len(of_team), begin + number * team, np.int64)
            size = np.ones_like(first)
            if team > 1 and len(of_team):
                pace = _pace(mine[number * team : (number + 1) * team])
                rank = np.full(len(of_team), team, np.int64)
                if settings.split == "few":
                    rank = split_by_heads(of_team, pace, priced.linear, priced.exchange[team], slack)
                size[rank == team] = team
                first[rank < team] += rank[rank < team]
            found.append((first, size, of_team))
    first, size, table = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((table[:, LO], table[:, DOC]))
    table = table[order]
    return _joined(Pieces(first[order], size[order], table[:, DOC], table[:, LO], table[:, HI]))


def _pace(speeds: Ints) -> Ints:
    """Speeds over their mean, in the unit of the loops."""
    from flexcp.planners.groups.compiled_dealing import PACE

    return np.asarray(np.maximum(speeds * PACE * len(speeds) // speeds.sum(), 1))


def _joined(pieces: Pieces) -> Pieces:
    """Neighbouring pieces of one document on the same ranks as one."""
    apart = np.ones(len(pieces), bool)
    apart[1:] = np.any(
        [np.diff(getattr(pieces, name)) != 0 for name in ("first", "size", "document")]
        + [pieces.lo[1:] != pieces.hi[:-1]],
        axis=0,
    )
    return replace(pieces.take(apart), hi=pieces.hi[np.append(np.flatnonzero(apart)[1:], len(pieces)) - 1])


def _note(placement: Placement, settings: Settings) -> str:
    """The settings, as ``groups:`` takes them, and how many ranks documents have."""
    regions = placement.regions[0]
    computed = np.unique(regions.document * placement.ranks + regions.rank)
    ranks = np.bincount(computed // placement.ranks, minlength=placement.batch.documents)
    degrees = Counter(int(n) for n in ranks if n > 1)
    whole = f"{int((ranks == 1).sum())} of {len(ranks)} documents on one rank"
    if not degrees:
        return f"{settings}: {whole}"
    listed = ", ".join(f"{count} x {n}" if count > 1 else str(n) for n, count in sorted(degrees.items(), reverse=True))
    return f"{settings}: {whole}, others on {listed} ranks"
