"""Parts: which part of a rank's inputs arrives in which stage.

:mod:`flexcp.schedule.stages` decides how many stages there are and how large they are. Here the key pieces of each rank
are cut accordingly, separately inside and across nodes, so that both ports are busy in every stage. A stage should also
be even between ranks: if many ranks read the same owner in one stage, they all wait for its port. There are two ways:

- If messages are long, every stage has a share of what a rank reads of each owner. Then ports, and the work on the
  keys, are as even in each stage as in the whole pass, but there are as many messages in each stage.
- Otherwise owners follow each other, in an order that is different for each rank, so that the readers of an owner are
  spread over all stages. If keys are relayed inside nodes, the order is that of the owners' distance: each rank begins
  with the owner before it. The distance inside a node counts first; otherwise, all ranks of a node that read the tokens
  of another node would begin with the same rank of it.

A planner may wish for stages of its own (:class:`flexcp.plan.placement.Divisions`); then pieces are cut by its blocks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import overlaps, spread
from flexcp.arrays.totals import sums
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.plan.placement import Divisions, Placement
from flexcp.schedule.needs import Pieces
from flexcp.schedule.stages import PARTS, Stages
from flexcp.shape import Kind, Shape

Ints = NDArray[np.int64]
MOST_OWNERS = 32
"""Stages have a share of every owner only if ranks read at most this many owners, on average over ranks that read."""
LONG_MESSAGE = 4
"""A message is long if its bytes take this many times as long as the message costs besides them."""
GOLDEN = 40_503
"""2^16 divided by the golden ratio: multiples of it, modulo 2^16, are spread evenly."""
CUT_TOKENS = 128
"""Pieces are cut at multiples of this many tokens, so that kernels have few incomplete tiles."""
SHARE_TOKENS = 192
"""Stages have a share of every owner only if shares have at least this many tokens on average.

