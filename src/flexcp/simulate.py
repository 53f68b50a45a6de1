"""Simulate: how long a placement takes.

:func:`predict` is the closed short form, what ``auto`` is scored by: nothing is scheduled, everything is arithmetic on columns. It counts
the same bytes as the plan would move (exactly, by rank, direction and level) and the same pairs (exactly, those that a rank can compute
from its own tokens apart from the rest), and puts them together like this, for every rank:

    needed, gather    max(own work, inputs) + other work + outputs
    ring              head exchange + (own work, then each hop's work, against the next hop) + head exchange home
    step              sum over masks of layers x (forward + backward attention)  +  layers x linear time of its tokens

The step takes as long as its slowest rank. *Exposed* is the part of attention's time in which a rank does not compute. What is
approximate: a ring's work is spread evenly over its hops after the first; every hop takes as long as the slowest link of its ring; an
exchange takes as long as the busiest port among a rank and the ranks that send to it; ranks do not wait for each other's work.
Everything is an integer in nanoseconds and rounded up.

:func:`lower_bound` is the compute of the batch perfectly divided: no placement is predicted faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.batch import Batch, LayerMask
from flexcp.clusters import NOMINAL_SPEED, Cluster
from flexcp.cost import CostModel
from flexcp.intervals import overlaps, united
from flexcp.masks import K0, K1, Q0, Q1, area, cut
from flexcp.pieces import Kind, Shape
from flexcp.plan import Placement, Regions
from flexcp.schedule import Pieces, needed_pieces

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a step is predicted to cost, forward and backward.

    ``attention_ns``, ``exposed_ns`` and ``linear_ns`` are of each rank, over all layers; ``sent`` and ``received`` are bytes of one layer,
    ``[mask, backward, across nodes, rank]``.
    """

    attention_ns: Ints
    exposed_ns: Ints
    linear_ns: Ints
    sent: Ints
    received: Ints

    @property
    def rank_ns(self) -> Ints:
        """Time of each rank."""
        return self.attention_ns + self.exposed_ns + self.linear_ns

    @property
    def slowest(self) -> int:
        """The rank that the step waits for."""
        return int(self.rank_ns.argmax())

    @property
    def total_ns(self) -> int:
        """Time of the step."""
        return int(self.rank_ns.max())

    @property
    def breakdown(self) -> dict[str, int]:
        """The slowest rank's nanoseconds by what they go to."""
        at = self.slowest
        parts = {"attention": self.attention_ns, "exposed": self.exposed_ns, "linear": self.linear_ns}
        return {name: int(values[at]) for name, values in parts.items()}

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {milliseconds(ns)}" for name, ns in self.breakdown.items())
        return f"{milliseconds(self.total_ns)} ms on rank {self.slowest} ({parts})"


def milliseconds(ns: int) -> str:
    """Nanoseconds as milliseconds with three decimals."""
    return f"{ns / 1e6:.3f}"


def predict(placement: Placement, shape: Shape, cluster: Cluster, cost: CostModel) -> Prediction:
    """The predicted time of one step of this placement."""
    rings = _rings(placement)
    compute = np.zeros(placement.ranks, np.int64)
    total = np.zeros(placement.ranks, np.int64)
    sent, received = [], []
    for mask, regions in zip(placement.batch.masks, placement.regions, strict=True):
        pairs = _pairs(placement, mask, regions, rings)
        work = _work(placement, regions, pairs, cost)
        for backward, moves in enumerate(_moves(placement, shape, mask, regions, pairs)):
            own, rest = _compute_ns(work, rings, shape, cluster, cost, bool(backward))
            compute += mask.layers * (own + rest)
            total += mask.layers * _attention_ns(own, rest, moves, rings, cluster, cost)
            ports = _ports(_joined(moves), cluster)
            sent.append(ports.sent)
            received.append(ports.received)
    layers = sum(mask.layers for mask in placement.batch.masks)
    linear = layers * cost.linear_ns(placement.tokens, shape, cluster)
    by_mask = (len(placement.batch.masks), 2, 2, placement.ranks)
    return Prediction(compute, total - compute, linear, np.reshape(sent, by_mask), np.reshape(received, by_mask))


