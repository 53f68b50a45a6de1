"""Issue: the parts of messages that ranks post in a pass, in the order in which they leave.

The row of a stage in :class:`~flexcp.plan.execution.Execution` says how its messages are issued: whole, in one call, in
which every rank begins with its next neighbour; or as chunks in conflict-free rounds (:mod:`flexcp.plan.rounds`), with
a number of rounds per call. The two levels have separate ports, so the n-th call holds the n-th rounds inside nodes and
the n-th rounds across nodes. The executor posts these parts and the simulator times them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.tables import Table
from flexcp.plan.plan import Plan
from flexcp.plan.rounds import find_messages

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Parts(Table):
    """Parts of messages: bytes ``start..stop`` (exclusive) of the message from ``source`` to ``target`` in ``stage``.

    ``across`` is the level (0 inside nodes, 1 across nodes). A call is what a rank posts together. Calls and rounds
    count from 0 in each stage and level; a message that is issued whole is in call 0 and round 0. Rows are sorted by
    stage, level and round.
    """

    stage: Ints
    across: Ints
    round: Ints
    call: Ints
    source: Ints
    target: Ints
    start: Ints
    stop: Ints


def issued_parts(
    plan: Plan, mask: int, backward: bool, rounds_per_call: Ints | None = None, chunk_bytes: int | None = None
) -> Parts:
    """Return the parts of messages that all ranks post in a pass, in the order in which they leave.

    ``rounds_per_call`` (one number per stage, 0 for whole messages in one call) and ``chunk_bytes`` replace the plan's
    own choices where given.
    """
    program = plan.programs[mask][backward]
    each = program.execution.rounds_per_call if rounds_per_call is None else rounds_per_call
    found = []
    if not each.all():
        messages, stages, levels = find_messages(program, plan.shape, plan.cluster)
        stage, zero = stages[messages.exchange], np.zeros_like(messages.size)
        ends = (messages.source, messages.target)
        parts = Parts(stage, levels[messages.exchange], zero, zero, *ends, zero, messages.size)
        found.append(parts.take(each[stage] == 0))
    if each.any():
        rounds = plan.rounds(mask, backward, chunk_bytes)
        chunks, exchanges = rounds.chunks, rounds.exchanges
        stage, number = exchanges.stage[chunks.exchange], chunks.round
        call = number // np.maximum(each[stage], 1)
        ends = (chunks.source, chunks.target)
        parts = Parts(stage, exchanges.across[chunks.exchange], number, call, *ends, chunks.start, chunks.stop)
        found.append(parts.take(each[stage] > 0))
    if len(found) == 1:
        return found[0]
    return Parts.join(found).sorted_by("stage", "across", "round")
