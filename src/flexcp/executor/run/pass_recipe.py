"""Pass recipe: a rank's program for one mask and direction, and how it is executed as far as the plan decides that.

A recipe holds integers and no tensors, so a planner process can make it (:mod:`flexcp.executor.run.rank_recipe`). The
training process is left with what needs the device: making a kernel's work lists and uploading index maps
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
    """One kernel launch: slices (``work``) over a query shelf and a key shelf of the program.

    ``heads`` are its query heads, counted from the first head of the query shelf; ``groups`` are its KV heads, counted
    from the first of the key shelf. ``whole`` says that the slices touch every row of the query shelf. ``list_key`` is
    (number of query heads, number of KV heads, hash of the slices): launches with equal keys can share a kernel's work
    list.
    """

    work: ShelfWork
    heads: slice
    groups: slice
    whole: bool
    list_key: tuple[int, int, str]


@dataclass(frozen=True)
class PassRecipe:
    """What a rank does in one pass (one direction of one attention layer).

    - ``launches[slot]``: the kernel launches of a slot.
    - ``opens[slot]``: the numbers of the shelves that are allocated in a slot.
    - ``sends[stage]`` and ``receives[stage]``: (peer, bytes) of each message.
    - ``untouched_dq``: for each query shelf, the first slot that receives, sends or moves its dq (see
      :func:`touched_dq`).
    - ``finished_rows[slot][launch]``: the own rows that each launch of a forward begins and finishes, or None (see
      :func:`flexcp.executor.run.finished_rows.finished_rows`); always None for a backward.
    - ``by_fields`` and ``by_rows``: the moves that pack messages, if :func:`pass_recipe` was asked for them.
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
        """Whether any launch computes on the rank's own query rows."""
        return any(launch.work.q_shelf == QUERIES for slot in self.launches for launch in slot)


def pass_recipe(program: RankProgram, backward: bool, shape: Shape, packing: str | None = None) -> PassRecipe:
    """Derive the recipe of a program.

    ``packing`` is ``"fields"`` or ``"rows"`` to include the moves of that packing, or None to leave them for later.
    """
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
    """Return, for each query shelf, the first slot that receives, sends or moves its dq (number of slots if none does).

    Laid blocks do not count: they are written to another tensor. A slot moves data before it computes. So in all
    earlier slots a kernel may leave the shelf's dq *open*, that is, in an unfinished form of its own
    (:mod:`flexcp.executor.kernels`).
    """
    first = {number: len(program.slots) for number, shelf in enumerate(program.shelves) if shelf.side == QUERIES}
    for at, slot in enumerate(program.slots):
        moved = [block for pair in slot.own for block in pair]
        for block in [b for m in slot.receive + slot.send for b in m.blocks] + moved:
            if block.kind == Kind.DQ and not block.laid:
                first[block.shelf] = min(first[block.shelf], at)
    return first


def only_lists_add_to_dq(program: RankProgram, touched: dict[int, int]) -> bool:
    """Return whether nothing but the rank's own work lists adds to dq of own rows; some of it may be laid.

    ``touched`` is the result of :func:`touched_dq`.
    """
    return touched[QUERIES] == len(program.slots)


def covers(slices: Ints, rows: int) -> bool:
    """Return whether each of the query rows ``0..rows - 1`` is in a slice."""
    order = np.argsort(slices[:, Q0], kind="stable")
    start, stop = slices[order, Q0], np.maximum.accumulate(slices[order, Q1])
    return rows == 0 or bool(len(slices) and start[0] == 0 and np.all(start[1:] <= stop[:-1]) and stop[-1] == rows)


def _launch(work: ShelfWork, program: RankProgram, shape: Shape) -> LaunchRecipe:
    """Return the recipe of one kernel launch, which computes ``work``."""
    queries, keys = program.shelves[work.q_shelf], program.shelves[work.kv_shelf]
    share = shape.queries_per_key
    heads = slice(work.h0 - queries.h0, work.h1 - queries.h0)
    groups = slice(work.h0 // share - keys.h0, -(-work.h1 // share) - keys.h0)
    digest = hashlib.blake2b(work.slices.tobytes(), digest_size=16).hexdigest()
    key = (heads.stop - heads.start, groups.stop - groups.start, digest)
    return LaunchRecipe(work, heads, groups, covers(work.slices, queries.rows), key)
