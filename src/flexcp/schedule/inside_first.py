"""Inside first: a way to cut a pass into stages, the first of which brings everything that comes from the same node.

The stages after it bring what crosses nodes, beside work that hides it.

Transfers inside a node are fast, but slow down the work beside them a lot, because that work leaves many
multiprocessors to them. Transfers that only cross nodes are slow and cost the work beside them little
(:class:`flexcp.cost.Contention`). If every stage has both kinds (:mod:`flexcp.schedule.stages`), the first kind slows
down all work. If they are kept apart, it slows down only the work of the first and the last slot:

    slot 0        own work, first share    | queries and keys from the same node
    slot 1        work on those            | keys from other nodes, first part
    slot 2 .. n   work on the last part    | next part, gradients of the part before the last
    slot n + 1    work on the last part    | gradients of the part before it
    slot n + 2    own work, second share   | gradients of the last part and of the node, results of moved queries

The first slot after the exchange inside nodes has to hide the first part, and gradients of the last part have little
work beside them. So parts need not be equal: in the forward the first one may be the smallest, in the backward the last
one. The number of parts, their sizes and the share of own work that is held back are chosen for the least time under
contention over all ranks together. If nothing crosses nodes, there is a single stage. Passes in which everything
crosses nodes, keys are relayed or queries cross nodes are not cut in this way.
"""

from __future__ import annotations

from itertools import accumulate, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.totals import sums
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.plan.placement import Placement, Regions
from flexcp.schedule.flows import Flows, Moves, exchange_ns
from flexcp.schedule.routes import Needs
from flexcp.schedule.stages import MANY_PEERS, MOST_STAGES, PARTS, Peers, Stages
from flexcp.schedule.thin_ends import contention_table
from flexcp.schedule.work import Cuts, Pairs, Work, count_pairs, homes_of
from flexcp.shape import Shape

Ints = NDArray[np.int64]
MOST_ACROSS = MOST_STAGES - 1
"""The largest number of parts into which keys that cross nodes are cut."""
RATIOS = (1, 2, 4)
"""How many times as large as the next smaller part a part may be."""
FEW_RATIOS = (2,)
"""The ratios that are tried if there are many pairs of ranks that exchange messages, because each takes time."""
NEXT_BEST = 1
"""How many other ways to cut are kept besides the best."""


class NodeWork(NamedTuple):
    """How each rank's work on received keys is divided between keys of its own node and keys of other nodes.

    ``near`` is the share of the work on keys of its own node, in parts of ``PARTS``; ``again`` is the work of one more
    pass over the rows that also read keys of other nodes, in (query, key) pairs x query heads. ``inside`` says whether
    anything is exchanged inside nodes.
    """

    near: Ints
    again: Ints
    inside: bool


