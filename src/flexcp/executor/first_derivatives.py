"""First derivatives: refuse derivatives of a gradient that has none.

A backward that exchanges messages or computes in place cannot be differentiated. Torch's ``once_differentiable`` says
so only if the *gradients* it is given require one. Those of ``out.sum()`` do not, and the part of a second derivative
that comes through saved tensors would be missing silently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def only_first(name: str) -> Callable[[Backward], Backward]:
    """Return a decorator for the backward of an autograd function: its results have no derivatives.

    Whoever asks for them is told so, by an error that calls the function ``name``.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def once(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not torch.is_grad_enabled():  # the usual backward; with create_graph=True gradients are enabled
                return found
            causes = [x for x in (*grads, *ctx.saved_tensors) if x is not None and x.requires_grad]
            return tuple(_NoFurther.apply(x, name, *causes) if x is not None and causes else x for x in found)

        return once

    return decorate


class _NoFurther(torch.autograd.Function):
    """Pass a gradient on as a function of what it was made from; the backward refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, *causes: Tensor) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            f"{ctx.name} has no second derivatives: differentiate its results once, and keep the term that needs "
            "create_graph=True on tensors that do not pass through it"
        )
