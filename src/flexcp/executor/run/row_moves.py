"""Row moves: what :class:`flexcp.executor.run.row_packing.RowPacking` launches, as tables of integers.

The heads of a row lie side by side on a shelf and in a message, so every block is a list of *row runs*: some number of
rows of equal length, at equal distances, that move from one tensor to another. All messages of a stage lie in one
allocation, so a few pairs of tensors (a field of a shelf, and the messages) cover everything that moves to or from all
peers. One launch moves all of it, however many blocks there are. Results are reduced in the order of messages. One
launch adds all gradients of a stage (:mod:`flexcp.executor.run.row_sums`); outputs are merged message by message. Laid
results (:mod:`flexcp.executor.run.laid_rows`) are copied together with inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import spread
from flexcp.executor.run.laid_rows import FINISHED, other_areas
from flexcp.executor.run.message_parts import message_bytes, message_parts
from flexcp.executor.run.rank_program import Block, Message, RankProgram, Rows
from flexcp.executor.run.row_sums import Additions, sum_runs
from flexcp.plan.memory import KEYS, QUERIES, aligned_starts
from flexcp.shape import DTYPE_BYTES, FIELDS, OUTPUTS, Field, Kind, Shape

Ints = NDArray[np.int64]
PAIRS = 4
"""The most pairs of tensors that one launch moves rows between; the kernels of ``row_kernels.py`` take that many."""
RUN_BYTES = 32_768
RUN_ROWS = 16
"""The most bytes and rows of one row run, which one GPU program moves row by row; a longer row is a run by itself."""


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
    def key(self) -> tuple[object, ...]:
        """What moves must have in common to share a launch: being plain copies, or the same operation and dtypes."""
        return ("bytes",) if self.plain else (self.what, self.source.dtype, self.target.dtype)

    @property
    def pair(self) -> tuple[object, ...]:
        """What identifies the source tensor and the target tensor; equal for moves between the same two tensors."""
        return self.source.shelf, self.target.shelf, self.target.name, self.source.dtype


@dataclass(frozen=True)
class Launch:
    """Moves with the same :attr:`Move.key`, done by one kernel launch.

    ``pairs`` has one move for each pair of a source and a target tensor, ``table`` the row runs of all moves, one per
    column (:func:`_runs`, :func:`_merged_runs`, :func:`flexcp.executor.run.row_sums.sum_runs`).
    """

    pairs: tuple[Move, ...]
    table: Ints
    word: int
    """The unit of the table: words of this many bytes in a plain copy, or 0 for elements."""
    longest: int
    """The length of the longest row in the table's unit; in a merge, the most heads of a row."""


@dataclass(frozen=True)
class RowMoves:
    """For each stage, the launches that fill messages, take in received ones, and move blocks inside the rank.

    For each side (queries, keys) with laid results, ``rounds`` are the launches that round the sums of all other
    results, and ``copies_of_laid`` those that copy the laid ones to the sums.
    """

    packs: list[list[Launch]]
    unpacks: list[list[Launch]]
    moves: list[list[Launch]]
    rounds: list[list[Launch]]
    copies_of_laid: list[list[Launch]]


def row_moves(program: RankProgram, shape: Shape) -> RowMoves:
    """Derive the launches that pack, unpack and move rows in each stage of a program."""
    made = _Builder(program, shape)
    return RowMoves(
        [made.launches(made.leaving(slot.send)) for slot in program.slots],
        [made.arrivals(slot.receive) for slot in program.slots],
        [
            [launch for here, there in slot.own for launch in made.launches(made.inside(here, there))]
            for slot in program.slots
        ],
        [made.launches(made.rounded(side)) for side in (QUERIES, KEYS)],
        [made.launches(made.copied_back(side)) for side in (QUERIES, KEYS)],
    )


