"""Plan: the placement of one batch, and for each mask and direction a program of transfers.

``flexcp.schedule.transfers`` makes a plan from a :class:`~flexcp.plan.placement.Placement` by adding a program per mask
and direction.

The class holds the data and its hash. Everything else that can be computed from a plan (check, memory, text, ...) is a
function in another module of this package, with a method here that imports the module and calls the function.
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
    """Return the hash of a header (JSON values) and tables, as 32 hexadecimal digits."""
    found = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for table in tables:
        found.update(len(table).to_bytes(8, "little"))
        found.update(table.matrix().astype("<i8").tobytes())
    return found.hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of one batch: immutable, hashable, printable, the same on every rank.

    ``programs[m]`` is (forward, backward) of the batch's m-th mask. ``requested`` is the strategy given to the planner
    and ``strategy`` the one that placed the batch; they differ if ``requested`` is ``auto``, or ``usp`` without
    degrees. ``layout_given`` says that the user fixed which rank keeps which tokens; like the planner's note it is no
    part of the hash, because it does not change what runs. ``print(plan)`` shows a picture of which rank computes what;
    ``repr(plan)`` and f-strings give one line, for logs.
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
        """The strategy that placed the batch: the requested one, or the choice of ``auto``.

        For ``usp`` without degrees the chosen degrees are added (``usp:4,2`` has 4 ranks per ring position and 2
        positions), because they depend on heads and nodes, which tensor parallelism changes.
        """
        if self.requested == "usp" and self.placement.traffic.groups:
            grid = self.placement.traffic.groups[0]
            return f"usp:{len(grid[0])},{len(grid)}"
        if self.requested != "auto":
            return self.requested
        return self.placement.note.split(": ")[0].split(" (")[0] or self.requested

    @property
    def label(self) -> str:
        """The strategy as headings show it: ``blocks``, or ``auto: blocks`` if ``auto`` chose it."""
        from flexcp.plan.text import label

        return label(self)

    @cached_property
    def hash(self) -> str:
        """The identity of the plan, 32 hexadecimal digits: plans are equal exactly if their hashes are, on any machine.

        The hash also covers what was planned for: cluster, cost model and model, with their names.
        """
        return digest(self.header(), self.tables())

    def header(self) -> dict[str, Any]:
        """Return what the hash covers besides tables, as plain JSON values."""
        return header(self)

    def tables(self) -> list[Table]:
        """Return all tables of the plan in a fixed order: :meth:`moving_tables`, then the execution of each program."""
        return [*self.moving_tables(), *(program.execution for pair in self.programs for program in pair)]

    def moving_tables(self) -> list[Table]:
        """Return the tables of the placement and the transfers: runs, then for each mask regions and transfers.

        The transfers of the forward come before those of the backward.
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
        """Execute the plan symbolically, forward and backward.

        Raise :class:`flexcp.plan.check.PlanError` if it would compute or move something wrongly.
        """
        from flexcp.plan.check import check_plan

        check_plan(self)

    def bytes(self, backward: bool = False, mask: int = 0) -> Ints:
        """Return the bytes that each rank sends each other rank in one layer, ``[source, target]``.

        ``mask`` is the number of the layer's mask.
        """
        from flexcp.plan.statistics import bytes_between

        return bytes_between(self, backward, mask)

    def inter_node_bytes(self, backward: bool = False, mask: int = 0) -> int:
        """Return the bytes that cross between nodes in one layer of mask number ``mask``, in one direction."""
        from flexcp.plan.statistics import bytes_between_nodes

        return bytes_between_nodes(self, backward, mask)

    def peers(self, rank: int) -> list[int]:
        """Return the ranks that ``rank`` sends to or receives from, under any mask and in either direction.

        Each of them needs a connection.
        """
        from flexcp.plan.statistics import peers_of

        return peers_of(self, rank)

    def work(self, mask: int = 0) -> Ints:
        """Return the (query, key) pairs x query heads that each rank computes in one layer of mask number ``mask``."""
        return self.placement.work(mask)

    def work_of_layers(self) -> Ints:
        """Return the (query, key) pairs x query heads that each rank computes, summed over all layers of all masks."""
        return self.placement.work_of_layers()

    def rounds(
        self, mask: int = 0, backward: bool = False, chunk_bytes: int | None = None, rounds_per_call: int | None = None
    ) -> Rounds:
        """Return the conflict-free rounds of one layer and their efficiency (:mod:`flexcp.plan.rounds`).

        In a round, every rank sends to at most one rank and receives from at most one. ``chunk_bytes`` is the size into
        which messages are cut (None: chosen for each exchange), and ``rounds_per_call`` how many rounds are posted
        together (None: all). The result is cached for each set of arguments.
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
        """Return the bytes that attention needs on ``rank``, without allocating them (:mod:`flexcp.plan.memory`).

        ``kernel`` is the name of a kernel (``step.kernels``); without a name, the kernel that needs most is counted.
        Raise ValueError if the plan has no such rank.
        """
        from flexcp.plan.memory import plan_memory

        return plan_memory(self, rank, kernel)

    def explain(self) -> str:
        """Return one line on the strategy: what ``auto`` chose and by how much (simulated), or the planner's note.

        Without a note it says that the strategy was asked for.
        """
        from flexcp.plan.text import explanation

        return explanation(self)

    def __str__(self) -> str:
        from flexcp.plan.text import picture

        return picture(self)

    def __format__(self, spec: str) -> str:
        """Return the one-line form, so that f-strings suit logs; ``str(plan)`` and ``print(plan)`` give the picture."""
        return format(repr(self), spec)

    def __repr__(self) -> str:
        from flexcp.plan.text import one_line

        return one_line(self)
