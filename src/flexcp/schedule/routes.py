"""Routes: keys that several ranks of a node read cross the network once, through a port that has time.

Keys from the reader's own node come straight from their owner. Of those from other nodes every token enters the node
once, at its *entry*: a rank that reads it and passes it on to the others. The gradients take the same way back and are
added up at the entry, so they leave the node once too.

Entries share the node's ports: tokens with several readers take turns, and a rank that would receive more than twice
its even share of what enters its node leaves the rest to ranks with room, although these do not read it. Inside a node
that detour is cheap. It is made only for what would take clearly longer than a message takes to start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.distinct import distinct
from flexcp.arrays.intervals import overlaps, spread
from flexcp.arrays.tables import Table
from flexcp.arrays.totals import sums
from flexcp.clusters import Cluster
from flexcp.schedule.needs import Pieces
from flexcp.shape import Kind, Shape

Ints = NDArray[np.int64]
TURNS = 4
"""In how many chunks a port's share is dealt out."""
OVER = 2
"""A port may have so many times its even share of what enters before others help it."""
STARTS = 20
"""A detour is not worth less than the bytes of so many latencies."""
CHUNK_TOKENS = 128
"""Chunks of keys are multiples of this."""
SHELF_LINES = 5 * 2 * 128
"""Bytes at most between the kept tensors of a head range: two on each
of at most five shelves (four stages, one more behind a relay).
"""


@dataclass(frozen=True, eq=False)
class Relays(Table):
    """Row ``first`` of the pieces that come from their owners is passed on to ``rank``."""

    first: Ints
    rank: Ints


class Routes(NamedTuple):
    """How key pieces travel: ``first`` straight from their owners, then ``relays`` inside the node."""

    first: Pieces
    relays: Relays


class Needs(NamedTuple):
    """What ranks read from others: query pieces, and key pieces with their routes."""

    q: Pieces
    keys: Routes


def route_keys(keys: Pieces, shape: Shape, cluster: Cluster, relay: bool = True) -> Routes:
    """Routes of the key pieces that ranks read from others; without ``relay`` each straight from its owner."""
    size = cluster.ranks_per_node
    across = keys.owner // size != keys.rank // size
    if not relay or not across.any():
        return Routes(keys, Relays.make(0, first=0, rank=0))
    chunks, readers, segment = _chunks(_same_heads(keys.take(across), cluster), cluster)
    chunks, readers, entry = _merged(chunks, readers, segment, _entries(chunks, readers, shape, cluster))
    straight = keys.take(~across)
    others = readers.take(readers.rank != entry[readers.first])
    first = Pieces.join([straight, replace(chunks, rank=entry)])
    return Routes(first, Relays(len(straight) + others.first, others.rank))


def kept_bytes(keys: Routes, shape: Shape, cluster: Cluster) -> Ints:
    """Bytes that each rank needs to keep the keys it receives in one layer."""
    first, relays = keys
    received = Pieces.join([first, replace(first.take(relays.first), rank=relays.rank)])
    each = int(shape.bytes_per_token_head()[Kind.KV, 0])
    ranges = np.unique(np.stack([received.rank, received.h0, received.h1]), axis=1)
    lines = np.bincount(ranges[0], minlength=cluster.ranks) * SHELF_LINES
    return sums(received.rank, received.amount * each, cluster.ranks) + lines


def _same_heads(keys: Pieces, cluster: Cluster) -> Pieces:
    """The pieces cut by heads where ranks of one node read different heads of one owner,
    so that ranges are equal or apart.
    """
    pair = keys.rank // cluster.ranks_per_node * cluster.ranks + keys.owner
    borders = distinct(np.concatenate([keys.h0, keys.h1]), int(keys.h1.max()) + 1)
    first, last = np.searchsorted(borders, keys.h0), np.searchsorted(borders, keys.h1)
    heads = first * len(borders) + last
    low = np.full(cluster.nodes * cluster.ranks, len(borders) ** 2)
    high = np.zeros_like(low)
    np.minimum.at(low, pair, heads)
    np.maximum.at(high, pair, heads)
    mixed = (low < high)[pair]
    if not mixed.any():
        return keys
    piece, within = spread(np.where(mixed, last - first, 1))
    h0 = np.where(mixed[piece], borders[first[piece] + within], keys.h0[piece])
    h1 = np.where(mixed[piece], borders[np.minimum(first[piece] + within + 1, len(borders) - 1)], keys.h1[piece])
    return replace(keys.take(piece), h0=h0, h1=h1)