class _Builder:
    """Makes moves and launches for one program."""

    def __init__(self, program: RankProgram, shape: Shape) -> None:
        self.program, self.shape = program, shape
        self.accumulator = "float64" if shape.dtype == "float64" else "float32"

    def leaving(self, messages: list[Message]) -> Iterator[Move]:
        """Yield the copies that fill messages from shelves."""
        for blocks in self._in_messages(messages):
            for block, places in blocks:
                for field in FIELDS[block.kind]:
                    there = places[field.name]
                    yield Move("copy", self._on_shelf(block, field), there, self._length(block, field))

    def arrivals(self, messages: list[Message]) -> list[Launch]:
        """Return the launches that take in messages.

        Inputs and laid results of all messages are copied together and gradients added together, but outputs are merged
        message by message. The blocks of a message whose outputs may share rows get separate launches.
        """
        together: list[Move] = []
        merged: list[Launch] = []
        for blocks in self._in_messages(messages):
            taken = [list(self._taken_in(block, places)) for block, places in blocks]
            together += [move for moves in taken for move in moves if move.what != "merge"]
            outputs = [moves for moves in taken if moves and moves[0].what == "merge"]
            # One launch must not write a row twice, so blocks that may share rows get separate launches.
            if _disjoint([block for block, _ in blocks if block.kind == Kind.O]):
                outputs = [[move for moves in outputs for move in moves]]
            merged += [launch for moves in outputs for launch in self.launches(moves)]
        return self.launches(together) + merged

    def rounded(self, side: int) -> Iterator[Move]:
        """Yield the moves of sums to finished results, for all results of a side's own rows that are not laid.

        There are none for a side without laid results.
        """
        shelf = self.program.shelves[side]
        summed = other_areas(self.program.laid[side], shelf.h1 - shelf.h0, shelf.rows)
        return (Move("copy", sums, finished, length) for sums, finished, length in self._own_results(side, summed))

    def copied_back(self, side: int) -> Iterator[Move]:
        """Yield the moves of the laid results of a side from the finished results to the sums."""
        found = self._own_results(side, self.program.laid[side])
        return (Move("copy", finished, sums, length) for sums, finished, length in found)

    def _own_results(self, side: int, areas: Ints) -> Iterator[tuple[Place, Place, int]]:
        """Yield (place of sums, place of finished results, elements of a row) for areas of a side with laid results."""
        received = [block for slot in self.program.slots for message in slot.receive for block in message.blocks]
        moved = [there for slot in self.program.slots for _, there in slot.own]
        kinds = {block.kind for block in received + moved if block.laid and block.shelf == side}
        for field in (f for kind in sorted(kinds) for f in FIELDS[kind] if f.name in FINISHED):
            for h0, h1, first, last in areas.tolist():
                block = Block(Kind.O, side, slice(first, last), last - first, h0, h1, False)
                yield self._on_shelf(block, field), self._finished(block, field), self._length(block, field)

    def inside(self, here: Block, there: Block) -> Iterator[Move]:
        """Yield the moves of a block from one shelf of this rank to another."""
        return self._taken_in(there, {field.name: self._on_shelf(here, field) for field in FIELDS[here.kind]})

    def _taken_in(self, block: Block, places: dict[str, Place]) -> Iterator[Move]:
        """Yield the moves of a block to its shelf: inputs and laid results are copied, gradients added, outputs merged.

        ``places`` are the places that the block's fields come from, by field name.
        """
        fields = {field.name: field for field in FIELDS[block.kind]}
        if block.laid:
            for name, field in fields.items():
                yield Move("copy", places[name], self._finished(block, field), self._length(block, field))
            return
        if block.kind == Kind.O:
            lse = (places["lse"], self._on_shelf(block, fields["lse"]))
            target, length = self._on_shelf(block, fields["out"]), self._length(block, fields["out"])
            yield Move("merge", places["out"], target, length, block.h1 - block.h0, lse)
            return
        what = "add" if block.kind in OUTPUTS else "copy"
        for name, field in fields.items():
            yield Move(what, places[name], self._on_shelf(block, field), self._length(block, field))

    def _length(self, block: Block, field: Field) -> int:
        """Return the number of elements of one field in a row of the block."""
        return (block.h1 - block.h0) * field.numbers(self.shape)

    def _on_shelf(self, block: Block, field: Field) -> Place:
        """Return the place of a block's field on its shelf."""
        shelf, numbers = self.program.shelves[block.shelf], field.numbers(self.shape)
        dtype = self.shape.dtype if field.precise is False else self.accumulator
        step = (shelf.h1 - shelf.h0) * numbers
        return Place(block.shelf, field.name, dtype, block.rows, block.h0 * numbers, step)

    def _finished(self, block: Block, field: Field) -> Place:
        """Return the place of a block's field among the finished results of own rows; its LSE has no other place."""
        place = self._on_shelf(block, field)
        if field.name not in FINISHED:
            return place
        return replace(place, name=FINISHED[field.name], dtype=self.shape.dtype)

    def _in_messages(self, messages: list[Message]) -> Iterator[list[tuple[Block, dict[str, Place]]]]:
        """Yield for each message its blocks, with the places of their fields in the message."""
        starts = aligned_starts([message_bytes(message, self.shape) for message in messages])
        for message, begin in zip(messages, starts, strict=False):
            found: dict[int, dict[str, Place]] = {id(block): {} for block in message.blocks}
            for part in message_parts(message, self.shape):
                dtype = self.accumulator if part.precise else self.shape.dtype
                start = (begin + part.offset) // DTYPE_BYTES[dtype]
                rows, step = slice(0, part.block.count), self._length(part.block, part.field)
                found[id(part.block)][part.field.name] = Place(None, part.field.name, dtype, rows, start, step)
            yield [(block, found[id(block)]) for block in message.blocks]

    def launches(self, moves: Iterable[Move]) -> list[Launch]:
        """Group moves into launches, as few as possible, and return these."""
        groups: dict[tuple[object, ...], dict[tuple[object, ...], list[Move]]] = {}
        for move in moves:
            groups.setdefault(move.key, {}).setdefault(move.pair, []).append(move)
        found = []
        for pairs in groups.values():
            lists = list(pairs.values())
            most = 1 if lists[0][0].what == "merge" else PAIRS
            found += [self._launch(lists[at : at + most]) for at in range(0, len(lists), most)]
        return found

    def _launch(self, pairs: list[list[Move]]) -> Launch:
        """Return one launch of the given moves, which are grouped by pairs of source and target tensor."""
        examples = tuple(moves[0] for moves in pairs)
        word = 0
        if examples[0].what == "merge":
            table = np.concatenate([_merged_runs(move) for move in pairs[0]], axis=1)
            longest = max(move.heads for move in pairs[0])
        elif examples[0].what == "add":
            added = [_additions(move, number) for number, moves in enumerate(pairs) for move in moves]
            table = sum_runs(Additions(*(np.concatenate(columns) for columns in zip(*added, strict=True))))
            longest = int(table[3].max(initial=1))
        else:
            parts = [_runs(move, number) for number, moves in enumerate(pairs) for move in moves]
            table = np.concatenate(parts, axis=1)
            word = _count_in_words(table) if examples[0].plain else 0
            longest = int(table[3].max(initial=1))
        return Launch(examples, table, word, longest)


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


