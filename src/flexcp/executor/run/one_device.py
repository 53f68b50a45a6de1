"""One device: attention of one work list over all rows and heads of its arguments, without any exchange.

It is used by :func:`flexcp.slice_attention`, and for passes in which no rank exchanges anything and this rank has a
single kernel launch. Inputs are not copied, and a kernel with ``FRESH`` writes its results once, in their final dtype.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexcp.executor.kernels import Settings
from flexcp.executor.kernels.sinks_and_delta import OutputGradient
from flexcp.executor.run.message_layout import Types


def local_forward(
    kernel: Any,
    work: Any,
    whole: bool,
    types: Types,
    settings: Settings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rounded: bool,
) -> tuple[Tensor, Tensor]:
    """Run a forward and return the output, and the LSE in the statistics dtype.

    ``kernel`` is a kernel module, ``work`` its work list; ``whole`` says that every query row sees a key. The output is
    in the accumulator dtype; if ``rounded`` and ``whole`` are set and the kernel has ``FRESH``, it is in the model's
    dtype.
    """
    size = (*q.shape[:2], v.shape[2])
    if whole and kernel.FRESH:
        out = torch.empty(size, dtype=types.model if rounded else types.accumulator, device=q.device)
        lse = torch.empty(size[:2], dtype=types.statistics, device=q.device)
        kernel.forward(q, k, v, work, replace(settings, fresh=True), out, lse)
        return out, lse
    out = torch.zeros(size, dtype=types.accumulator, device=q.device)
    lse = torch.full(size[:2], -torch.inf, dtype=types.statistics, device=q.device)
    kernel.forward(q, k, v, work, settings, out, lse)
    return out, lse


def local_backward(
    kernel: Any,
    work: Any,
    whole: bool,
    types: Types,
    settings: Settings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    back: OutputGradient,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a backward and return dq, dk and dv in the accumulator dtype.

    ``kernel`` is a kernel module, ``work`` its work list, ``lse`` the forward's LSE. If every query row sees a key
    (``whole``), a kernel with ``FRESH`` returns dq in the model's dtype, and a kernel with ``backward_alone`` returns
    all three so, unless gradients must be deterministic or ``back`` has no output.
    """
    if whole and back.out is not None and not settings.deterministic and hasattr(kernel, "backward_alone"):
        found: tuple[Tensor, Tensor, Tensor] = kernel.backward_alone(q, k, v, lse, back, work, settings)
        return found
    do, delta = back.do, back.delta
    dk, dv = (torch.zeros(x.shape, dtype=types.accumulator, device=x.device) for x in (k, v))
    if whole and kernel.FRESH:
        dq = torch.empty(q.shape, dtype=types.model, device=q.device)
        kernel.backward(q, k, v, do, lse, delta, work, replace(settings, fresh=True), dq, dk, dv)
        return dq, dk, dv
    dq = torch.zeros(q.shape, dtype=types.accumulator, device=q.device)
    kernel.backward(q, k, v, do, lse, delta, work, settings, dq, dk, dv)
    return dq, dk, dv
