"""Priced documents: what documents cost, for :mod:`flexcp.planners.groups.groups`.

Costs are integers in *pairs* (:mod:`flexcp.cost`), over all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import numpy as np
from numpy.typing import NDArray

from flexcp.cost import TILE_ROWS
from flexcp.planners.request import Request
from flexcp.shape import Kind
from flexcp.simulator.copies import copy_mbps, own_bytes

Ints = NDArray[np.int64]
MILLION = 1_000_000
LARGEST_LOAD = 1 << 49
"""The loads of a batch are shifted down together until their sum has no more bits than this number.

So compiled loops can multiply them by a pace within 64 bits.
"""


@dataclass(frozen=True, eq=False)
class PricedDocuments:
    """The costs of a batch's documents over all layers, in (query, key) pairs.

    ``attention`` and ``load`` (attention and everything else) are those of each document. ``linear`` is the cost of a
    token in the rest of each layer, and ``token`` adds what clearing and rounding its results costs. ``row`` is the
    cost of a row besides its pairs (``token`` and its share of a row tile). ``cut`` is what a token of a cut document
    costs more than one of a whole document, because rows are passed once more for keys that arrive, and ``exchange[u]``
    the cost of a token that ``u`` ranks split, by heads or by keys, for each of these ranks. All but ``row`` are
    shifted down by ``shift`` bits (``LARGEST_LOAD``).
    """

    attention: Ints
    load: Ints
    linear: int
    token: int
    row: int
    cut: int
    exchange: dict[int, int]
    shift: int


def price_documents(request: Request, teams: list[int], by_keys: bool = False) -> PricedDocuments:
    """Return the costs of a batch's documents, with ``exchange`` for teams of the given sizes.

    With ``by_keys``, the ranks of a team divide keys instead of heads.
    """
    batch, cost = request.batch, request.cost
    documents = np.arange(batch.documents, dtype=np.int64)
    layers = sum(m.layers for m in batch.masks)
    area = batch.weighted_rows_area(documents, np.zeros_like(documents), batch.lengths)
    attention = area + layers * cost.row_tiles_work(batch.lengths)
    linear = cost.pairs_per_token(request.shape) * layers
    token = linear + _own_copies(request) * layers
    row_tile = layers * cost.row_tile_pairs // TILE_ROWS
    load = attention + token * batch.lengths
    shift = max(0, int(load.sum()).bit_length() - LARGEST_LOAD.bit_length())
    return PricedDocuments(
        attention >> shift,
        np.maximum(load >> shift, 1),
        linear >> shift,
        token >> shift,
        token + row_tile,
        row_tile >> shift,
        {u: layers * _exchange(request, u, by_keys) >> shift for u in teams},
        shift,
    )


def _own_copies(request: Request) -> int:
    """Return the cost of clearing and rounding the results of one token in one layer, forward and backward, in pairs.

    Every rank does this for its own tokens, unless nothing moves (:mod:`flexcp.simulator.copies`).
    """
    if request.ranks == 1:
        return 0
    passes = (True,) if request.cluster.writes_results_once else (False, True)
    both = (own_bytes(request.shape, backward) for backward in passes)
    size = sum(2 * precise + final for final, precise in both) * MILLION
    return size * 1000 // copy_mbps(request.cluster) // sum(million_pairs_ns(request))


def million_pairs_ns(request: Request) -> tuple[int, int]:
    """Return the nanoseconds of a million pairs of all heads on one rank, (forward, backward); each at least 1."""
    alone = replace(request.cluster, nodes=1, ranks_per_node=1, speeds=())
    pairs = np.array([request.shape.heads * MILLION], np.int64)
    forward, backward = (
        max(1, int(request.cost.attention_ns(pairs, request.shape, alone, way)[0])) for way in (False, True)
    )
    return forward, backward


def _exchange(request: Request, team: int, by_keys: bool) -> int:
    """Return the cost of a split token for each rank of a team of ``team`` ranks, in pairs of one layer.

    It is the time in which the rank receives its heads of a token from another rank, forward and backward, and returns
    results, with the copies before and after these transfers. With ``by_keys``, it receives no keys, returns partial
    results, and has the query heads of its group (:mod:`flexcp.planners.groups.key_regions`).
    """
    cost, shape, cluster = request.cost, request.shape, request.cluster
    wire, precise = shape.bytes_per_token_head().T
    groups = gcd(team, shape.kv_heads) if by_keys else team
    queries, keys = -(-shape.heads // groups), 0 if by_keys else -(-shape.kv_heads // team)
    inputs = queries * int(2 * wire[Kind.Q] + wire[Kind.DO]) + 2 * keys * int(wire[Kind.KV])
    results, summed = (
        queries * int(e[Kind.O] + e[Kind.DQ]) + keys * int(e[Kind.DKV]) for e in (precise if by_keys else wire, precise)
    )
    # Inputs are read and written at both ends. Results are cleared and packed at the sender, and laid at the receiver.
    copied = 4 * inputs + 3 * results + 2 * summed
    # Bytes of a million tokens, without those that the rank itself keeps.
    travelling, copying = (size * MILLION * (team - 1) // team for size in (inputs + results, copied))
    ns = int(cost.link_ns(np.array([travelling], np.int64), cluster.intra_mbps)[0])
    return (ns + copying * 1000 // copy_mbps(cluster)) // sum(million_pairs_ns(request))
