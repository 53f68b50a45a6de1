"""Bounds: lower bounds on the time of one pass over a batch, whatever the placement.

- *compute*: the attention of the batch, divided perfectly over the ranks according to their speeds.
- *link*: the bytes that must move because a document has more work than a unit (a rank, or a node) can do in the time.
  Let a unit do w pairs (counted over query heads) of a document of n tokens. For every KV head it needs k keys and r
  rows with r * k * g >= its pairs of that head (g query heads per KV head). By the inequality of arithmetic and
  geometric means it therefore reads and returns at least ``2 * sqrt(b * c * w)`` bytes, where b is the bytes of a key
  and c the bytes of a row, both directions together. What the unit keeps itself does not move: with m tokens, at most
  ``m * (b + g * c)`` bytes per head. Over all H KV heads, a unit that keeps
  ``m* = 2 * sqrt(b * c * w / H) / (b + g * c)`` tokens may need nothing, and a unit that keeps fewer always needs
  something. This need is concave in m, so the total is least if ``n / m*`` units need nothing and all others keep no
  tokens. So of ``A / w`` units, A being the pairs of the document, all but ``n / m*`` move ``2 * sqrt(b * c * w)``
  bytes. The ports of all units together must carry this: both ports of every rank, or the network ports of every node.
  In more time a unit can do more work, so fewer bytes must move; the bound is the time at which the two agree.
- *granularity*: the least time of a rank that has any work: it starts a kernel with one row tile of one head. Nothing
  larger has to stay together, because rows, keys and heads can all be divided.

``floor`` is the largest of the three, and a plan's *optimality* is its time divided by ``floor``. The bounds leave out
the row tiles that are added when documents are cut, so an optimality of 1.0 cannot be reached if anything is cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from flexcp.batch import Batch
from flexcp.clusters import NOMINAL_SPEED, Cluster
from flexcp.cost import CostModel
from flexcp.schedule.predict import document_work
from flexcp.shape import Kind, Shape

STEPS = 60
"""The number of halvings in the search for the time at which compute and bytes agree."""


@dataclass(frozen=True)
class Bounds:
    """Three lower bounds on attention in one direction, in nanoseconds.

    ``compute``: its pairs, divided perfectly. ``link``: the bytes that must move. ``granularity``: the least that a
    rank with any work does. The module's docstring derives them.
    """

    compute: int
    link: int
    granularity: int

    @property
    def floor(self) -> int:
        """The largest of the three bounds, at least 1."""
        return max(self.compute, self.link, self.granularity, 1)


def pass_bounds(batch: Batch, mask: int, shape: Shape, cluster: Cluster, cost: CostModel, backward: bool) -> Bounds:
    """Return the bounds of one layer's attention in one direction, under mask number ``mask`` of the batch."""
    alone = replace(cluster, nodes=1, ranks_per_node=1, speeds=())
    work = document_work(batch, shape, cost)[mask]
    whole = int(cost.attention_ns(work.sum(keepdims=True), shape, alone, backward)[0])
    compute = -(-whole * NOMINAL_SPEED // sum(cluster.rank_speeds))
    documents = np.arange(batch.documents)
    areas = batch.masks[mask].rows_area(documents, np.zeros_like(documents), batch.lengths) * shape.heads
    # The pairs x heads that the fastest rank computes in a nanosecond.
    a_lot = np.array([10**9], np.int64)
    speed = 1e9 / int(cost.attention_ns(a_lot, shape, alone, backward)[0]) * max(cluster.rank_speeds) / NOMINAL_SPEED
    link = _link_ns(areas.astype(float), batch.lengths.astype(float), speed, shape, cluster, cost, backward)
    tile = int(cost.attention_ns(np.array([cost.row_tile_pairs], np.int64), shape, alone, backward)[0])
    granularity = cost.kernel_ns + tile * NOMINAL_SPEED // max(cluster.rank_speeds) if areas.any() else 0
    return Bounds(compute, math.ceil(link), granularity)


def _link_ns(
    areas: np.ndarray,
    lengths: np.ndarray,
    speed: float,
    shape: Shape,
    cluster: Cluster,
    cost: CostModel,
    backward: bool,
) -> float:
    """Return the least nanoseconds in which the unavoidable bytes can move, for the slower of the two levels.

    ``areas`` are the (query, key) pairs x heads of each document and ``lengths`` its tokens; ``speed`` is how many
    pairs x heads the fastest rank computes in a nanosecond. The levels are ranks with both of their ports, and nodes
    with their network ports.
    """
    each = shape.bytes_per_token_head()[:, 0].astype(float)
    key, row = each[Kind.KV], each[Kind.Q] + each[Kind.O]
    if backward:
        key, row = key + each[Kind.DKV], each[Kind.Q] + each[Kind.DO] + each[Kind.DQ]
    per_ns = cost.link_efficiency / 1e6  # megabytes a second are 1e-3 bytes a nanosecond, efficiency is per mille
    levels = [(1, cluster.ranks * (cluster.intra_mbps + cluster.inter_mbps * (cluster.nodes > 1)))]
    if cluster.nodes > 1:
        levels.append((cluster.ranks_per_node, cluster.ranks * cluster.inter_mbps))
    found = 0.0
    for ranks_of_unit, mbps in levels:

        def needed(ns: float, ranks: int = ranks_of_unit, mbps: int = mbps) -> float:
            moved = unavoidable_bytes(areas, lengths, speed * ranks * ns, key, row, shape)
            return moved / (mbps * per_ns)

        low, high = 0.0, float(areas.sum()) / speed
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if needed(middle) > middle else (low, middle)
        found = max(found, low)
    return found


def unavoidable_bytes(
    areas: np.ndarray, lengths: np.ndarray, work: float, key: float, row: float, shape: Shape
) -> float:
    """Return the bytes that must move if no rank or node (a unit) does more than ``work`` of a document.

    ``work`` and ``areas`` (of each document) are (query, key) pairs x heads, and ``lengths`` the tokens of each
    document; ``key`` and ``row`` are the bytes of a key and of a row of one head.
    """
    if work <= 0:
        return math.inf
    each = 2 * math.sqrt(key * row * work)
    enough = 2 * math.sqrt(key * row * work / shape.kv_heads) / (key + shape.queries_per_key * row)
    units = np.floor(areas / work) - np.ceil(lengths / enough)
    return float(np.maximum(units, 0).sum() * each)
