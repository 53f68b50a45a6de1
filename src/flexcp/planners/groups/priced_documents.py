"""Priced documents: what a batch's documents cost, the arithmetic under :mod:`flexcp.planners.groups.groups`.

Costs are in *pairs* (:mod:`flexcp.cost`) over all layers, all integers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flexcp.cost import TILE_ROWS
from flexcp.planners.request import Request
from flexcp.shape import Kind
from flexcp.simulator.copies import copy_mbps

Ints = NDArray[np.int64]
MILLION = 1_000_000
LARGEST_LOAD = 1 << 49
"""Loads of a batch are shifted below this together, so that compiled loops may multiply them by a pace."""


@dataclass(frozen=True, eq=False)
class PricedDocuments:
    """Attention and load (attention and the rest of all layers) of every document; a token's ``linear`` price, and what
    a row costs besides its area; ``exchange[u]`` is a token whose heads are split over ``u`` ranks, for each of them.
    """

    attention: Ints
    load: Ints
    linear: int
    row: int
    exchange: dict[int, int]


def price_documents(request: Request, teams: list[int]) -> PricedDocuments:
    """The prices of a batch, for teams of the given sizes."""
    batch, cost = request.batch, request.cost
    documents = np.arange(batch.documents, dtype=np.int64)
    layers = sum(m.layers for m in batch.masks)
    area = batch.weighted_rows_area(documents, np.zeros_like(documents), batch.lengths)
    attention = area + layers * cost.row_tiles_work(batch.lengths)
    linear = cost.pairs_per_token(request.shape) * layers
    load = attention + linear * batch.lengths
    shift = max(0, int(load.sum()).bit_length() - LARGEST_LOAD.bit_length())
    return PricedDocuments(
        attention >> shift,
        np.maximum(load >> shift, 1),
        linear >> shift,
        linear + layers * cost.row_tile_pairs // TILE_ROWS,
        {u: layers * _exchange(request, u) >> shift for u in teams},
    )


def _exchange(request: Request, team: int) -> int:
    """Pairs in whose time a rank of a team receives its heads of a token from another, forward and backward,
    and returns results.

    Half of what travels is taken to be hidden; what a rank copies around it never is.
    """
    cost, shape, cluster = request.cost, request.shape, request.cluster
    alone = replace(cluster, nodes=1, ranks_per_node=1, speeds=())
    pairs = np.array([shape.heads * MILLION], np.int64)
    pair_ns = int(sum(cost.attention_ns(pairs, shape, alone, backward)[0] for backward in (False, True)))
    wire, precise = shape.bytes_per_token_head().T
    queries, keys = -(-shape.heads // team), -(-shape.kv_heads // team)
    inputs = queries * int(2 * wire[Kind.Q] + wire[Kind.DO]) + 2 * keys * int(wire[Kind.KV])
    results, summed = (queries * int(e[Kind.O] + e[Kind.DQ]) + keys * int(e[Kind.DKV]) for e in (wire, precise))
    # Inputs are read and written at both ends; results are cleared, packed, and read twice and written where they are
    # merged.
    copied = 4 * inputs + 2 * results + 4 * summed
    # A million tokens, of which a rank keeps its part.
    travelling, copying = (size * MILLION * (team - 1) // team for size in (inputs + results, copied))
    ns = int(cost.link_ns(np.array([travelling], np.int64), cluster.intra_mbps)[0]) // 2
    return (ns + copying * 1000 // copy_mbps(cluster)) // max(1, pair_ns)