def _chunks(keys: Pieces, cluster: Cluster) -> tuple[Pieces, Relays, Ints]:
    """The keys that enter nodes, cut where readers change and into turns:
    (chunks with a node for a rank, their readers, their segment).
    """
    node = keys.rank // cluster.ranks_per_node
    # One axis for everything that is alike but for its reader and its tokens.
    kinds = np.stack([node, keys.owner, keys.h0, keys.h1, keys.partial])
    distance = (keys.owner - node * cluster.ranks_per_node) % cluster.ranks
    order = np.lexsort((keys.partial, keys.h1, keys.h0, distance, node))
    differs = np.any(np.diff(kinds[:, order], axis=1) != 0, axis=0)
    kind = np.empty(len(keys), np.int64)
    kind[order] = np.concatenate([np.zeros(1, np.int64), np.cumsum(differs)])
    span = int(keys.stop.max()) + 1
    edges = distinct(np.concatenate([kind * span + keys.start, kind * span + keys.stop]))
    same = edges[:-1] // span == edges[1:] // span
    low, high = edges[:-1][same], edges[1:][same]
    piece, segment = overlaps(kind * span + keys.start, kind * span + keys.stop, low, high)
    # Turns: no chunk is more than a part of a port's share, in whole tiles.
    of_segment = np.zeros(len(low), np.int64)
    of_segment[segment] = piece
    seen = sums(segment, np.ones_like(segment), len(low)) > 0
    heads = (keys.h1 - keys.h0)[of_segment]
    amount = np.where(seen, (high - low) * heads, 0)
    share = sums(node[of_segment], amount, cluster.nodes) // (cluster.ranks_per_node * TURNS)
    tokens = np.maximum(-(-share[node[of_segment]] // (heads * CHUNK_TOKENS)), 1) * CHUNK_TOKENS
    count = np.where(seen, -(-(high - low) // tokens), 0)
    of_chunk, turn = spread(count)
    start = low[of_chunk] + turn * tokens[of_chunk]
    stop = np.minimum(start + tokens[of_chunk], high[of_chunk])
    of_piece = of_segment[of_chunk]
    base = kind[of_piece] * span
    chunks = Pieces(
        node[of_piece],
        keys.owner[of_piece],
        start - base,
        stop - base,
        keys.h0[of_piece],
        keys.h1[of_piece],
        keys.partial[of_piece],
    )
    first_chunk = np.cumsum(count) - count
    pair, turn = spread(count[segment])
    readers = Relays(first_chunk[segment[pair]] + turn, keys.rank[piece[pair]])
    return chunks, readers.sorted_by("first", "rank"), of_chunk


def _entries(chunks: Pieces, readers: Relays, shape: Shape, cluster: Cluster) -> Ints:
    """The rank at which each chunk enters its node."""
    size, ranks = cluster.ranks_per_node, cluster.ranks
    amount = chunks.amount
    begin = np.searchsorted(readers.first, np.arange(len(chunks) + 1))
    entry: Ints = readers.rank[begin[:-1] + np.arange(len(chunks)) % np.diff(begin)]
    node, total = chunks.rank, sums(chunks.rank, amount, cluster.nodes)
    each = int(shape.bytes_per_token_head()[Kind.KV, 0])
    free = STARTS * cluster.latency_ns * cluster.inter_mbps // (1000 * each)
    share = np.maximum(-(-OVER * total // size), free)
    order = np.argsort(entry, kind="stable")
    before = np.cumsum(amount[order]) - amount[order]
    before -= before[np.searchsorted(entry[order], entry[order])]
    over = np.zeros(len(chunks), bool)
    over[order] = before + amount[order] > share[node[order]]
    if not over.any():
        return entry
    # What is over goes along the room that is left in the node, rank by rank.
    room = np.maximum(np.repeat(share, size) - sums(entry[~over], amount[~over], ranks), 0)
    upto = np.cumsum(room)
    node_room = np.concatenate([np.zeros(1, np.int64), upto])[::size]
    index = np.flatnonzero(over)
    index = index[np.argsort(node[index], kind="stable")]
    laid = np.cumsum(amount[index]) - amount[index]
    laid -= laid[np.searchsorted(node[index], node[index])]
    # Ports together have room for twice what enters, so this ends inside the node.
    entry[index] = np.searchsorted(upto, node_room[node[index]] + laid, side="right")
    return entry


def _merged(chunks: Pieces, readers: Relays, segment: Ints, entry: Ints) -> tuple[Pieces, Relays, Ints]:
    """Neighbouring chunks of one segment with one entry as one."""
    alike = (segment[1:] == segment[:-1]) & (entry[1:] == entry[:-1])
    first, last = np.concatenate([[True], ~alike]), np.concatenate([~alike, [True]])
    merged = replace(chunks.take(first), stop=chunks.stop[last])
    kept = first[readers.first]
    return merged, Relays((np.cumsum(first) - 1)[readers.first[kept]], readers.rank[kept]), entry[first]
