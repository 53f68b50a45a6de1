"""Loops of rounds: messages cut into chunks, and chunks coloured into as many rounds
as the busiest port has of them, compiled.

Chunks are the edges of a bipartite multigraph from senders to receivers; a colour is a round, in which nobody sends or
receives twice. As many colours as the busiest vertex has edges are always enough (Koenig): an edge whose ends have no
free colour in common swaps two colours along a path, and then has one.

Edges come with the largest first and take the oldest colour that both ends have free. So a colour holds edges of
similar size, and the sum of the colours' largest edges stays near the least there is. Swaps take the newest colours,
which hold the smallest edges: a large edge that moves into a newer colour makes that one as large.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.compiled_sort import stable_order
from flexcp.arrays.jit import compiled

Ints = NDArray[np.int64]


MESSAGE, START, STOP, ROUND = range(4)
"""Columns of a table of chunks."""


@compiled
def in_rounds(
    first: Ints,
    source: Ints,
    target: Ints,
    size: Ints,
    port: Ints,
    least: Ints,
    ranks: int,
    given: int,
    enough: int,
    most: int,
    unit: int,
) -> tuple[Ints, Ints, Ints]:
    """Exchange g has the messages ``first[g] .. first[g + 1]``: the table of all chunks;
    chunk size and time of each exchange.

    Chunks have ``given`` bytes; or, when that is 0, as many as the largest message, halved (rounded up to ``unit``)
    while rounds take over ``enough`` per mille of the busiest port, at most to one in ``most`` and never below
    ``least``. The best size is kept.
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
            tried = given if given > 0 else -(-largest // (number * unit)) * unit
            these = cut(size[a:b], tried)
            time = coloured(these, source[a:b], target[a:b], ranks)
            if number == 1 or time < spent[g]:
                limit[g], spent[g], best = tried, time, these
            number *= 2
            worth = given == 0 and spent[g] * 1000 > port[g] * enough
            if not worth or number > most or largest // number < least[g]:
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
    """The messages in chunks of ``limit`` bytes and what is left over, largest first; rounds are open."""
    rest = np.empty(len(size), np.int64)  # negative, for the order
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
    """Write the chunks' rounds, those with the largest chunk first; the sum of the rounds' largest chunks."""
    count = len(chunks)
    senders, receivers = np.empty(count, np.int64), np.empty(count, np.int64)
    for e in range(count):
        senders[e], receivers[e] = source[chunks[e, MESSAGE]], target[chunks[e, MESSAGE]]
    colour, rounds = colour_edges(senders, receivers, ranks)
    largest, place, total = np.zeros(rounds, np.int64), np.empty(rounds, np.int64), 0
    for e in range(count):
        largest[colour[e]] = min(largest[colour[e]], chunks[e, START] - chunks[e, STOP])  # negative, for the order
    order = stable_order(largest)
    for c in range(rounds):
        place[order[c]] = c
        total -= largest[c]
    for e in range(count):
        chunks[e, ROUND] = place[colour[e]]
    return total


@compiled
def copy_chunks(into: Ints, at: int, chunks: Ints, count: int, message: int) -> None:
    """Chunks to the rows from ``at`` on, their messages counted from ``message``."""
    for i in range(count):
        into[at + i, MESSAGE] = chunks[i, MESSAGE] + message
        for column in range(START, ROUND + 1):
            into[at + i, column] = chunks[i, column]


@compiled
def colour_edges(source: Ints, target: Ints, ranks: int) -> tuple[Ints, int]:
    """Colours 0, 1, ... of the edges ``source[e] -> target[e]``, and how many there are: the largest degree."""
    # Receivers are the vertices from ``ranks`` on.
    degree = np.zeros(2 * ranks, np.int64)
    for e in range(len(source)):
        degree[source[e]] += 1
        degree[ranks + target[e]] += 1
    width = 0
    for v in range(2 * ranks):
        width = max(width, degree[v])
    taken = np.full((2 * ranks, width), -1, np.int32)  # the edge of each vertex and colour
    lowest = np.zeros(2 * ranks, np.int64)  # a vertex's colours below it are taken
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
            c = newest_free(taken[s])
            swap(source, target, ranks, taken, colour, lowest, t, c, newest_free(taken[t]))
        colour[e] = c
        taken[s, c] = taken[t, c] = e
    return colour, width


@compiled
def newest_free(taken: NDArray[np.int32]) -> int:
    """The newest colour that a vertex has free: with an edge still to come it has one."""
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
    """Exchange the colours ``c`` and ``other`` along the path that leaves ``t`` with ``c``,
    so that c becomes free there.

    The path comes to senders by edges of colour c. A sender that has none, such as the one that asks, is not on it.
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
