"""Search: find the pieces of all documents, for given settings of :mod:`flexcp.planners.groups.groups`.

Documents are dealt to nodes, then to the teams of each node, and are then split by heads over a team or kept whole on
one of its ranks. Units are dealt equal loads, and a load is time over both directions. But ranks that shard the model
(FSDP) wait for each other in every layer. A step then takes as long as the slowest team in the forward plus the slowest
team in the backward, and these can be different teams, because attention spends a smaller share of its time in the
forward than the rest of a layer does: teams with many tokens are late in the forward and those with much attention in
the backward. Also, loads do not include what it costs to split documents by heads.

So documents are dealt several times, with attention weighing less against tokens each time, down to its weight in the
forward. The pieces with the least time are taken, by an estimate that includes the cost of splitting. If ranks do not
wait for each other in every layer, or if there are very many documents, documents are dealt once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.planners.groups.priced_documents import PricedDocuments, million_pairs_ns
from flexcp.planners.groups.rows import CLOSE_TO_EVEN, Pieces
from flexcp.planners.request import Request

Ints = NDArray[np.int64]
WHOLE = 1000
"""Weights and shares are counted in parts of this many."""
LIGHTER = 2
"""The number of weights below ``WHOLE`` that are tried."""
LEVEL = 400
"""Without slack, a unit may be one part in this many above the mean."""
PASSES_OF_CUT = 2
"""With slack, how often the rows of a cut document are passed more often than those of a whole one.

They are passed again for keys that arrive, and what arrives is copied and slows down the work beside it. Without slack,
where levelling by exact work decides, they count as passed once more.
"""
SPLITS = ("few", "all", "shared", "keys")
"""The values of ``split``: the order of :mod:`flexcp.planners.groups.compiled_search`, then ``keys``.

With ``keys``, teams split the same documents as with ``shared``.
"""
MANY_DOCUMENTS = 50_000
"""With more documents than this, only one weight is tried."""
TOKENS_FORWARD = 333
"""The share of the forward in the time of a token outside attention: its backward has twice as many products."""


class Found(NamedTuple):
    """The pieces of all documents, and the estimated time of a step, in the unit of loads.

    ``pours`` says that units were short for the groups of long documents, so that pouring these gives other pieces.
    """

    pieces: Pieces
    time: int
    pours: bool


def find_pieces(request: Request, priced: PricedDocuments, team: int, slack: int, poured: bool, split: str) -> Found:
    """Return the pieces of all documents, each with the rank or team that it is on, and an estimate of their time.

    ``team``, ``slack``, ``poured`` (``long``) and ``split`` are the settings, as in
    :mod:`flexcp.planners.groups.groups`.
    """
    from flexcp.planners.groups.compiled_dealing import ATTENTION, COLUMNS, DOC, EXTRA, HI, LO, LOAD
    from flexcp.planners.groups.compiled_search import deal_to_ranks

    items = np.zeros((request.batch.documents, COLUMNS), np.int64)
    items[:, DOC] = np.arange(request.batch.documents)
    items[:, HI] = request.batch.lengths
    items[:, ATTENTION] = priced.attention
    speeds = np.array(request.cluster.rank_speeds, np.int64)
    node, room = request.cluster.ranks_per_node, request.token_cap or 0
    parts = max(1, 100 // slack) if slack else LEVEL
    which = SPLITS.index("shared" if split == "keys" else split)
    if not coupled(request) and (team == 1 or slack == 0):
        items[:, EXTRA] = priced.cut * (PASSES_OF_CUT if slack else 1)
    settings = np.array([node, team, parts, poured, which, room, priced.token, priced.exchange.get(team, 0)], np.int64)
    forward = forward_share(request)
    found: list[tuple[int, int, Ints, Ints]] = []
    pours = False
    for weight in _weights(request, team, forward):
        items[:, LOAD] = np.maximum(priced.load - priced.attention * (WHOLE - weight) // WHOLE, 1)
        if team == 1:
            _price_as_cut(items, request.ranks, parts)
        table, where, times, short = deal_to_ranks(items, speeds, settings)
        pours |= bool(short)
        found.append((_step_time(times, forward, request.batch.layers), len(found), table, where))
    time, _, table, where = min(found, key=lambda one: one[:2])
    order = np.lexsort((table[:, LO], table[:, DOC]))
    table, where = table[order], where[order]
    pieces = Pieces(where[:, 0], where[:, 1], table[:, DOC], table[:, LO], table[:, HI])
    return Found(_small_parts_last(_joined(pieces), node), time, pours)


def _price_as_cut(items: Ints, ranks: int, parts: int) -> None:
    """Add what cutting costs to the loads of items too large for a rank, so that nodes that get them know it.

    A rank may be one part in ``parts`` above the mean.
    """
    from flexcp.planners.groups.compiled_dealing import ATTENTION, EXTRA, HI, LOAD

    even = int(items[:, LOAD].sum()) // ranks
    long = items[:, LOAD] > even + even // parts
    more = np.where(long, items[:, EXTRA] * items[:, HI], 0)
    items[:, LOAD] += more
    items[:, ATTENTION] += more
    items[long, EXTRA] = 0


def coupled(request: Request) -> bool:
    """Return whether ranks wait for each other in every layer of the request's step, as they do with FSDP."""
    return request.training is not None and request.training.sync == "fsdp"


