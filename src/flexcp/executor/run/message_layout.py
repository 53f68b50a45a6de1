"""Message layout: make the tensors of shelves and of messages, as views of memory or as new allocations.

Offsets and sizes are integers derived from the plan: :mod:`flexcp.plan.memory` has those of a shelf,
:mod:`flexcp.executor.run.message_parts` those of a message.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.executor.kernels import accumulator_dtype
from flexcp.executor.run.laid_rows import FINISHED, Ints, cover_all
from flexcp.executor.run.message_parts import MessagePart
from flexcp.executor.run.rank_program import Shelf
from flexcp.plan.memory import KEYS, aligned_starts, field_sizes, shelf_fields
from flexcp.shape import Shape

Shelves = dict[int, dict[str, Tensor]]
"""The tensors of each shelf, by shelf number and name of the field."""


@dataclass(frozen=True)
class Types:
    """The dtypes of a pass and its device.

    ``model`` is the dtype of inputs and outputs, ``accumulator`` that of sums and partial results.
    """

    model: torch.dtype
    accumulator: torch.dtype
    statistics: torch.dtype
    """The dtype of LSE and delta of a rank's own rows."""
    device: torch.device


def types_of(x: Tensor) -> Types:
    """Return the dtypes and the device of a pass over tensors like ``x``.

    On a CPU, LSE and delta are float64: they enter every probability, and doubles cost nothing there.
    """
    accumulator = accumulator_dtype(x.dtype)
    return Types(x.dtype, accumulator, torch.float64 if x.device.type == "cpu" else accumulator, x.device)


def part_view(part: MessagePart, message: Tensor, types: Types) -> Tensor:
    """Return one part of a message's bytes as a tensor of the part's dtype and size."""
    dtype = types.accumulator if part.precise else types.model
    return message[part.offset : part.offset + part.bytes].view(dtype).view(part.size)


def new_inputs(
    shelf: Shelf, backward: bool, shape: Shape, types: Types, memory: Tensor | None = None
) -> dict[str, Tensor]:
    """Return uninitialised tensors for the inputs of a shelf, by field name; they lie in ``memory`` if it is given."""
    return laid_out(shelf, backward, False, shape, types, memory)


def new_results(
    shelf: Shelf, backward: bool, shape: Shape, types: Types, memory: Tensor | None = None, clear_dq: bool = True
) -> dict[str, Tensor]:
    """Return tensors for the results of a shelf, by field: outputs and gradients start at zero, LSE at -inf.

    Without ``clear_dq``, dq is left uninitialised.
    """
    found = laid_out(shelf, backward, True, shape, types, memory)
    for name, part, value in cleared_parts(found, shelf, backward, shape, memory):
        if clear_dq or name != "dq":
            part.fill_(value)
    return found


def cleared_parts(
    results: dict[str, Tensor], shelf: Shelf, backward: bool, shape: Shape, memory: Tensor | None
) -> list[tuple[str, Tensor, float]]:
    """Return what to fill with which value before work adds to the results of a shelf, and a field that lies there."""
    if results and memory is not None and shelf.side == KEYS:  # one launch clears dk and dv, which lie side by side
        return [("dk", memory[: _starts(shelf, backward, True, shape)[-1]], 0.0)]
    return [(name, x, -torch.inf if name == "lse" else 0.0) for name, x in results.items()]


def new_own_results(
    shelf: Shelf,
    backward: bool,
    shape: Shape,
    types: Types,
    laid: Ints,
    finishes: bool,
    opens: bool,
    clear_dq: bool = True,
) -> dict[str, Tensor]:
    """Return tensors for the results of the rank's own rows of a side, by field.

    Sums start at zero and LSE at -inf, unless all results are ``laid`` (areas). Fields with the names of ``FINISHED``
    are for the results in the model's dtype, if there are laid ones or the kernel ``finishes`` out or dq. A forward
    that finishes writes every row, so its sums are left uninitialised. ``opens`` says that the kernel may leave dq in a
    form of its own for some time. Without ``clear_dq``, dq is left uninitialised too.
    """
    found = laid_out(shelf, backward, True, shape, types, None)
    all_laid = cover_all(laid, shelf.h1 - shelf.h0, shelf.rows)
    for name, x in found.items():
        if not all_laid and not (finishes and name in ("out", "lse")) and (clear_dq or name != "dq"):
            x.fill_(-torch.inf if name == "lse" else 0.0)
    for name in [name for name in found if name in FINISHED and (len(laid) or finishes)]:
        # Without a change of dtype the sums are the results, but not in a tensor that is finished row by row or closed.
        same = found[name].dtype == types.model and not finishes and not (opens and name == "dq")
        found[FINISHED[name]] = found[name] if same else torch.empty_like(found[name], dtype=types.model)
    return found


def laid_out(
    shelf: Shelf, backward: bool, results: bool, shape: Shape, types: Types, memory: Tensor | None
) -> dict[str, Tensor]:
    """Return the uninitialised inputs or results of a shelf, by field name.

    They are views of ``memory``, side by side as :mod:`flexcp.plan.memory` counts them, or separate allocations if
    ``memory`` is None.
    """
    heads, starts = shelf.h1 - shelf.h0, _starts(shelf, backward, results, shape)
    found = {}
    for field, at in zip(shelf_fields(shelf.side, backward, results), starts, strict=False):
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


def _starts(shelf: Shelf, backward: bool, results: bool, shape: Shape) -> list[int]:
    """Return the first byte of each input, or result, of a shelf, and the end of the last one."""
    return aligned_starts(field_sizes(shelf.side, backward, results, shelf.rows * (shelf.h1 - shelf.h0), shape))
