"""Levelling: move tokens between the pieces of cut documents until all ranks have the same work.

Documents are dealt by loads that treat all tokens of a document alike. The rows that a rank then gets cost a little
more or less: row tiles are passed once for keys at home and once for keys that arrive, and the first piece of a causal
document reads few of the latter. So the work of a placement is counted exactly, and units (ranks or teams) that share a
document give each other tokens of it.

A shared document is a *bridge* between units. Of all bridges, a forest is used: those over which most can move, without
cycles. In each of its trees, units give away what they have above the mean of the tree, or get what they lack, from the
leaves to the root, as far as the piece that gives has tokens. Teams are levelled first, then single ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.totals import sums
from flexcp.plan.placement import Placement
from flexcp.planners.groups.priced_documents import PricedDocuments
from flexcp.planners.groups.rows import Pieces
from flexcp.planners.request import Request
from flexcp.schedule.work import count_pairs, cut_regions, rank_work

Ints = NDArray[np.int64]


class Bridge(NamedTuple):
    """Two units that share a document, and the number of the largest piece that each has of it."""

    one: int
    other: int
    piece: int
    other_piece: int


def level(request: Request, priced: PricedDocuments, pieces: Pieces, placement: Placement) -> Pieces:
    """Return the pieces with tokens moved between them; ``placement`` is that of the pieces as they are."""
    load, tokens = _loads(request, placement) >> priced.shift, pieces.hi - pieces.lo
    each = np.maximum(1, priced.load // request.batch.lengths)[pieces.document]  # the load of a token of each piece
    speeds = np.array(request.cluster.rank_speeds, np.int64)
    for size in sorted(set(pieces.size.tolist()), reverse=True):
        units, paces = (amount.reshape(-1, size).sum(axis=1) for amount in (load, speeds))
        bridges = _forest(_bridges(pieces, tokens, size), len(units))
        before = units.copy()
        _level(units, paces, bridges, tokens, each)
        load += np.repeat((units - before) // size, size)
    return _cut_again(pieces, tokens)


def _loads(request: Request, placement: Placement) -> Ints:
    """Return the work of each rank over all layers, including its tokens, in (query, key) pairs."""
    masks, linear = request.batch.masks, request.cost.pairs_per_token(request.shape)
    found = placement.tokens * linear * sum(mask.layers for mask in masks)
    for mask, regions in zip(masks, placement.regions, strict=True):
        pairs = count_pairs(placement, regions, cut_regions(placement, mask, regions))
        work = rank_work(placement, regions, pairs, request.cost)
        found = found + (work.own + work.rest) * mask.layers // request.shape.heads
    return found


def _bridges(pieces: Pieces, tokens: Ints, size: int) -> list[Bridge]:
    """Return the bridges between units of ``size`` ranks, those over which most tokens can move first.

    The unit with the largest piece of a document has a bridge to all others that have a piece of it.
    """
    found: list[tuple[int, Bridge]] = []
    units = pieces.first // size
    borders = np.flatnonzero(np.diff(pieces.document, prepend=-1, append=-1))
    cut = np.diff(borders) > 1
    for begin, end in zip(borders[:-1][cut].tolist(), borders[1:][cut].tolist(), strict=True):
        largest: dict[int, int] = {}  # unit to its largest piece, the unit with the largest of all first
        for at in sorted(range(begin, end), key=lambda at: (-int(tokens[at]), at)):
            if pieces.size[at] == size:
                largest.setdefault(int(units[at]), at)
        sharing = list(largest)
        for unit in sharing[1:]:
            bridge = Bridge(sharing[0], unit, largest[sharing[0]], largest[unit])
            found.append((int(tokens[bridge.other_piece]), bridge))
    return [bridge for _, bridge in sorted(found, key=lambda one: (-one[0], one[1]))]


def _forest(bridges: list[Bridge], units: int) -> list[Bridge]:
    """Return bridges that connect the same units without cycles, from leaves to roots.

    The first unit of a returned bridge is nearer to its root. Bridges that come first are preferred.
    """
    tree = list(range(units))

    def root_of(unit: int) -> int:
        while tree[unit] != unit:
            tree[unit] = tree[tree[unit]]
            unit = tree[unit]
        return unit

    beside: dict[int, list[Bridge]] = {}
    for bridge in bridges:
        one, other = root_of(bridge.one), root_of(bridge.other)
        if one != other:
            tree[other] = one
            beside.setdefault(bridge.one, []).append(bridge)
            beside.setdefault(bridge.other, []).append(
                Bridge(bridge.other, bridge.one, bridge.other_piece, bridge.piece)
            )
    found: list[Bridge] = []
    seen: set[int] = set()
    for root in beside:
        if root in seen:
            continue
        seen.add(root)
        queue = [root]
        for unit in queue:
            outwards = [bridge for bridge in beside[unit] if bridge.other not in seen]
            seen.update(bridge.other for bridge in outwards)
            queue += [bridge.other for bridge in outwards]
            found += outwards
    return found[::-1]


def _level(units: Ints, paces: Ints, bridges: list[Bridge], tokens: Ints, each: Ints) -> None:
    """Move tokens over the bridges until units have loads in proportion to their paces, as far as possible.

    ``units`` are the loads of all units and ``tokens`` the tokens of all pieces; both are changed. ``each`` is the load
    of one token of each piece. Nothing is moved if the slowest unit would then be slower: a unit that could not pass on
    all that it was given may be.
    """
    before = units.copy(), tokens.copy()
    tree = np.arange(len(units), dtype=np.int64)
    for bridge in reversed(bridges):
        tree[bridge.other] = tree[bridge.one]
    whole, pace = (sums(tree, amount, len(units))[tree] for amount in (units, paces))
    target = whole // pace * paces + whole % pace * paces // pace
    for bridge in bridges:
        moved = int(units[bridge.other] - target[bridge.other]) // int(each[bridge.piece])
        moved = max(min(moved, int(tokens[bridge.other_piece])), -int(tokens[bridge.piece]))
        tokens[bridge.other_piece] -= moved
        tokens[bridge.piece] += moved
        units[bridge.other] -= moved * each[bridge.piece]
        units[bridge.one] += moved * each[bridge.piece]
    if int((units // paces).max()) > int((before[0] // paces).max()):
        units[:], tokens[:] = before


def _cut_again(pieces: Pieces, tokens: Ints) -> Pieces:
    """Return the pieces with other numbers of tokens; pieces without tokens are left out."""
    stop = np.cumsum(tokens)
    first = np.flatnonzero(np.diff(pieces.document, prepend=-1))
    begin = np.repeat((stop - tokens)[first], np.diff(np.append(first, len(pieces))))
    return replace(pieces, lo=stop - tokens - begin, hi=stop - begin).take(tokens > 0)
