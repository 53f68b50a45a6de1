"""Packing: copy blocks between shelves (a rank's buffers of tokens) and messages.

A packing is made once for a program and a device, uploads all index maps then, and is used by every layer. In each
stage it fills the messages to send, lays received inputs on their shelves, and reduces received outputs into their
rows, or lays them as well if they are complete (:mod:`flexcp.executor.run.laid_rows`). Reductions follow the order of
the plan's table of transfers, so the same plan gives the same bits.

:class:`FieldPacking` is plain torch, field by field, on any device. :mod:`flexcp.executor.run.row_packing` does the
same on a GPU in a few launches per stage.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.kernels import merge, uploaded
from flexcp.executor.run.field_moves import FieldMoves, field_moves
from flexcp.executor.run.laid_rows import FINISHED, Ints, other_areas
from flexcp.executor.run.message_layout import Shelves, Types, part_view
from flexcp.executor.run.rank_program import Block, RankProgram
from flexcp.shape import FIELDS, OUTPUTS, Field, Kind, Shape


class Packing(Protocol):
    """Moves the blocks (pieces of tokens) of a stage between a rank's shelves and its messages."""

    def pack(self, stage: int, buffers: Buffers, shelves: Shelves) -> None:
        """Fill the messages that leave in ``stage``."""

    def unpack(self, stage: int, buffers: Buffers, shelves: Shelves) -> None:
        """Lay the inputs that arrived in ``stage`` on their shelves, and merge or add the outputs into their rows."""

    def move(self, stage: int, shelves: Shelves) -> None:
        """Copy, merge or add the blocks that ``stage`` moves from one shelf of this rank to another."""

    def round_sums(self, side: int, shelves: Shelves) -> None:
        """Round the sums of a side's own rows, where they are not laid, and write them to the finished results."""

    def copy_laid_to_sums(self, side: int, shelves: Shelves) -> None:
        """Copy the laid results of a side's own rows to the sums, in the accumulator's dtype."""


class FieldPacking:
    """Packing in plain torch, with one copy, sum or merge for each field of a block."""

    def __init__(self, program: RankProgram, shape: Shape, types: Types, moves: FieldMoves | None = None) -> None:
        self.program, self.types, self._moves = program, types, moves or field_moves(program, shape)
        # Blocks of a recipe share index arrays; each array is uploaded once.
        there = {id(rows): uploaded(rows, types.device) for rows in {id(r): r for _, r in self._moves.indexed}.values()}
        self._index = {id(block): there[id(rows)] for block, rows in self._moves.indexed}
        own = zip(program.laid, program.shelves, strict=False)
        self._summed = [other_areas(laid, shelf.h1 - shelf.h0, shelf.rows) for laid, shelf in own]

    def pack(self, stage: int, buffers: Buffers, shelves: Shelves) -> None:
        for (_, message), parts in zip(buffers.messages, self._moves.sends[stage], strict=True):
            for part in parts:
                part_view(part, message, self.types).copy_(self._read(shelves, part.block, part.field))

    def unpack(self, stage: int, buffers: Buffers, shelves: Shelves) -> None:
        receives = self.program.slots[stage].receive
        for (_, memory), message, parts in zip(buffers.messages, receives, self._moves.receives[stage], strict=True):
            found: dict[int, dict[str, Tensor]] = {}
            for part in parts:
                found.setdefault(id(part.block), {})[part.field.name] = part_view(part, memory, self.types)
            for block in message.blocks:
                self._take_in(shelves, block, found[id(block)])

    def move(self, stage: int, shelves: Shelves) -> None:
        for here, there in self.program.slots[stage].own:
            self._take_in(shelves, there, {f.name: self._read(shelves, here, f) for f in FIELDS[here.kind]})

    def round_sums(self, side: int, shelves: Shelves) -> None:
        for name, finished in _finished_fields(shelves[side]):
            _copy_areas(shelves[side][name], shelves[side][finished], self._summed[side])

    def copy_laid_to_sums(self, side: int, shelves: Shelves) -> None:
        for name, finished in _finished_fields(shelves[side]):
            _copy_areas(shelves[side][finished], shelves[side][name], self.program.laid[side])

    def _read(self, shelves: Shelves, block: Block, field: Field) -> Tensor:
        """Return one field of a block from its shelf (a view if the rows are a range)."""
        return shelves[block.shelf][field.name][self._rows(block)][:, block.h0 : block.h1]

    def _rows(self, block: Block) -> slice | Tensor:
        return block.rows if isinstance(block.rows, slice) else self._index[id(block)]

    def _take_in(self, shelves: Shelves, block: Block, fields: dict[str, Tensor]) -> None:
        """Write the fields of a block to its shelf: merge outputs by their LSE, add gradients, copy inputs.

        Laid results are copied, too.
        """
        shelf, at = shelves[block.shelf], (self._rows(block), slice(block.h0, block.h1))
        if block.laid:
            for name, value in fields.items():
                target = shelf[FINISHED.get(name, name)]
                target[at] = value.to(target.dtype)
            return
        if block.kind == Kind.O:
            more = fields["out"].to(self.types.accumulator)
            out, lse = merge(shelf["out"][at], shelf["lse"][at], more, fields["lse"])
            shelf["out"][at], shelf["lse"][at] = out.to(more.dtype), lse
            return
        for name, value in fields.items():
            target = shelf[name]
            if block.kind in OUTPUTS:
                target[at] += value.to(target.dtype)
            else:
                target[at] = value.to(target.dtype)


def _finished_fields(shelf: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Return (field of the sums, field of the finished results) for each result of a shelf that has both."""
    return [(name, finished) for name, finished in FINISHED.items() if name in shelf and finished in shelf]


def _copy_areas(source: Tensor, target: Tensor, areas: Ints) -> None:
    """Copy areas (:mod:`flexcp.executor.run.laid_rows`) from one tensor to another, in the other's dtype."""
    for h0, h1, first, last in areas.tolist():
        target[first:last, h0:h1] = source[first:last, h0:h1].to(target.dtype)
