"""Rounds: cut the messages of a stage into chunks, and order the chunks so that no two use a port at the same time.

Everything that one rank sends another in a stage is one message. Transfers inside nodes and across nodes are two
*levels* with separate ports, and the messages of one stage on one level are an *exchange*. Messages are cut into chunks
of at most ``chunk_bytes``, and chunks are assigned to rounds by edge colouring (:mod:`flexcp.plan.compiled_rounds`): in
a round, every rank sends to at most one peer and receives from at most one. There are as many rounds as the busiest
port has chunks, which is the minimum. A *call* is a few consecutive rounds that the executor posts together.

A round lasts as long as its largest chunk, so rounds hold chunks of similar size, the largest first. The *efficiency*
of an exchange is the sum over rounds of the largest chunk, divided by the bytes of the busiest port: 1.0 if that port
never waits, more if it does. Smaller chunks waste less time but start more messages. By default, messages stay whole,
and the chunk size is halved only while the efficiency is above ``WORTH_PERMILLE``, a chunk takes longer than its
start-up, and the largest message has at most ``MOST_CHUNKS`` chunks.

All of this is integer arithmetic on the plan, so every rank finds the same rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import offsets
from flexcp.arrays.tables import Table
from flexcp.arrays.totals import sums
from flexcp.clusters import Cluster
from flexcp.io.setting_checks import check_whole
from flexcp.plan.program import Program, Transfers
from flexcp.shape import Shape

Ints = NDArray[np.int64]
WORTH_PERMILLE = 1050
"""Chunks are small enough if their rounds move at most this, per mille of the busiest port's bytes.

