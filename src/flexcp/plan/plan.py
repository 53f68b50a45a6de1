"""Plan: one batch, planned: a placement, and for each mask and direction what moves when.

``flexcp.schedule.transfers`` makes a plan of a :class:`~flexcp.plan.placement.Placement` by adding a program per mask
and direction.

The class is its data and its hash. What else can be said about a plan is a function in a module beside this one, with a
method here that calls it; those modules load when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.tables import Table
from flexcp.batch import Batch
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.plan.fields import header
from flexcp.plan.placement import Placement
from flexcp.plan.program import Program
from flexcp.shape import Shape

if TYPE_CHECKING:
    from flexcp.plan.memory import Memory
    from flexcp.plan.rounds import Rounds

Ints = NDArray[np.int64]


def digest(header: dict[str, Any], tables: Sequence[Table]) -> str:
    """The hash of a header and tables."""
    found = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for table in tables:
        found.update(len(table).to_bytes(8, "little"))
        found.update(table.matrix().astype("<i8").tobytes())
    return found.hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class Plan:
    """One batch, planned: immutable, hashable, printable, the same on every rank.

    ``programs[m]`` is (forward, backward) of the batch's m-th mask. ``requested`` is the strategy that was asked for,
    ``strategy`` the one that placed the batch: they differ where ``auto`` was asked. ``layout_given`` says that the
    user fixed who keeps which tokens; like notes it is no part of the hash, because what runs is the same.
    ``print(plan)`` shows a picture of who computes what; ``repr(plan)`` and f-strings are one line, for logs.
    """

    shape: Shape
    cluster: Cluster
    cost: CostModel
    requested: str
    placement: Placement
    programs: tuple[tuple[Program, Program], ...]
    layout_given: bool = False

    @property
    def batch(self) -> Batch:
        return self.placement.batch

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def strategy(self) -> str:
        """The strategy that placed the batch, with its degree where it has one: what ``auto`` chose, or what was asked.

        ``usp`` without degrees chooses them by heads and nodes, so they are named: tensor parallelism changes both.
        """
        if self.requested == "usp" and self.placement.traffic.groups:
            grid = self.placement.traffic.groups[0]
            return f"usp:{len(grid[0])},{len(grid)}"
        if self.requested != "auto":
            return self.requested
        return self.placement.note.split(": ")[0].split(" (")[0] or self.requested

    @property
    def label(self) -> str:
        """The strategy for headings: ``blocks``, or ``auto: blocks`` where ``auto`` was asked for and chose it."""
        from flexcp.plan.text import label

        return label(self)

    @cached_property
    def hash(self) -> str:
        """Identity of the plan: equal on ranks, machines and CPU types exactly when the plans are equal.

        It covers what was planned for too: the cluster and the cost model with its model, by numbers and by name.
        """
        return digest(self.header(), self.tables())

    def header(self) -> dict[str, Any]:
        """Everything of the plan that is not a table, as plain JSON values."""
        return header(self)

    def tables(self) -> list[Table]:
        """All tables of the plan in a fixed order: what moves, then how each program is executed."""
        return [*self.moving_tables(), *(program.execution for pair in self.programs for program in pair)]

    def moving_tables(self) -> list[Table]:
        """The tables that say what is where and what moves: runs, then for each mask regions,
        forward and backward transfers.
        """
        found: list[Table] = [self.placement.runs]
        for regions, (forward, backward) in zip(self.placement.regions, self.programs, strict=True):
            found += [regions, forward.transfers, backward.transfers]
        return found

    def __hash__(self) -> int:
        return int(self.hash[:15], 16)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.hash == other.hash

    def check(self) -> None:
        """Execute the plan symbolically, forward and backward;
        raises :class:`flexcp.plan.check.PlanError` on any broken invariant.
        """
        from flexcp.plan.check import check_plan

        check_plan(self)

    def bytes(self, backward: bool = False, mask: int = 0) -> Ints:
        """``[source, target]`` bytes of one layer."""
        from flexcp.plan.statistics import bytes_between

        return bytes_between(self, backward, mask)

    def inter_node_bytes(self, backward: bool = False, mask: int = 0) -> int:
        """Bytes of one layer that cross between nodes."""
        from flexcp.plan.statistics import bytes_between_nodes

        return bytes_between_nodes(self, backward, mask)

    def peers(self, rank: int) -> list[int]:
        """The ranks that ``rank`` sends to or receives from, under any mask and in either direction:
        a connection each.
        """
        from flexcp.plan.statistics import peers_of

        return peers_of(self, rank)

    def work(self, mask: int = 0) -> Ints:
        """Area x query heads of each rank."""
        return self.placement.work(mask)

    def work_of_layers(self) -> Ints:
        """The same over all layers: the work of every mask as often as layers have it."""
        from flexcp.plan.statistics import work_of_layers

        return work_of_layers(self)

    def rounds(
        self, mask: int = 0, backward: bool = False, chunk_bytes: int | None = None, rounds_per_call: int | None = None
    ) -> Rounds:
        """The conflict-free rounds of one layer, and what they lose (:mod:`flexcp.plan.rounds`).
        Made once for each set of arguments.
        """
        from flexcp.plan.rounds import plan_rounds

        key = (mask, backward, chunk_bytes, rounds_per_call)
        if key not in self._rounds:
            program = self.programs[mask][backward]
            self._rounds[key] = plan_rounds(program, self.shape, self.cluster, chunk_bytes, rounds_per_call)
        return self._rounds[key]

    @cached_property
    def _rounds(self) -> dict[tuple[int, bool, int | None, int | None], Rounds]:
        return {}

    def memory(self, rank: int, kernel: str | None = None) -> Memory:
        """What attention needs on ``rank``, in bytes, before anything is allocated (:mod:`flexcp.plan.memory`).

        With the name of a kernel (``step.kernels``) it is what that one needs, without whichever needs most.
        """
        from flexcp.plan.memory import plan_memory

        return plan_memory(self, rank, kernel)

    def explain(self) -> str:
        """One line: the strategy, and where ``auto`` was asked what it took, over what, and by how much, simulated."""
        from flexcp.plan.text import explanation

        return explanation(self)

    def __str__(self) -> str:
        from flexcp.plan.text import picture

        return picture(self)

    def __format__(self, spec: str) -> str:
        """One line in f-strings, which are for logs; ``str(plan)`` and ``print(plan)`` give the picture."""
        return format(repr(self), spec)

    def __repr__(self) -> str:
        from flexcp.plan.text import one_line

        return one_line(self)
