"""Row packing: what :mod:`flexcp.executor.run.packing` does, on a GPU, in a few launches per stage.

The heads of a row lie side by side on a shelf and in a message, so every block is a list of *runs*: so many rows of so many numbers, at a
step, between a pair of tensors. All messages of a stage are one allocation, so a few pairs (a field of a shelf and the messages) hold all
that is to be moved for all peers, and one launch moves it, however many blocks there are. Outputs are reduced message by message, which
keeps their order fixed. The tables of runs are integers, uploaded once per program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp.arrays.intervals import spread
from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.kernels import row_kernels, uploaded
from flexcp.executor.run.message_layout import Shelves, Types, message_bytes, message_parts
from flexcp.executor.run.rank_program import Block, Message, RankProgram, Rows
from flexcp.plan.memory import aligned_starts
from flexcp.shape import FIELDS, OUTPUTS, Field, Kind, Shape

Ints = NDArray[np.int64]
RUN_BYTES = 32_768
RUN_ROWS = 16
"""What one program moves at most, unless a single row is longer; it walks its rows one after the other."""


@dataclass(frozen=True)
class _Place:
    """Rows of a field, on a shelf or in the stage's messages (shelf None): row r begins at number ``start + r * step``."""

    shelf: int | None
    name: str
    dtype: torch.dtype
    rows: Rows
    start: int
    step: int


@dataclass(frozen=True)
class _Move:
    """Rows of ``length`` numbers from one place to another: copied, added, or merged by their LSEs (one for each of ``heads``)."""

    what: str
    source: _Place
    target: _Place
    length: int
    heads: int = 0
    lse: tuple[_Place, _Place] | None = None

    @property
    def plain(self) -> bool:
        """Whether bytes are only copied."""
        return self.what == "copy" and self.source.dtype == self.target.dtype

    @property
    def key(self) -> tuple[object, ...]:
        """Moves of one key can be one launch."""
        return ("bytes",) if self.plain else (self.what, self.source.dtype, self.target.dtype)

    @property
    def pair(self) -> tuple[object, ...]:
        """Moves between the same tensors."""
        return self.source.shelf, self.target.shelf, self.target.name, self.source.dtype


@dataclass(frozen=True)
class _Launch:
    """Moves of one key: one move of each pair of tensors, and all their runs as a table on the device."""

    pairs: tuple[_Move, ...]
    table: Tensor
    word: int
    """Bytes of what the table counts: words where bytes are copied, else 0 for numbers."""
    longest: int


class RowPacking:
    """Copies and reductions by tables of rows."""

    def __init__(self, program: RankProgram, shape: Shape, types: Types) -> None:
        self.program, self.shape, self.types = program, shape, types
        self._packs = [self._launches(self._leaving(slot.send)) for slot in program.slots]
        self._unpacks = [self._arrivals(slot.receive) for slot in program.slots]
        self._moves = [
            [launch for here, there in slot.own for launch in self._launches(self._inside(here, there))]
            for slot in program.slots
        ]

    def pack(self, stage: int, buffers: Buffers, shelves: Shelves) -> None:
        for launch in self._packs[stage]:
            _run(launch, buffers.memory, shelves)

    def unpack(self, stage: int, buffers: Buffers, shelves: Shelves) -> None:
        for launch in self._unpacks[stage]:
            _run(launch, buffers.memory, shelves)

    def move(self, stage: int, shelves: Shelves) -> None:
        for launch in self._moves[stage]:
            _run(launch, None, shelves)

    def _leaving(self, messages: list[Message]) -> Iterator[_Move]:
        for blocks in self._in_messages(messages):
            for block, places in blocks:
                for field in FIELDS[block.kind]:
                    there = places[field.name]
                    yield _Move("copy", self._on_shelf(block, field), there, self._length(block, field))

    def _arrivals(self, messages: list[Message]) -> list[_Launch]:
        """Inputs of all messages together, then outputs message by message."""
        laid: list[_Move] = []
        summed: list[_Launch] = []
        for blocks in self._in_messages(messages):
            taken = [list(self._taken_in(block, places)) for block, places in blocks]
            laid += [move for moves in taken for move in moves if move.what == "copy"]
            outputs = [moves for moves in taken if moves and moves[0].what != "copy"]
            # Rows that appear twice in a message must not meet in one launch.
            if _disjoint([block for block, _ in blocks if block.kind in OUTPUTS]):
                outputs = [[move for moves in outputs for move in moves]]
            summed += [launch for moves in outputs for launch in self._launches(moves)]
        return self._launches(laid) + summed

    def _inside(self, here: Block, there: Block) -> Iterator[_Move]:
        return self._taken_in(there, {field.name: self._on_shelf(here, field) for field in FIELDS[here.kind]})

    def _taken_in(self, block: Block, places: dict[str, _Place]) -> Iterator[_Move]:
        """What happens to the fields of a block that came: inputs are copied, gradients added, outputs merged."""
        fields = {field.name: field for field in FIELDS[block.kind]}
        if block.kind == Kind.O:
            lse = (places["lse"], self._on_shelf(block, fields["lse"]))
            target, length = self._on_shelf(block, fields["out"]), self._length(block, fields["out"])
            yield _Move("merge", places["out"], target, length, block.h1 - block.h0, lse)
            return
        what = "add" if block.kind in OUTPUTS else "copy"
        for name, field in fields.items():
            yield _Move(what, places[name], self._on_shelf(block, field), self._length(block, field))

    def _length(self, block: Block, field: Field) -> int:
        return (block.h1 - block.h0) * field.numbers(self.shape)

    def _on_shelf(self, block: Block, field: Field) -> _Place:
        shelf, numbers = self.program.shelves[block.shelf], field.numbers(self.shape)
        dtype = self.types.model if field.precise is False else self.types.accumulator
        step = (shelf.h1 - shelf.h0) * numbers
        return _Place(block.shelf, field.name, dtype, block.rows, block.h0 * numbers, step)

    def _in_messages(self, messages: list[Message]) -> Iterator[list[tuple[Block, dict[str, _Place]]]]:
        """For each message its blocks with the places of their fields."""
        starts = aligned_starts([message_bytes(message, self.shape) for message in messages])
        for message, begin in zip(messages, starts, strict=False):
            found: dict[int, dict[str, _Place]] = {id(block): {} for block in message.blocks}
            for part in message_parts(message, self.shape, self.types):
                start = (begin + part.offset) // part.dtype.itemsize
                rows, step = slice(0, part.block.count), self._length(part.block, part.field)
                found[id(part.block)][part.field.name] = _Place(None, part.field.name, part.dtype, rows, start, step)
            yield [(block, found[id(block)]) for block in message.blocks]

    def _launches(self, moves: Iterable[_Move]) -> list[_Launch]:
        groups: dict[tuple[object, ...], dict[tuple[object, ...], list[_Move]]] = {}
        for move in moves:
            groups.setdefault(move.key, {}).setdefault(move.pair, []).append(move)
        found = []
        for pairs in groups.values():
            lists = list(pairs.values())
            most = 1 if lists[0][0].what == "merge" else row_kernels.PAIRS
            found += [self._launch(lists[at : at + most]) for at in range(0, len(lists), most)]
        return found

    def _launch(self, pairs: list[list[_Move]]) -> _Launch:
        examples = tuple(moves[0] for moves in pairs)
        word = 0
        if examples[0].what == "merge":
            table = np.concatenate([_merged_runs(move) for move in pairs[0]], axis=1)
            longest = max(move.heads for move in pairs[0])
        else:
            parts = [_runs(move, number) for number, moves in enumerate(pairs) for move in moves]
            table = np.concatenate(parts, axis=1)
            word = _count_in_words(table) if examples[0].plain else 0
            longest = int(table[3].max(initial=1))
        return _Launch(examples, uploaded(table, self.types.device), word, longest)