def _step_time(times: Ints, forward: int, layers: int) -> int:
    """Return the time of a step in which ranks wait for each other in every layer, in the unit of ``times``.

    ``times`` are those of :func:`flexcp.planners.groups.compiled_search.deal_to_ranks`, and ``forward`` is the share of
    the forward in the time of attention. A rank may be almost one layer ahead of others, so teams that are early in the
    forward and late in the backward gain the time of one layer.
    """
    attention, others = times.T
    first = attention * forward // WHOLE + others * TOKENS_FORWARD // WHOLE
    second = attention + others - first
    return max(int((first + second).max()), int(first.max()) * (layers - 1) // layers + int(second.max()))


def forward_share(request: Request) -> int:
    """Return the share of the forward in the time of attention, per mille."""
    forward, backward = million_pairs_ns(request)
    return WHOLE * forward // (forward + backward)


def _weights(request: Request, team: int, forward: int) -> list[int]:
    """Return the weights of attention with which documents are dealt; the first is ``WHOLE``.

    ``forward`` is the share of the forward in the time of attention.
    """
    if not coupled(request) or team == request.ranks or request.batch.documents > MANY_DOCUMENTS:
        return [WHOLE]
    least = min(WHOLE, forward * WHOLE // TOKENS_FORWARD)
    return [WHOLE - (WHOLE - least) * step // LIGHTER for step in range(LIGHTER + 1)]


def _small_parts_last(pieces: Pieces, node: int) -> Pieces:
    """Return the pieces with those of each document in another order: nodes that have most of it come first.

    Inside a node, the largest pieces come first. The last pieces get the middle rows of a zig-zag, which read the
    fewest keys, so ranks that compute little of a document also receive little of it. ``node`` is the number of ranks
    of a node.
    """
    tokens, at = pieces.hi - pieces.lo, pieces.first // node
    _, of_node = np.unique(pieces.document * (1 + int(at.max())) + at, return_inverse=True)
    share = np.bincount(of_node, tokens).astype(np.int64)[of_node]
    order = np.lexsort(
        (pieces.lo, _below_largest(tokens, of_node), at, _below_largest(share, pieces.document), pieces.document)
    )
    pieces, tokens = pieces.take(order), tokens[order]
    stop = np.cumsum(tokens)
    begin = (stop - tokens)[np.searchsorted(pieces.document, pieces.document)]
    return replace(pieces, lo=stop - tokens - begin, hi=stop - begin)


def _below_largest(amount: Ints, of: Ints) -> Ints:
    """Return how far each amount is below the largest of its group ``of``, in parts that are close to even."""
    largest = np.zeros(int(of.max()) + 1, np.int64)
    np.maximum.at(largest, of, amount)
    return (largest[of] - amount) * CLOSE_TO_EVEN // largest[of]


def _joined(pieces: Pieces) -> Pieces:
    """Return the pieces with adjacent pieces of one document on the same ranks joined."""
    apart = np.ones(len(pieces), bool)
    apart[1:] = np.any(
        [np.diff(getattr(pieces, name)) != 0 for name in ("first", "size", "document")]
        + [pieces.lo[1:] != pieces.hi[:-1]],
        axis=0,
    )
    return replace(pieces.take(apart), hi=pieces.hi[np.append(np.flatnonzero(apart)[1:], len(pieces)) - 1])
