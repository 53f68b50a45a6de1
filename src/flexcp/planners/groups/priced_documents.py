"""Priced documents: what a batch's documents cost a group of ranks, the arithmetic under :mod:`flexcp.planners.groups.groups`.

Costs are in *pairs* (:mod:`flexcp.cost`), all integers. The formulas, and where they leave system B's, are in that module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import offsets
from flexcp.batch import Batch
from flexcp.clusters import NOMINAL_SPEED, Cluster
from flexcp.cost import TILE_ROWS
from flexcp.masks import HI, K0, K1, LO, Q0, Q1
from flexcp.planners.request import Request, refuse_over_cap
from flexcp.shape import Kind

Ints = NDArray[np.int64]
Amount = TypeVar("Amount", int, Ints)
CLOSE_TO_BEST = 64
"""What is within 1/64 of the best is left alone: closer costs cuts, and cost models err by more."""
MOVE_SCALE = 16
"""Prices of moved keys are kept in 1/16 pairs, because on slow devices one key is only a few pairs."""
UNLIMITED = 1 << 60
NEVER = 1 << 60
"""Later than any time."""
MILLION = 1_000_000


@dataclass(frozen=True)
class Prices:
    """In pairs: a token in the rest of all layers; a row besides its area (that, and its part of a row tile); 16 keys moved inside a node
    and across nodes; starting an exchange, and each peer. ``gradient`` is the per mille of the last four that the keys' gradients cost.
    """

    linear: int
    row: int
    inside: int
    across: int
    start: int
    peer: int
    gradient: int


@dataclass(frozen=True, eq=False)
class PricedDocuments:
    """The batch as this planner sees it: documents heaviest first, numbered in that order; ``document`` is the batch's number.

    ``tokens``, ``attention`` and ``load`` are per document; ``cap`` is the most tokens a rank may keep; ``speeds`` are per mille.
    """

    batch: Batch
    document: Ints
    tokens: list[int]
    attention: list[int]
    load: list[int]
    prices: Prices
    cluster: Cluster
    speeds: tuple[int, ...]
    cap: int
    _moved: dict[int, list[int]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return len(self.speeds)

    @cached_property
    def fastest(self) -> int:
        """Speed of the fastest rank."""
        return max(self.speeds)

    @cached_property
    def mean(self) -> int:
        """When all ranks are ready if all load is spread over them."""
        return self.even(sum(self.load), range(self.ranks))

    @cached_property
    def bound(self) -> int:
        """:func:`groups_lower_bound` of this work."""
        return groups_lower_bound(self)

    @cached_property
    def best_key_prices(self) -> Ints:
        """``key_price`` for every degree from 1 up, in as few nodes as hold it."""
        per_node = self.cluster.ranks_per_node
        return np.array([self.key_price(d, d // -(-d // per_node)) for d in range(1, self.ranks + 1)], np.int64)

    def even(self, load: int, ranks: Sequence[int]) -> int:
        """When these ranks are ready with ``load`` spread over them by their speeds."""
        return -(-load * NOMINAL_SPEED // sum(self.speeds[r] for r in ranks))

    def moved(self, documents: list[int]) -> list[list[int]]:
        """For each document and degree: keys (times layers) that the busiest rank reads of others when it is cut zig-zag."""
        new = [d for d in documents if d not in self._moved]
        if new:
            rows = _moved_keys(self.batch, self.document[new], self.ranks).tolist()
            self._moved.update(zip(new, rows, strict=True))
        return [self._moved[d] for d in documents]

    def key_price(self, degree: int, local: int) -> int:
        """What a key costs a rank with ``local`` of its group's ranks in its node, times ``degree - 1``; both ports work at once.

        A key of another node enters through one of the node's ports, which share what enters, and is passed on inside.
        """
        entering = -(-(degree - local) * self.prices.across // self.cluster.ranks_per_node)
        return max(entering, (degree - 1) * self.prices.inside)

    def exchange(self, keys: Amount, degree: Amount, key_price: Amount) -> Amount:
        """Time to receive ``keys`` from the other ranks of the group, forward and backward, and to return their gradients."""
        peers = degree - 1
        moving = keys * key_price // (MOVE_SCALE * (peers + (peers == 0)))
        time: Amount = (moving + self.prices.start + self.prices.peer * peers) * (keys > 0)
        return time * (1000 + self.prices.gradient) // 1000


def price_documents(request: Request) -> PricedDocuments:
    refuse_over_cap(request)
    batch, cap = request.batch, request.token_cap
    documents = np.arange(batch.documents, dtype=np.int64)
    layers = sum(m.layers for m in batch.masks)
    area = batch.weighted_rows_area(documents, np.zeros_like(documents), batch.lengths)
    attention = area + layers * request.cost.row_tiles_work(batch.lengths)
    prices = _prices(request, layers)
    load = attention + prices.linear * batch.lengths
    order = np.argsort(-load, kind="stable")
    return PricedDocuments(
        batch,
        order,
        batch.lengths[order].tolist(),
        attention[order].tolist(),
        load[order].tolist(),
        prices,
        request.cluster,
        request.cluster.rank_speeds,
        UNLIMITED if cap is None else cap,
    )


def _prices(request: Request, layers: int) -> Prices:
    """Everything in pairs of a rank of nominal speed, from the cost model's nanoseconds for a million of each."""
    cost, shape = request.cost, request.shape
    one_rank = replace(request.cluster, nodes=1, ranks_per_node=1, speeds=())
    pairs = np.array([shape.heads * MILLION], np.int64)
    pair_ns = int(sum(cost.attention_ns(pairs, shape, one_rank, backward)[0] for backward in (False, True)))
    each = shape.bytes_per_token_head()
    # Keys come in for the forward and again for the backward; every reader returns its part of dkv.
    key_bytes, gradient_bytes = 2 * int(each[Kind.KV, 0]), int(each[Kind.DKV, 1])
    keys = np.array([shape.kv_heads * key_bytes * MILLION], np.int64)

    def moved(mbps: int) -> int:
        return max(1, MOVE_SCALE * int(cost.link_ns(keys, mbps)[0]) // pair_ns)

    def waited(nanoseconds: int) -> int:
        return 2 * layers * nanoseconds * MILLION // pair_ns  # once a pass

    linear = cost.pairs_per_token(shape) * layers
    return Prices(
        linear,
        linear + layers * cost.row_tile_pairs // TILE_ROWS,
        moved(request.cluster.intra_mbps),
        moved(request.cluster.inter_mbps),
        waited(request.cluster.latency_ns),
        waited(cost.message_ns),
        1000 * gradient_bytes // key_bytes,
    )


def _moved_keys(batch: Batch, documents: Ints, ranks: int) -> Ints:
    """``PricedDocuments.moved`` as ``[document, degree - 1]``, from the slices in closed form.

    A rank has two runs of rows. In a slice they read at most all its keys, and at most their own rows plus the band's width each.
    """
    degree = np.arange(1, ranks + 1, dtype=np.int64)
    length = batch.lengths[documents][:, None]
    rows = -(-length // (2 * degree))
    keys = np.zeros((len(documents), ranks), np.int64)
    for mask in batch.masks:
        index, at = mask.of_documents(documents)
        slices = mask.slices[at][:, :, None]
        run = np.minimum(rows[index], slices[:, Q1] - slices[:, Q0]) + slices[:, HI] - slices[:, LO]
        read = np.zeros_like(keys)
        np.add.at(read, index, np.minimum(slices[:, K1] - slices[:, K0], 2 * run))
        keys += mask.layers * np.maximum(np.minimum(read, length) - length // degree, 0)
    keys[:, 0] = 0
    return keys


def groups_lower_bound(work: PricedDocuments) -> int:
    """The smallest tau in which any assignment could be ready: all load evenly shared, and every document with its best degree alone."""
    alone = [
        [d]
        for d, load in enumerate(work.load)
        if load * NOMINAL_SPEED > work.mean * work.fastest or work.tokens[d] > work.cap
    ]
    if not alone:
        return work.mean
    least = np.array([least_degree(work, documents) for documents in alone], np.int64)
    degree = np.arange(1, work.ranks + 1, dtype=np.int64)
    times = np.where(degree >= least[:, None], group_times(work, alone, work.fastest), NEVER)
    return max(work.mean, int(times.min(axis=1).max()))


def group_times(work: PricedDocuments, atomic: list[list[int]], speed: int = NOMINAL_SPEED) -> Ints:
    """``[group, degree - 1]`` T of atomic groups, on ranks of the given speed in as few nodes as hold them."""
    documents = [d for group in atomic for d in group]
    first = offsets(np.array([len(group) for group in atomic], np.int64))
    of_document = np.repeat(np.arange(len(atomic)), np.diff(first))
    loads = np.array([work.load[d] for d in documents], np.int64)
    load = np.add.reduceat(loads, first[:-1])[:, None]
    attention = np.add.reduceat(np.array([work.attention[d] for d in documents], np.int64), first[:-1])[:, None]
    degree = np.arange(1, work.ranks + 1, dtype=np.int64)
    # A document heavier than the group's mean cannot stay whole.
    cut = loads[:, None] > (-(-load // degree))[of_document]
    keys = np.add.reduceat(np.where(cut, np.array(work.moved(documents), np.int64), 0), first[:-1], axis=0)
    moving = work.exchange(keys, degree, work.best_key_prices)
    compute = -(-load * NOMINAL_SPEED // (degree * speed))
    later = -(-(load - attention) * NOMINAL_SPEED // (degree * speed))
    return np.asarray(np.maximum(compute, later + moving))


def least_degree(work: PricedDocuments, documents: list[int]) -> int:
    """The fewest ranks whose caps hold these documents."""
    return max(1, -(-sum(work.tokens[d] for d in documents) // work.cap))
