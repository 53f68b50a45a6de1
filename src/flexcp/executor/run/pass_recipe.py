"""Pass recipe: a rank's program for one mask and direction with everything about its execution
that the plan alone decides.

Integers only; no tensor, so that a planner process can make it (:mod:`flexcp.executor.run.rank_recipe`) and the
training process is left with what needs the device: a kernel's work lists and the upload of index maps
(:mod:`flexcp.executor.run.prepared`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.run.field_moves import FieldMoves, field_moves
from flexcp.executor.run.finished_rows import OwnRows, finished_rows
from flexcp.executor.run.message_parts import message_bytes
from flexcp.executor.run.rank_program import RankProgram, ShelfWork
from flexcp.executor.run.row_moves import RowMoves, row_moves
from flexcp.masks import Q0, Q1
from flexcp.plan.memory import KEYS, QUERIES
from flexcp.shape import Kind, Shape

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LaunchRecipe:
    """A launch: its heads on the shelf of its queries, its groups on that of its keys,
    and whether its slices touch every query row.

    Launches of one ``list_key`` have the same slices, so that forward and backward share a kernel's work list.
    """

    work: ShelfWork
    heads: slice
    groups: slice
    whole: bool
    list_key: tuple[int, int, str]


@dataclass(frozen=True)
class PassRecipe:
    """By slot: launches, shelves to open; by stage (peer, bytes) of the messages that leave and arrive.
    ``untouched_dq`` is the slot up to which the dq of a query shelf may be open, ``finished_rows`` says of a forward
    which rows its launches begin and finish. What packs messages, by fields or by rows, is there where it was asked
    for.
    """

    program: RankProgram
    backward: bool
    launches: list[list[LaunchRecipe]]
    opens: list[list[int]]
    sends: list[list[tuple[int, int]]]
    receives: list[list[tuple[int, int]]]
    untouched_dq: dict[int, int]
    finished_rows: list[list[OwnRows]] | None
    by_fields: FieldMoves | None = None
    by_rows: RowMoves | None = None

    @property
    def has_own_lists(self) -> bool:
        """Whether a launch adds to own rows."""
        return any(launch.work.q_shelf == QUERIES for slot in self.launches for launch in slot)


def pass_recipe(program: RankProgram, backward: bool, shape: Shape, packing: str | None = None) -> PassRecipe:
    """The recipe of a program; ``packing`` is ``"fields"`` or ``"rows"`` where what moves is to be in it too."""
    opens: list[list[int]] = [[] for _ in program.slots]
    for number, shelf in enumerate(program.shelves):
        if number > KEYS:
            opens[shelf.stage].append(number)
    return PassRecipe(
        program,
        backward,
        [[_launch(work, program, shape) for work in slot.work] for slot in program.slots],
        opens,
        [[(m.peer, message_bytes(m, shape)) for m in slot.send] for slot in program.slots],
        [[(m.peer, message_bytes(m, shape)) for m in slot.receive] for slot in program.slots],
        touched_dq(program),
        None if backward else finished_rows(program),
        field_moves(program, shape) if packing == "fields" else None,
        row_moves(program, shape) if packing == "rows" else None,
    )


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


def _launch(work: ShelfWork, program: RankProgram, shape: Shape) -> LaunchRecipe:
    queries, keys = program.shelves[work.q_shelf], program.shelves[work.kv_shelf]
    share = shape.queries_per_key
    heads = slice(work.h0 - queries.h0, work.h1 - queries.h0)
    groups = slice(work.h0 // share - keys.h0, -(-work.h1 // share) - keys.h0)
    digest = hashlib.blake2b(work.slices.tobytes(), digest_size=16).hexdigest()
    key = (heads.stop - heads.start, groups.stop - groups.start, digest)
    return LaunchRecipe(work, heads, groups, covers(work.slices, queries.rows), key)
