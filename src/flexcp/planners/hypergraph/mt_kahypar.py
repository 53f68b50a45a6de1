"""Mt-KaHyPar's part: V-cycles that improve a partition over nodes, then over the ranks of each node.

A V-cycle coarsens the hypergraph, improves the partition of the coarse one, and refines it while it is made fine again.
The partitioner has one weight per vertex: a share of tokens plus a share of compute, in proportions that change from
round to round. It runs a deterministic preset on one thread with a seed; its other presets do not give the same result
twice.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.planners.hypergraph.model import Tiling
from flexcp.planners.hypergraph.search import Bundles, Search
from flexcp.planners.request import Refused

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

TOKEN_SHARES = ((1, 1), (1, 2), (2, 1))
"""The proportions (tokens, compute) of all tokens and all compute in the partitioner's weights, round by round."""
QUALITY_VERTICES = 2_000
"""Up to this many vertices, the partitioner's better and slower preset is used."""
SCALE = 1 << 28
"""The sum of the limits of all parts in the partitioner's weights, which have 32 bits."""


def partitioner(strategy: str = "hypergraph") -> Any:
    """Return Mt-KaHyPar, initialised for one thread; raise Refused if the optional package is not installed.

    ``strategy`` is for the message.
    """
    try:
        return initialised()
    except ImportError:
        raise Refused(
            f"strategy {strategy} needs the Mt-KaHyPar partitioner: pip install flexcp[hypergraph], or use blocks"
        ) from None


@cache
def initialised() -> Any:
    """Return the package's initialised object; a process can initialise it only once."""
    import mtkahypar

    return mtkahypar.initialize(1, False)


def improve(search: Search, seed: int) -> None:
    """Improve the search's partition with a V-cycle over nodes, then with one over the ranks of each node.

    Limits may be exceeded afterwards.
    """
    p, nodes = search.partition, search.limits.nodes
    if nodes[-1] > 0:
        _settle(search, *_vcycle(search, nodes, seed))
    for node in range(int(nodes[-1]) + 1):
        ranks = np.flatnonzero(nodes == node)
        if len(ranks) > 1:
            owner, worker = _vcycle(search, np.where(nodes == node, np.arange(len(nodes)) - ranks[0], -1), seed)
            p.owner = np.where(owner >= 0, ranks[owner], p.owner)
            p.worker = np.where(worker >= 0, ranks[worker], p.worker)
            p.count()


def _vcycle(search: Search, part_of: Ints, seed: int) -> tuple[Ints, Ints]:
    """Return the parts of blocks and of tiles after one V-cycle of Mt-KaHyPar from the present ones.

    ``part_of`` is the part of each rank, -1 if its blocks and tiles take no part; these have -1 in the results. If
    tokens must not move, those of each part are one vertex, so heavy that no part can hold two of them.
    """
    p, t = search.partition, search.partition.tiling
    parts, count = int(part_of.max()) + 1, len(t.blocks)
    part = np.concatenate([part_of[p.owner], part_of[p.worker]])
    vertex, movable = np.full(len(part), -1, np.int64), part >= 0
    held = 0 if search.limits.free else parts
    if held:
        vertex[:count], movable[:count] = part[:count], False
    vertex[movable] = held + np.arange(np.count_nonzero(movable))
    nets, prices = net_lists(t, vertex, parts)
    if nets:
        weights, most = _weights(search, part_of, movable, (0, 1) if held else TOKEN_SHARES[seed % len(TOKEN_SHARES)])
        heavy = max(most) + 1 if held else 0
        start = [*range(held), *part[movable].tolist()]
        found = _improved(nets, prices, [heavy] * held + weights, [m + heavy for m in most], start, seed)
        if not held:
            part[movable] = found
        elif len(np.unique(found[:held])) == held:
            # Each part gets the number of the fixed tokens that it holds.
            part[movable] = np.argsort(found[:held], kind="stable")[found[held:]]
    return part[:count], part[count:]


