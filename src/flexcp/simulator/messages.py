"""Messages: a program's chunks in the order in which ports take them, and how long each holds its two ports.

What is issued together, and in which order, is the plan's to say (:mod:`flexcp.plan.issue`): whole messages, or chunks
in the order of their rounds. A chunk takes its bytes at the port's bandwidth, more where others of its call crowd in at
its target as the cost model says, the first chunk of a message one message's start-up more, and the first chunk of a
rank in every further call the start-up of a call. *In line* whole messages go out peer by peer in the order of ranks,
each waiting for its turn: what a rank does that loops over its peers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.distinct import distinct
from flexcp.cost import CostModel
from flexcp.plan.issue import Parts, issued_parts
from flexcp.plan.plan import Plan

Ints = NDArray[np.int64]
MANY = 1 << 30


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
    plan: Plan,
    mask: int,
    backward: bool,
    cost: CostModel,
    rounds_per_call: Ints | None = None,
    in_line: bool = False,
    ranks_per_nic: int = 1,
) -> TimedChunks:
    """The chunks of all stages of a program; ``rounds_per_call`` of each stage stands for the plan's own where given.

    A network port is as fast as those of the ranks that share it together.
    """
    cluster = plan.cluster
    each = plan.programs[mask][backward].execution.rounds_per_call if rounds_per_call is None else rounds_per_call
    parts = issued_parts(plan, mask, backward, each * (not in_line))
    if in_line:
        parts = parts.sorted_by("stage", "across", "source", "target")
    size, first = parts.stop - parts.start, parts.start == 0
    inside, across = (cost.link_ns(size, mbps) for mbps in (cluster.intra_mbps, cluster.inter_mbps * ranks_per_nic))
    ns = np.where(parts.across, across, inside)
    if cost.crowding:
        together = np.minimum(_messages_at_target(parts, cluster.ranks), np.where(each > 0, each, MANY)[parts.stage])
        ns = ns * (1000 + cost.crowding * (together - 1)) // 1000
    ns = ns + cost.message_ns * first
    if parts.call.any():
        starts = (((parts.stage * 2 + parts.across) * cluster.ranks + parts.source) << 20) + parts.call
        _, opens = np.unique(starts, return_index=True)
        ns[opens[parts.call[opens] > 0]] += cluster.latency_ns
    return TimedChunks(parts.stage, parts.across, parts.source, parts.target, size, ns, parts.round)


def _messages_at_target(parts: Parts, ranks: int) -> Ints:
    """For each part, the messages that arrive at its target in its stage, through the same port."""
    port = (parts.stage * 2 + parts.across) * ranks + parts.target
    messages = distinct(port * ranks + parts.source) // ranks
    ports, count = np.unique(messages, return_counts=True)
    return count[np.searchsorted(ports, port)]