def lower_bound(batch: Batch, shape: Shape, cluster: Cluster, cost: CostModel) -> int:
    """Nanoseconds of the batch's compute divided perfectly over the ranks, each as fast as it is."""
    alone = replace(cluster, nodes=1, ranks_per_node=1, speeds=())
    ns = 0
    for mask, work in zip(batch.masks, document_work(batch, shape, cost), strict=True):
        whole = work.sum(keepdims=True)
        ns += mask.layers * sum(int(cost.attention_ns(whole, shape, alone, b)[0]) for b in (False, True))
        ns += mask.layers * int(cost.linear_ns(batch.lengths.sum(keepdims=True), shape, alone)[0])
    return ns * NOMINAL_SPEED // sum(cluster.rank_speeds)


def document_work(batch: Batch, shape: Shape, cost: CostModel) -> list[Ints]:
    """For each mask, the least work of every document in pairs x query heads: its area and its row tiles, cut nowhere."""
    documents = np.arange(batch.documents, dtype=np.int64)
    found = []
    for mask in batch.masks:
        areas = mask.rows_area(documents, np.zeros_like(documents), batch.lengths)
        of_slice, at = mask.of_documents(documents)
        document, q0, q1 = united(of_slice, mask.slices[at, Q0], mask.slices[at, Q1])
        rows = _sums(document, q1 - q0, batch.documents)
        found.append((areas + cost.row_tiles_work(rows)) * shape.heads)
    return found


# --- rings -------------------------------------------------------------------------------------------------------------


class _Rings(NamedTuple):
    """Where each rank stands: its group's number of ring positions, and labels of its position and its group.

    Ranks of one position hold each other's keys before the ring turns. Without rings every rank is a position of its own.
    """

    turn: bool
    positions: Ints
    position: Ints
    group: Ints


def _rings(placement: Placement) -> _Rings:
    alone = np.arange(placement.ranks, dtype=np.int64)
    if placement.traffic.kind != "ring":
        return _Rings(False, np.ones_like(alone), alone, alone)
    positions, position, group = np.ones_like(alone), alone.copy(), alone.copy()
    for ranks in _grids_by_shape(placement):
        positions[ranks] = ranks.shape[1]
        position[ranks] = ranks[:, :, :1]
        group[ranks] = ranks[:, :1, :1]
    return _Rings(True, positions, position, group)


# --- work --------------------------------------------------------------------------------------------------------------


class _Pairs(NamedTuple):
    """Pairs of each region, those whose row and key are both kept at its ring position, and how often hops bring it more keys."""

    all: Ints
    own: Ints
    hops: Ints


class _Work(NamedTuple):
    """Pairs x query heads of each rank, row tiles included: on keys of its own position, and on all others."""

    own: Ints
    rest: Ints


def _pairs(placement: Placement, mask: LayerMask, regions: Regions, rings: _Rings) -> _Pairs:
    first, same = _same_rows(placement, regions, rings)
    if len(first) < len(regions):
        return _Pairs(*(column[same] for column in _pairs_of_each(placement, mask, regions.take(first), rings)))
    return _pairs_of_each(placement, mask, regions, rings)


def _same_rows(placement: Placement, regions: Regions, rings: _Rings) -> tuple[Ints, Ints]:
    """(one of each kind, kind of each region): regions of one ring position that differ only in their heads are a kind."""
    everyone = np.arange(len(regions), dtype=np.int64)
    if np.all(rings.position == np.arange(placement.ranks)):
        return everyone, everyone
    label = (
        rings.position[regions.rank] * (placement.stream + 1) + placement.batch.starts[regions.document] + regions.q0
    )
    _, first, same = np.unique(label, return_index=True, return_inverse=True)
    alike = all(np.array_equal(c, c[first][same]) for c in (regions.q1, regions.k0, regions.k1))
    return (first, same) if alike else (everyone, everyone)


def _pairs_of_each(placement: Placement, mask: LayerMask, regions: Regions, rings: _Rings) -> _Pairs:
    index, slices = mask.cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
    begin = placement.batch.starts[regions.document[index]]
    runs = united(rings.position[placement.runs.rank], placement.runs.start, placement.runs.stop)
    pairs = _sums(index, area(slices), len(regions))
    own = np.zeros_like(pairs)
    if not placement.assemble_own:
        position = rings.position[regions.rank[index]]
        own = _sums(index, _own_area(slices, begin, position, runs, placement.stream), len(regions))
    hops = (pairs > own).astype(np.int64)
    if rings.turn:
        np.maximum.at(hops, index, _runs_seen(slices, begin, runs) - (own > 0)[index])
        hops = np.where(pairs > own, np.minimum(hops, rings.positions[regions.rank] - 1), 0)
    return _Pairs(pairs, own, hops)


