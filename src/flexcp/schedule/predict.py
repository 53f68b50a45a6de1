"""Predict: how long a placement takes, in closed form.

:func:`predict` gives the time by which ``auto`` scores candidates. Nothing is scheduled; everything is arithmetic on
columns. The bytes are exactly those that the plan would move (by rank, direction and level), and so are the pairs
(those that a rank can compute from its own tokens are counted separately). For every rank the parts are combined like
this:

    needed    own work and stages of other work, each against the next inputs and the last results
              (:mod:`flexcp.schedule.stages`)
    gather    max(own work, inputs) + other work + outputs
    ring      head exchange + (own work, then each hop's work, against the next hop) + head exchange home
    step      sum over masks of layers x (forward + backward attention)  +  layers x linear time of its tokens

The step takes as long as its slowest rank. *Exposed* is the part of attention's time in which a rank does not compute.
All times are integers in nanoseconds, rounded up. The approximations are:

- The work of a ring is spread evenly over its hops after the first. Under causal and full masks this is as good as
  exact. Under other masks, work is counted hop by hop and a rank waits for the one before it, unless the ring is very
  large.
- Every hop takes as long as the slowest link of its ring.
- An exchange takes as long as the busiest port among a rank and the ranks that send to it.
- The ranks for which an exchange of a static method waits were ready from the start.

:func:`lower_bound` is the compute of the batch divided perfectly: no placement is predicted to be faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import united
from flexcp.arrays.totals import sums
from flexcp.batch import Batch, LayerMask
from flexcp.clusters import NOMINAL_SPEED, Cluster
from flexcp.cost import CostModel
from flexcp.masks import Q0, Q1, causal, full
from flexcp.plan.placement import Placement
from flexcp.schedule.analysis import MaskAnalysis, analyse
from flexcp.schedule.flows import Moves, exchange_ns, join_flows, ports_ns, static_moves, through_ports
from flexcp.schedule.rings import Rings, count_static_pairs, hop_work, rings_of
from flexcp.schedule.work import Work, pass_work_ns
from flexcp.shape import Shape

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a step is predicted to cost, forward and backward.

    For each rank over all layers, in nanoseconds: ``attention_ns`` is what it computes in attention, ``exposed_ns`` how
    long it waits for messages there, and ``linear_ns`` the rest of each layer. ``moves`` are what moves in one layer of
    each mask, forward then backward, mask by mask.
    """

    attention_ns: Ints
    exposed_ns: Ints
    linear_ns: Ints
    moves: tuple[Moves, ...]
    cluster: Cluster

    @property
    def sent(self) -> Ints:
        """Bytes that each rank sends in one layer, ``[mask, backward, level, rank]``.

        Level 0 is inside nodes, level 1 across nodes.
        """
        return self._bytes("sent")

    @property
    def received(self) -> Ints:
        """Bytes that each rank receives in one layer, ``[mask, backward, level, rank]``.

        Level 0 is inside nodes, level 1 across nodes.
        """
        return self._bytes("received")

    def _bytes(self, way: str) -> Ints:
        """Return the bytes through all ports, ``[mask, backward, level, rank]``; ``way`` is "sent" or "received"."""
        found = [getattr(through_ports(moves.everything, self.cluster), way) for moves in self.moves]
        return np.reshape(found, (-1, 2, 2, self.cluster.ranks))

    @property
    def rank_ns(self) -> Ints:
        """The nanoseconds of each rank."""
        return self.attention_ns + self.exposed_ns + self.linear_ns

    @property
    def slowest(self) -> int:
        """The rank with the longest time, for which the step waits."""
        return int(self.rank_ns.argmax())

    @property
    def total_ns(self) -> int:
        """The nanoseconds of the step, which are those of its slowest rank."""
        return int(self.rank_ns.max())

    @property
    def breakdown(self) -> dict[str, int]:
        """The nanoseconds of the slowest rank by what it spends them on: attention, exposed, linear."""
        at = self.slowest
        parts = {"attention": self.attention_ns, "exposed": self.exposed_ns, "linear": self.linear_ns}
        return {name: int(values[at]) for name, values in parts.items()}

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {milliseconds(ns)}" for name, ns in self.breakdown.items())
        return f"{milliseconds(self.total_ns)} ms on rank {self.slowest} ({parts})"


def milliseconds(ns: int) -> str:
    """Return nanoseconds as text in milliseconds, with three decimals."""
    return f"{ns / 1e6:.3f}"


