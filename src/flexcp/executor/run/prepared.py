"""Prepared: make a rank's program ready for a kernel and a device, from its recipe.

Recipes are made by :mod:`flexcp.executor.run.pass_recipe`. Work lists and index maps depend on the plan alone, so they
are made once, at the first layer, and kept with the step. The loop over slots then copies nothing to the device and
never makes the host wait. Forward and backward share a work list if their slices are the same.

Some kernels can leave dq *open*: they add to it in a form of their own, which ``close_dq`` turns into the gradient
(:mod:`flexcp.executor.kernels`). With such a kernel the work lists of a query shelf leave its dq open until the first
slot in which a message reads or changes that dq; later lists add to the gradient itself. ``open_dq`` clears such a dq.
Both functions are told which rows and heads of dq these lists add to (:mod:`flexcp.executor.kernels.dq_states`).
Some kernels can write a row directly in the model's dtype when the last work list adds to it. For them each list of a
forward names the rows that it is the first and the last to add to (:mod:`flexcp.executor.run.finished_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flexcp.executor.kernels import find_kernel, has_triton, uploaded
from flexcp.executor.kernels.dq_states import dq_states
from flexcp.executor.run.finished_rows import OwnRows
from flexcp.executor.run.laid_rows import NO_AREAS
from flexcp.executor.run.message_layout import Types
from flexcp.executor.run.packing import FieldPacking, Packing
from flexcp.executor.run.pass_recipe import LaunchRecipe, PassRecipe, only_lists_add_to_dq
from flexcp.executor.run.rank_program import RankProgram, ShelfWork
from flexcp.plan.memory import QUERIES
from flexcp.shape import Shape

WorkLists = dict[tuple[object, ...], Any]
"""The kernels' work lists of a step; the keys hold everything that a list was made from."""


@dataclass(frozen=True)
class PreparedWork:
    """One kernel launch, and the kernel's work list for it (``list``).

    ``heads`` are its query heads, counted from the first of the query shelf, and ``groups`` its KV heads, counted from
    the first of the key shelf. ``whole`` says that its slices touch every row of the query shelf. ``open_dq`` says that
    this launch may leave the shelf's dq open, for ``close_dq`` to finish.
    """

    work: ShelfWork
    heads: slice
    groups: slice
    list: Any
    whole: bool
    open_dq: bool


@dataclass(frozen=True, eq=False)
class Prepared:
    """A program that is ready to run on one kernel and device.

    - ``work[slot]``: the kernel launches of a slot.
    - ``opens[slot]``: the numbers of the shelves that are allocated in a slot.
    - ``closes[slot]``: the query shelves whose dq is closed after the slot's work, because no later slot leaves it
      open.
    - ``open_shelves``: the query shelves whose dq some launch leaves open; the first of these launches is also the
      first to add to it.
    - ``dq_states``: for each of them, the states of its dq, ``[rows, heads]``, on the device.
    - ``sends[stage]`` and ``receives[stage]``: (peer, bytes) of each message.
    - ``kernel``: the kernel's module.
    - ``finishes``: whether the kernel writes own rows (of the output, or of dq in a backward) directly in the model's
      dtype when the last list adds to them.
    - ``packing``: copies between shelves and messages.
    """

    program: RankProgram
    kernel: Any
    work: list[list[PreparedWork]]
    opens: list[list[int]]
    closes: list[list[int]]
    open_shelves: frozenset[int]
    dq_states: dict[int, Tensor]
    finishes: bool
    sends: list[list[tuple[int, int]]]
    receives: list[list[tuple[int, int]]]
    packing: Packing

    @property
    def alone(self) -> PreparedWork | None:
        """The only launch of a program that consists of one launch over all heads; None for other programs."""
        slot = self.program.slots[0]
        if len(self.program.slots) > 1 or slot.own or len(self.work[0]) != 1:
            return None
        found = self.work[0][0]
        return found if found.work.h1 - found.work.h0 == self.program.shelves[QUERIES].h1 else None


def prepare(recipe: PassRecipe, shape: Shape, kernel: str, types: Types, lists: WorkLists) -> Prepared:
    """Make a program ready for a kernel and for the device of ``types``.

    ``kernel`` is the kernel's name. Work lists are looked up in ``lists``, and new ones are added to it.
    """
    module, program = find_kernel(kernel), recipe.program
    untouched = recipe.untouched_dq if hasattr(module, "close_dq") else {}
    can_finish = getattr(module, "FINISHES", False)
    finished = recipe.finished_rows if can_finish else None
    # A dq to which only work lists add is complete when it is closed.
    closed_once = bool(untouched) and only_lists_add_to_dq(program, untouched)
    finishes = can_finish and recipe.backward and closed_once and recipe.has_own_lists
    target = (shape, kernel, module, types, lists)
    work = [
        [
            _prepared(
                w, at < untouched.get(w.work.q_shelf, 0), None if finished is None else finished[at][number], *target
            )
            for number, w in enumerate(slot)
        ]
        for at, slot in enumerate(recipe.launches)
    ]
    last = {w.work.q_shelf: at for at, slot in enumerate(work) for w in slot if w.open_dq}
    closes: list[list[int]] = [[] for _ in work]
    for number, at in last.items():
        closes[at].append(number)
    return Prepared(
        program,
        kernel=module,
        work=work,
        opens=recipe.opens,
        closes=closes,
        open_shelves=frozenset(last),
        dq_states={number: _dq_states(program, work, number, types) for number in last},
        finishes=finished is not None or finishes,
        sends=recipe.sends,
        receives=recipe.receives,
        packing=_packing(recipe, shape, types),
    )


def _dq_states(program: RankProgram, work: list[list[PreparedWork]], number: int, types: Types) -> Tensor:
    """Return the states of a query shelf's dq, on the device."""
    shelf = program.shelves[number]
    lists = [(w.work.slices, w.heads) for slot in work for w in slot if w.open_dq and w.work.q_shelf == number]
    laid = program.laid[QUERIES] if number == QUERIES else NO_AREAS
    return uploaded(dq_states(shelf.rows, shelf.h1 - shelf.h0, lists, laid), types.device)


def packs_by_rows(device_type: str) -> bool:
    """Return whether messages are packed by tables of rows on this type of device (else field by field)."""
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
    """Prepare one kernel launch; its work list is made unless ``lists`` has it.

    ``open_dq`` says that it may leave dq open. ``own`` are the rows that it begins and finishes, or None if the kernel
    is not to be told. ``name`` and ``kernel`` are the kernel's name and module.
    """
    rows = {} if own is None else {"begins": own.begins, "finishes": own.finishes}
    key = (name, types.device, *launch.list_key, *(runs.tobytes() for runs in rows.values()))
    if key not in lists:
        sizes = (*launch.list_key[:2], shape.head_dim, shape.v_head_dim)
        lists[key] = kernel.prepare(launch.work.slices, *sizes, types.device, **rows)
    return PreparedWork(launch.work, launch.heads, launch.groups, lists[key], launch.whole, open_dq)


def _packing(recipe: PassRecipe, shape: Shape, types: Types) -> Packing:
    """Return the packing that is used on the device of ``types``."""
    if packs_by_rows(types.device.type):
        from flexcp.executor.run.row_packing import RowPacking

        return RowPacking(recipe.program, shape, types, recipe.by_rows)
    return FieldPacking(recipe.program, shape, types, recipe.by_fields)
