"""Messages: the chunks of a program in the order in which ports take them, and how long each holds its two ports.

The plan says what is issued together and in which order (:mod:`flexcp.plan.issue`): whole messages, or chunks in the
order of their rounds. A chunk takes the time of its bytes at the port's bandwidth, and more if other messages of its
call crowd its target, as the cost model says. The first chunk of a message takes the start-up of a message more, and
the first chunk of a rank in every call but the first takes the start-up of a call more. *In line*, each rank sends
whole messages peer by peer in the order of ranks and waits for each, like a program that loops over its peers.
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
"""More messages than any port has; it stands for "no limit" on how many of them crowd a port."""


class TimedChunks(NamedTuple):
    """Chunks (parts of messages) in the order in which ports take them, with ``size`` in bytes.

    ``across`` is the level (0 inside nodes, 1 across nodes), ``ns`` is how many nanoseconds a chunk holds its ports.
    ``round`` is its conflict-free round in the stage, 0 for a message that is sent whole.
    """

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
    """Return the chunks of all stages of a program, in the order in which ports take them.

    ``rounds_per_call`` (one number per stage, 0 for whole messages in one call) replaces the plan's own choice if
    given. With ``in_line``, ranks send whole messages peer by peer. ``ranks_per_nic`` ranks share one network port,
    which is as fast as their ports together.
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
    """Return for each part the number of messages that arrive at its target in its stage and on its level."""
    port = (parts.stage * 2 + parts.across) * ranks + parts.target
    messages = distinct(port * ranks + parts.source) // ranks
    ports, count = np.unique(messages, return_counts=True)
    return count[np.searchsorted(ports, port)]