def predict(
    placement: Placement,
    shape: Shape,
    cluster: Cluster,
    cost: CostModel,
    keep_kv: int = 0,
    analysis: list[MaskAnalysis] | None = None,
) -> Prediction:
    """Return the predicted time of one step of this placement.

    ``keep_kv`` is how many bytes of received keys and values a rank may keep for the backward, over all layers.
    ``analysis`` is what :func:`flexcp.schedule.analysis.analyse` returned; without it, it is computed here, with stages
    posted up to two slots ahead. Both are used only if ``placement.traffic.kind`` is ``"needed"``.
    """
    if placement.traffic.kind == "needed":
        times = _needed_times(analysis or analyse(placement, shape, cluster, cost, keep_kv))
    else:
        times = _static_times(placement, shape, cluster, cost)
    compute = np.zeros(placement.ranks, np.int64)
    total = np.zeros(placement.ranks, np.int64)
    for mask, both in zip(placement.batch.masks, times, strict=True):
        for found in both:
            compute += mask.layers * found.busy
            total += mask.layers * _until_results_are_home(found.ns, found.moves)
    layers = sum(mask.layers for mask in placement.batch.masks)
    linear = layers * cost.linear_ns(placement.tokens, shape, cluster)
    return Prediction(compute, total - compute, linear, tuple(found.moves for both in times for found in both), cluster)


class _PassTime(NamedTuple):
    """One layer's attention in one direction, of each rank: nanoseconds that it computes and in all, and what moves.

    ``busy`` is compute; ``ns`` also includes waits.
    """

    busy: Ints
    ns: Ints
    moves: Moves


def _needed_times(masks: list[MaskAnalysis]) -> list[list[_PassTime]]:
    """Return the times of forward and backward for every mask, with the stages that were chosen."""
    both = [(found.forward, found.backward) for found in masks]
    return [[_PassTime(one.work.own + one.work.rest, one.stages.ns, one.moves) for one in pair] for pair in both]


def _static_times(placement: Placement, shape: Shape, cluster: Cluster, cost: CostModel) -> list[list[_PassTime]]:
    """Return the times of forward and backward for every mask under a static method.

    Static methods keep no keys for the backward.
    """
    rings, moves = rings_of(placement), static_moves(placement, shape)
    times = []
    for mask, regions in zip(placement.batch.masks, placement.regions, strict=True):
        uneven = rings.turn and _is_uneven(mask)
        by_hop = hop_work(placement, mask, regions, rings, cost) if uneven else None
        if by_hop is None:
            pairs = count_static_pairs(placement, mask, regions, rings)
            kernels = np.maximum(rings.positions - 1, 1)
            both = zip(pass_work_ns(placement, regions, pairs, shape, cluster, cost, kernels), moves, strict=True)
            found = [_PassTime(w.own + w.rest, _static_ns(w, m, rings, cluster, cost), m) for w, m in both]
        else:
            spans = [_hop_spans(by_hop, shape, cluster, cost, backward) for backward in (False, True)]
            each = zip(spans, moves, strict=True)
            found = [_PassTime(w.sum(axis=1), _turned_ns(w, m, rings, cluster, cost), m) for w, m in each]
        times.append(found)
    return times


def _hop_spans(by_hop: Ints, shape: Shape, cluster: Cluster, cost: CostModel, backward: bool) -> Ints:
    """Return the nanoseconds of the work of each hop, ``[rank, hop]``, including the start of each kernel.

    ``by_hop`` is that work in (query, key) pairs x query heads, ``[rank, hop]``.
    """
    spans = np.stack([cost.attention_ns(work, shape, cluster, backward) for work in by_hop.T], axis=1)
    return spans + cost.kernel_ns * (by_hop > 0)


def _until_results_are_home(ns: Ints, moves: Moves) -> Ints:
    """Return the time of each rank, raised to that of the slowest rank that computes results for it."""
    home = join_flows([moves.relayed, moves.dkv_hops, moves.gradients, moves.outputs])
    found = ns.copy()
    np.maximum.at(found, home.target, ns[home.source])
    return found


def lower_bound(batch: Batch, shape: Shape, cluster: Cluster, cost: CostModel, head_flops: int = 0) -> int:
    """Return the nanoseconds of the batch's compute, divided perfectly over the ranks according to their speeds.

    ``head_flops`` are the FLOPs of the projection to the vocabulary per token, if it belongs to the step.
    """
    alone = replace(cluster, nodes=1, ranks_per_node=1, speeds=())
    ns = int(cost.vocabulary_ns(batch.lengths.sum(keepdims=True), head_flops, shape, alone)[0])
    for mask, work in zip(batch.masks, document_work(batch, shape, cost), strict=True):
        whole = work.sum(keepdims=True)
        ns += mask.layers * sum(int(cost.attention_ns(whole, shape, alone, b)[0]) for b in (False, True))
        ns += mask.layers * int(cost.linear_ns(batch.lengths.sum(keepdims=True), shape, alone)[0])
    return ns * NOMINAL_SPEED // sum(cluster.rank_speeds)


