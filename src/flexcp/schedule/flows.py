"""Flows: the bytes from rank to rank, forward and backward, and how long it takes to exchange them.

These are the same bytes that the plan's transfers would move, counted without making the transfers. Every rank has a
port inside its node and a port across nodes; both work at the same time and in both directions. An exchange in which
all messages are issued together takes a rank as long as the busiest port among its own and those of ranks that send to
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.distinct import distinct
from flexcp.arrays.totals import sums
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.plan.placement import Placement
from flexcp.schedule.needs import Pieces
from flexcp.schedule.rings import grids_by_shape
from flexcp.schedule.routes import Needs
from flexcp.shape import Kind, Shape

Ints = NDArray[np.int64]


class Flows(NamedTuple):
    """Bytes from rank to rank: ``size`` bytes from ``source`` to ``target``."""

    source: Ints
    target: Ints
    size: Ints


NO_FLOWS = Flows(*np.zeros((3, 0), np.int64))


class Moves(NamedTuple):
    """What moves in one direction (forward or backward) of one layer, by the time at which it moves.

    ``inputs`` come from their owners. ``relays`` pass inputs on inside a node; ``relayed`` are the gradients of these
    inputs on their way back to the rank that passed them on. ``gradients`` of keys leave when the work on those keys is
    done, ``outputs`` when all work is done. ``kv_hops`` and ``dkv_hops`` are what keys and their gradients move around
    rings, with one flow per link for all hops of a pass.
    """

    inputs: Flows = NO_FLOWS
    relays: Flows = NO_FLOWS
    kv_hops: Flows = NO_FLOWS
    dkv_hops: Flows = NO_FLOWS
    relayed: Flows = NO_FLOWS
    gradients: Flows = NO_FLOWS
    outputs: Flows = NO_FLOWS

    @property
    def everything(self) -> Flows:
        """All flows of the pass together."""
        return join_flows(self)


def join_flows(parts: Sequence[Flows]) -> Flows:
    """Return all flows of the parts in one table, without flows from a rank to itself or of 0 bytes."""
    some = [part for part in parts if len(part.size)]
    if not some:  # happens a hundred times in one call of auto
        return NO_FLOWS
    joined = some[0] if len(some) == 1 else Flows(*map(np.concatenate, zip(*some, strict=True)))
    moves = (joined.source != joined.target) & (joined.size > 0)
    return joined if moves.all() else Flows(*(column[moves] for column in joined))


def static_moves(placement: Placement, shape: Shape) -> tuple[Moves, Moves]:
    """Return what moves in the forward and in the backward of a placement whose traffic is a gather or rings."""
    return _gathered(placement, shape) if placement.traffic.kind == "gather" else _passed_round(placement, shape)


def needed_moves(shape: Shape, needs: Needs, keys_kept: bool) -> tuple[Moves, Moves]:
    """Return what moves in the forward and in the backward of a placement whose traffic is of the kind ``"needed"``.

    With ``keys_kept``, keys do not travel again in the backward.
    """
    each = shape.bytes_per_token_head()
    q, direct, relays = needs.q, needs.keys.direct, needs.keys.relays
    passed_on = direct.take(relays.piece)
    rows, keys = (q.owner, q.rank, q), (direct.owner, direct.rank, direct)
    again = (passed_on.rank, relays.rank, passed_on)

    def there(way: tuple[Ints, Ints, Pieces], *kinds: Kind) -> Flows:
        source, target, pieces = way
        return join_flows([Flows(source, target, pieces.amount * sum(each[kind, 0] for kind in kinds))])

    def back(way: tuple[Ints, Ints, Pieces], kind: Kind) -> Flows:
        source, target, pieces = way
        return join_flows([Flows(target, source, pieces.amount * each[kind, pieces.partial])])

    arriving, passing = there(keys, Kind.KV), there(again, Kind.KV)
    forward = Moves(join_flows([there(rows, Kind.Q), arriving]), passing, outputs=back(rows, Kind.O))
    moved = there(rows, Kind.Q, Kind.DO)
    backward = Moves(
        moved if keys_kept else join_flows([moved, arriving]),
        NO_FLOWS if keys_kept else passing,
        relayed=back(again, Kind.DKV),
        gradients=back(keys, Kind.DKV),
        outputs=back(rows, Kind.DQ),
    )
    return forward, backward


def _gathered(placement: Placement, shape: Shape) -> tuple[Moves, Moves]:
    """Return the moves of a gather, forward and backward: all keys of a group go to all its ranks.

    In the backward they go again, and every rank's partial gradients of them (dkv) return to the owners.
    """
    each = shape.bytes_per_token_head() * shape.kv_heads
    keys, grads = [], []
    for grid in placement.traffic.groups:
        ranks = np.array(grid, np.int64).reshape(-1)
        owner, reader = np.repeat(ranks, len(ranks)), np.tile(ranks, len(ranks))
        tokens = placement.tokens[owner]
        keys.append(Flows(owner, reader, tokens * each[Kind.KV, 0]))
        grads.append(Flows(reader, owner, tokens * each[Kind.DKV, 1]))
    inputs = join_flows(keys)
    return Moves(inputs), Moves(inputs, outputs=join_flows(grads))


def _passed_round(placement: Placement, shape: Shape) -> tuple[Moves, Moves]:
    """Return the moves of rings, forward and backward.

    Heads are exchanged between the ranks of each ring position, keys travel from position to position, and in the
    backward their gradients (dkv) follow them.
    """
    each = shape.bytes_per_token_head()
    forward: list[Moves] = []
    backward: list[Moves] = []
    for ranks in grids_by_shape(placement):
        split = ranks.shape[2]
        borders = np.arange(split + 1) * shape.heads // split
        low, high = shape.kv_range(borders[:-1], borders[1:])
        heads, kv_heads = np.diff(borders), high - low
        # The gradient of a KV head that several head groups read is the sum of partial gradients from all of them.
        shared = int(split > shape.kv_heads)
        # [group, position, owner, worker]: an owner's tokens and the heads of the rank that works on them.
        owner = np.repeat(ranks, split, axis=2).reshape(-1)
        worker = np.tile(ranks, (1, 1, split)).reshape(-1)
        of_heads, of_kv = (placement.tokens[owner] * np.tile(count, ranks.size) for count in (heads, kv_heads))
        there = Flows(owner, worker, of_heads * each[Kind.Q, 0] + of_kv * each[Kind.KV, 0])
        there_again = Flows(owner, worker, there.size + of_heads * each[Kind.DO, 0])
        home = Flows(worker, owner, of_heads * each[Kind.O, 0])
        home_again = Flows(worker, owner, of_heads * each[Kind.DQ, 0] + of_kv * each[Kind.DKV, shared])
        # A link into a position carries the keys of all other positions, and the dkv of all positions but the sender's.
        links = np.roll(ranks, 1, axis=1).reshape(-1), ranks.reshape(-1)
        at = placement.tokens[ranks].sum(axis=2, keepdims=True)
        others = at.sum(axis=1, keepdims=True) - at
        keys = (others * kv_heads * each[Kind.KV, 0]).reshape(-1)
        grads = (np.roll(others, 1, axis=1) * kv_heads * each[Kind.DKV, 1]).reshape(-1)
        kv_hops, dkv_hops = Flows(*links, keys), Flows(*links, grads)
        forward.append(Moves(there, kv_hops=kv_hops, outputs=home))
        backward.append(Moves(there_again, kv_hops=kv_hops, dkv_hops=dkv_hops, outputs=home_again))
    both = [Moves(*(join_flows(parts) for parts in zip(*moves, strict=True))) for moves in (forward, backward)]
    return both[0], both[1]


class Ports(NamedTuple):
    """Bytes through each rank's ports, each ``[level, rank]``; level 0 is inside the node, level 1 across nodes."""

    sent: Ints
    received: Ints