def _work(placement: Placement, regions: Regions, pairs: _Pairs, cost: CostModel) -> _Work:
    # Every pass over a region pays for its row tiles: one over own keys, and one for each hop that brings keys it reads.
    tiles = cost.row_tiles_work(regions.q1 - regions.q0)
    heads = regions.h1 - regions.h0
    own = (pairs.own + tiles * ((pairs.own > 0) | (pairs.all == 0))) * heads
    rest = (pairs.all - pairs.own + tiles * pairs.hops) * heads
    return _Work(_sums(regions.rank, own, placement.ranks), _sums(regions.rank, rest, placement.ranks))


def _own_area(slices: Ints, begin: Ints, position: Ints, runs: tuple[Ints, Ints, Ints], stream: int) -> Ints:
    """Pairs of each slice whose row and key are both kept at ``position``."""
    keeper, start, stop = runs
    span = stream + 1  # one axis for all positions: those of different ones never meet
    axis_start, axis_stop = keeper * span + start, keeper * span + stop
    base = position * span + begin
    item, run = overlaps(base + slices[:, Q0], base + slices[:, Q1], axis_start, axis_stop)
    rows = cut(slices[item], start[run] - begin[item], stop[run] - begin[item], 0, stream)
    at, run = overlaps(base[item] + rows[:, K0], base[item] + rows[:, K1], axis_start, axis_stop)
    item = item[at]
    both = cut(rows[at], 0, stream, start[run] - begin[item], stop[run] - begin[item])
    return _sums(item, area(both), len(slices))


def _runs_seen(slices: Ints, begin: Ints, runs: tuple[Ints, Ints, Ints]) -> Ints:
    """In how many runs the keys of each slice lie: at least as many as ring positions that hold them."""
    start, stop = np.sort(runs[1]), np.sort(runs[2])
    return np.searchsorted(start, begin + slices[:, K1]) - np.searchsorted(stop, begin + slices[:, K0], side="right")


def _compute_ns(
    work: _Work, rings: _Rings, shape: Shape, cluster: Cluster, cost: CostModel, backward: bool
) -> tuple[Ints, Ints]:
    """Nanoseconds of the work on own keys and of all other work, with the start of each kernel."""
    own = cost.attention_ns(work.own, shape, cluster, backward) + cost.kernel_ns * (work.own > 0)
    kernels = np.where(work.rest > 0, np.maximum(rings.positions - 1, 1), 0)
    return own, cost.attention_ns(work.rest, shape, cluster, backward) + cost.kernel_ns * kernels


# --- bytes -------------------------------------------------------------------------------------------------------------


class _Flows(NamedTuple):
    """Bytes from rank to rank."""

    source: Ints
    target: Ints
    size: Ints


class _Moves(NamedTuple):
    """What moves in one direction of one layer, by when it moves. The hops of a ring are a pass's total, one flow a link."""

    inputs: _Flows
    kv_hops: _Flows
    dkv_hops: _Flows
    outputs: _Flows


def _joined(parts: Sequence[_Flows]) -> _Flows:
    """All flows of the parts; what stays on its rank is none, nor is one without bytes."""
    columns = [np.concatenate([getattr(p, f) for p in parts] or [np.zeros(0, np.int64)]) for f in _Flows._fields]
    moves = (columns[0] != columns[1]) & (columns[2] > 0)
    return _Flows(*(c[moves] for c in columns))


def _moves(
    placement: Placement, shape: Shape, mask: LayerMask, regions: Regions, pairs: _Pairs
) -> tuple[_Moves, _Moves]:
    """Forward and backward, the same bytes as the plan's transfers."""
    if placement.traffic.kind == "needed":
        return _needed(placement, shape, mask, regions, pairs)
    if placement.traffic.kind == "gather":
        return _gathered(placement, shape)
    return _passed_round(placement, shape)


