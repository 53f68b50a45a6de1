"""Row runs: moves of rows between shelves and messages, and the tables of integers that kernels read.

A *row run* is a number of rows of equal length, at equal distances in the source and in the target, that one GPU
program moves. Each column of a table is one run. Copies are cut into runs of a limited size; additions and merges are
cut into chains (:mod:`flexcp.executor.run.row_chains`), so that one launch reduces the results of all messages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import spread
from flexcp.executor.run.rank_program import Rows
from flexcp.executor.run.row_chains import Chains, Stretches, find_chains
from flexcp.shape import DTYPE_BYTES

Ints = NDArray[np.int64]
RUN_BYTES = 32_768
RUN_ROWS = 16
"""The most bytes and rows of one row run that is copied, row by row; a longer row is a run by itself."""
PROGRAMS = 2048
"""About how many programs of a launch that reduces results are enough to keep a GPU busy."""
SUM_ELEMENTS = (2048, 4096)
MERGE_ELEMENTS = (4096, 4096)
"""The least and the most elements that one program adds to, or merges into; a longer row is a run by itself.

Within these limits, a launch has about ``PROGRAMS`` programs. Longer runs make smaller tables, but launches slower: on
an H200, sums in runs of 8,192 elements took up to 1.4 times as long, and merges in runs of 16,384 up to 1.08 times.
"""


@dataclass(frozen=True)
class Place:
    """Rows of a field on a shelf, or in the stage's messages (``shelf`` is None).

    Row r begins at element ``start + r * step``. ``name`` is the field's name, such as ``"k"``, and ``dtype`` the name
    of the torch dtype in that place.
    """

    shelf: int | None
    name: str
    dtype: str
    rows: Rows
    start: int
    step: int


@dataclass(frozen=True)
class Move:
    """Rows of ``length`` elements that are copied, added or merged from one place to another.

    ``what`` is ``"copy"``, ``"add"`` or ``"merge"``. Outputs are merged by their LSEs: a row then has ``heads`` heads,
    with one LSE each, and ``lse`` are the places of the source's and the target's LSEs.
    """

    what: str
    source: Place
    target: Place
    length: int
    heads: int = 0
    lse: tuple[Place, Place] | None = None

    @property
    def plain(self) -> bool:
        """Whether the move is a copy without a change of dtype."""
        return self.what == "copy" and self.source.dtype == self.target.dtype

    @property
    def merged(self) -> tuple[Place, Place, Place, Place]:
        """The places of a merge: source, target, and the LSEs of both."""
        assert self.lse is not None
        return self.source, self.target, *self.lse

    @property
    def key(self) -> tuple[object, ...]:
        """What moves must have in common to share a launch: being plain copies, or the same operation and dtypes."""
        return ("bytes",) if self.plain else (self.what, self.source.dtype, self.target.dtype)

    @property
    def pair(self) -> tuple[object, ...]:
        """What identifies the source tensor and the target tensor; equal for moves between the same two tensors."""
        return self.source.shelf, self.target.shelf, self.target.name, self.source.dtype


def copy_runs(move: Move, pair: int) -> Ints:
    """Return the row runs of a copy between the ``pair``-th pair of tensors, one run per column.

    The rows of the table are ``pair, from, to, length, rows, step from, step to``, in bytes for a plain copy, else in
    elements. Rows without gaps on both sides are joined into one long row.
    """
    unit = DTYPE_BYTES[move.source.dtype] if move.plain else 1
    gapless = move.source.step == move.target.step == move.length
    most = max(1, RUN_BYTES // (move.length * DTYPE_BYTES[move.source.dtype]))
    here, there, rows = _stretches(move.source.rows, move.target.rows, most if gapless else min(most, RUN_ROWS))
    begin = (move.source.start + here * move.source.step) * unit
    to = (move.target.start + there * move.target.step) * unit
    steps = (move.source.step * unit, move.target.step * unit)
    length = np.full(len(rows), move.length * unit)
    if gapless:  # one long row
        length, rows = length * rows, np.ones_like(rows)
    return np.stack(np.broadcast_arrays(pair, begin, to, length, rows, *steps))


def sum_runs(pairs: list[list[Move]]) -> Ints:
    """Return the row runs of additions, which are grouped by pairs of source and target tensor, one run per column.

    The rows of the table are those of :func:`copy_runs`, in elements, and the number of runs in the chain that begins
    with the run.
    """
    moves = [move for each in pairs for move in each]
    pair = np.repeat(np.arange(len(pairs)), [len(each) for each in pairs])
    first, step = _starts(move.source for move in moves)
    column, to_step = _starts(move.target for move in moves)
    chains, move, row = _chained(moves, pair, column, np.array([move.length for move in moves]), 1)
    source = first[move] + row * step[move] + chains.column - column[move]
    to = chains.column + chains.row * to_step[move]
    begins = np.flatnonzero(chains.parts)
    gapless = (step[move] == chains.columns) & (to_step[move] == chains.columns)
    joined = np.repeat(np.logical_and.reduceat(gapless, begins), chains.parts[begins])  # into one long row
    length, rows = np.where(joined, chains.columns * chains.rows, chains.columns), np.where(joined, 1, chains.rows)
    return np.stack([pair[move], source, to, length, rows, step[move], to_step[move], chains.parts])


def merge_runs(moves: list[Move]) -> Ints:
    """Return the row runs of merges between one pair of tensors, one run per column.

    The rows of the table are ``rows, heads``, the first element and the step of source, target, source LSE and target
    LSE, and the number of runs in the chain that begins with the run.
    """
    width = moves[0].length // moves[0].heads
    starts = [_starts(places) for places in zip(*(move.merged for move in moves), strict=True)]
    first_head, heads = starts[1][0] // width, np.array([move.heads for move in moves])
    chains, move, row = _chained(moves, np.zeros_like(heads), first_head, heads, width)
    head, columns = chains.column - first_head[move], [chains.rows, chains.columns]
    for (start, step), at, numbers in zip(starts, (row, chains.row) * 2, (width, width, 1, 1), strict=True):
        columns += [start[move] + at * step[move] + head * numbers, step[move]]
    return np.stack([*columns, chains.parts])


def _starts(places: Iterable[Place]) -> tuple[Ints, Ints]:
    """Return the first elements of places, and the steps from row to row."""
    start, step = zip(*((place.start, place.step) for place in places), strict=True)
    return np.array(start), np.array(step)


def _chained(moves: list[Move], target: Ints, column: Ints, columns: Ints, width: int) -> tuple[Chains, Ints, Ints]:
    """Return (chains of the moves, the move of each part, the source row at which each part begins).

    For each move there are the number of its target, and its first column and number of columns there; a column has
    ``width`` elements.
    """
    here, there, count = zip(*(_stretches(m.source.rows, m.target.rows, sys.maxsize) for m in moves), strict=True)
    move = np.repeat(np.arange(len(moves)), [len(each) for each in count])
    source, row, rows = np.concatenate(here), np.concatenate(there), np.concatenate(count)
    least, most = MERGE_ELEMENTS if moves[0].what == "merge" else SUM_ELEMENTS
    even = int((rows * columns[move]).sum()) * width // PROGRAMS
    asked = Stretches(target[move], row, rows, column[move], columns[move])
    chains = find_chains(asked, max(1, min(max(even, least), most) // width))
    return chains, move[chains.stretch], (source - row)[chains.stretch] + chains.row


def _stretches(source: Rows, target: Rows, most: int) -> tuple[Ints, Ints, Ints]:
    """Split a move of rows into stretches that ascend by one on both sides, of at most ``most`` rows each.

    Returns (first source row, first target row, number of rows) of each stretch.
    """
    if isinstance(source, slice) and isinstance(target, slice):
        first = np.array([[source.start], [target.start]])
        count = np.array([source.stop - source.start])
    else:
        rows = np.stack([np.arange(r.start, r.stop) if isinstance(r, slice) else r for r in (source, target)])
        begins = np.flatnonzero(np.any(np.diff(rows, axis=1, prepend=rows[:, :1] - 2) != 1, axis=0))
        first, count = rows[:, begins], np.diff(begins, append=rows.shape[1])
    index, part = spread(-(-count // most))
    skipped = part * most
    return first[0, index] + skipped, first[1, index] + skipped, np.minimum(most, count[index] - skipped)


def count_in_words(runs: Ints) -> int:
    """Change row runs in place from bytes to the longest words that divide all their numbers; return a word's bytes.

    A word has 1, 2, 4, 8 or 16 bytes.
    """
    counted = (1, 2, 3, 5, 6)
    common = int(np.bitwise_or.reduce([np.bitwise_or.reduce(runs[column]) for column in counted], initial=16))
    word = common & -common
    for column in counted:
        runs[column] >>= word.bit_length() - 1
    return word
