"""Routes: keys that several ranks of a node read cross the network once, through a port that is not overloaded.

Keys from the reader's own node come directly from their owner. Keys from other nodes enter the node once, at their
*entry*: a rank that reads them and passes them on to the other readers. Gradients take the same way back. They are
added up at the entry, so they also leave the node only once.

The entries share the load of the node's ports. The readers of the same tokens take turns in being their entry. If a
rank would receive more than twice its even share of what enters its node, the rest enters at ranks with room, although
these do not read it; inside a node this detour is cheap. It is only made for amounts that take clearly longer than the
start of a message.
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
"""A chunk of keys, which enters a node at one rank, is at most 1 / ``TURNS`` of a port's even share, rounded up."""
OVER = 2
"""How many times its even share of what enters a node a port may receive before others help it."""
STARTS = 20
"""No detour is made for a rank that receives fewer bytes than its port carries in this many latencies."""
CHUNK_TOKENS = 128
"""The length of a chunk of keys is a multiple of this many tokens, except for the last one of a piece."""
SHELF_LINES = 5 * 2 * 128
"""The most bytes of padding between the kept keys and values of a head range.

There are two tensors with 128 bytes alignment on each of at most five shelves (four stages, and one more after a
relay).
"""


@dataclass(frozen=True, eq=False)
class Relays(Table):
    """Key pieces that are passed on inside a node: row ``piece`` of :attr:`Routes.direct` is passed on to ``rank``."""

    piece: Ints
    rank: Ints


class Routes(NamedTuple):
    """How key pieces travel: ``direct`` come from their owners, ``relays`` pass some of these on inside the node."""

    direct: Pieces
    relays: Relays


class Needs(NamedTuple):
    """What ranks read from others: query pieces ``q``, and key pieces with their routes."""

    q: Pieces
    keys: Routes


def route_keys(keys: Pieces, shape: Shape, cluster: Cluster, relay: bool = True) -> Routes:
    """Return the routes of the key pieces that ranks read from others.

    Without ``relay``, every piece comes directly from its owner.
    """
    size = cluster.ranks_per_node
    across = keys.owner // size != keys.rank // size
    if not relay or not across.any():
        return Routes(keys, Relays.make(0, piece=0, rank=0))
    chunks, readers, segment = _chunks(_same_heads(keys.take(across), cluster), cluster)
    chunks, readers, entry = _merged(chunks, readers, segment, _entries(chunks, readers, shape, cluster))
    straight = keys.take(~across)
    others = readers.take(readers.rank != entry[readers.piece])
    direct = Pieces.join([straight, replace(chunks, rank=entry)])
    return Routes(direct, Relays(len(straight) + others.piece, others.rank))


def kept_bytes(keys: Routes, shape: Shape, cluster: Cluster) -> Ints:
    """Return the bytes that each rank needs to keep the keys and values it receives in one layer, padding included."""
    direct, relays = keys
    received = Pieces.join([direct, replace(direct.take(relays.piece), rank=relays.rank)])
    each = int(shape.bytes_per_token_head()[Kind.KV, 0])
    ranges = np.unique(np.stack([received.rank, received.h0, received.h1]), axis=1)
    lines = np.bincount(ranges[0], minlength=cluster.ranks) * SHELF_LINES
    return sums(received.rank, received.amount * each, cluster.ranks) + lines


def _same_heads(keys: Pieces, cluster: Cluster) -> Pieces:
    """Return the key pieces, cut by heads so that the readers of one node can share what they read from one owner.

    The head ranges that the readers of a node read from an owner are then either equal or disjoint, so that what
    several of them read can enter the node once. Where all these ranges are equal already, nothing is cut.
    """
    sides = (cluster.nodes, cluster.ranks)
    pair = np.ravel_multi_index((keys.rank // cluster.ranks_per_node, keys.owner), sides)
    borders = distinct(np.concatenate([keys.h0, keys.h1]), int(keys.h1.max()) + 1)
    first, last = np.searchsorted(borders, keys.h0), np.searchsorted(borders, keys.h1)
    heads = first * len(borders) + last
    low = np.full(np.prod(sides), np.iinfo(np.int64).max)
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
    """Cut keys that enter nodes where their readers change, and into chunks; return (chunks, readers, segments).

    ``keys`` are pieces that cross nodes. The ``rank`` of a chunk is the number of the node that it enters. ``readers``
    has a row for each chunk (``piece``) and each rank that reads it. A segment is a range of tokens with the same
    readers; the last result is the segment of each chunk.
    """
    node = keys.rank // cluster.ranks_per_node
    # Pieces that differ only in reader and tokens get the same kind, so that all tokens can be put on one axis.
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
    # A chunk is at most 1 / TURNS of a port's even share, rounded up to whole tiles.
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
    return chunks, readers.sorted_by("piece", "rank"), of_chunk


def _entries(chunks: Pieces, readers: Relays, shape: Shape, cluster: Cluster) -> Ints:
    """Return the rank at which each chunk enters its node; the arguments are results of :func:`_chunks`."""
    size, ranks = cluster.ranks_per_node, cluster.ranks
    amount = chunks.amount
    begin = np.searchsorted(readers.piece, np.arange(len(chunks) + 1))
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
    # Chunks beyond a port's share fill the room that is left on the ranks of the node, rank by rank.
    room = np.maximum(np.repeat(share, size) - sums(entry[~over], amount[~over], ranks), 0)
    upto = np.cumsum(room)
    node_room = np.concatenate([np.zeros(1, np.int64), upto])[::size]
    index = np.flatnonzero(over)
    index = index[np.argsort(node[index], kind="stable")]
    laid = np.cumsum(amount[index]) - amount[index]
    laid -= laid[np.searchsorted(node[index], node[index])]
    # The ports of a node together have room for twice what enters, so the rank found is in the node.
    entry[index] = np.searchsorted(upto, node_room[node[index]] + laid, side="right")
    return entry


def _merged(chunks: Pieces, readers: Relays, segment: Ints, entry: Ints) -> tuple[Pieces, Relays, Ints]:
    """Return (chunks, readers, entries) with neighbouring chunks of one segment and one entry merged.

    ``segment`` and ``entry`` are the segment of each chunk (:func:`_chunks`) and the rank at which it enters its node.
    """
    alike = (segment[1:] == segment[:-1]) & (entry[1:] == entry[:-1])
    first, last = np.concatenate([[True], ~alike]), np.concatenate([~alike, [True]])
    merged = replace(chunks.take(first), stop=chunks.stop[last])
    kept = first[readers.piece]
    return merged, Relays((np.cumsum(first) - 1)[readers.piece[kept]], readers.rank[kept]), entry[first]
