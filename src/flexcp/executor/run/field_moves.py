"""Field moves: what :class:`flexcp.executor.run.packing.FieldPacking` copies, derived from a program as integers."""

from __future__ import annotations

from dataclasses import dataclass

from flexcp.executor.run.message_parts import MessagePart, message_parts
from flexcp.executor.run.rank_program import Block, Ints, RankProgram
from flexcp.shape import Shape

Parts = tuple[tuple[MessagePart, ...], ...]
"""For each message of a stage, its parts."""


@dataclass(frozen=True)
class FieldMoves:
    """What is copied in each stage.

    ``sends`` and ``receives`` have the parts of the messages of each stage. ``indexed`` has all blocks whose rows are
    an array of row numbers instead of a range, with that array.
    """

    sends: tuple[Parts, ...]
    receives: tuple[Parts, ...]
    indexed: tuple[tuple[Block, Ints], ...]


def field_moves(program: RankProgram, shape: Shape) -> FieldMoves:
    """Derive the field moves of a program: the parts of all its messages, and its blocks with scattered rows."""
    sends, receives = (
        tuple(tuple(tuple(message_parts(m, shape)) for m in messages) for messages in side)
        for side in ([slot.send for slot in program.slots], [slot.receive for slot in program.slots])
    )
    blocks = [b for slot in program.slots for m in slot.send + slot.receive for b in m.blocks]
    blocks += [block for slot in program.slots for pair in slot.own for block in pair]
    return FieldMoves(sends, receives, tuple((b, b.rows) for b in blocks if not isinstance(b.rows, slice)))
