"""Bounds: what no placement of a batch is faster than, one pass at a time.

- *compute*: the attention of the batch divided perfectly over the ranks, each as fast as it is.
- *link*: bytes that must move because a document is more work than a unit (a rank, or a node) can do in the time. Let a
  unit do w pairs (over query heads) of a document of n tokens. For every KV head it needs k keys and r rows with
  r * k * g >= its pairs there (g query heads to a KV head), so by the inequality of means it reads and returns at least
  ``2 * sqrt(b * c * w)`` bytes, b being the bytes of a key and c those of a row, both ways. It saves what it keeps
  itself: with m tokens at most ``m * (b + g * c)`` for each head. Spread over all H KV heads, a unit that keeps
  ``m* = 2 * sqrt(b * c * w / H) / (b + g * c)`` tokens may need nothing, one with fewer always does; since that need is
  concave in m, the least total has ``n / m*`` units that need nothing, and all others keep none. So of ``A / w`` units
  all but ``n / m*`` move ``2 * sqrt(b * c * w)``. All ports of all units together must carry that, ranks through both
  of their ports, nodes through the network's. More time means more work a unit can do and fewer bytes: the bound is
  where both meet.
- *granularity*: the least that a rank with any work does: it starts a kernel, which has a row tile of one head. More of
  a document has to stay together in no plan: rows, keys and heads can all be divided.

``floor`` is the largest of the three; a plan's *optimality* is its time over that. They leave out that row tiles
multiply when documents are cut, so 1.0 is out of reach wherever anything is cut.
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
"""Halvings of the search for the time in which compute and bytes meet."""


@dataclass(frozen=True)
class Bounds:
    """Nanoseconds of one pass of one mask's layer, each of which no placement is faster than."""

    compute: int
    link: int
    granularity: int

    @property
    def floor(self) -> int:
        return max(self.compute, self.link, self.granularity, 1)


def pass_bounds(batch: Batch, mask: int, shape: Shape, cluster: Cluster, cost: CostModel, backward: bool) -> Bounds:
    """The bounds of one layer's attention under a mask in one direction."""
    alone = replace(cluster, nodes=1, ranks_per_node=1, speeds=())
    work = document_work(batch, shape, cost)[mask]
    whole = int(cost.attention_ns(work.sum(keepdims=True), shape, alone, backward)[0])
    compute = -(-whole * NOMINAL_SPEED // sum(cluster.rank_speeds))
    documents = np.arange(batch.documents)
    areas = batch.masks[mask].rows_area(documents, np.zeros_like(documents), batch.lengths) * shape.heads
    # Pairs x heads of one rank in a nanosecond, as many as the fastest does.
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
    """The time in which what units cannot do alone has moved, the slower of both levels."""
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
    """Bytes that move when no unit does more than ``work`` pairs of a document."""
    if work <= 0:
        return math.inf
    each = 2 * math.sqrt(key * row * work)
    enough = 2 * math.sqrt(key * row * work / shape.kv_heads) / (key + shape.queries_per_key * row)
    units = np.floor(areas / work) - np.ceil(lengths / enough)
    return float(np.maximum(units, 0).sum() * each)
