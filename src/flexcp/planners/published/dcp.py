"""dcp: DCP's placement (arXiv 2510.10620, SOSP'25), by partitioning a hypergraph of token and computation blocks.

The steps of the paper, and how each is done here:

1. *Blocks*: `dcp:1024` cuts documents into blocks of this many tokens; without a number, a batch has about 128 blocks.
   The queries, keys and outputs of a token block stay together. A computation block is a (query block, key block, KV
   head with its query heads), as fine as DCP's.
2. *Hypergraph* (:mod:`flexcp.planners.hypergraph.model`, the one that our `hypergraph` uses): vertices are token blocks
   and computation blocks. A net joins a block of queries, keys or outputs with everything that reads or writes it, and
   its weight is its bytes, so that the sum of weight x (parts spanned - 1) is the forward volume.
3. *Partition* over nodes with tolerance 0.4, then inside each node over its ranks with tolerance 0.1, by Mt-KaHyPar
   without an initial partition. A block that another node keeps is a vertex with almost no weight when its readers are
   divided, as in DCP's code. The paper asks for both tokens and work within the tolerance, but Mt-KaHyPar has only one
   weight per vertex. In DCP's code tokens outweigh all work, and work is then up to nine times the mean for ragged
   lengths. Here two weightings are tried, tokens far above work and both equal, and the partition whose largest excess
   over a mean is smaller is taken.
4. *Divisions*: keys arrive in a few stages, chosen by DCP's greedy rule
   (:mod:`~flexcp.planners.published.dcp_divisions`).
5. *Two levels*: what several ranks of a node need crosses to the node once and is passed on inside.

Partitioning is seeded and runs on one thread with a deterministic preset, but it is compiled C++ with floating point
inside, so plans must be made once and shared. Planning takes seconds and needs the same package as `hypergraph`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.totals import imbalance
from flexcp.plan.placement import Placement, Regions, Runs, Wishes
from flexcp.planners.hypergraph.model import Tiling, make_tiling
from flexcp.planners.hypergraph.mt_kahypar import SCALE, net_lists, partitioner
from flexcp.planners.hypergraph.partition import Partition, placement_of
from flexcp.planners.published.dcp_divisions import divisions_of
from flexcp.planners.published.ranges import refuse_layout, whole_number
from flexcp.planners.request import Request, refuse_tolerances
from flexcp.planners.token_runs import check_cap

Ints = NDArray[np.int64]
NODE_TOLERANCE, RANK_TOLERANCE = 0.4, 0.1
"""The tolerances of the paper, for the division over nodes and over the ranks of a node."""
TOKEN_SHARES = (1, 64)
"""How many times as much as all work all tokens weigh, one entry for each weighting that is tried.

