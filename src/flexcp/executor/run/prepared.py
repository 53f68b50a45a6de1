"""Prepared: a rank's program made ready for a kernel and a device, by its recipe
(:mod:`flexcp.executor.run.pass_recipe`).

Work lists and index maps depend on the plan alone, so they are made once, at the first layer, and kept with the step:
the loop itself copies nothing to the device and never makes the host wait. Forward and backward share a work list where
their slices are the same.

Where a kernel can leave dq open (:mod:`flexcp.executor.kernels`), the lists of a shelf do so up to the first slot in
which the rank's messages read that dq or add to it; lists from then on add to the gradient itself. Where it can write
rows that a list is the last to add to, lists of a forward say which rows those are, and which they are the first to add
to (:mod:`flexcp.executor.run.finished_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexcp.executor.kernels import find_kernel, has_triton
from flexcp.executor.run.finished_rows import OwnRows
from flexcp.executor.run.message_layout import Types
from flexcp.executor.run.packing import FieldPacking, Packing
from flexcp.executor.run.pass_recipe import LaunchRecipe, PassRecipe
from flexcp.executor.run.rank_program import RankProgram, ShelfWork
from flexcp.plan.memory import QUERIES
from flexcp.shape import Shape

WorkLists = dict[tuple[object, ...], Any]


@dataclass(frozen=True)
class PreparedWork:
    """A launch: where its tensors lie, the kernel's work list, whether its slices touch every row of the query shelf,
    and whether the shelf's dq may be open while it runs.
    """

    work: ShelfWork
    heads: slice
    groups: slice
    list: Any
    whole: bool
    open_dq: bool


@dataclass(frozen=True)
class Prepared:
    """A program, by slot: work, shelves to open; by stage (peer, bytes) of the messages that leave and arrive;
    and its packing.

    ``closes`` are the shelves whose dq the lists of a slot are the last to leave open: it is closed after them.
    ``finishes`` says that own rows (of the output or, of a backward, of dq) can be written where they stay by whoever
    adds to them last.
    """

    program: RankProgram
    kernel: Any
    work: list[list[PreparedWork]]
    opens: list[list[int]]
    closes: list[list[int]]
    finishes: bool
    sends: list[list[tuple[int, int]]]
    receives: list[list[tuple[int, int]]]
    packing: Packing

    @property
    def alone(self) -> PreparedWork | None:
        """The only thing this program does, if that is one launch over all own rows and heads."""
        slot = self.program.slots[0]
        if len(self.program.slots) > 1 or slot.own or len(self.work[0]) != 1:
            return None
        found = self.work[0][0]
        return found if found.work.h1 - found.work.h0 == self.program.shelves[QUERIES].h1 else None


def prepare(recipe: PassRecipe, shape: Shape, kernel: str, types: Types, lists: WorkLists) -> Prepared:
    """Make a program ready; ``lists`` holds the work lists of this step and gets the new ones."""
    module, program = find_kernel(kernel), recipe.program
    untouched = recipe.untouched_dq if hasattr(module, "close_dq") else {}
    can_finish = getattr(module, "FINISHES", False)
    finished = recipe.finished_rows if can_finish else None
    # Nobody but lists adds to own rows of dq, so it is finished when it is closed.
    finishes = can_finish and recipe.backward and untouched.get(QUERIES) == len(program.slots) and recipe.has_own_lists
    model = (shape, kernel, module, types, lists)
    work = [
        [
            _prepared(
                w, at < untouched.get(w.work.q_shelf, 0), None if finished is None else finished[at][number], *model
            )
            for number, w in enumerate(slot)
        ]
        for at, slot in enumerate(recipe.launches)
    ]
    last = {w.work.q_shelf: at for at, slot in enumerate(work) for w in slot if w.open_dq}
    closes: list[list[int]] = [[] for _ in work]
    for number, at in last.items():
        closes[at].append(number)
    ready = (
        program,
        module,
        work,
        recipe.opens,
        closes,
        finished is not None or finishes,
        recipe.sends,
        recipe.receives,
    )
    return Prepared(*ready, _packing(recipe, shape, types))


def packs_by_rows(device_type: str) -> bool:
    """Whether messages are packed by tables of rows on such a device, and not field by field."""
    return device_type == "cuda" and has_triton()


def _prepared(
    launch: LaunchRecipe,
    open_dq: bool,
    own: OwnRows | None,
    shape: Shape,
    name: str,
    kernel: Any,
    types: Types,
    lists: WorkLists,
) -> PreparedWork:
    rows = {} if own is None else {"begins": own.begins, "finishes": own.finishes}
    key = (name, types.device, *launch.list_key, *(runs.tobytes() for runs in rows.values()))
    if key not in lists:
        sizes = (*launch.list_key[:2], shape.head_dim, shape.v_head_dim)
        lists[key] = kernel.prepare(launch.work.slices, *sizes, types.device, **rows)
    return PreparedWork(launch.work, launch.heads, launch.groups, lists[key], launch.whole, open_dq)


def _packing(recipe: PassRecipe, shape: Shape, types: Types) -> Packing:
    if packs_by_rows(types.device.type):
        from flexcp.executor.run.row_packing import RowPacking

        return RowPacking(recipe.program, shape, types, recipe.by_rows)
    return FieldPacking(recipe.program, shape, types, recipe.by_fields)
