"""Levelling: move tokens between the pieces of cut documents until all ranks have the same work.

Documents are dealt by loads that treat all tokens of a document alike. The rows that a rank then gets cost a little
more or less: row tiles are passed once for keys at home and once for keys that arrive, and the first piece of a causal
document reads few of the latter. So the work of a placement is counted exactly, and units (ranks or teams) that share a
document give each other tokens of it.

Cut documents connect units. Of these links, a forest is used: those over which most can move, without circles. In
each of its trees, units give away what they have above the mean of the tree, or get what they lack, from the leaves to
the root, as far as the piece that gives has tokens. Teams are levelled first, then single ranks.
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


class Link(NamedTuple):
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
        links = _forest(_links(pieces, tokens, size), len(units))
        before = units.copy()
        _level(units, paces, links, tokens, each)
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


def _links(pieces: Pieces, tokens: Ints, size: int) -> list[Link]:
    """Return the links between units of ``size`` ranks, those over which most tokens can move first.

    The unit with the largest piece of a document is linked to all others that have a piece of it.
    """
    found: list[tuple[int, Link]] = []
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
            link = Link(sharing[0], unit, largest[sharing[0]], largest[unit])
            found.append((int(tokens[link.other_piece]), link))
    return [link for _, link in sorted(found, key=lambda one: (-one[0], one[1]))]


def _forest(links: list[Link], units: int) -> list[Link]:
    """Return links that connect the same units without circles, from leaves to roots: the first unit of a returned link
    is nearer to its root. Links that come first are preferred.
    """
    tree = list(range(units))

    def root_of(unit: int) -> int:
        while tree[unit] != unit:
            tree[unit] = tree[tree[unit]]
            unit = tree[unit]
        return unit

    beside: dict[int, list[Link]] = {}
    for link in links:
        one, other = root_of(link.one), root_of(link.other)
        if one != other:
            tree[other] = one
            beside.setdefault(link.one, []).append(link)
            beside.setdefault(link.other, []).append(Link(link.other, link.one, link.other_piece, link.piece))
    found: list[Link] = []
    seen: set[int] = set()
    for root in beside:
        if root in seen:
            continue
        seen.add(root)
        queue = [root]
        for unit in queue:
            outwards = [link for link in beside[unit] if link.other not in seen]
            seen.update(link.other for link in outwards)
            queue += [link.other for link in outwards]
            found += outwards
    return found[::-1]


def _level(units: Ints, paces: Ints, links: list[Link], tokens: Ints, each: Ints) -> None:
    """Move tokens over the links until units have loads in proportion to their paces, as far as possible.

    ``units`` are the loads of all units and ``tokens`` the tokens of all pieces; both are changed. ``each`` is the load
    of one token of each piece.
    """
    tree = np.arange(len(units), dtype=np.int64)
    for link in reversed(links):
        tree[link.other] = tree[link.one]
    whole, pace = (sums(tree, amount, len(units))[tree] for amount in (units, paces))
    target = whole // pace * paces + whole % pace * paces // pace
    for link in links:
        moved = int(units[link.other] - target[link.other]) // int(each[link.piece])
        moved = max(min(moved, int(tokens[link.other_piece])), -int(tokens[link.piece]))
        tokens[link.other_piece] -= moved
        tokens[link.piece] += moved
        units[link.other] -= moved * each[link.piece]
        units[link.one] += moved * each[link.piece]


def _cut_again(pieces: Pieces, tokens: Ints) -> Pieces:
    """Return the pieces with other numbers of tokens; pieces without tokens are left out."""
    stop = np.cumsum(tokens)
    first = np.flatnonzero(np.diff(pieces.document, prepend=-1))
    begin = np.repeat((stop - tokens)[first], np.diff(np.append(first, len(pieces))))
    return replace(pieces, lo=stop - tokens - begin, hi=stop - begin).take(tokens > 0)
