"""Messages: a program's chunks in the order in which ports take them, and how long each holds its two ports.

With rounds (:mod:`flexcp.plan.rounds`) a stage's chunks are in the order of their rounds. A chunk takes its bytes at the port's bandwidth,
the first chunk of a message one message's start-up more, and the first chunk of a rank in every further call the start-up of a call.
*Without* rounds whole messages go out peer by peer in the order of ranks, each waiting for its turn: what a rank does that loops over its
peers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.cost import CostModel
from flexcp.plan.plan import Plan
from flexcp.plan.program import Program
from flexcp.plan.rounds import find_messages, plan_rounds

Ints = NDArray[np.int64]


class TimedChunks(NamedTuple):
    """Rows in the order in which ports take them. ``across`` is the level, ``ns`` how long a chunk holds its ports."""

    stage: Ints
    across: Ints
    source: Ints
    target: Ints
    size: Ints
    ns: Ints
    round: Ints


def find_chunks(
    plan: Plan, program: Program, cost: CostModel, rounds: bool, rounds_per_call: int = 16, ranks_per_nic: int = 1
) -> TimedChunks:
    """The chunks of all stages of a program; a network port is as fast as those of the ranks that share it together."""
    cluster = plan.cluster
    if rounds:
        made = plan_rounds(program, plan.shape, cluster, rounds_per_call=rounds_per_call)
        chunks, call = made.chunks, made.call
        stage, across = made.exchanges.stage[chunks.exchange], made.exchanges.across[chunks.exchange]
        source, target, size, number = chunks.source, chunks.target, chunks.stop - chunks.start, chunks.round
        first = chunks.start == 0
    else:
        messages, stages, levels = find_messages(program, plan.shape, cluster)
        messages = messages.sorted_by("exchange", "source", "target")
        stage, across = stages[messages.exchange], levels[messages.exchange]
        source, target, size = messages.source, messages.target, messages.size
        call = number = np.zeros_like(size)
        first = np.ones(len(size), bool)
    ns = np.where(
        across, cost.link_ns(size, cluster.inter_mbps * ranks_per_nic), cost.link_ns(size, cluster.intra_mbps)
    )
    ns = ns + cost.message_ns * first
    starts = (((stage * 2 + across) * cluster.ranks + source) << 20) + call
    _, opens = np.unique(starts, return_index=True)
    opens = opens[call[opens] > 0]
    ns[opens] += cluster.latency_ns
    return TimedChunks(stage, across, source, target, size, ns, number)