def _weights(search: Search, part_of: Ints, movable: Bools, shares: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Return the weights of movable vertices, and the limit of each part.

    ``shares`` are the proportions of all tokens and all compute in the weights.
    """
    t, (token_share, load_share) = search.partition.tiling, shares
    tokens, load = token_share / search.mean_tokens, load_share / search.mean_load
    weights = np.concatenate([(t.blocks.stop - t.blocks.start) * tokens, t.tiles.load * load])[movable]
    most = search.limits.tokens * tokens + search.limits.loads * load
    limits = np.array([most[part_of == part].sum() for part in range(int(part_of.max()) + 1)])
    # The partitioner rejects limits that cannot hold all vertices, so they are raised if there is too much already.
    limits *= max(1.0, weights.sum() / limits.sum())
    scale = SCALE / limits.sum()
    return (weights * scale).astype(np.int64).tolist(), np.ceil(limits * scale).astype(np.int64).tolist()


def _improved(
    nets: list[list[int]], prices: list[int], weights: list[int], most: list[int], part: list[int], seed: int
) -> Ints:
    """Return the part of each vertex after one V-cycle from ``part``; part i holds weights of at most ``most[i]``."""
    import mtkahypar

    presets, mt = mtkahypar.PresetType, partitioner()
    few = len(weights) <= QUALITY_VERTICES
    mtkahypar.set_seed(seed)
    context = mt.context_from_preset(presets.DETERMINISTIC_QUALITY if few else presets.DETERMINISTIC)
    context.logging = False
    context.set_partitioning_parameters(len(most), 0.0, mtkahypar.Objective.KM1)
    context.set_individual_target_block_weights(most)
    graph = mt.create_hypergraph(context, len(weights), len(nets), nets, weights, prices)
    partitioned = graph.create_partitioned_hypergraph(context, len(most), part)
    partitioned.improve_partition(context, 1)
    return np.array(partitioned.get_partition(), np.int64)


def net_lists(t: Tiling, vertex: Ints, parts: int) -> tuple[list[list[int]], list[int]]:
    """Return (the vertices of each net, the prices of nets), as Mt-KaHyPar takes them.

    ``vertex`` is the partitioner's number of each block, then of each tile, -1 for none. First come the nets with their
    blocks, then nets without their blocks, for the extra price. Nets with fewer than two vertices are left out, and
    prices are scaled so that ``parts`` times their sum fits 32 bits.
    """
    count, tile = len(t.nets), len(t.blocks) + t.pins.tile
    dear = t.nets.extra[t.pins.net] > 0
    net = np.concatenate([np.arange(count), t.pins.net, count + t.pins.net[dear]])
    pin = vertex[np.concatenate([t.nets.block, tile, tile[dear]])]
    net, pin = net[pin >= 0], pin[pin >= 0]
    pin = pin[np.argsort(net, kind="stable")]
    size = np.bincount(net, minlength=2 * count)
    several = np.flatnonzero(size > 1)
    if not len(several):
        return [], []
    pin = pin[np.repeat(size > 1, size)]
    price = np.concatenate([t.nets.price, t.nets.extra])[several]
    price = price // int(np.gcd.reduce(price))
    shift = max(0, (int(price.sum()) * parts).bit_length() - 30)
    lists = [pins.tolist() for pins in np.split(pin, np.cumsum(size[several])[:-1])]
    return lists, np.maximum(price >> shift, 1).tolist()


def _settle(search: Search, owner: Ints, worker: Ints) -> None:
    """Give blocks and tiles that changed their node a rank in the new node; ``owner`` and ``worker`` are the new nodes.

    Strips of tiles go to the rank that has most of what they read, blocks to the rank that reads most of them.
    """
    p, t, nodes = search.partition, search.partition.tiling, search.limits.nodes
    changed = worker != nodes[p.worker]
    if changed.any():
        label = np.where(changed, t.tiles.strip * (nodes[-1] + 1) + worker, -1)
        bundles = search.bundles(np.full(len(owner), -1, np.int64), label)
        rank = _nearest(search, bundles, bundles.name % (nodes[-1] + 1))
        p.worker[changed] = rank[np.searchsorted(bundles.name, label[changed])]
        p.count()
    changed = owner != nodes[p.owner]
    if changed.any():
        bundles = search.bundles(np.where(changed, np.arange(len(owner)), -1), np.full(len(worker), -1, np.int64))
        p.owner[changed] = _nearest(search, bundles, owner[changed])
        p.count()


def _nearest(search: Search, bundles: Bundles, node: Ints) -> Ints:
    """Return for each bundle the rank of its node that has most bytes of its nets; of equal ones the least loaded.

    ``node`` is the node of each bundle.
    """
    p, t, nodes = search.partition, search.partition.tiling, search.limits.nodes
    of = np.repeat(np.arange(len(node)), np.diff(bundles.first))
    has = p.reads[bundles.net] | (p.owner[t.nets.block[bundles.net]][:, None] == np.arange(t.ranks))
    worth = np.zeros((len(node), t.ranks), np.int64)
    np.add.at(worth, of, has * t.nets.price[bundles.net][:, None])
    worth[node[:, None] != nodes] = -1
    order = np.argsort(p.loads, kind="stable")
    return np.asarray(order[np.argmax(worth[:, order], axis=1)])
