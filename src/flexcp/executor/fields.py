"""Fields: the tensors that make up a piece, where they lie on a shelf, and where in a message.

A message is raw bytes without padding: first all fields in the accumulator dtype, then those in the model's, so every field is aligned
by construction and bytes on the wire are exactly the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.executor.kernels import accumulator_dtype
from flexcp.executor.program import KEYS, Block, Message, Shelf
from flexcp.pieces import Kind, Shape

Shelves = dict[int, dict[str, Tensor]]


@dataclass(frozen=True)
class Field:
    """A tensor of a piece: its name on a shelf, its last dimension (None: one number per token and head), its precision."""

    name: str
    width: str | None
    precise: bool | None
    """True: always accumulator dtype; False: always the model's; None: accumulator when the piece is partial."""

    def numbers(self, shape: Shape) -> int:
        """Numbers of one token and head."""
        return int(getattr(shape, self.width)) if self.width else 1


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
    """The dtypes of a pass and its device."""

    model: torch.dtype
    accumulator: torch.dtype
    statistics: torch.dtype
    """What a rank keeps its own rows' LSE and delta in."""
    device: torch.device


def types_of(x: Tensor) -> Types:
    """The types of a pass over tensors like ``x``. LSE and delta enter every probability, and on a CPU doubles cost nothing."""
    accumulator = accumulator_dtype(x.dtype)
    return Types(x.dtype, accumulator, torch.float64 if x.device.type == "cpu" else accumulator, x.device)


@dataclass(frozen=True)
class Part:
    """One field of one block inside a message."""

    block: Block
    field: Field
    dtype: torch.dtype
    size: tuple[int, ...]
    offset: int
    """Bytes from the message's first."""
    bytes: int

    def view(self, message: Tensor) -> Tensor:
        """This part of a message's bytes as a tensor."""
        return message[self.offset : self.offset + self.bytes].view(self.dtype).view(self.size)


def message_parts(message: Message, shape: Shape, types: Types) -> Iterator[Part]:
    """The parts of a message in the order they travel, accumulator dtype first."""
    offset = 0
    for precise in (True, False):
        for block in message.blocks:
            for field in FIELDS[block.kind]:
                if (block.partial if field.precise is None else field.precise) != precise:
                    continue
                dtype = types.accumulator if precise else types.model
                size: tuple[int, ...] = (block.count, block.h1 - block.h0)
                size += (field.numbers(shape),) if field.width else ()
                part = Part(block, field, dtype, size, offset, dtype.itemsize * int(torch.Size(size).numel()))
                yield part
                offset += part.bytes


def message_bytes(message: Message, shape: Shape) -> int:
    """Bytes on the wire."""
    each = shape.bytes_per_token_head()
    return sum(int(each[b.kind, int(b.partial)]) * b.count * (b.h1 - b.h0) for b in message.blocks)


def new_inputs(shelf: Shelf, backward: bool, shape: Shape, types: Types) -> dict[str, Tensor]:
    """Room for what arrives on a shelf."""
    kinds = (Kind.KV,) if shelf.side == KEYS else (Kind.Q, Kind.DO) if backward else (Kind.Q,)
    fields = [field for kind in kinds for field in FIELDS[kind]]
    return {f.name: _empty(shelf, f, shape, types.accumulator if f.precise else types.model, types) for f in fields}


def new_results(shelf: Shelf, backward: bool, shape: Shape, types: Types) -> dict[str, Tensor]:
    """Room for what is computed on a shelf: out starts at zero with LSE -inf, gradients at zero."""
    if shelf.side == KEYS and not backward:
        return {}
    found = {}
    for field in FIELDS[Kind.DKV if shelf.side == KEYS else Kind.DQ if backward else Kind.O]:
        dtype, fill = (types.statistics, -torch.inf) if field.name == "lse" else (types.accumulator, 0.0)
        found[field.name] = _empty(shelf, field, shape, dtype, types).fill_(fill)
    return found


def _empty(shelf: Shelf, field: Field, shape: Shape, dtype: torch.dtype, types: Types) -> Tensor:
    size = [shelf.rows, shelf.h1 - shelf.h0] + ([field.numbers(shape)] if field.width else [])
    return torch.empty(size, dtype=dtype, device=types.device)