def _needed(
    placement: Placement, shape: Shape, mask: LayerMask, regions: Regions, pairs: _Pairs
) -> tuple[_Moves, _Moves]:
    # A document whose regions all find their rows and keys at home moves nothing, and most are like that.
    travels = np.zeros(placement.batch.documents, bool)
    travels[regions.document[pairs.all > pairs.own]] = True
    if not travels.any():
        still = _Moves(*[_joined([])] * 4)
        return still, still
    q, kv = needed_pieces(placement, shape, mask, regions.take(travels[regions.document]))
    each = shape.bytes_per_token_head()
    none = _joined([])

    def inputs(pieces: Pieces, *kinds: Kind) -> _Flows:
        size = (pieces.stop - pieces.start) * (pieces.h1 - pieces.h0)
        return _Flows(pieces.owner, pieces.rank, size * sum(each[kind, 0] for kind in kinds))

    def outputs(pieces: Pieces, kind: Kind) -> _Flows:
        size = (pieces.stop - pieces.start) * (pieces.h1 - pieces.h0)
        return _Flows(pieces.rank, pieces.owner, size * each[kind, pieces.partial])

    keys = inputs(kv, Kind.KV)
    forward = _Moves(_joined([inputs(q, Kind.Q), keys]), none, none, _joined([outputs(q, Kind.O)]))
    returned = _joined([outputs(q, Kind.DQ), outputs(kv, Kind.DKV)])
    return forward, _Moves(_joined([inputs(q, Kind.Q, Kind.DO), keys]), none, none, returned)


def _gathered(placement: Placement, shape: Shape) -> tuple[_Moves, _Moves]:
    """All keys of a group to all of it, and in the backward every rank's partial dkv home."""
    each = shape.bytes_per_token_head() * shape.kv_heads
    none = _joined([])
    keys, grads = [], []
    for grid in placement.traffic.groups:
        ranks = np.array(grid, np.int64).reshape(-1)
        owner, reader = np.repeat(ranks, len(ranks)), np.tile(ranks, len(ranks))
        tokens = placement.tokens[owner]
        keys.append(_Flows(owner, reader, tokens * each[Kind.KV, 0]))
        grads.append(_Flows(reader, owner, tokens * each[Kind.DKV, 1]))
    inputs = _joined(keys)
    return _Moves(inputs, none, none, none), _Moves(inputs, none, none, _joined(grads))


def _passed_round(placement: Placement, shape: Shape) -> tuple[_Moves, _Moves]:
    """Heads exchanged inside each ring position, keys passed from position to position, dkv after them."""
    each = shape.bytes_per_token_head()
    forward: list[_Moves] = []
    backward: list[_Moves] = []
    for ranks in _grids_by_shape(placement):
        split = ranks.shape[2]
        borders = np.arange(split + 1) * shape.heads // split
        low, high = shape.kv_range(borders[:-1], borders[1:])
        heads, kv_heads = np.diff(borders), high - low
        # A KV head that several head groups read gets its gradient from all of them.
        shared = int(split > shape.kv_heads)
        # [group, position, owner, worker]: an owner's tokens and the heads of the rank that works on them.
        owner = np.repeat(ranks, split, axis=2).reshape(-1)
        worker = np.tile(ranks, (1, 1, split)).reshape(-1)
        of_heads, of_kv = (placement.tokens[owner] * np.tile(count, ranks.size) for count in (heads, kv_heads))
        there = _Flows(owner, worker, of_heads * each[Kind.Q, 0] + of_kv * each[Kind.KV, 0])
        there_again = _Flows(owner, worker, there.size + of_heads * each[Kind.DO, 0])
        home = _Flows(worker, owner, of_heads * each[Kind.O, 0])
        home_again = _Flows(worker, owner, of_heads * each[Kind.DQ, 0] + of_kv * each[Kind.DKV, shared])
        # A link into a position carries the keys of all positions but that one; dkv of all but the sender's.
        links = np.roll(ranks, 1, axis=1).reshape(-1), ranks.reshape(-1)
        at = placement.tokens[ranks].sum(axis=2, keepdims=True)
        others = at.sum(axis=1, keepdims=True) - at
        keys = (others * kv_heads * each[Kind.KV, 0]).reshape(-1)
        grads = (np.roll(others, 1, axis=1) * kv_heads * each[Kind.DKV, 1]).reshape(-1)
        forward.append(_Moves(there, _Flows(*links, keys), _joined([]), home))
        backward.append(_Moves(there_again, _Flows(*links, keys), _Flows(*links, grads), home_again))
    both = [_Moves(*(_joined(parts) for parts in zip(*moves, strict=True))) for moves in (forward, backward)]
    return both[0], both[1]


