"""Slots: when the inputs of a pass are there, and in which slot work runs.

The executor that does the work, the simulator that times it and the memory that holds its inputs all ask here:

- what arrives in stage s is there from slot s on, a rank's own tokens from the program's ``own_stage`` on, and keys
  that were kept of the forward one slot before the stage that brought them;
- work runs in the first slot in which its queries and its keys are there;
- the share of own work that a program holds back runs in the slot after the rank's last inputs.

Only :mod:`flexcp.plan.check` has these rules in words of its own, so that it can find a mistake made here.
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
    """The q and kv pieces of a pass; ``stage`` is the slot from which on each is there."""
    forward, program = plan.programs[mask][0].transfers, plan.programs[mask][backward]
    kind = program.transfers.kind
    found = program.transfers.take((kind == Kind.Q) | (kind == Kind.KV))
    if not program.keys_kept:
        return found
    kept = forward.take(forward.kind == Kind.KV)
    return Transfers.join([found, replace(kept, stage=kept.stage - 1)])


def work_slot(queries: Ints, keys: Ints) -> Ints:
    """The slot in which work runs, from the slots in which its queries and its keys are there."""
    return np.maximum(queries, keys)


def held_slot(program: Program, last_input: Ints) -> Ints:
    """The slot in which held work runs, from the stages of ranks' last inputs (0 for a rank without any).

    A rank without inputs does so when the first inputs of others are worked on: those of stage 1, or kept keys, which
    are there in slot 0.
    """
    earliest = 0 if program.keys_kept else 1
    slot: Ints = np.minimum(np.maximum(last_input, earliest) + 1, program.stages - 1)
    return slot
