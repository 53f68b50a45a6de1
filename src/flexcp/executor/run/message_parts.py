"""Message parts: where each field of a piece (such as k and v) lies in a message, as integers.

A message is raw bytes without padding: first all fields in the accumulator dtype, then those in the model's dtype. So
every field is aligned, and the bytes on the wire are exactly those that the plan counts. Nothing here needs torch, so
planner processes can use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from flexcp.executor.run.rank_program import Block, Message
from flexcp.shape import FIELDS, Field, Shape


@dataclass(frozen=True, slots=True)
class MessagePart:
    """One field of one block inside a message, ``bytes`` bytes long; as a tensor it has the shape ``size``."""

    block: Block
    field: Field
    precise: bool
    """Whether the part travels in the accumulator dtype (else in the model's)."""
    size: tuple[int, ...]
    offset: int
    """The part's first byte in the message."""
    bytes: int


def message_parts(message: Message, shape: Shape) -> Iterator[MessagePart]:
    """Yield the parts of a message in the order of their bytes: those in the accumulator dtype first."""
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
    """Return the size of a message in bytes."""
    each = shape.bytes_per_token_head()
    return sum(int(each[b.kind, int(b.partial)]) * b.count * (b.h1 - b.h0) for b in message.blocks)