def through_ports(flows: Flows, cluster: Cluster) -> Ports:
    """Return the bytes that the flows send and receive through each rank's ports."""
    across = flows.source // cluster.ranks_per_node != flows.target // cluster.ranks_per_node
    level = across * cluster.ranks
    size = 2 * cluster.ranks
    sent, received = (sums(level + end, flows.size, size).reshape(2, -1) for end in (flows.source, flows.target))
    return Ports(sent, received)


def exchange_ns(flows: Flows, cluster: Cluster, cost: CostModel) -> Ints:
    """Return the nanoseconds of each rank in an exchange whose messages are all issued together.

    This is the time of the busiest port among its own and those of ranks that send to it, plus the start of its
    messages.
    """
    ranks = cluster.ranks
    if len(flows.size) == 0:
        return np.zeros(ranks, np.int64)
    ports = through_ports(flows, cluster)
    leaving = ports_ns(ports.sent, cluster, cost)
    busiest = np.maximum(leaving, ports_ns(ports.received, cluster, cost))
    np.maximum.at(busiest, flows.target, leaving[flows.source])
    pairs = distinct(flows.source * ranks + flows.target, ranks * ranks)
    peers = np.maximum(np.bincount(pairs // ranks, minlength=ranks), np.bincount(pairs % ranks, minlength=ranks))
    return busiest + np.where(peers > 0, cluster.latency_ns + cost.message_ns * (peers - 1), 0)


def ports_ns(size: Ints, cluster: Cluster, cost: CostModel) -> Ints:
    """Return the nanoseconds that ``size[level, rank]`` bytes need through each rank's two ports.

    Level 0 is the port inside the node, level 1 the port across nodes; the two work in parallel.
    """
    inside = cost.link_ns(size[0], cluster.intra_mbps)
    return inside if cluster.nodes == 1 else np.maximum(inside, cost.link_ns(size[1], cluster.inter_mbps))