def _runs(move: Move, pair: int) -> Ints:
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


def _additions(move: Move, pair: int) -> Additions:
    """Return the additions of a move between the ``pair``-th pair of tensors."""
    here, there, rows = _stretches(move.source.rows, move.target.rows, sys.maxsize)
    first = move.source.start + here * move.source.step
    columns = (pair, first, move.source.step, there, rows, move.target.start, move.target.step, move.length)
    return Additions(*np.broadcast_arrays(*columns))


def _merged_runs(move: Move) -> Ints:
    """Return the row runs of a merge, one per column.

    The rows of the table are ``rows, heads``, then the first element and the step of source, target, source LSE and
    target LSE.
    """
    assert move.lse is not None
    most = max(1, RUN_BYTES // (move.length * DTYPE_BYTES[move.target.dtype]))
    here, there, rows = _stretches(move.source.rows, move.target.rows, min(most, RUN_ROWS))
    columns: list[Any] = [rows, move.heads]
    for place, first in ((move.source, here), (move.target, there), (move.lse[0], here), (move.lse[1], there)):
        columns += [place.start + first * place.step, place.step]
    return np.stack(np.broadcast_arrays(*columns))


def _count_in_words(runs: Ints) -> int:
    """Change row runs in place from bytes to the longest words that divide all their numbers; return a word's bytes.

    A word has 1, 2, 4, 8 or 16 bytes.
    """
    counted = (1, 2, 3, 5, 6)
    common = int(np.bitwise_or.reduce([np.bitwise_or.reduce(runs[column]) for column in counted], initial=16))
    word = common & -common
    for column in counted:
        runs[column] >>= word.bit_length() - 1
    return word


def _disjoint(blocks: list[Block]) -> bool:
    """Return whether no two blocks of the same kind can touch the same rows and heads of a shelf.

    Each block is judged by the range from its first to its last row.
    """
    if len(blocks) < 2:
        return True
    ends = [
        (b.rows.start, b.rows.stop) if isinstance(b.rows, slice) else (b.rows.min(), b.rows.max() + 1) for b in blocks
    ]
    spot = np.array([(b.kind, b.shelf, *rows, b.h0, b.h1) for b, rows in zip(blocks, ends, strict=True)])
    kind, shelf, first, last, h0, h1 = spot.T
    meet = (kind[:, None] == kind) & (shelf[:, None] == shelf)
    meet &= (first[:, None] < last) & (first < last[:, None]) & (h0[:, None] < h1) & (h0 < h1[:, None])
    return int(meet.sum()) == len(blocks)
