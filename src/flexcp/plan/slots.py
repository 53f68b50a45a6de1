"""Slots: the slot from which on each input of a pass is there, and the slot in which work runs.

In slot s a rank waits for the messages of stage s, posts later stages, and computes. The executor, the simulator and
the memory computation all use these rules:

- Pieces of stage s are there from slot s on, a rank's own tokens from slot ``own_stage`` on. Keys that were kept from
  stage s of the forward are there from slot s - 1 on.
- Work runs in the first slot in which its queries and its keys are there.
- Held work (own work that a rank holds back to hide transfers of results) runs in the slot after its last inputs.

Only :mod:`flexcp.plan.check` implements these rules a second time, so that it can find a mistake made here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.plan import Plan
from flexcp.plan.program import Program, Transfers
from flexcp.shape import Kind

Ints = NDArray[np.int64]


def pass_inputs(plan: Plan, mask: int, backward: bool) -> Transfers:
    """Return the q and kv pieces of a pass; their ``stage`` is the slot from which on they are there.

    Keys that were kept from the forward are included.
    """
    forward, program = plan.programs[mask][0].transfers, plan.programs[mask][backward]
    kind = program.transfers.kind
    found = program.transfers.take((kind == Kind.Q) | (kind == Kind.KV))
    if not program.keys_kept:
        return found
    kept = forward.take(forward.kind == Kind.KV)
    return Transfers.join([found, replace(kept, stage=kept.stage - 1)])


def work_slot(queries: Ints, keys: Ints) -> Ints:
    """Return the slot in which work runs, from the first slots in which its queries and its keys are there."""
    return np.maximum(queries, keys)


def held_slot(program: Program, last_input: Ints) -> Ints:
    """Return the slot in which each rank runs its held work: the slot after its last inputs, or the last slot.

    ``last_input`` is the stage of each rank's last inputs (0: no inputs). A rank without inputs runs its held work as
    if it had inputs of the first stage: stage 1, or slot 0 if the program keeps keys. Held work is own work that waits,
    to hide transfers of results.
    """
    earliest = 0 if program.keys_kept else 1
    slot: Ints = np.minimum(np.maximum(last_input, earliest) + 1, program.stages - 1)
    return slot
