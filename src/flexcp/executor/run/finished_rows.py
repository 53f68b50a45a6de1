"""Finished rows: which work list of a forward is the first, and which the last, to add to each of a rank's own rows.

A list *begins* a row if no earlier list adds to it in any of the list's heads, and *finishes* it if no later list does.
If lists begin and finish every own row in every head that is not laid (:mod:`flexcp.executor.run.laid_rows`), and no
message adds to own rows, then a kernel that supports it (:mod:`flexcp.executor.kernels`) writes each finished row
once, in the model's dtype: the output need not be cleared before the pass or rounded after it. Otherwise (part of a row
comes from another rank, or a list finishes a row in only some of its heads) outputs are accumulated over the whole pass
and rounded at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.run.laid_rows import area_flags, ranges_of
from flexcp.executor.run.rank_program import RankProgram, ShelfWork, Slot
from flexcp.masks import Q0, Q1
from flexcp.plan.memory import QUERIES
from flexcp.shape import Kind

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class OwnRows:
    """The own rows that a work list begins and finishes, as ascending ranges ``[n, 2]`` (first row, last row + 1).

    A list *begins* a row if no earlier list adds to it, and *finishes* it if no later list does.
    """

    begins: Ints
    finishes: Ints


def finished_rows(program: RankProgram) -> list[list[OwnRows]] | None:
    """Return, by slot and work list of a forward, the own rows that the list begins and finishes.

    None unless lists begin and finish every own row in every head that is not laid, and nothing that another rank or
    shelf computed is added to own rows.
    """
    if any(_adds_to_own(slot) for slot in program.slots):
        return None
    own = program.shelves[QUERIES]
    lists = [work for slot in program.slots for work in slot.work]
    laid = program.laid[QUERIES]
    own_lists = [work for work in lists if work.q_shelf == QUERIES]
    borders = sorted({0, own.h1, *(h for work in own_lists for h in (work.h0, work.h1)), *laid[:, :2].flat})
    flags = area_flags(laid, borders, own.rows)
    begun, all_begun = _not_before(lists, borders, flags)
    finished, all_finished = _not_before(lists[::-1], borders, flags)
    if not (all_begun and all_finished):
        return None
    rows = iter(map(OwnRows, begun, reversed(finished)))
    return [[next(rows) for _ in slot.work] for slot in program.slots]


def _not_before(lists: list[ShelfWork], borders: list[int], laid: Flags) -> tuple[list[Ints], bool]:
    """Return, for each list, the ranges of own rows that no list before it adds to in any of its heads.

    The second result is whether these ranges, and the ``laid`` results, cover every own row in every head. ``borders``
    are the heads at which the head ranges of lists on own rows, or of laid results, begin or end; ``laid`` has a flag
    for each part of the heads between two borders and each row.
    """
    before: Flags = np.zeros_like(laid)
    found, runs = np.zeros_like(before), []
    for work in lists:
        if work.q_shelf != QUERIES:
            runs.append(np.zeros((0, 2), np.int64))
            continue
        part = slice(borders.index(work.h0), borders.index(work.h1))
        touched = _touched(work, laid.shape[1])
        first = touched & ~before[part].any(axis=0)
        before[part] |= touched
        found[part] |= first
        runs.append(ranges_of(first))
    return runs, bool((found | laid).all())


def _adds_to_own(slot: Slot) -> bool:
    """Return whether a slot adds outputs to own rows that arrived in a message or come from another shelf.

    Laid blocks are not added.
    """
    blocks = [block for message in slot.receive for block in message.blocks] + [there for _, there in slot.own]
    return any(block.kind == Kind.O and block.shelf == QUERIES and not block.laid for block in blocks)


def _touched(work: ShelfWork, rows: int) -> Flags:
    """Return a flag for each of the ``rows`` own rows: whether it is in one of the list's slices.

    Slices are trimmed, so such a row sees a key.
    """
    change = np.bincount(work.slices[:, Q0], minlength=rows + 1) - np.bincount(work.slices[:, Q1], minlength=rows + 1)
    return np.cumsum(change)[:rows] > 0
