"""Compiled loops of rounds: cut messages into chunks, and assign chunks to rounds by edge colouring.

Chunks are the edges of a bipartite multigraph from senders to receivers. A colour is a round: no two edges of a colour
share a sender or a receiver. By Koenig's theorem, as many colours are enough as the busiest vertex has edges: if the
ends of an edge have no free colour in common, swapping two colours along a path frees one.

Edges are coloured from the largest to the smallest, and an edge takes the lowest colour that is free at both ends. So a
colour holds edges of similar size, and the sum over colours of the largest edge stays near its minimum. Swaps use the
highest free colours, which hold the smallest edges, because a large edge that moves into a colour makes its round long.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.compiled_sort import stable_order
from flexcp.arrays.jit import compiled

Ints = NDArray[np.int64]


MESSAGE, START, STOP, ROUND = range(4)
"""Columns of a table of chunks: message, byte range in the message (end exclusive), round."""


@compiled
def in_rounds(
    first: Ints,
    source: Ints,
    target: Ints,
    size: Ints,
    port: Ints,
    least: Ints,
    ranks: int,
    chunk_bytes: int,
    worth_permille: int,
    most_chunks: int,
    alignment: int,
) -> tuple[Ints, Ints, Ints]:
    """Return the table of chunks of all exchanges, and of each exchange the chunk size and time, both in bytes.

    The time is the sum over rounds of the largest chunk. Exchange g has the messages ``first[g]`` to
    ``first[g + 1] - 1`` and its busiest port ``port[g]`` bytes. Chunks have ``chunk_bytes`` bytes. If that
    is 0, the chunk size is the largest message at first, and is halved (rounded up to a multiple of ``alignment``)
    while the time is more than ``worth_permille`` of the busiest port's bytes; the largest message has at most
    ``most_chunks`` chunks, and chunks are not smaller than ``least[g]``. The size with the shortest time is kept.
    """
    exchanges = len(first) - 1
    limit = np.zeros(exchanges, np.int64)
    spent = np.zeros(exchanges, np.int64)
    chunks = np.empty((len(size), 4), np.int64)
    found = 0
    for g in range(exchanges):
        a, b = first[g], first[g + 1]
        largest, number = 0, 1
        for m in range(a, b):
            largest = max(largest, size[m])
        best = chunks[:0]
        while True:
            tried = chunk_bytes if chunk_bytes > 0 else -(-largest // (number * alignment)) * alignment
            these = cut(size[a:b], tried)
            time = coloured(these, source[a:b], target[a:b], ranks)
            if number == 1 or time < spent[g]:
                limit[g], spent[g], best = tried, time, these
            number *= 2
            worth = chunk_bytes == 0 and spent[g] * 1000 > port[g] * worth_permille
            if not worth or number > most_chunks or largest // number < least[g]:
                break
        if found + len(best) > len(chunks):
            wider = np.empty((len(chunks) + found + len(best), 4), np.int64)
            copy_chunks(wider, 0, chunks, found, 0)
            chunks = wider
        copy_chunks(chunks, found, best, len(best), a)
        found += len(best)
    return chunks[:found], limit, spent


@compiled
def cut(size: Ints, limit: int) -> Ints:
    """Cut messages into chunks of ``limit`` bytes and smaller rests; return the table of chunks, largest first.

    All chunks are in round 0.
    """
    rest = np.empty(len(size), np.int64)  # negative, so that sorting puts the largest first
    count, at = 0, 0
    for m in range(len(size)):
        rest[m] = -(size[m] % limit)
        count += -(-size[m] // limit)
    chunks = np.zeros((count, 4), np.int64)
    for m in range(len(size)):
        for number in range(size[m] // limit):
            chunks[at, MESSAGE], chunks[at, START], chunks[at, STOP] = m, number * limit, (number + 1) * limit
            at += 1
    for m in stable_order(rest)[: count - at]:
        chunks[at, MESSAGE], chunks[at, START], chunks[at, STOP] = m, size[m] + rest[m], size[m]
        at += 1
    return chunks


@compiled
def coloured(chunks: Ints, source: Ints, target: Ints, ranks: int) -> int:
    """Write the round of each chunk into the table, and return the sum over rounds of the largest chunk, in bytes.

    Rounds are numbered by their largest chunk, from the largest on. ``source`` and ``target`` are those of each
    message.
    """
    count = len(chunks)
    senders, receivers = np.empty(count, np.int64), np.empty(count, np.int64)
    for e in range(count):
        senders[e], receivers[e] = source[chunks[e, MESSAGE]], target[chunks[e, MESSAGE]]
    colour, rounds = colour_edges(senders, receivers, ranks)
    largest, place, total = np.zeros(rounds, np.int64), np.empty(rounds, np.int64), 0
    for e in range(count):
        # Sizes are negative, so that sorting puts the largest first.
        largest[colour[e]] = min(largest[colour[e]], chunks[e, START] - chunks[e, STOP])
    order = stable_order(largest)
    for c in range(rounds):
        place[order[c]] = c
        total -= largest[c]
    for e in range(count):
        chunks[e, ROUND] = place[colour[e]]
    return total


@compiled
def copy_chunks(into: Ints, at: int, chunks: Ints, count: int, message: int) -> None:
    """Copy ``count`` chunks into the rows ``at``, ``at + 1``, ... of ``into``; add ``message`` to message numbers."""
    for i in range(count):
        into[at + i, MESSAGE] = chunks[i, MESSAGE] + message
        for column in range(START, ROUND + 1):
            into[at + i, column] = chunks[i, column]


@compiled
def colour_edges(source: Ints, target: Ints, ranks: int) -> tuple[Ints, int]:
    """Colour the edges ``source[e] -> target[e]`` so that no two edges of a colour share a source or a target.

    Return (the colour of each edge, the number of colours, which is the largest degree of a vertex).
    """
    # Senders are vertices 0 to ranks - 1, receivers are vertices ranks to 2 * ranks - 1.
    degree = np.zeros(2 * ranks, np.int64)
    for e in range(len(source)):
        degree[source[e]] += 1
        degree[ranks + target[e]] += 1
    width = 0
    for v in range(2 * ranks):
        width = max(width, degree[v])
    taken = np.full((2 * ranks, width), -1, np.int32)  # [vertex, colour]: the edge of this colour, -1 if free
    lowest = np.zeros(2 * ranks, np.int64)  # [vertex]: all colours below this one are taken
    colour = np.empty(len(source), np.int64)
    for e in range(len(source)):
        s, t = source[e], ranks + target[e]
        while taken[s, lowest[s]] >= 0:
            lowest[s] += 1
        while taken[t, lowest[t]] >= 0:
            lowest[t] += 1
        c = max(lowest[s], lowest[t])
        while c < width and (taken[s, c] >= 0 or taken[t, c] >= 0):
            c += 1
        if c == width:
            c = highest_free(taken[s])
            swap(source, target, ranks, taken, colour, lowest, t, c, highest_free(taken[t]))
        colour[e] = c
        taken[s, c] = taken[t, c] = e
    return colour, width


@compiled
def highest_free(taken: NDArray[np.int32]) -> int:
    """Return the highest free colour of a vertex; ``taken[colour]`` is the edge of that colour, or -1.

    There is one as long as an edge of the vertex is not coloured.
    """
    c = len(taken) - 1
    while taken[c] >= 0:
        c -= 1
    return c


@compiled
def swap(
    source: Ints,
    target: Ints,
    ranks: int,
    taken: NDArray[np.int32],
    colour: Ints,
    lowest: Ints,
    t: int,
    c: int,
    other: int,
) -> None:
    """Free colour ``c`` at ``t``: swap it with ``other`` along the path that leaves ``t`` with colour ``c``.

    ``t`` is a receiver, so the path reaches senders by edges of colour c. The sender of the edge to be coloured has no
    such edge, so it is not on the path, and c stays free there. ``taken[vertex, colour]`` is the edge of that colour
    (-1: none), and all colours below ``lowest[vertex]`` are taken.
    """
    vertex, old, new = t, c, other
    edge = taken[t, c]
    taken[t, c] = -1
    lowest[t] = min(lowest[t], c)
    while edge >= 0:
        onto = source[edge] if vertex >= ranks else ranks + target[edge]
        following = taken[onto, new]
        taken[vertex, new] = taken[onto, new] = edge
        colour[edge] = new
        if following < 0:
            taken[onto, old] = -1
            lowest[onto] = min(lowest[onto], old)
        vertex, edge, old, new = onto, following, new, old
