"""Execution: how the stages of a program are carried out, stage by stage.

The plan says it, the executor does it and the simulator reads it, all from the columns of one small table:

    rounds_per_call   how the messages of stage s are issued: 0, all in one call; n, as many conflict-free rounds to a
                      call
    ahead             how many slots before slot s, which needs them, they are posted: in slot ``s - ahead``, before its
                      work; 0 is at the very beginning of slot s, beside nothing
    margin            how many multiprocessors the work of slot s leaves free, on ranks whose transfers are under way
                      meanwhile

:mod:`flexcp.schedule.execution` chooses them. Stages are posted in order, so all ranks make the same calls in the same
order. A rank without transfers beside a slot leaves nothing free there, whatever the column says: that rule is
:func:`margins`, for everybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.tables import Table

if TYPE_CHECKING:
    from flexcp.plan.program import Program

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Execution(Table):
    """Row s is of stage s and of slot s."""

    rounds_per_call: Ints
    ahead: Ints
    margin: Ints

    @property
    def posted(self) -> Ints:
        """The slot in which each stage is posted; stage 0 has no transfers."""
        posted: Ints = np.maximum(np.arange(len(self)) - self.ahead, 0)
        return posted

    def posts(self, slot: int) -> tuple[list[int], list[int]]:
        """The stages that ``slot`` posts: before it waits for what it needs, and behind that, before its work."""
        stages = np.flatnonzero(self.posted == slot)
        stages = stages[stages > 0]
        late = self.ahead[stages] == 0
        return stages[late].tolist(), stages[~late].tolist()

    def problem(self, stages: int) -> str | None:
        """What is wrong with this table for a program of so many stages, if anything."""
        if len(self) != stages:
            return f"execution has {len(self)} rows for {stages} stages"
        for name in self.names():
            if getattr(self, name).min(initial=0) < 0:
                return f"{name} is below 0"
        number = np.arange(1, stages)
        if np.any(self.ahead[1:] > number):
            return "a stage is posted before the first slot"
        if np.any(np.diff(self.posted[1:]) < 0):
            return "a stage is posted before the one in front of it"
        return None


def one_call_ahead(stages: int) -> Execution:
    """Every stage one call of whole messages, posted one slot ahead, beside work that leaves nothing free.

    What plans did before they said it, and so what a plan file of version 1 means.
    """
    return Execution.make(stages, rounds_per_call=0, ahead=1, margin=0)


def under_way(program: Program, ranks: int) -> NDArray[np.bool_]:
    """``[rank, slot]``: whether transfers of a rank may be under way while it computes."""
    t, how = program.transfers, program.execution
    size = program.stages + 1
    busy = np.zeros(ranks * size, bool)
    moves = np.flatnonzero(t.source != t.target)
    stage = t.stage[moves]
    for end in (t.source, t.target):
        busy[end[moves] * size + stage] = True
    # Stage s is under way from the slot that posts it to slot s - 1: a step up there, a step down in slot s, which may
    # be the same.
    place = np.flatnonzero(busy)
    stage = place % size
    steps = np.bincount(place - stage + how.posted[stage], minlength=len(busy)) - busy
    found: NDArray[np.bool_] = np.cumsum(steps.reshape(ranks, size), axis=1)[:, :-1] > 0
    return found


def margins(program: Program, ranks: int) -> Ints:
    """``[rank, slot]``: the multiprocessors that a rank leaves free in a slot."""
    return np.where(under_way(program, ranks), program.execution.margin, 0)
