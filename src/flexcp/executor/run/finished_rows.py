"""Finished rows: which of a forward's work lists is the last to add to a rank's own rows.

A list *finishes* a row if no later list and no later message adds to it, in any of the list's heads. Where every own row is finished by
a list, in every head, a kernel that can (:mod:`flexcp.executor.kernels`) writes each row once, rounded, where it stays: nothing is cleared
before and nothing rounded after. Where a row's last part arrives from another rank, or a list finishes a row in some of its heads only,
nobody finishes anything, and outputs are sums until the end of the pass.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.run.rank_program import Block, RankProgram, ShelfWork, Slot
from flexcp.masks import Q0, Q1
from flexcp.plan.memory import QUERIES
from flexcp.shape import Kind

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def finished_rows(program: RankProgram) -> list[list[Ints]] | None:
    """By slot and list of a forward: the runs of own rows ``[n, 2]`` that the list finishes. None where some row is not finished so."""
    own = program.shelves[QUERIES]
    heads = _head_borders(program, own.h1)
    later: Flags = np.zeros((len(heads) - 1, own.rows), np.bool_)
    finished: Flags = np.zeros_like(later)
    found: list[list[Ints]] = []
    for slot in reversed(program.slots):
        runs: list[Ints] = []
        for work in reversed(slot.work):
            if work.q_shelf != QUERIES:
                runs.append(np.zeros((0, 2), np.int64))
                continue
            part = _part(heads, work.h0, work.h1)
            rows = _touched(work, own.rows)
            last = rows & ~later[part].any(axis=0)
            later[part] |= rows
            finished[part] |= last
            runs.append(_runs(last))
        found.append(runs[::-1])
        for block in _added(slot):
            later[_part(heads, block.h0, block.h1), block.rows] = True
    return found[::-1] if finished.all() else None


def _added(slot: Slot) -> list[Block]:
    """Blocks of outputs that a slot adds to own rows."""
    blocks = [block for message in slot.receive for block in message.blocks] + [there for _, there in slot.own]
    return [block for block in blocks if block.kind == Kind.O and block.shelf == QUERIES]


def _head_borders(program: RankProgram, heads: int) -> list[int]:
    """Heads at which lists or messages that add to own rows begin or end."""
    borders = {0, heads}
    for slot in program.slots:
        borders.update(h for w in slot.work if w.q_shelf == QUERIES for h in (w.h0, w.h1))
        borders.update(h for block in _added(slot) for h in (block.h0, block.h1))
    return sorted(borders)


def _part(borders: list[int], h0: int, h1: int) -> slice:
    return slice(borders.index(h0), borders.index(h1))


def _touched(work: ShelfWork, rows: int) -> Flags:
    """Rows that some slice of the list has."""
    change = np.bincount(work.slices[:, Q0], minlength=rows + 1) - np.bincount(work.slices[:, Q1], minlength=rows + 1)
    return np.cumsum(change)[:rows] > 0


def _runs(flags: Flags) -> Ints:
    """Where flags are set, as runs ``[first, last + 1]``."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    return edges.reshape(-1, 2).astype(np.int64)