def _stretches(source: Rows, target: Rows, most: int) -> tuple[Ints, Ints, Ints]:
    """(first row here, first row there, rows) of stretches in which both ascend one by one, of at most ``most`` rows."""
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


def _runs(move: _Move, pair: int) -> Ints:
    """Columns ``pair, from, to, length, rows, step from, step to``, in bytes if plain, else in numbers."""
    unit = move.source.dtype.itemsize if move.plain else 1
    gapless = move.source.step == move.target.step == move.length
    most = max(1, RUN_BYTES // (move.length * move.source.dtype.itemsize))
    here, there, rows = _stretches(move.source.rows, move.target.rows, most if gapless else min(most, RUN_ROWS))
    begin = (move.source.start + here * move.source.step) * unit
    to = (move.target.start + there * move.target.step) * unit
    steps = (move.source.step * unit, move.target.step * unit)
    length = np.full(len(rows), move.length * unit)
    if gapless:  # one long row
        length, rows = length * rows, np.ones_like(rows)
    return np.stack(np.broadcast_arrays(pair, begin, to, length, rows, *steps))


def _merged_runs(move: _Move) -> Ints:
    """Columns ``rows, heads``, then first number and step of: from, to, LSE from, LSE to."""
    assert move.lse is not None
    most = max(1, RUN_BYTES // (move.length * move.target.dtype.itemsize))
    here, there, rows = _stretches(move.source.rows, move.target.rows, min(most, RUN_ROWS))
    columns: list[Any] = [rows, move.heads]
    for place, first in ((move.source, here), (move.target, there), (move.lse[0], here), (move.lse[1], there)):
        columns += [place.start + first * place.step, place.step]
    return np.stack(np.broadcast_arrays(*columns))


def _count_in_words(runs: Ints) -> int:
    """Change runs of bytes to the longest words (up to 16 bytes) that divide all of them; the bytes of a word."""
    counted = (1, 2, 3, 5, 6)
    common = int(np.bitwise_or.reduce([np.bitwise_or.reduce(runs[column]) for column in counted], initial=16))
    word = common & -common
    for column in counted:
        runs[column] >>= word.bit_length() - 1
    return word


def _disjoint(blocks: list[Block]) -> bool:
    """Whether no two blocks of a kind can touch the same rows and heads of a shelf."""
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


def _run(launch: _Launch, memory: Tensor | None, shelves: Shelves) -> None:
    move = launch.pairs[0]
    pairs = [(_tensor(m.source, memory, shelves), _tensor(m.target, memory, shelves)) for m in launch.pairs]
    if move.what == "merge":
        assert move.lse is not None
        source, target = pairs[0][0].view(move.source.dtype), pairs[0][1]
        source_lse, target_lse = (_tensor(place, memory, shelves).view(place.dtype) for place in move.lse)
        row_kernels.merge_rows(
            source, target, source_lse, target_lse, launch.table, launch.longest, move.length // move.heads
        )
    elif launch.word:
        row_kernels.copy_rows(pairs, launch.table, launch.word, launch.longest)
    else:
        types = (move.source.dtype, move.target.dtype)
        row_kernels.add_rows(pairs, launch.table, *types, launch.longest, add=move.what == "add")


def _tensor(place: _Place, memory: Tensor | None, shelves: Shelves) -> Tensor:
    """The shelf's field, or the bytes of the stage's messages."""
    if place.shelf is not None:
        return shelves[place.shelf][place.name]
    assert memory is not None
    return memory
