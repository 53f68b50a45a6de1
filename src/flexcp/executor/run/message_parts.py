"""Message parts: where the tensors of a piece lie in a message. Integers only;
no tensor, so that planner processes can ask.

A message is raw bytes without padding: first all fields in the accumulator dtype, then those in the model's, so every
field is aligned by construction and bytes on the wire are exactly the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from flexcp.executor.run.rank_program import Block, Message
from flexcp.shape import FIELDS, Field, Shape


@dataclass(frozen=True, slots=True)
class MessagePart:
    """One field of one block inside a message."""

    block: Block
    field: Field
    precise: bool
    """Whether it travels in the accumulator dtype, and not in the model's."""
    size: tuple[int, ...]
    offset: int
    """Bytes from the message's first."""
    bytes: int


def message_parts(message: Message, shape: Shape) -> Iterator[MessagePart]:
    """The parts of a message in the order they travel, accumulator dtype first."""
    offset = 0
    for precise in (True, False):
        each = shape.accumulator_bytes if precise else shape.element_bytes
        for block in message.blocks:
            for field in FIELDS[block.kind]:
                if (block.partial if field.precise is None else field.precise) != precise:
                    continue
                size: tuple[int, ...] = (block.count, block.h1 - block.h0)
                size += (field.numbers(shape),) if field.width else ()
                part = MessagePart(block, field, precise, size, offset, each * prod(size))
                yield part
                offset += part.bytes


def message_bytes(message: Message, shape: Shape) -> int:
    """Bytes on the wire."""
    each = shape.bytes_per_token_head()
    return sum(int(each[b.kind, int(b.partial)]) * b.count * (b.h1 - b.h0) for b in message.blocks)
