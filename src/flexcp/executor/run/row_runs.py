"""Row runs: moves of rows between shelves and messages, and the tables of integers that kernels read.

A *row run* is a number of rows of equal length, at equal distances in the source and in the target, that one GPU
program moves (in a merge, several programs with a few heads each). Each column of a table is one run. Copies are cut
into runs of a limited size; additions and merges are cut into chains (:mod:`flexcp.executor.run.row_chains`), so that
one launch reduces the results of all messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import spread
from flexcp.executor.run.rank_program import Rows
from flexcp.executor.run.row_chains import Chains, Stretches, find_chains
from flexcp.shape import DTYPE_BYTES

Ints = NDArray[np.int64]
COUNTED = [1, 2, 3, 5, 6]
"""The rows of a table of copies that count elements, bytes or words."""
PROGRAMS = 2048
"""About how many row runs of a launch are enough to keep a GPU busy."""
COPY_ROWS = (2, 16)
"""Limits of the rows with gaps between them that one run copies; see :func:`_length_of_runs`."""
COPY_BYTES = (8192, 32_768)
"""Limits of the bytes that one run copies."""
SUM_ELEMENTS = (1024, 4096)
"""Limits of the elements that one run adds."""
MERGE_ELEMENTS = (512, 4096)
"""Limits of the elements that one run merges."""


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


def copy_runs(pairs: list[list[Move]]) -> Ints:
    """Return the row runs of copies, which are grouped by pairs of source and target tensor, one run per column.

    The rows of the table are ``pair, from, to, length, rows, step from, step to``, in bytes for a plain copy, else in
    elements. Rows without gaps on both sides are joined into one long row.
    """
    moves, pair = _listed(pairs)
    (first, step), (to, to_step) = _starts(m.source for m in moves), _starts(m.target for m in moves)
    length, element = np.array([m.length for m in moves]), np.array([DTYPE_BYTES[m.source.dtype] for m in moves])
    gapless = (step == length) & (to_step == length)
    move, here, there, rows = _cut_for_copies(moves, length * element, gapless)
    begin, target = first[move] + here * step[move], to[move] + there * to_step[move]
    joined = gapless[move]  # into one long row
    length, rows = length[move] * np.where(joined, rows, 1), np.where(joined, 1, rows)
    runs = np.stack([pair[move], begin, target, length, rows, step[move], to_step[move]])
    if moves[0].plain:
        runs[COUNTED] *= element[move]
    return runs


def _cut_for_copies(moves: list[Move], row_bytes: Ints, gapless: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut the rows of copies into runs, and return what :func:`_stretches` does of each.

    ``row_bytes`` are the bytes of a row of each move; ``gapless`` says that its rows have no gaps on either side.
    """
    move, here, there, count = _stretches(moves)
    size = _length_of_runs(int((count * row_bytes[move]).sum()), COPY_BYTES)
    most = np.maximum(1, size // row_bytes)
    most = np.where(gapless, most, np.minimum(most, _length_of_runs(int(count.sum()), COPY_ROWS)))[move]
    stretch, part = spread(-(-count // most))
    skipped = part * most[stretch]
    rows = np.minimum(most[stretch], count[stretch] - skipped)
    return move[stretch], here[stretch] + skipped, there[stretch] + skipped, rows


def _length_of_runs(total: int, limits: tuple[int, int]) -> int:
    """Return how much of ``total`` (rows, bytes or elements of all messages of a launch) one run moves at most.

    It is so much that the launch has about ``PROGRAMS`` runs, but not under the first nor over the second limit. Longer
    runs make smaller tables, but launches slower, because a program moves one row after the other.
    """
    least, most = limits
    return min(max(total // PROGRAMS, least), most)


def sum_runs(pairs: list[list[Move]]) -> Ints:
    """Return the row runs of additions, which are grouped by pairs of source and target tensor, one run per column.

    The rows of the table are those of :func:`copy_runs`, in elements, and the number of runs in the chain that begins
    with the run.
    """
    moves, pair = _listed(pairs)
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
    move, source, row, rows = _stretches(moves)
    limits = MERGE_ELEMENTS if moves[0].what == "merge" else SUM_ELEMENTS
    elements = _length_of_runs(int((rows * columns[move]).sum()) * width, limits)
    asked = Stretches(target[move], row, rows, column[move], columns[move])
    chains = find_chains(asked, max(1, elements // width))
    return chains, move[chains.stretch], (source - row)[chains.stretch] + chains.row


def _listed(pairs: list[list[Move]]) -> tuple[list[Move], Ints]:
    """Return the moves of all pairs of tensors, and the number of each move's pair."""
    return [move for each in pairs for move in each], np.repeat(np.arange(len(pairs)), [len(each) for each in pairs])


def _stretches(moves: list[Move]) -> tuple[Ints, Ints, Ints, Ints]:
    """Split moves into stretches of rows that ascend by one on both sides.

    Returns (number of the move, first source row, first target row, number of rows) of each stretch.
    """
    here, there, count = zip(*(_ascending(move.source.rows, move.target.rows) for move in moves), strict=True)
    move = np.repeat(np.arange(len(moves)), [len(each) for each in count])
    return move, np.concatenate(here), np.concatenate(there), np.concatenate(count)


def _ascending(source: Rows, target: Rows) -> tuple[Ints, Ints, Ints]:
    """Split the rows of one move where either side does not ascend by one.

    Returns (first source row, first target row, number of rows) of each stretch.
    """
    if isinstance(source, slice) and isinstance(target, slice):
        return np.array([source.start]), np.array([target.start]), np.array([source.stop - source.start])
    rows = np.stack([np.arange(r.start, r.stop) if isinstance(r, slice) else r for r in (source, target)])
    begins = np.flatnonzero(np.any(np.diff(rows, axis=1, prepend=rows[:, :1] - 2) != 1, axis=0))
    return rows[0, begins], rows[1, begins], np.diff(begins, append=rows.shape[1])


def count_in_words(runs: Ints) -> int:
    """Change row runs in place from bytes to the longest words that divide all their numbers; return a word's bytes.

    A word has 1, 2, 4, 8 or 16 bytes.
    """
    common = int(np.bitwise_or.reduce(runs[COUNTED], axis=None, initial=16))
    word = common & -common
    runs[COUNTED] >>= word.bit_length() - 1
    return word
