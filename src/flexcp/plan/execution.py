"""Execution: a table that says how and when the transfers of each stage are posted.

The plan holds the table, the executor follows it and the simulator reads it. Row s has three columns:

    rounds_per_call   how the messages of stage s are issued: 0 means all in one call, n means n conflict-free rounds
                      per call
    ahead             how many slots ahead stage s is posted: in slot ``s - ahead``, before the work of that slot; 0
                      means at the very beginning of slot s, so that no work overlaps the transfers
    margin            how many multiprocessors the work of slot s leaves free, on ranks with transfers under way in
                      that slot

:mod:`flexcp.schedule.execution` chooses the values. Stages are posted in order, so all ranks make the same calls in the
same order. A rank without transfers under way in a slot leaves no multiprocessors free there, whatever the column says;
:func:`margins` applies this rule.
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
    """How each stage is posted; row s describes stage s and slot s.

    ``rounds_per_call`` is how many conflict-free rounds of messages are posted in one call (0: whole messages in a
    single call), ``ahead`` how many slots before slot s the messages of stage s are posted, and ``margin`` how many
    multiprocessors the work of slot s leaves free. The module's docstring says more.
    """

    rounds_per_call: Ints
    ahead: Ints
    margin: Ints

    @property
    def posted(self) -> Ints:
        """The slot in which each stage is posted; stage 0 has no transfers."""
        posted: Ints = np.maximum(np.arange(len(self)) - self.ahead, 0)
        return posted

    def posts(self, slot: int) -> tuple[list[int], list[int]]:
        """Return the stages that ``slot`` posts: (before it waits for arrivals, after waiting and before work)."""
        stages = np.flatnonzero(self.posted == slot)
        stages = stages[stages > 0]
        late = self.ahead[stages] == 0
        return stages[late].tolist(), stages[~late].tolist()

    def problem(self, stages: int) -> str | None:
        """Return a text that says what is wrong with this table for a program of ``stages`` stages, or None."""
        if len(self) != stages:
            return f"execution has {len(self)} rows for {stages} stages"
        for name in self.names():
            if getattr(self, name).min(initial=0) < 0:
                return f"{name} is below 0"
        number = np.arange(1, stages)
        if np.any(self.ahead[1:] > number):
            return "a stage is posted before the first slot"
        if np.any(np.diff(self.posted[1:]) < 0):
            return "a stage is posted before an earlier stage"
        return None


def one_call_ahead(stages: int) -> Execution:
    """Return an execution in which every stage is one call of whole messages, posted one slot ahead, without margin.

    Plans of version 1 were executed like this, so their files are read with this table.
    """
    return Execution.make(stages, rounds_per_call=0, ahead=1, margin=0)


def under_way(program: Program, ranks: int) -> NDArray[np.bool_]:
    """Return ``[rank, slot]``: whether a rank may have transfers under way while it computes in the slot."""
    t, how = program.transfers, program.execution
    size = program.stages + 1
    busy = np.zeros(ranks * size, bool)
    moves = np.flatnonzero(t.source != t.target)
    stage = t.stage[moves]
    for end in (t.source, t.target):
        busy[end[moves] * size + stage] = True
    # Stage s is under way from the slot that posts it to slot s - 1. So count +1 in the slot that posts it and -1 in
    # slot s (these may be the same slot), and sum up.
    place = np.flatnonzero(busy)
    stage = place % size
    steps = np.bincount(place - stage + how.posted[stage], minlength=len(busy)) - busy
    found: NDArray[np.bool_] = np.cumsum(steps.reshape(ranks, size), axis=1)[:, :-1] > 0
    return found


def margins(program: Program, ranks: int) -> Ints:
    """Return ``[rank, slot]``: how many multiprocessors a rank leaves free, 0 where it has no transfers under way."""
    return np.where(under_way(program, ranks), program.execution.margin, 0)
