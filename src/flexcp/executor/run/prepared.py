"""Prepared: a rank's program made ready for a kernel and a device.

Work lists and index maps depend on the plan alone, so they are made once, at the first layer, and kept with the step: the loop itself
copies nothing to the device and never makes the host wait. Forward and backward share a work list where their slices are the same.

Where a kernel can leave dq open (:mod:`flexcp.executor.kernels`), the lists of a shelf do so up to the first slot in which the rank's
messages read that dq or add to it; lists from then on add to the gradient itself. Where it can write rows that a list is the last to
add to, lists of a forward say which rows those are, and which they are the first to add to (:mod:`flexcp.executor.run.finished_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.kernels import find_kernel, has_triton
from flexcp.executor.run.finished_rows import OwnRows, finished_rows
from flexcp.executor.run.message_layout import Types, message_bytes
from flexcp.executor.run.packing import FieldPacking, Packing
from flexcp.executor.run.rank_program import RankProgram, ShelfWork
from flexcp.masks import Q0, Q1
from flexcp.plan.memory import KEYS, QUERIES
from flexcp.shape import Kind, Shape

Ints = NDArray[np.int64]
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

    ``closes`` are the shelves whose dq the lists of a slot are the last to leave open: it is closed after them. ``finishes`` says that own
    rows (of the output or, of a backward, of dq) can be written where they stay by whoever adds to them last.
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


def prepare(
    program: RankProgram, backward: bool, shape: Shape, kernel: str, types: Types, lists: WorkLists
) -> Prepared:
    """Make a program ready; ``lists`` holds the work lists of this step and gets the new ones."""
    module = find_kernel(kernel)
    touched = touched_dq(program) if hasattr(module, "close_dq") else {}
    can_finish = getattr(module, "FINISHES", False)
    finished = finished_rows(program) if can_finish and not backward else None
    # Nobody but lists adds to own rows of dq, so it is finished when it is closed.
    finishes = can_finish and backward and touched.get(QUERIES) == len(program.slots) and bool(_lists_of_own(program))
    model = (program, shape, kernel, module, types, lists)
    work = [
        [
            _prepared(w, at < touched.get(w.q_shelf, 0), None if finished is None else finished[at][number], *model)
            for number, w in enumerate(slot.work)
        ]
        for at, slot in enumerate(program.slots)
    ]
    last = {w.work.q_shelf: at for at, slot in enumerate(work) for w in slot if w.open_dq}
    closes = [[number for number, slot in last.items() if slot == at] for at in range(len(work))]
    opens: list[list[int]] = [[] for _ in program.slots]
    for number, shelf in enumerate(program.shelves):
        if number > KEYS:
            opens[shelf.stage].append(number)
    sends = [[(m.peer, message_bytes(m, shape)) for m in slot.send] for slot in program.slots]
    receives = [[(m.peer, message_bytes(m, shape)) for m in slot.receive] for slot in program.slots]
    ready = (program, module, work, opens, closes, finished is not None or finishes, sends, receives)
    return Prepared(*ready, _packing(program, shape, types))


def _lists_of_own(program: RankProgram) -> list[ShelfWork]:
    return [work for slot in program.slots for work in slot.work if work.q_shelf == QUERIES]


def touched_dq(program: RankProgram) -> dict[int, int]:
    """The first slot that takes dq in, sends it or moves it, of each query shelf; past the last slot where none does.

    A slot does so before it computes, so dq may be open in the slots before it.
    """
    first = {number: len(program.slots) for number, shelf in enumerate(program.shelves) if shelf.side == QUERIES}
    for at, slot in enumerate(program.slots):
        moved = [block for pair in slot.own for block in pair]
        for block in [b for m in slot.receive + slot.send for b in m.blocks] + moved:
            if block.kind == Kind.DQ:
                first[block.shelf] = min(first[block.shelf], at)
    return first


def covers(slices: Ints, rows: int) -> bool:
    """Whether every one of ``rows`` query rows is in a slice."""
    order = np.argsort(slices[:, Q0], kind="stable")
    start, stop = slices[order, Q0], np.maximum.accumulate(slices[order, Q1])
    return rows == 0 or bool(len(slices) and start[0] == 0 and np.all(start[1:] <= stop[:-1]) and stop[-1] == rows)


def _prepared(
    work: ShelfWork, open_dq: bool, own: OwnRows | None, program: RankProgram, shape: Shape, name: str, kernel: Any,
    types: Types, lists: WorkLists,
) -> PreparedWork:  # fmt: skip
    queries, keys = program.shelves[work.q_shelf], program.shelves[work.kv_shelf]
    share = shape.queries_per_key
    heads = slice(work.h0 - queries.h0, work.h1 - queries.h0)
    groups = slice(work.h0 // share - keys.h0, -(-work.h1 // share) - keys.h0)
    counts = (heads.stop - heads.start, groups.stop - groups.start)
    rows = {} if own is None else {"begins": own.begins, "finishes": own.finishes}
    key = (name, types.device, *counts, work.slices.tobytes(), *(runs.tobytes() for runs in rows.values()))
    if key not in lists:
        sizes = (*counts, shape.head_dim, shape.v_head_dim)
        lists[key] = kernel.prepare(work.slices, *sizes, types.device, **rows)
    return PreparedWork(work, heads, groups, lists[key], covers(work.slices, queries.rows), open_dq)


def _packing(program: RankProgram, shape: Shape, types: Types) -> Packing:
    if types.device.type == "cuda" and has_triton():
        from flexcp.executor.run.row_packing import RowPacking

        return RowPacking(program, shape, types)
    return FieldPacking(program, shape, types)