def _grids_by_shape(placement: Placement) -> list[Ints]:
    """The groups' grids as arrays ``[group, ring position, head group]``, one for each shape there is."""
    found: dict[tuple[int, int], list[tuple[tuple[int, ...], ...]]] = {}
    for grid in placement.traffic.groups:
        found.setdefault((len(grid), len(grid[0])), []).append(grid)
    return [np.array(grids, np.int64) for grids in found.values()]


class _Ports(NamedTuple):
    """Bytes through each rank's ports, ``[across nodes, rank]``."""

    sent: Ints
    received: Ints


def _ports(flows: _Flows, cluster: Cluster) -> _Ports:
    across = flows.source // cluster.ranks_per_node != flows.target // cluster.ranks_per_node
    level = across * cluster.ranks
    size = 2 * cluster.ranks
    sent, received = (_sums(level + end, flows.size, size).reshape(2, -1) for end in (flows.source, flows.target))
    return _Ports(sent, received)


# --- time --------------------------------------------------------------------------------------------------------------


def _attention_ns(own: Ints, rest: Ints, moves: _Moves, rings: _Rings, cluster: Cluster, cost: CostModel) -> Ints:
    """Time of each rank for one layer's attention in one direction, waiting included."""
    there = _exchange_ns(moves.inputs, cluster, cost)
    home = _exchange_ns(moves.outputs, cluster, cost)
    if not rings.turn:
        return np.maximum(own, there) + rest + home
    keys, grads, both = _hops_ns(moves, rings, cluster, cost)
    hops = np.maximum(rings.positions - 1, 1)
    each = -(-rest // hops)
    # The work on own keys hides the first hop, every later piece of work the hop after it. Gradients follow the keys two hops behind,
    # so the last two travel alone, the very last with nothing left to hide it.
    turning = np.maximum(own, keys) + each
    if len(moves.dkv_hops.size) == 0:
        turning += (hops - 1) * np.maximum(each, keys)
    else:
        turning += grads
        alone, together = np.minimum(hops - 1, 1), np.maximum(hops - 2, 0)
        turning += alone * (np.maximum(each, keys) + np.maximum(each, grads) - each) + together * np.maximum(each, both)
    return there + np.where(rings.positions > 1, turning, own + rest) + home


def _hops_ns(moves: _Moves, rings: _Rings, cluster: Cluster, cost: CostModel) -> tuple[Ints, Ints, Ints]:
    """Time of one hop of keys, of gradients and of both together, as slow as the slowest link of the rank's group."""
    hops = np.maximum(rings.positions - 1, 1)
    keys, grads = (_ports(flows, cluster).received for flows in (moves.kv_hops, moves.dkv_hops))
    found = []
    for size in (keys, grads, keys + grads):
        times = _through_ports_ns(-(-size // hops), cluster, cost)
        slowest = np.zeros(cluster.ranks, np.int64)
        np.maximum.at(slowest, rings.group, times + cluster.latency_ns * (times > 0))
        found.append(slowest[rings.group])
    return found[0], found[1], found[2]


def _exchange_ns(flows: _Flows, cluster: Cluster, cost: CostModel) -> Ints:
    """Time of each rank in a grouped exchange: the busiest port of its own or of a rank it waits for, and the start of its messages."""
    ranks = cluster.ranks
    if len(flows.size) == 0:
        return np.zeros(ranks, np.int64)
    ports = _ports(flows, cluster)
    leaving = _through_ports_ns(ports.sent, cluster, cost)
    busiest = np.maximum(leaving, _through_ports_ns(ports.received, cluster, cost))
    np.maximum.at(busiest, flows.target, leaving[flows.source])
    pairs = np.unique(flows.source * ranks + flows.target)
    peers = np.maximum(np.bincount(pairs // ranks, minlength=ranks), np.bincount(pairs % ranks, minlength=ranks))
    return busiest + np.where(peers > 0, cluster.latency_ns + cost.message_ns * (peers - 1), 0)


def _through_ports_ns(size: Ints, cluster: Cluster, cost: CostModel) -> Ints:
    """Time of ``size[across nodes, rank]`` bytes through each rank's two ports at once."""
    inside, across = cost.link_ns(size[0], cluster.intra_mbps), cost.link_ns(size[1], cluster.inter_mbps)
    return np.maximum(inside, across)


def _sums(index: Ints, values: Ints, size: int) -> Ints:
    total = np.zeros(size, np.int64)
    np.add.at(total, index, values)
    return total
