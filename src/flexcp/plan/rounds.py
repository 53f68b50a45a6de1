"""Rounds: a stage's messages in an order in which no port is asked for twice at once.

What one rank sends another in a stage is one message. Inside a node and across nodes are two *levels* with ports of
their own, and what moves in one stage on one level is an *exchange*. Its messages are cut into chunks of at most
``chunk_bytes``, and the chunks coloured into rounds (:mod:`flexcp.plan.compiled_rounds`): in a round every rank sends
to one peer at most and receives from one at most. There are exactly as many rounds as the busiest port has chunks;
fewer cannot be. A few consecutive rounds are a *call*, what an executor posts together.

A round lasts as long as its largest chunk, so rounds hold chunks of similar size, the largest first. What an exchange
loses is its *efficiency*: the sum over rounds of the largest chunk / the bytes of the busiest port, 1.0 when that port
never waits. Smaller chunks lose less and start more messages. Unless told, an exchange keeps whole messages and halves
its chunks only while it loses more than ``WORTH_PERMILLE`` says and a chunk takes longer than its start-up.

Everything is integers from the plan, so every rank finds the same rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import offsets
from flexcp.arrays.tables import Table
from flexcp.arrays.totals import sums
from flexcp.clusters import Cluster
from flexcp.plan.program import Program, Transfers
from flexcp.shape import Shape

Ints = NDArray[np.int64]
WORTH_PERMILLE = 1050
"""Chunks are small enough when their rounds take no longer than this, against the busiest port."""
MOST_CHUNKS = 16
"""The largest message of an exchange is cut into no more chunks than this."""
ALIGNMENT = 16
"""Chunks begin at multiples of this, unless the user's own size does not."""


@dataclass(frozen=True, eq=False)
class Messages(Table):
    """All bytes from one rank to another in one exchange."""

    exchange: Ints
    source: Ints
    target: Ints
    size: Ints


@dataclass(frozen=True, eq=False)
class Chunks(Table):
    """Bytes ``start..stop`` of the message from ``source`` to ``target`` of an exchange,
    in the order of exchange, round and source.

    ``exchange`` is a row of :class:`Exchanges`; rounds count from 0 in each.
    """

    exchange: Ints
    round: Ints
    source: Ints
    target: Ints
    start: Ints
    stop: Ints


@dataclass(frozen=True, eq=False)
class Exchanges(Table):
    """What moves in a stage inside nodes (``across`` 0) or across them (1), at least one byte;
    sorted by stage and level.

    ``spent`` is the sum over rounds of the largest chunk, ``port`` what the busiest port sends or receives; both are
    bytes.
    """

    stage: Ints
    across: Ints
    chunk_bytes: Ints
    rounds: Ints
    spent: Ints
    port: Ints

    @property
    def efficiency(self) -> NDArray[np.float64]:
        """Time of the rounds against the busiest port's; 1.0 is perfect."""
        return self.spent / self.port


@dataclass(frozen=True, eq=False)
class Rounds:
    """The rounds of a program, and how many of them are posted together (None: all)."""

    exchanges: Exchanges
    chunks: Chunks
    rounds_per_call: int | None

    @property
    def call(self) -> Ints:
        """The call of each chunk, from 0 in each exchange."""
        number = self.chunks.round
        return number * 0 if self.rounds_per_call is None else number // self.rounds_per_call


def plan_rounds(
    program: Program,
    shape: Shape,
    cluster: Cluster,
    chunk_bytes: int | None = None,
    rounds_per_call: int | None = None,
) -> Rounds:
    """The rounds of every stage and level of a program; without ``chunk_bytes`` each has chunks as large as pays."""
    from flexcp.plan.compiled_rounds import in_rounds  # compiled: only who asks for rounds loads Numba

    if chunk_bytes is not None:
        _check_count("chunk_bytes", chunk_bytes)
    if rounds_per_call is not None:
        _check_count("rounds_per_call", rounds_per_call)
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
    """The messages of a program; stage and level of each exchange.

    Every rank begins with its next neighbour: where sizes are equal, an exchange of all with all falls into rounds by
    itself.
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
    """Stage, source, target and bytes of all that one rank sends another in a stage, where that is anything."""
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
    """The most bytes that one rank sends or receives in each exchange."""
    sides = (messages.source, messages.target)
    totals = [sums(messages.exchange * ranks + rank, messages.size, exchanges * ranks) for rank in sides]
    most: Ints = np.maximum(*totals).reshape(exchanges, ranks).max(axis=1, initial=0)
    return most


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is a whole number of at least 1; got {value!r}")
