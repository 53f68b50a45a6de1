"""Exchange: messages between ranks. Packs blocks into one buffer per peer and stage, posts them, hands out what arrives.

A message is raw bytes without padding: first all fields in the accumulator dtype, then those in the model's, so every field is aligned
by construction and bytes on the wire are exactly the plan's. Sends and receives of a stage are posted together and never wait for each
other, so no order of arrival can deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor.program import QUERIES, Block, Message, Shelf
from flexcp.pieces import Kind, Shape

Shelves = dict[int, dict[str, Tensor]]


@dataclass(frozen=True)
class Field:
    """A tensor of a piece: its name on a shelf, its last dimension (None: one number per token and head), its precision."""

    name: str
    width: str | None
    precise: bool | None
    """True: always accumulator dtype; False: always the model's; None: accumulator when the piece is partial."""


FIELDS: dict[Kind, tuple[Field, ...]] = {
    Kind.Q: (Field("q", "head_dim", False),),
    Kind.KV: (Field("k", "head_dim", False), Field("v", "v_head_dim", False)),
    Kind.O: (Field("out", "v_head_dim", None), Field("lse", None, True)),
    Kind.DO: (Field("do", "v_head_dim", False), Field("lse", None, True), Field("delta", None, True)),
    Kind.DQ: (Field("dq", "head_dim", None),),
    Kind.DKV: (Field("dk", "head_dim", None), Field("dv", "v_head_dim", None)),
}


@dataclass(frozen=True)
class Types:
    """The two dtypes of a pass and its device."""

    model: torch.dtype
    accumulator: torch.dtype
    device: torch.device

    @property
    def statistics(self) -> torch.dtype:
        """What a rank keeps its own rows' LSE and delta in; they enter every probability, and on a CPU doubles cost nothing."""
        return torch.float64 if self.device.type == "cpu" else self.accumulator


def new_field(
    shelf: Shelf, field: Field, shape: Shape, device: torch.device, dtype: torch.dtype, fill: float | None
) -> Tensor:
    """Room for a field on a shelf, filled unless ``fill`` is None."""
    size = [shelf.rows, shelf.h1 - shelf.h0] + ([getattr(shape, field.width)] if field.width else [])
    if fill is None:
        return torch.empty(size, dtype=dtype, device=device)
    return torch.full(size, fill, dtype=dtype, device=device)


def side_fields(side: int, backward: bool) -> tuple[Kind, ...]:
    """Kinds of input pieces a shelf of that side holds."""
    if side == QUERIES:
        return (Kind.Q, Kind.DO) if backward else (Kind.Q,)
    return (Kind.KV,)


def _layout(
    message: Message, shape: Shape, types: Types
) -> Iterator[tuple[Block, Field, torch.dtype, tuple[int, ...], int]]:
    """(block, field, dtype, shape, byte offset) of every field of a message, accumulator dtype first."""
    offset = 0
    for precise in (True, False):
        for block in message.blocks:
            for field in FIELDS[block.kind]:
                if (block.partial if field.precise is None else field.precise) != precise:
                    continue
                dtype = types.accumulator if precise else types.model
                size = (block.count, block.h1 - block.h0)
                size += (getattr(shape, field.width),) if field.width else ()
                yield block, field, dtype, size, offset
                offset += dtype.itemsize * int(torch.Size(size).numel())


def _size(message: Message, shape: Shape) -> int:
    each = shape.bytes_per_token_head()
    return sum(int(each[b.kind, int(b.partial)]) * b.count * (b.h1 - b.h0) for b in message.blocks)


def read_block(shelves: Shelves, block: Block, field: Field) -> Tensor:
    """The rows and heads of a block on its shelf (a view where rows are consecutive)."""
    rows = block.rows if isinstance(block.rows, slice) else torch.from_numpy(block.rows)
    return shelves[block.shelf][field.name][rows][:, block.h0 : block.h1]


class Exchange:
    """Point-to-point messages of one pass over one process group; without a group there is nobody to talk to."""

    def __init__(
        self, group: dist.ProcessGroup | None, shape: Shape, types: Types, sent: list[int], timeout: timedelta
    ) -> None:
        self.group, self.shape, self.types, self.timeout = group, shape, types, timeout
        self.sent = sent
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._receiving: list[dist.Work] = []
        self._arriving: list[tuple[Message, Tensor]] = []

    def post(self, stage: int, sends: list[Message], receives: list[Message], shelves: Shelves) -> None:
        """Start all transfers of a stage."""
        operations, buffers = [], []
        for message in sends:
            buffer = self._packed(message, shelves)
            self.sent[message.peer] += buffer.numel()
            operations.append(dist.P2POp(dist.isend, buffer, group=self.group, tag=stage, group_peer=message.peer))
            buffers.append(buffer)
        self._arriving = []
        for message in receives:
            buffer = torch.empty(_size(message, self.shape), dtype=torch.uint8, device=self.types.device)
            operations.append(dist.P2POp(dist.irecv, buffer, group=self.group, tag=stage, group_peer=message.peer))
            self._arriving.append((message, buffer))
        if operations:
            works = dist.batch_isend_irecv(operations)
            # NCCL answers a whole batch with one handle, gloo with one for each operation.
            self._sending += [(w, b) for w, b in zip(works, buffers, strict=False)]
            self._receiving = works[len(sends) :] if len(works) == len(operations) else works

    def arrived(self) -> Iterator[tuple[Block, dict[str, Tensor]]]:
        """Wait for the stage posted last and yield its blocks with their fields, peer by peer in a fixed order."""
        for work in self._receiving:
            work.wait(self.timeout)
        self._receiving = []
        for message, buffer in self._arriving:
            found: dict[int, dict[str, Tensor]] = {}
            for block, field, dtype, size, offset in _layout(message, self.shape, self.types):
                count = dtype.itemsize * int(torch.Size(size).numel())
                found.setdefault(id(block), {})[field.name] = buffer[offset : offset + count].view(dtype).view(size)
            for block in message.blocks:
                yield block, found[id(block)]
        self._arriving = []

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._sending:
            work.wait(self.timeout)
        self._sending = []

    def _packed(self, message: Message, shelves: Shelves) -> Tensor:
        buffer = torch.empty(_size(message, self.shape), dtype=torch.uint8, device=self.types.device)
        for block, field, dtype, size, offset in _layout(message, self.shape, self.types):
            count = dtype.itemsize * int(torch.Size(size).numel())
            buffer[offset : offset + count].view(dtype).view(size).copy_(read_block(shelves, block, field))
        return buffer