Cut at multiples of ``CUT_TOKENS``, smaller shares would be uneven, and so would the stages be.
"""


def cut_into_stages(
    keys: Pieces,
    borders: Ints,
    cluster: Cluster,
    across_borders: tuple[int, ...] = (),
    in_shares: bool = False,
    relayed: bool = False,
) -> tuple[Pieces, Ints, Ints]:
    """Cut key pieces by the borders of each rank's stages; return (parts, the stage of each, the piece of each).

    Stages are numbered from 1, and the piece of a part is its row in ``keys``. With ``across_borders``, the first stage
    has all pieces from the same node, and the other stages have the rest, cut by these borders. With ``in_shares``,
    every stage has a share of what a rank reads of each owner; otherwise owners follow each other, in the order of
    their distance if keys are ``relayed``.
    """
    if borders.shape[1] == 2:
        return keys, np.ones(len(keys), np.int64), np.arange(len(keys), dtype=np.int64)
    size, ranks = cluster.ranks_per_node, cluster.ranks
    across = (keys.owner // size != keys.rank // size).astype(np.int64)
    port = 2 * keys.rank + across
    turn = _distance(keys, cluster) if relayed else _turn(keys)
    order = np.lexsort((keys.h0, keys.start, keys.owner, turn, port))
    keys, across, port = keys.take(order), across[order], port[order]
    whole = port * ranks + keys.owner if in_shares else port
    amount = keys.amount
    total = sums(whole, amount, 2 * ranks * ranks)[whole]
    before = np.cumsum(amount) - amount
    begins = np.flatnonzero(np.append(True, whole[1:] != whole[:-1])[: len(whole)])
    before -= np.repeat(before[begins], np.diff(np.append(begins, len(whole))))
    of_piece = _borders_by_level(across_borders)[across] if across_borders else borders[keys.rank]
    cuts = -(-total[:, None] * of_piece // PARTS)
    first, last = ((at[:, None] >= cuts[:, 1:-1]).sum(axis=1) for at in (before, before + amount - 1))
    piece, within = spread(last - first + 1)
    stage = first[piece] + within
    keys = keys.take(piece)
    start, stop = (_cut_at(keys, cuts[piece, s] - before[piece]) for s in (stage, stage + 1))
    real = start < stop
    return replace(keys, start=start, stop=stop).take(real), stage[real] + 1, order[piece[real]]


def _turn(keys: Pieces) -> Ints:
    """Return numbers by which the pieces of each rank are put in order.

    Neighbours that read the same owners, and owners that the same ranks read, get numbers that are far apart. So the
    pieces of any stretch of the order have many owners, and each owner has about equally many of them.
    """
    return (keys.owner + keys.rank) * GOLDEN % (1 << 16)


def _distance(keys: Pieces, cluster: Cluster) -> Ints:
    """Return the distance of each piece's owner, counted downwards from its rank: first inside nodes, then by node."""
    size = cluster.ranks_per_node
    inside, nodes = (keys.rank - keys.owner) % size, (keys.rank // size - keys.owner // size) % cluster.nodes
    return inside * cluster.nodes + nodes


def shares_are_long(keys: Pieces, stages: Stages, shape: Shape, cluster: Cluster, cost: CostModel) -> bool:
    """Return whether stages may have a share of what a rank reads of each owner.

    That balances ports and work in every stage, but makes more messages. There must not be too many of them, and they
    must be long compared with what each of them costs, and with what pieces are cut at.
    """
    number = int(stages.number.max()) if len(keys) else 1
    if number == 1:
        return False
    pairs = len(np.unique(keys.rank * cluster.ranks + keys.owner))
    if pairs > MOST_OWNERS * len(np.unique(keys.rank)):
        return False
    if int((keys.stop - keys.start).sum()) < SHARE_TOKENS * pairs * number:
        return False
    size = int(keys.amount.sum()) * int(shape.bytes_per_token_head()[Kind.KV, 0])
    share = np.array([size // (pairs * number)])
    mbps = cluster.inter_mbps if cluster.nodes > 1 else cluster.intra_mbps
    return int(cost.link_ns(share, mbps)[0]) >= LONG_MESSAGE * cost.message_ns


def _borders_by_level(across_borders: tuple[int, ...]) -> Ints:
    """Return the borders ``[across, border]`` in ``PARTS`` for pieces from the same node (0) and from other nodes (1).

    Pieces from the same node are all in the first stage; pieces that cross nodes are in the others.
    """
    found = np.full((2, len(across_borders) + 1), PARTS, np.int64)
    found[:, 0] = 0
    found[1, 1:] = across_borders
    return found


def cut_by_divisions(keys: Pieces, divisions: Divisions, placement: Placement) -> tuple[Pieces, Ints, Ints]:
    """Cut key pieces into the stages that a planner wishes for; return (parts, the stage of each, the piece of each).

    Stages are numbered from 1, and the piece of a part is its row in ``keys``.
    """
    block, owner, start, stop = placement.owned_parts(divisions.borders[:-1], divisions.borders[1:])
    span = int(placement.tokens.max())  # one axis for all owners, on which different ones touch but do not overlap
    order = np.argsort(owner * span + start, kind="stable")
    block, low, high = block[order], (owner * span + start)[order], (owner * span + stop)[order]
    piece, at = overlaps(keys.owner * span + keys.start, keys.owner * span + keys.stop, low, high)
    stage = divisions.stage[keys.rank[piece], block[at]]
    first = np.append(True, (piece[1:] != piece[:-1]) | (stage[1:] != stage[:-1]))[: len(piece)]
    last = np.append(first[1:], True)[: len(piece)]
    parts = keys.take(piece[first])
    begin = np.maximum(parts.start, (low[at] % span)[first])
    end = np.minimum(parts.stop, (high[at] - owner[order][at] * span)[last])
    return replace(parts, start=begin, stop=end), stage[first], piece[first]


def _cut_at(keys: Pieces, amount: Ints) -> Ints:
    """Return the token of each piece before which about ``amount`` tokens x heads of it lie.

    It is a multiple of ``CUT_TOKENS`` after the start of the piece, or an end of the piece.
    """
    length = keys.stop - keys.start
    tokens = np.clip(amount // (keys.h1 - keys.h0), 0, length)
    whole = (tokens + CUT_TOKENS // 2) // CUT_TOKENS * CUT_TOKENS
    return keys.start + np.where((tokens == 0) | (tokens == length), tokens, np.minimum(whole, length))
