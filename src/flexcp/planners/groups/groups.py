"""groups: place every document on as few ranks as it needs.

These are one rank, a team of ranks of one node that split the document's heads, or several units that share its rows. A
*unit* is a node, a team or a rank.

This extends flexible groups (FCP's second system, the first version of DHP). A document that needs no cut stays whole
on one rank, groups may have any size, and inside a node a document may be split by heads instead of rows, which moves
fewer bytes if there are enough KV heads.

*How.* The steps go from the largest units down to ranks (:mod:`flexcp.planners.groups.search`), each with a compiled
loop:

1. Nodes (:func:`~flexcp.planners.groups.compiled_dealing.deal`). A document that is too much work for one node gets a
   group of nodes, as few as possible, and is cut by rows into equal parts over it. All others stay whole and go
   heaviest first to the group that then finishes first. Remaining differences are evened out by cuts: the slowest node
   gives part of a short document to the fastest. So only what must cross nodes does. Nodes that compute least of a
   document get rows that read few keys (:func:`flexcp.planners.groups.search.find_pieces`).
2. Teams of a node, by the same loop: a document is on one team, or cut by rows over several.
3. Ranks of a team (:func:`~flexcp.planners.groups.compiled_team.split_by_heads`). Documents stay whole on one rank,
   except for those that were cut in steps 1 and 2 and for the heaviest ones, as many as are needed to make attention
   even: these are split by heads over the whole team, and any of its ranks may keep their rows. With teams of one rank,
   step 2 has already found the rank.
4. Levelling: ranks that share documents give each other tokens of them until their exactly counted work is even
   (:mod:`flexcp.planners.groups.levelling`).

Groups are balanced by *load*, attention and the rest of the layer together. Ranks inside a group are balanced in
attention and in tokens separately: they wait for each other's keys in every layer, so less attention on a rank cannot
make up for more tokens.

*Settings.* ``groups:team=8+slack=12+long=poured+split=all+level=yes``:

- ``team``: the ranks of a team.
- ``slack``: how many per cent a unit may be above the mean before documents are cut for it; 0 stands for a quarter of
  one. Less cutting is faster if links are slow.
- ``long``: what happens if the groups of long documents together need more units than there are. With ``whole``, each
  gets fewer units and takes longer; with ``poured``, long documents are laid end to end, so that neighbours share a
  unit.
- ``split``: with ``all``, a team splits every document, which moves more bytes and gives all its ranks the same work;
  with ``few``, only as many as needed; with ``shared``, only what it shares with other teams, and it deals the other
  documents to its ranks, as if each were a team of one. Then long documents move few bytes and most others none.
  With ``keys``, it splits the same documents, but divides their keys instead of their heads
  (:mod:`flexcp.planners.groups.key_regions`). This is faster if few KV heads and slow links make keys that cross nodes,
  and their gradients, the slowest part.
- ``level``: whether step 4 follows. Even work is not always faster: where transfers take the time, they can get longer.

For ``team``, ``slack``, ``long`` and ``level``, values that are not given are searched, as far as an estimate of their
time does not rule them out; the placement with the least predicted time, including copies, is taken
(:mod:`flexcp.planners.price`). Teams of one rank are searched only if there are too few KV heads for a team as large as
a node, or if ranks have different speeds, because the prediction is too optimistic about transfers by rows. The event
simulator compares settings better: ``auto`` uses :func:`all_groupings` for each of :func:`searched_settings`. A
placement takes a few milliseconds.

The token cap is always kept, and with equal tokens, pads cost at most 1/64 of the step
(:mod:`flexcp.planners.groups.rows`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import gcd

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.placement import Placement
from flexcp.planners.groups.levelling import level
from flexcp.planners.groups.priced_documents import PricedDocuments, price_documents
from flexcp.planners.groups.rows import Pieces, place_pieces
from flexcp.planners.groups.search import MANY_DOCUMENTS, SPLITS, coupled, find_pieces
from flexcp.planners.price import price_ns
from flexcp.planners.request import Refused, Request, refuse_over_cap, refuse_tolerances

Ints = NDArray[np.int64]
SLACKS = (1, 2, 12)
"""The values of ``slack`` that are tried over several nodes, in per cent above the mean."""
SLACKS_ALONE = (1, 2, 6, 12, 25)
"""The same if layers consist of attention alone."""
SLACKS_OF_A_NODE = (2, 12, 25)
"""The same on a single node, where the smallest is not worth the time of trying it."""
SLACKS_BY_KEYS = (0, 2, 12)
"""The same if teams divide keys."""
USUAL_SLACK = 2
"""The value of ``slack`` if only one is tried."""
CLEARLY_LONGER = 5
"""Settings whose estimated time is this many per cent above the least one are left out."""
WORTH_CUTTING = 400
"""A slack below the usual one is only tried if the estimated time is shorter by more than one part in this many."""
LEVELLINGS = 2
"""How often the work of ranks is counted and levelled."""
FEW_RANKS = 4
"""On several nodes, ``auto`` also tries teams of one rank if the heaviest document needs at most this many ranks."""
WORDS = {"long": ("whole", "poured"), "split": SPLITS, "level": ("no", "yes")}
"""The values of the settings that are words and not numbers."""


@dataclass(frozen=True)
class Settings:
    """The settings of one placement (see the module docstring); ``str`` gives them as ``groups:`` takes them."""

    team: int = 1
    slack: int = USUAL_SLACK
    long: str = "whole"
    split: str = "few"
    level: str = "no"

    def __str__(self) -> str:
        return "+".join(f"{name}={value}" for name, value in asdict(self).items())


def groups(request: Request) -> Placement:
    """Place a batch in flexible groups, with the settings that have the least predicted time.

    Settings that the request's argument gives are fixed. Raise Refused for a fixed layout, for tolerances, or if the
    batch does not fit the token cap.
    """
    found = all_groupings(request)
    return found[0] if len(found) == 1 else min(found, key=lambda placement: price_ns(request, placement))


def all_groupings(request: Request) -> list[Placement]:
    """Return a placement for each combination of settings that the request's argument leaves open, without duplicates.

    Raise Refused as :func:`groups` does.
    """
    if request.layout is not None:
        raise Refused("groups places tokens itself, so it cannot keep a fixed layout; use blocks, or layout='free'")
    refuse_tolerances(request)
    refuse_over_cap(request)
    given = _given(request)
    tried = _settings(request, given)
    by_keys = tried[0].split == "keys"
    priced = price_documents(request, sorted({each.team for each in tried}), by_keys)
    placements: list[Placement] = []
    for each, pieces in _worth_placing(request, priced, tried):
        levels = (given["level"],) if "level" in given else _levels(request, each.slack)
        placements += _placed(request, priced, pieces, each, levels)
    return placements


def _placed(
    request: Request, priced: PricedDocuments, pieces: Pieces, settings: Settings, levels: tuple[str, ...]
) -> Iterator[Placement]:
    """Yield the placement of pieces for each of some values of ``level``; none if levelling changes nothing."""
    by_keys = settings.split == "keys"
    placement = place_pieces(request, priced, pieces, by_keys)
    if "no" in levels:
        yield replace(placement, note=_note(placement, settings))
    if "yes" in levels:
        before = pieces
        for _ in range(LEVELLINGS):
            pieces = level(request, priced, pieces, placement)
            placement = place_pieces(request, priced, pieces, by_keys)
        if "no" not in levels or not _same(pieces, before):
            yield replace(placement, note=_note(placement, replace(settings, level="yes")))


def _levels(request: Request, slack: int) -> tuple[str, ...]:
    """Return the values of ``level`` worth trying for a slack.

    Levelling is not worth it if ranks wait for each other in every layer, and very many documents are even without it.
    """
    if coupled(request) or request.batch.documents > MANY_DOCUMENTS:
        return ("no",)
    return ("no", "yes") if slack > 0 else ("yes",)


def _worth_placing(
    request: Request, priced: PricedDocuments, tried: list[Settings]
) -> Iterator[tuple[Settings, Pieces]]:
    """Yield the settings to place, with their pieces, without duplicates.

    If ranks wait for each other in every layer, the time of pieces can be estimated well. Then settings whose pieces
    take clearly longer than others are left out, and so are those that cut more documents and gain little.
    """
    found: list[tuple[Settings, Pieces, int]] = []
    pours = True
    for each in tried:  # in each team and slack, ``whole`` comes before ``poured``
        poured = each.long == "poured"
        if poured and not pours:
            continue
        pieces, time, pours = find_pieces(request, priced, each.team, each.slack, poured, each.split)
        if not any(_same(pieces, other) for _, other, _ in found):
            found.append((each, pieces, time))
    for each, pieces, time in found:
        others = [(other, taken) for other, _, taken in found if other.team == each.team]
        usual = next((taken for other, taken in others if other.slack == USUAL_SLACK), None)
        longer = time * 100 > min(taken for _, taken in others) * (100 + CLEARLY_LONGER)
        gains_little = usual is not None and time * WORTH_CUTTING > usual * (WORTH_CUTTING - 1)
        if not coupled(request) or not (longer or (each.slack < USUAL_SLACK and gains_little)):
            yield each, pieces


def _same(a: Pieces, b: Pieces) -> bool:
    """Return whether two tables of pieces are equal."""
    return len(a) == len(b) and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in a.names())


# --- settings ---------------------------------------------------------------------------------------------------------


def _settings(request: Request, given: dict[str, str]) -> list[Settings]:
    """Return the settings to try: all combinations worth trying of those that are not ``given``.

    ``split`` is not varied: it is ``few`` unless given. ``level`` is left at its default, because it changes nothing
    before documents are placed.
    """
    split = given.get("split", Settings.split)
    sizes = team_sizes_by_keys(request) if split == "keys" else team_sizes(request)
    teams = [int(given["team"])] if "team" in given else sizes
    slacks = (int(given["slack"]),) if "slack" in given else _slacks(request, split)
    longs = (given["long"],) if "long" in given else WORDS["long"]
    # Where all ranks are one team nothing is dealt to units.
    return [
        Settings(*each, split)
        for each in product(teams, slacks, longs)
        if each[0] < request.ranks or each[2] == longs[0]
    ]


def _slacks(request: Request, split: str) -> tuple[int, ...]:
    """Return the values of ``slack`` worth trying, in per cent above the mean.

    More cuts cost more where exchanges are expensive compared with the work, so larger slacks are tried there.
    """
    if split == "keys":
        return SLACKS_BY_KEYS
    if request.cluster.nodes == 1:
        return SLACKS_OF_A_NODE
    return SLACKS_ALONE if request.cost.attention_alone(request.shape) else SLACKS


def _given(request: Request) -> dict[str, str]:
    """Return the settings in the request's argument, name to value.

    Raise ValueError for an unknown name or a wrong value, Refused for a team size that does not suit heads and nodes.
    """
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
        least = 0 if name == "slack" else 1
        if name not in WORDS and (not value.isdecimal() or not least <= int(value) <= 1000):
            raise ValueError(
                f"{name} is a whole number from {least} to 1000, {example}; got 'groups:{request.argument}'"
            )
        found[name] = value
    possible = _possible_teams(request, found.get("split") == "keys")
    if "team" in found and int(found["team"]) not in possible:
        raise Refused(
            f"teams of {found['team']} do not suit {request.shape.heads} query heads, {request.shape.kv_heads} KV "
            f"heads and nodes of {request.cluster.ranks_per_node} ranks; sizes that do: {possible}"
        )
    return found


def _possible_teams(request: Request, by_keys: bool = False) -> list[int]:
    """Return the team sizes that divide a node and, unless teams divide keys (``by_keys``), the heads.

    If latents travel, only 1 is possible, because queries then cannot.
    """
    node, shape = request.cluster.ranks_per_node, request.shape
    if shape.latent is not None:
        return [1]
    return [u for u in range(1, node + 1) if node % u == 0 and (by_keys or shape.divides_over(u))]


def team_sizes(request: Request) -> list[int]:
    """Return the team sizes worth trying.

    The most promising size is the largest with which every rank has KV heads of its own: a larger team moves fewer
    bytes per rank, as long as ranks do not share KV heads. If it is a whole node, no other size is tried; otherwise 1
    and the largest possible size are tried too. They are also tried if ranks have different speeds, because rows can be
    divided in proportion to speeds and heads cannot.
    """
    possible, cluster = _possible_teams(request), request.cluster
    own_keys = max(u for u in possible if request.shape.kv_heads % u == 0)
    if own_keys == cluster.ranks_per_node and len(set(cluster.rank_speeds)) == 1:
        return [own_keys]
    return sorted({1, own_keys, possible[-1]})


def team_sizes_by_keys(request: Request) -> list[int]:
    """Return the sizes of teams worth trying if teams divide keys: the smallest and the largest with several parts.

    The more ranks divide the keys of the same rows, the fewer keys cross nodes, and the more queries travel inside.
    """
    keys = request.shape.kv_heads
    several = [team for team in _possible_teams(request, by_keys=True) if gcd(team, keys) < team]
    return sorted({several[0], several[-1]}) if several else [1]


def searched_settings(request: Request) -> list[str]:
    """Return the arguments of ``groups`` that ``auto`` tries: a ``team=`` for each of :func:`team_sizes`.

    Other settings are left open. On several nodes, teams of one rank are added if no document needs more than
    ``FEW_RANKS`` ranks: cut by rows, most documents stay whole, move nothing and copy nothing. Layers of attention
    alone also have a setting that cuts documents of a node by rows and without slack, but splits those that nodes
    share by heads.
    """
    likely, cluster = team_sizes(request), request.cluster
    found = [f"team={team}" for team in likely]
    if cluster.nodes == 1 or 1 in likely:
        return found
    load = price_documents(request, []).load
    few = int(load.max()) * request.ranks <= FEW_RANKS * int(load.sum())
    if request.cost.attention_alone(request.shape):
        shared = f"team={cluster.ranks_per_node}+slack=0+split=shared"
        return [*found, shared, f"team=1+slack={USUAL_SLACK}"] if few else [*found, shared]
    return [*found, "team=1+slack=0"] if few else found


def searched_by_keys(request: Request) -> list[str]:
    """Return the arguments with which ``auto`` tries teams that divide keys, for :func:`team_sizes_by_keys`.

    There are none on a single node, whose links are fast, and where KV heads are enough for a team as large as a node.
    """
    if request.cluster.nodes == 1 or 1 not in team_sizes(request):
        return []
    return [f"team={team}+split=keys" for team in team_sizes_by_keys(request) if team > 1]


# --- notes ------------------------------------------------------------------------------------------------------------


def _note(placement: Placement, settings: Settings) -> str:
    """Return the settings, as ``groups:`` takes them, and on how many ranks documents are computed."""
    regions = placement.regions[0]
    computed = np.unique(regions.document * placement.ranks + regions.rank)
    ranks = np.bincount(computed // placement.ranks, minlength=placement.batch.documents)
    degrees = Counter(int(n) for n in ranks if n > 1)
    whole = f"{int((ranks == 1).sum())} of {len(ranks)} documents on one rank"
    if not degrees:
        return f"{settings}: {whole}"
    listed = ", ".join(f"{count} x {n}" if count > 1 else str(n) for n, count in sorted(degrees.items(), reverse=True))
    return f"{settings}: {whole}, others on {listed} ranks"