def node_work(
    needs: Needs, placement: Placement, regions: Regions, cuts: Cuts, pairs: Pairs, cluster: Cluster, cost: CostModel
) -> NodeWork | None:
    """Return how work is divided between keys of the own node and of other nodes.

    Return None if a pass cannot be cut in this way: keys are relayed, queries cross nodes, or no keys travel.
    """
    keys, size = needs.keys.direct, cluster.ranks_per_node
    crossing = keys.owner // size != keys.rank // size
    if len(needs.keys.relays) or len(keys) == 0 or np.any(needs.q.owner // size != needs.q.rank // size):
        return None
    if not crossing.any():
        return NodeWork(np.full(cluster.ranks, PARTS), np.zeros(cluster.ranks, np.int64), True)
    of_node = count_pairs(placement, regions, cuts, homes_of(placement, np.arange(cluster.ranks) // size)).own
    heads = regions.h1 - regions.h0
    here = pairs.own + (0 if pairs.at_keys is None else pairs.at_keys)
    near, rest = (sums(regions.rank, (x - here) * heads, cluster.ranks) for x in (of_node, pairs.all))
    reads = sums(keys.rank, crossing.astype(np.int64), cluster.ranks) > 0
    tiles = cost.row_tiles_work(regions.q1 - regions.q0) * (pairs.all > of_node) * heads
    found = near * PARTS // np.maximum(rest, 1)
    inside = len(needs.q) > 0 or not crossing.all()
    return NodeWork(np.where(reads, found, PARTS), sums(regions.rank, tiles, cluster.ranks), inside)


class NodeTimes(NamedTuple):
    """What ways to cut are compared by in one direction, in nanoseconds; ``near`` and ``inside`` as in ``NodeWork``.

    ``again`` is the work of one more pass over the rows that read keys of other nodes. ``there`` and ``back`` are how
    long inputs and gradients of keys take each rank, ``[across, rank]``, and ``home`` results for moved queries.
    """

    near: Ints
    again: Ints
    inside: bool
    there: Ints
    back: Ints
    home: Ints


def node_times(
    of_nodes: NodeWork, moves: Moves, shape: Shape, cluster: Cluster, cost: CostModel, backward: bool
) -> NodeTimes:
    """Return the times of what ``moves`` in one direction, inside and across nodes separately."""
    again = cost.attention_ns(of_nodes.again, shape, cluster, backward)
    there, back = (_by_level(flows, cluster, cost) for flows in (moves.inputs, moves.gradients))
    return NodeTimes(of_nodes.near, again, of_nodes.inside, there, back, exchange_ns(moves.outputs, cluster, cost))


def inside_first(
    times: NodeTimes, work: Work, peers: Peers, cost: CostModel, backward: bool, rest_of_layer: Ints
) -> Stages:
    """Return the fastest stages of which the first brings everything from the same node.

    ``work`` is in nanoseconds. ``rest_of_layer`` is how many nanoseconds each rank computes before its attention
    begins. ``contended_ns`` of the result is its time under contention, and its ``others`` are the next best ways to
    cut keys that cross nodes. Its ``ns`` has no meaning; :func:`flexcp.schedule.stages.faster_way` sets it.
    """
    from flexcp.schedule.compiled_contention import inside_then_across

    near, again, _, there, back, home = times
    rest = work.rest - work.at_keys
    ratios = RATIOS if len(peers.source) <= MANY_PEERS else FEW_RATIOS
    ways: list[tuple[int, ...]] = cuts_across(backward, ratios) if (near < PARTS).any() else [(0, PARTS)]
    known = (rest_of_layer, contention_table(cost, backward), peers.source, peers.senders)
    table = borders_table(ways)
    found, held = inside_then_across(work.own, rest, near, again, work.at_keys, there, back, home, table, *known)
    return fastest(times, ways, found, held, 1 + NEXT_BEST)


def borders_table(ways: list[tuple[int, ...]]) -> Ints:
    """Return the borders of all ways to cut as rows of one table; shorter ways repeat their last border."""
    longest = max(map(len, ways))
    return np.array([(*way, *(PARTS,) * (longest - len(way))) for way in ways], np.int64)


def fastest(times: NodeTimes, ways: list[tuple[int, ...]], found: Ints, held: Ints, count: int) -> Stages:
    """Return the stages of the fastest of some ways to cut, with the next ones, ``count`` in all, in ``others``.

    ``found`` are the times of the ways, -1 for those that are slower than others, and ``held`` is ``[way, rank]``.
    """
    tried = np.flatnonzero(found >= 0)
    order = tried[np.argsort(found[tried], kind="stable")][:count].tolist()  # stable: of equal ones the first
    best, *others = (stages_of(times.near, ways[row], held[row], int(found[row]), times.inside) for row in order)
    return best._replace(others=tuple(others))


def stages_of(near: Ints, way: tuple[int, ...], held: Ints, contended_ns: int, inside: bool = True) -> Stages:
    """Return the stages of one way to cut the keys that cross nodes; ``near`` is that of :class:`NodeWork`.

    Without ``inside``, nothing comes from the same node, and there is no stage for it.
    """
    if not inside:
        number = np.where(near < PARTS, len(way) - 1, 1)
        borders = np.where(near[:, None] < PARTS, np.array(way), np.array([0] + [PARTS] * (len(way) - 1)))
        return Stages(number, held, held, borders, contended_ns=contended_ns)
    borders = np.zeros((len(near), len(way) + 1), np.int64)
    borders[:, 1:] = near[:, None] + (PARTS - near)[:, None] * np.array(way) // PARTS
    number = np.where(near < PARTS, len(way), 1)
    return Stages(number, held, held, borders, across_borders=way, contended_ns=contended_ns)


def cuts_across(backward: bool, ratios: tuple[int, ...] = RATIOS) -> list[tuple[int, ...]]:
    """Return the ways to cut keys that cross nodes into stages: the borders of each way, in ``PARTS``.

    Each has up to ``MOST_ACROSS`` parts, each ``ratios`` times as large as its neighbour: in the forward the first part
    is the smallest, in the backward the last.
    """
    counts = range(2, MOST_ACROSS + 1)
    return [(0, PARTS), *(cut_in_parts(count, ratio, backward) for count, ratio in product(counts, ratios))]


def cut_in_parts(count: int, ratio: float, backward: bool) -> tuple[int, ...]:
    """Return the borders of ``count`` parts, in ``PARTS``, each ``ratio`` times as large as its smaller neighbour.

    In the forward the first part is the smallest, in the backward the last.
    """
    sizes = [ratio ** (count - 1 - i if backward else i) for i in range(count)]
    return tuple(int(PARTS * before / sum(sizes)) for before in accumulate(sizes, initial=0))


def _by_level(flows: Flows, cluster: Cluster, cost: CostModel) -> Ints:
    """Return ``[across, rank]``: nanoseconds that the flows inside nodes (0) and across nodes (1) take each rank."""
    size = cluster.ranks_per_node
    across = flows.source // size != flows.target // size
    ways = [Flows(*(column[way] for column in flows)) for way in (~across, across)]
    return np.stack([exchange_ns(way, cluster, cost) for way in ways])
