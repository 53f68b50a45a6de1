"""Registered: attention as a pair of operators that torch can trace, differentiate and name.

Both of flexcp's attentions, :func:`flexcp.attention` (over ranks) and :func:`flexcp.slice_attention` (one device), have the same outside:

    forward(q, k, v, sinks, where, *numbers) -> out, lse
    backward(do, dlse, q, k, v, sinks, where, out, lse, *numbers) -> dq, dk, dv, dsinks (empty without sinks)

A forward that keeps more for its backward than these has one more output, bytes of a size that only it knows, which the backward gets after
``lse``.

``where`` is the one tensor that says what attends to what: a step's handle, or slices. Shapes follow from q and v alone, so token counts
are free in a compiled model, and the exchange between ranks stays eager inside: compiled collectives could be reordered against FSDP's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]  # documented, but not in its __all__

from flexcp.executor.run.message_layout import types_of


def register_attention(forward: CustomOpDef, backward: CustomOpDef, keeps: bool = False) -> None:
    """Give a pair of operators their shapes, and the forward its gradient; ``keeps``: it has the third output."""
    forward.register_fake(_keeping_shapes if keeps else _forward_shapes)
    backward.register_fake(_backward_shapes)

    def gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, where, out, *rest = ctx.saved_tensors
        do = torch.zeros_like(out) if do is None else do
        dq, dk, dv, dsinks = backward(do, dlse, q, k, v, sinks, where, out, *rest, *ctx.numbers)
        return dq, dk, dv, None if sinks is None else dsinks, *([None] * (1 + len(ctx.numbers)))

    forward.register_autograd(gradients, setup_context=_save)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, where, *numbers = inputs
    ctx.save_for_backward(q, k, v, sinks, where, *output)
    ctx.numbers = numbers
    ctx.set_materialize_grads(False)


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, where: Tensor, *numbers: Any
) -> tuple[Tensor, Tensor]:
    size = (q.shape[0], q.shape[1], v.shape[2])
    return q.new_empty(size), q.new_empty(size[:2], dtype=types_of(q).statistics)


def _keeping_shapes(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, where: Tensor, *numbers: Any
) -> tuple[Tensor, Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return *_forward_shapes(q, k, v, sinks, where, *numbers), q.new_empty(size, dtype=torch.uint8)


def _backward_shapes(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, dsinks