def document_work(batch: Batch, shape: Shape, cost: CostModel) -> list[Ints]:
    """Return for each mask the least work of every document, in (query, key) pairs x query heads.

    This is the document's pairs and its row tiles, each once, as if it were not cut.
    """
    documents = np.arange(batch.documents, dtype=np.int64)
    found = []
    for mask in batch.masks:
        areas = mask.rows_area(documents, np.zeros_like(documents), batch.lengths)
        of_slice, at = mask.of_documents(documents)
        document, q0, q1 = united(of_slice, mask.slices[at, Q0], mask.slices[at, Q1])
        rows = sums(document, q1 - q0, batch.documents)
        found.append((areas + cost.row_tiles_work(rows)) * shape.heads)
    return found


def _static_ns(work: Work, moves: Moves, rings: Rings, cluster: Cluster, cost: CostModel) -> Ints:
    """Return the nanoseconds of each rank for one layer's attention in one direction, including waits.

    ``work`` is in nanoseconds.
    """
    own, rest = work.own, work.rest
    there = exchange_ns(moves.inputs, cluster, cost)
    home = exchange_ns(moves.outputs, cluster, cost)
    if not rings.turn:
        return np.maximum(own, there) + rest + home
    keys, grads, both = _hops_ns(moves, rings, cluster, cost)
    hops = np.maximum(rings.positions - 1, 1)
    each = -(-rest // hops)
    # The work on own keys hides the first hop, and the work of each hop hides the next one. Gradients follow their keys
    # two hops later, so the last two of them travel without keys, and no work hides the very last.
    turning = np.maximum(own, keys) + each
    if len(moves.dkv_hops.size) == 0:
        turning += (hops - 1) * np.maximum(each, keys)
    else:
        turning += grads
        alone, together = np.minimum(hops - 1, 1), np.maximum(hops - 2, 0)
        turning += alone * (np.maximum(each, keys) + np.maximum(each, grads) - each) + together * np.maximum(each, both)
    return there + np.where(rings.positions > 1, turning, own + rest) + home


def _is_uneven(mask: LayerMask) -> bool:
    """Return whether the work may differ from hop to hop of a ring."""
    return any(rule not in (causal(), full()) for rule in mask.rules)


def _turned_ns(spans: Ints, moves: Moves, rings: Rings, cluster: Cluster, cost: CostModel) -> Ints:
    """Return the nanoseconds of each rank for one layer's attention in one direction around rings, including waits.

    ``spans[rank, hop]`` is the work of each hop in nanoseconds.
    """
    keys, grads, both = _hops_ns(moves, rings, cluster, cost)
    if len(moves.dkv_hops.size) == 0:
        grads, both = np.zeros_like(keys), keys
    last = rings.positions - 1
    begin = np.zeros(cluster.ranks, np.int64)
    for hop in range(spans.shape[1]):
        # The keys of the next hop and, from the third hop on, gradients travel beside the work of this hop.
        beside = np.where(hop < last, keys if hop < 2 else both, grads if hop >= 2 else 0)
        meeting = np.maximum(begin, begin[rings.before])
        end = np.maximum(begin + spans[:, hop], np.where(beside > 0, meeting + beside, 0))
        begin = np.where(hop <= last, end, begin)
    home = np.where(last > 0, grads, 0)
    turned = np.maximum(begin, np.where(home > 0, begin[rings.before], 0)) + home
    there, back = (exchange_ns(flows, cluster, cost) for flows in (moves.inputs, moves.outputs))
    return np.asarray(there + turned + back)


def _hops_ns(moves: Moves, rings: Rings, cluster: Cluster, cost: CostModel) -> tuple[Ints, Ints, Ints]:
    """Return the nanoseconds of one hop of keys, of gradients and of both together.

    Each is an array over ranks: the time of the slowest link in the rank's group.
    """
    hops = np.maximum(rings.positions - 1, 1)
    keys, grads = (through_ports(flows, cluster).received for flows in (moves.kv_hops, moves.dkv_hops))
    found = []
    for size in (keys, grads, keys + grads):
        times = ports_ns(-(-size // hops), cluster, cost)
        slowest = np.zeros(cluster.ranks, np.int64)
        np.maximum.at(slowest, rings.group, times + cluster.latency_ns * (times > 0))
        found.append(slowest[rings.group])
    return found[0], found[1], found[2]
