"""Message layout: the tensors of shelves and messages, by the integers that say where they lie
(:mod:`flexcp.plan.memory` on a shelf, :mod:`flexcp.executor.run.message_parts` in a message).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.executor.kernels import accumulator_dtype
from flexcp.executor.run.message_parts import MessagePart
from flexcp.executor.run.rank_program import Shelf
from flexcp.plan.memory import aligned_starts, field_sizes, shelf_fields
from flexcp.shape import Shape

Shelves = dict[int, dict[str, Tensor]]


@dataclass(frozen=True)
class Types:
    """The dtypes of a pass and its device."""

    model: torch.dtype
    accumulator: torch.dtype
    statistics: torch.dtype
    """What a rank keeps its own rows' LSE and delta in."""
    device: torch.device


def types_of(x: Tensor) -> Types:
    """The types of a pass over tensors like ``x``. LSE and delta enter every probability,
    and on a CPU doubles cost nothing.
    """
    accumulator = accumulator_dtype(x.dtype)
    return Types(x.dtype, accumulator, torch.float64 if x.device.type == "cpu" else accumulator, x.device)


def part_view(part: MessagePart, message: Tensor, types: Types) -> Tensor:
    """A part of a message's bytes as a tensor."""
    dtype = types.accumulator if part.precise else types.model
    return message[part.offset : part.offset + part.bytes].view(dtype).view(part.size)


def new_inputs(
    shelf: Shelf, backward: bool, shape: Shape, types: Types, memory: Tensor | None = None
) -> dict[str, Tensor]:
    """Room for what arrives on a shelf, in ``memory`` where that is given."""
    return _laid_out(shelf, backward, False, shape, types, memory)


def new_results(
    shelf: Shelf, backward: bool, shape: Shape, types: Types, memory: Tensor | None = None, finished: bool = False
) -> dict[str, Tensor]:
    """Room for what is computed on a shelf: out starts at zero with LSE -inf, gradients at zero.

    With ``finished`` there is room for rows of out or dq in the model's dtype too, each of which will be written, and
    out and LSE may start with anything.
    """
    found = _laid_out(shelf, backward, True, shape, types, memory)
    for name, x in found.items():
        if not (finished and name in ("out", "lse")):
            x.fill_(-torch.inf if name == "lse" else 0.0)
    if finished:
        found["finished"] = torch.empty_like(found["dq" if backward else "out"], dtype=types.model)
    return found


def _laid_out(
    shelf: Shelf, backward: bool, results: bool, shape: Shape, types: Types, memory: Tensor | None
) -> dict[str, Tensor]:
    """The tensors of a shelf, side by side as :mod:`flexcp.plan.memory` counts them,
    or each in an allocation of its own.
    """
    heads = shelf.h1 - shelf.h0
    fields = shelf_fields(shelf.side, backward, results)
    starts = aligned_starts(field_sizes(shelf.side, backward, results, shelf.rows * heads, shape))
    found = {}
    for field, at in zip(fields, starts, strict=False):
        dtype = types.accumulator if results or field.precise else types.model
        if results and field.name == "lse":
            dtype = types.statistics
        size = [shelf.rows, heads] + ([field.numbers(shape)] if field.width else [])
        if memory is None:
            found[field.name] = torch.empty(size, dtype=dtype, device=types.device)
        else:
            length = dtype.itemsize * int(torch.Size(size).numel())
            found[field.name] = memory[at : at + length].view(dtype).view(size)
    return found