What rounds move is the sum over rounds of the largest chunk.
"""
MOST_CHUNKS = 16
"""The largest message of an exchange is cut into at most this many chunks."""
ALIGNMENT = 16
"""Chunks begin at multiples of this many bytes, unless the user gives another chunk size."""


@dataclass(frozen=True, eq=False)
class Messages(Table):
    """The messages of a program: ``size`` bytes from ``source`` to ``target`` in exchange number ``exchange``.

    An exchange is all messages of one stage inside nodes, or all of one stage across nodes.
    """

    exchange: Ints
    source: Ints
    target: Ints
    size: Ints


@dataclass(frozen=True, eq=False)
class Chunks(Table):
    """Parts of messages: bytes ``start`` to ``stop`` (exclusive) of the message from ``source`` to ``target``.

    ``exchange`` is a row of :class:`Exchanges`; rounds count from 0 in each exchange. Rows are sorted by exchange,
    round and source.
    """

    exchange: Ints
    round: Ints
    source: Ints
    target: Ints
    start: Ints
    stop: Ints


@dataclass(frozen=True, eq=False)
class Exchanges(Table):
    """The exchanges of a program: the messages of one stage inside nodes (``across`` 0) or across nodes (1).

    Every exchange moves at least one byte. ``chunk_bytes`` is the largest chunk into which its messages are cut, and
    ``rounds`` the number of conflict-free rounds. ``spent`` is the sum over rounds of the largest chunk, ``port`` the
    bytes that the busiest port sends or receives. Rows are sorted by stage and level.
    """

    stage: Ints
    across: Ints
    chunk_bytes: Ints
    rounds: Ints
    spent: Ints
    port: Ints

    @property
    def efficiency(self) -> NDArray[np.float64]:
        """Time of the rounds relative to the time that the busiest port needs: 1.0 is perfect, more is worse."""
        return self.spent / self.port


@dataclass(frozen=True, eq=False)
class Rounds:
    """The rounds of a program; ``rounds_per_call`` is how many of them are posted together in one call (None: all).

    In a round, every rank sends to at most one rank and receives from at most one.
    """

    exchanges: Exchanges
    chunks: Chunks
    rounds_per_call: int | None

    @property
    def call(self) -> Ints:
        """The call of each chunk; calls count from 0 in each exchange."""
        number = self.chunks.round
        return number * 0 if self.rounds_per_call is None else number // self.rounds_per_call


def plan_rounds(
    program: Program,
    shape: Shape,
    cluster: Cluster,
    chunk_bytes: int | None = None,
    rounds_per_call: int | None = None,
) -> Rounds:
    """Return the rounds of every exchange of a program; without ``chunk_bytes`` a chunk size is chosen for each.

    ``rounds_per_call`` is only recorded in the result. Raise ValueError if one of the two is not a whole number of at
    least 1 or None.
    """
    from flexcp.plan.compiled_rounds import in_rounds  # imported here because it loads Numba

    if chunk_bytes is not None:
        check_whole("chunk_bytes", chunk_bytes, "a whole number of at least 1", 1)
    if rounds_per_call is not None:
        check_whole("rounds_per_call", rounds_per_call, "a whole number of at least 1", 1)
    messages, stage, across = find_messages(program, shape, cluster)
    first = np.searchsorted(messages.exchange, np.arange(len(stage) + 1))
    port = _busiest_ports(messages, len(stage), cluster.ranks)
    least = cluster.latency_ns * np.where(across, cluster.inter_mbps, cluster.intra_mbps) // 1000
    sizes = (chunk_bytes or 0, WORTH_PERMILLE, MOST_CHUNKS, ALIGNMENT)
    table, limit, spent = in_rounds(
        first, messages.source, messages.target, messages.size, port, least, cluster.ranks, *sizes
    )
    message, start, stop, number = table.T
    of = messages.take(message)
    rounds = np.zeros(len(stage), np.int64)
    np.maximum.at(rounds, of.exchange, number + 1)
    order = np.argsort((offsets(rounds)[of.exchange] + number) * cluster.ranks + of.source)  # all different
    chunks = Chunks(of.exchange, number, of.source, of.target, start, stop).take(order)
    return Rounds(Exchanges(stage, across, limit, rounds, spent, port), chunks, rounds_per_call)


def find_messages(program: Program, shape: Shape, cluster: Cluster) -> tuple[Messages, Ints, Ints]:
    """Return (the messages of a program, the stage of each exchange, the level of each exchange).

    An exchange is the messages of one stage on one level: 0 inside nodes, 1 across nodes. In an exchange, messages are
    sorted by the distance from source to target: every rank begins with its next neighbour. If all ranks exchange
    messages of equal size, this order alone is conflict-free.
    """
    node, ranks = cluster.ranks_per_node, cluster.ranks
    stage, source, target, size = _joined(program.transfers, ranks, program.transfers.bytes(shape))
    level = 2 * stage + (source // node != target // node)
    ahead = target - source
    ahead += ranks * (ahead < 0)
    order = np.argsort((level * ranks + ahead) * ranks + source, kind="stable")
    source, target, size, level = source[order], target[order], size[order], level[order]
    begins = np.diff(level, prepend=-1) > 0
    found, exchange = level[begins], np.cumsum(begins) - 1
    return Messages(exchange, source, target, size), found // 2, found % 2


def _joined(transfers: Transfers, ranks: int, size: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (stage, source, target, bytes) of every message: all that one rank sends another in a stage.

    ``size`` are the bytes of each transfer. Messages without bytes are left out.
    """
    stage, source, target = transfers.stage, transfers.source, transfers.target
    pair = (stage * ranks + source) * ranks + target
    if not (pair[1:] >= pair[:-1]).all():  # a program's transfers are in order, unless somebody made it by hand
        order = np.argsort(pair, kind="stable")
        pair, size, stage, source, target = (column[order] for column in (pair, size, stage, source, target))
    begins = np.ones(len(pair), bool)
    np.not_equal(pair[1:], pair[:-1], out=begins[1:])
    first = np.flatnonzero(begins)
    total = np.add.reduceat(size, first) if len(first) else size
    some = np.flatnonzero(total)
    here = first[some]
    return stage[here], source[here], target[here], total[some]


def _busiest_ports(messages: Messages, exchanges: int, ranks: int) -> Ints:
    """Return, for each exchange, the most bytes that one rank sends or receives."""
    sides = (messages.source, messages.target)
    totals = [sums(messages.exchange * ranks + rank, messages.size, exchanges * ranks) for rank in sides]
    most: Ints = np.maximum(*totals).reshape(exchanges, ranks).max(axis=1, initial=0)
    return most
