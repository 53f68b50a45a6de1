"""Finished rows: which work list of a forward is the first, and which the last, to add to each of a rank's own rows.

A list *begins* a row if no earlier list adds to it in any of the list's heads, and *finishes* it if no later list does.
If lists begin and finish every own row in every head, and no message adds to own rows, then a kernel that supports it
(:mod:`flexcp.executor.kernels`) writes each finished row once, in the model's dtype: the output need not be cleared
before the pass or rounded after it. Otherwise (part of a row comes from another rank, or a list finishes a row in only
some of its heads) outputs are accumulated over the whole pass and rounded at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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

    None unless lists begin and finish every own row in every head and nothing that another rank or shelf computed is
    added to own rows.
    """
    if any(_adds_to_own(slot) for slot in program.slots):
        return None
    own = program.shelves[QUERIES]
    lists = [work for slot in program.slots for work in slot.work]
    borders = sorted({0, own.h1, *(h for work in lists if work.q_shelf == QUERIES for h in (work.h0, work.h1))})
    begun, all_begun = _not_before(lists, borders, own.rows)
    finished, all_finished = _not_before(lists[::-1], borders, own.rows)
    if not (all_begun and all_finished):
        return None
    rows = iter(map(OwnRows, begun, reversed(finished)))
    return [[next(rows) for _ in slot.work] for slot in program.slots]


def _not_before(lists: list[ShelfWork], borders: list[int], rows: int) -> tuple[list[Ints], bool]:
    """Return, for each list, the ranges of own rows that no list before it adds to in any of its heads.

    The second result is whether these ranges cover every own row in every head. ``borders`` are the heads at which the
    head ranges of lists on own rows begin or end, and ``rows`` is the number of own rows.
    """
    before: Flags = np.zeros((len(borders) - 1, rows), np.bool_)
    found, runs = np.zeros_like(before), []
    for work in lists:
        if work.q_shelf != QUERIES:
            runs.append(np.zeros((0, 2), np.int64))
            continue
        part = slice(borders.index(work.h0), borders.index(work.h1))
        touched = _touched(work, rows)
        first = touched & ~before[part].any(axis=0)
        before[part] |= touched
        found[part] |= first
        runs.append(_runs(first))
    return runs, bool(found.all())


def _adds_to_own(slot: Slot) -> bool:
    """Return whether a slot adds outputs to own rows that arrived in a message or come from another shelf."""
    blocks = [block for message in slot.receive for block in message.blocks] + [there for _, there in slot.own]
    return any(block.kind == Kind.O and block.shelf == QUERIES for block in blocks)


def _touched(work: ShelfWork, rows: int) -> Flags:
    """Return a flag for each of the ``rows`` own rows: whether it is in one of the list's slices.

    Slices are trimmed, so such a row sees a key.
    """
    change = np.bincount(work.slices[:, Q0], minlength=rows + 1) - np.bincount(work.slices[:, Q1], minlength=rows + 1)
    return np.cumsum(change)[:rows] > 0


def _runs(flags: Flags) -> Ints:
    """Return the ranges (first, last + 1) in which flags are set: ``[0, 1, 1, 0, 1]`` gives ``[[1, 3], [4, 5]]``."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    return edges.reshape(-1, 2).astype(np.int64)