With 1 both have equal shares; with 64 tokens decide, as in DCP's code.
"""
SEED = 0
"""The seed of Mt-KaHyPar."""


def dcp(request: Request) -> Placement:
    """Place a batch as DCP does: token blocks and computation blocks on nodes, then on ranks; few bytes move."""
    return placed_within(request, NODE_TOLERANCE, RANK_TOLERANCE)


def placed_within(
    request: Request, node_tolerance: float, rank_tolerance: float, token_shares: Sequence[int] = TOKEN_SHARES
) -> Placement:
    """Place a batch as :func:`dcp` does, with given tolerances and given weightings of tokens against work.

    A tolerance is how far above the mean a node, or a rank of a node, may be (0.1 is 10 %). ``token_shares`` are as in
    ``TOKEN_SHARES``. Of the weightings, the one with the least excess of tokens or work over their means is taken.
    """
    size = whole_number(request.argument, "dcp", "tokens in a block", 1024)
    refuse_layout(request, "dcp")
    refuse_tolerances(request)
    partitioner("dcp")
    start = _on_one_rank(request)
    whole = Partition(make_tiling(request, start, size), start)
    found = [_cut(request, whole, share, node_tolerance, rank_tolerance) for share in token_shares]
    partition = min(found, key=lambda one: max(imbalance(one.loads), imbalance(one.tokens)))
    placement = placement_of(request, start, partition)
    check_cap(placement.runs, request)
    divisions = divisions_of(partition, request.cluster.ranks_per_node)
    return replace(placement, wishes=Wishes(divisions=divisions))


def _cut(request: Request, start: Partition, share: int, node_tolerance: float, rank_tolerance: float) -> Partition:
    """Return a copy of ``start`` in which blocks and tiles are divided over nodes, then over the ranks of each node.

    In the partitioner's weights, all tokens weigh ``share`` times as much as all work.
    """
    found, tiling, each = start.copy(), start.tiling, request.cluster.ranks_per_node
    count = len(tiling.blocks)
    everything = np.ones(count + len(tiling.tiles), bool)
    node = _divided(tiling, everything, request.cluster.nodes, node_tolerance, share)
    rank = node * each
    for number in range(request.cluster.nodes):
        mine = node == number
        rank[mine] += _divided(tiling, mine, each, rank_tolerance, share)[mine]
    found.owner, found.worker = rank[:count], rank[count:]
    found.count()
    return found


def _on_one_rank(request: Request) -> Placement:
    """Return a placement with everything on rank 0 and a region for each document and KV head.

    Only its cuts are used: blocks and tiles begin and end where they do.
    """
    batch, shape = request.batch, request.shape
    runs = Runs(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([batch.tokens]))
    document = np.repeat(np.arange(batch.documents), shape.kv_heads)
    head = np.tile(np.arange(shape.kv_heads), batch.documents) * (shape.heads // shape.kv_heads)
    ends = {"q1": batch.lengths[document], "k1": batch.lengths[document], "h1": head + shape.heads // shape.kv_heads}
    regions = Regions.make(len(document), rank=0, document=document, q0=0, k0=0, h0=head, **ends)
    return Placement(batch, request.ranks, 0, runs, (regions,) * len(batch.masks))


def _divided(tiling: Tiling, mine: NDArray[np.bool_], parts: int, tolerance: float, share: int) -> Ints:
    """Divide the blocks and tiles that ``mine`` selects into ``parts`` parts; return the part of each.

    ``mine`` covers all token blocks, then all tiles. Blocks that tiles of ``mine`` read but that are not in ``mine``
    take part with the least weight; the result holds their parts too, and 0 for everything else.
    """
    found = np.zeros(len(mine), np.int64)
    count = len(tiling.blocks)
    taking_part = mine.copy()
    if not mine.all():
        read = tiling.pins.net[mine[count + tiling.pins.tile]]
        taking_part[tiling.nets.block[read]] = True
    vertex = np.full(len(mine), -1, np.int64)
    vertex[taking_part] = np.arange(np.count_nonzero(taking_part))
    if parts == 1 or np.count_nonzero(mine) < 2:
        return found
    nets, prices = net_lists(tiling, vertex, parts)
    weights = _weights(tiling, mine, share)[taking_part]
    found[taking_part] = _partitioned(nets, prices, weights.tolist(), parts, tolerance / share)
    return found


def _weights(tiling: Tiling, mine: NDArray[np.bool_], share: int) -> Ints:
    """Return the partitioner's weight of each block and tile: its share of the tokens or work of ``mine``.

    All tokens together weigh ``share`` times as much as all work. The least weight is 1, also for what is not in
    ``mine``.
    """
    tokens, work = tiling.blocks.stop - tiling.blocks.start, tiling.tiles.load
    kept, busy = np.where(mine[: len(tokens)], tokens, 0), np.where(mine[len(tokens) :], work, 0)
    parts = (kept * (share / max(1, int(kept.sum()))), busy / max(1, int(busy.sum())))
    return np.maximum((np.concatenate(parts) * (SCALE / (share + 1))).astype(np.int64), 1)


def _partitioned(nets: list[list[int]], prices: list[int], weights: list[int], parts: int, tolerance: float) -> Ints:
    """Return the part of each vertex that Mt-KaHyPar finds without an initial partition.

    ``nets[i]`` lists the vertices of net i, ``prices`` are the weights of nets and ``weights`` those of vertices.
    """
    import mtkahypar

    mt: Any = partitioner("dcp")
    mtkahypar.set_seed(SEED)
    context = mt.context_from_preset(mtkahypar.PresetType.DETERMINISTIC)
    context.logging = False
    context.set_partitioning_parameters(parts, tolerance, mtkahypar.Objective.KM1)
    graph = mt.create_hypergraph(context, len(weights), len(nets), nets, weights, prices)
    return np.array(graph.partition(context).get_partition(), np.int64)
