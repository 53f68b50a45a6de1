"""Row moves: what :class:`flexcp.executor.run.row_packing.RowPacking` launches, as tables of integers.

The heads of a row lie side by side on a shelf and in a message, so every block is a list of *row runs*: some number of
rows of equal length, at equal distances, that move from one tensor to another. All messages of a stage lie in one
allocation, so a few pairs of tensors (a field of a shelf, and the messages) cover everything that moves to or from all
peers. One launch moves all of it, however many blocks there are. One launch also adds, or merges, all results of a
stage, in the order of messages (:mod:`flexcp.executor.run.row_chains`); laid results
(:mod:`flexcp.executor.run.laid_rows`) are copied together with inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.run.laid_rows import FINISHED, other_areas
from flexcp.executor.run.message_parts import message_bytes, message_parts
from flexcp.executor.run.rank_program import Block, Message, RankProgram
from flexcp.executor.run.row_runs import Move, Place, copy_runs, count_in_words, merge_runs, sum_runs
from flexcp.plan.memory import KEYS, QUERIES, aligned_starts
from flexcp.shape import DTYPE_BYTES, FIELDS, OUTPUTS, Field, Kind, Shape

Ints = NDArray[np.int64]
PAIRS = 4
"""The most pairs of tensors that one launch moves rows between; the kernels of ``row_kernels.py`` take that many."""


@dataclass(frozen=True)
class Launch:
    """Moves with the same :attr:`Move.key`, done by one kernel launch.

    ``pairs`` has one move for each pair of a source and a target tensor, ``table`` the row runs of all moves, one per
    column (:mod:`flexcp.executor.run.row_runs`).
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
        """Return the launches that take in messages: one of each kind, if all of its moves fit into one launch."""
        places = self._in_messages(messages)
        return self.launches(move for blocks in places for each in blocks for move in self._taken_in(*each))

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
        what, word = examples[0].what, 0
        if what == "merge":
            table = merge_runs(pairs[0])
            longest = max(move.heads for move in pairs[0])
        elif what == "add":
            table = sum_runs(pairs)
            longest = int(table[3].max(initial=1))
        else:
            table = copy_runs(pairs)
            word = count_in_words(table) if examples[0].plain else 0
            longest = int(table[3].max(initial=1))
        return Launch(examples, table, word, longest)
