"""Prepared: a rank's program made ready for a kernel and a device, by its recipe (:mod:`flexcp.executor.run.pass_recipe`).

Work lists and index maps depend on the plan alone, so they are made once, at the first layer, and kept with the step: the loop itself
copies nothing to the device and never makes the host wait. Forward and backward share a work list where their slices are the same.

Where a kernel can leave dq open (:mod:`flexcp.executor.kernels`), the lists of a shelf do so up to the first slot in which the rank's
messages read that dq or add to it; lists from then on add to the gradient itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexcp.executor.kernels import find_kernel, has_triton
from flexcp.executor.run.message_layout import Types
from flexcp.executor.run.packing import FieldPacking, Packing
from flexcp.executor.run.pass_recipe import LaunchRecipe, PassRecipe
from flexcp.executor.run.rank_program import RankProgram, ShelfWork
from flexcp.plan.memory import QUERIES
from flexcp.shape import Shape

WorkLists = dict[tuple[object, ...], Any]


@dataclass(frozen=True)
class PreparedWork:
    """A launch: where its tensors lie, the kernel's work list, whether its slices touch every row of the query shelf, and whether the
    shelf's dq may be open while it runs."""

    work: ShelfWork
    heads: slice
    groups: slice
    list: Any
    whole: bool
    open_dq: bool


@dataclass(frozen=True)
class Prepared:
    """A program, by slot: work, shelves to open; by stage (peer, bytes) of the messages that leave and arrive; and its packing.

    ``closes`` are the shelves whose dq the lists of a slot are the last to leave open: it is closed after them.
    """

    program: RankProgram
    kernel: Any
    work: list[list[PreparedWork]]
    opens: list[list[int]]
    closes: list[list[int]]
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
    work = [
        [_prepared(w, at < untouched.get(w.work.q_shelf, 0), shape, kernel, module, types, lists) for w in slot]
        for at, slot in enumerate(recipe.launches)
    ]
    last = {w.work.q_shelf: at for at, slot in enumerate(work) for w in slot if w.open_dq}
    closes: list[list[int]] = [[] for _ in work]
    for number, at in last.items():
        closes[at].append(number)
    packing = _packing(recipe, shape, types)
    return Prepared(program, module, work, recipe.opens, closes, recipe.sends, recipe.receives, packing)


def packs_by_rows(device_type: str) -> bool:
    """Whether messages are packed by tables of rows on such a device, and not field by field."""
    return device_type == "cuda" and has_triton()


def _prepared(
    launch: LaunchRecipe, open_dq: bool, shape: Shape, name: str, kernel: Any, types: Types, lists: WorkLists
) -> PreparedWork:
    key = (name, types.device, *launch.list_key)
    if key not in lists:
        sizes = (*launch.list_key[:2], shape.head_dim, shape.v_head_dim)
        lists[key] = kernel.prepare(launch.work.slices, *sizes, types.device)
    return PreparedWork(launch.work, launch.heads, launch.groups, lists[key], launch.whole, open_dq)


def _packing(recipe: PassRecipe, shape: Shape, types: Types) -> Packing:
    if packs_by_rows(types.device.type):
        from flexcp.executor.run.row_packing import RowPacking

        return RowPacking(recipe.program, shape, types, recipe.by_rows)
    return FieldPacking(recipe.program, shape, types, recipe.by_fields)
