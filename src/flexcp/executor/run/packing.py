"""Packing: blocks between shelves and messages.

A packing is made once for a program and a device, with all index maps already there, and used by every layer. Per stage it fills the
messages that leave, lays arrived inputs on their shelves and reduces arrived outputs into the rows they belong to, in table order, so the
same plan gives the same bits.

:class:`FieldPacking` is plain torch, field by field, on any device. :mod:`flexcp.executor.run.row_packing` does the same on a GPU in a few
launches per stage.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.kernels import merge, uploaded
from flexcp.executor.run.message_layout import MessagePart, Shelves, Types, message_parts
from flexcp.executor.run.rank_program import Block, Message, RankProgram
from flexcp.shape import FIELDS, OUTPUTS, Field, Kind, Shape


class Packing(Protocol):
    """Moves the blocks of a stage."""

    def pack(self, stage: int, buffers: Buffers, shelves: Shelves) -> None:
        """Fill the messages that leave in ``stage``."""

    def unpack(self, stage: int, buffers: Buffers, shelves: Shelves) -> None:
        """Take in the messages that arrived in ``stage``."""

    def move(self, stage: int, shelves: Shelves) -> None:
        """Copy or reduce what ``stage`` moves from one shelf of this rank to another."""


class FieldPacking:
    """One indexed copy per field of a block."""

    def __init__(self, program: RankProgram, shape: Shape, types: Types) -> None:
        self.program, self.types = program, types
        self._rows: dict[int, slice | Tensor] = {}
        for slot in program.slots:
            moved = [block for pair in slot.own for block in pair]
            for block in [b for m in slot.send + slot.receive for b in m.blocks] + moved:
                self._rows[id(block)] = (
                    block.rows if isinstance(block.rows, slice) else uploaded(block.rows, types.device)
                )
        self._sends = [[_parts(m, shape, types) for m in slot.send] for slot in program.slots]
        self._receives = [[_parts(m, shape, types) for m in slot.receive] for slot in program.slots]

    def pack(self, stage: int, buffers: Buffers, shelves: Shelves) -> None:
        for (_, message), parts in zip(buffers.messages, self._sends[stage], strict=True):
            for part in parts:
                part.view(message).copy_(self._read(shelves, part.block, part.field))

    def unpack(self, stage: int, buffers: Buffers, shelves: Shelves) -> None:
        receives = self.program.slots[stage].receive
        for (_, memory), message, parts in zip(buffers.messages, receives, self._receives[stage], strict=True):
            found: dict[int, dict[str, Tensor]] = {}
            for part in parts:
                found.setdefault(id(part.block), {})[part.field.name] = part.view(memory)
            for block in message.blocks:
                self._take_in(shelves, block, found[id(block)])

    def move(self, stage: int, shelves: Shelves) -> None:
        for here, there in self.program.slots[stage].own:
            self._take_in(shelves, there, {f.name: self._read(shelves, here, f) for f in FIELDS[here.kind]})

    def _read(self, shelves: Shelves, block: Block, field: Field) -> Tensor:
        """The rows and heads of a block on its shelf (a view where rows are consecutive)."""
        return shelves[block.shelf][field.name][self._rows[id(block)]][:, block.h0 : block.h1]

    def _take_in(self, shelves: Shelves, block: Block, fields: dict[str, Tensor]) -> None:
        shelf, at = shelves[block.shelf], (self._rows[id(block)], slice(block.h0, block.h1))
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


def _parts(message: Message, shape: Shape, types: Types) -> list[MessagePart]:
    return list(message_parts(message, shape, types))
