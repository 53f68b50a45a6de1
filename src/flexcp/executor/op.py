"""attention: the one differentiable call.

The forward runs the plan's forward program, adds the attention sink at home, and keeps q, k, v, the output and its LSE. The backward
needs only ``delta = rowsum(do * out) - dlse`` besides them: the LSE's own gradient and the sink's are in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexcp.executor.ends import delta_of, sinks_gradient, with_sinks
from flexcp.executor.executor import Runtime, run_backward, run_forward
from flexcp.executor.fields import types_of
from flexcp.executor.kernels import Settings
from flexcp.executor.step import Step


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    *,
    mask: str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    kernel: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the whole batch, seen from this rank.

    ``q`` is ``[local tokens, heads, head_dim]``; ``k`` and ``v`` have the KV heads, and ``v`` may have another head size.
    Returns ``[local tokens, heads, v_head_dim]``, and with ``return_lse`` also the log of the softmax denominator
    ``[local tokens, heads]``; both are differentiable.

    ``mask`` names one of the plan's masks (the first by default). ``scale`` defaults to ``head_dim ** -0.5``. ``softcap``
    bounds logits by ``softcap * tanh(logits / softcap)``. ``sinks`` holds one extra logit per query head that takes
    probability and gives no value; its gradient, like any parameter's, is this rank's share.

    ``kernel`` overrides the choice of :func:`flexcp.choose_kernel`; ``step.kernels`` says which ran and why. ``deterministic``
    makes gradients bitwise the same in every run, ``sm_margin`` leaves that many multiprocessors to communication.
    """
    _check(q, k, v, step, softcap, sinks, dropout, bias)
    number = step.plan.batch.masks.index(step.plan.batch.mask(mask))
    settings = Settings(q.shape[-1] ** -0.5 if scale is None else float(scale), softcap, deterministic, sm_margin)
    name = step.choose_kernel(q.device, kernel)
    out, lse = _Attention.apply(q, k, v, sinks, step, number, settings, name)
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        step: Step,
        mask: int,
        settings: Settings,
        kernel: str,
    ) -> tuple[Tensor, Tensor]:
        runtime = _runtime(step, q, settings, "forward")
        prepared = step.prepared(mask, False, kernel, runtime.types)
        kept_q, kept_k, kept_v = (_kept(x, step) for x in (q, k, v))
        out, lse = run_forward(prepared, runtime, kept_q, kept_k, kept_v, rounded=sinks is None)
        out, lse = _local(out, step), _local(lse, step)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.step, ctx.mask, ctx.settings, ctx.kernel = step, mask, settings, kernel
        ctx.set_materialize_grads(False)
        return out, lse.to(runtime.types.accumulator)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        step: Step = ctx.step
        do = torch.zeros_like(out) if grads[0] is None else grads[0].to(out.dtype)
        delta = delta_of(do, out, grads[1], lse.dtype)
        runtime = _runtime(step, q, ctx.settings, "backward")
        prepared = step.prepared(ctx.mask, True, ctx.kernel, runtime.types)
        inputs = (_kept(x, step) for x in (q, k, v, do, lse, delta))
        dq, dk, dv = (_local(x, step) for x in run_backward(prepared, runtime, *inputs))
        dsinks = None if sinks is None else sinks_gradient(sinks, lse, delta)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None, None


def _kept(x: Tensor, step: Step) -> Tensor:
    """Local rows in stream order."""
    order = step.kept_order_on(x.device)
    return x if order is None else x[order]


def _local(x: Tensor, step: Step) -> Tensor:
    """Undo :func:`_kept`."""
    order = step.kept_order_on(x.device)
    if order is None:
        return x
    out = torch.empty_like(x)
    out[order] = x
    return out


def _runtime(step: Step, q: Tensor, settings: Settings, direction: str) -> Runtime:
    return Runtime(step.plan.shape, types_of(q), settings, step.group, step.sent_bytes[direction], step.timeout)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    bias: Tensor | None,
) -> None:
    shape = step.plan.shape
    if dropout:
        raise NotImplementedError(f"attention dropout is not supported (got {dropout}); train with dropout=0")
    if bias is not None:
        raise NotImplementedError("an additive attention bias is not supported; express visibility as a mask")
    wanted = {
        "q": (q, (step.local_tokens, shape.heads, shape.head_dim)),
        "k": (k, (step.local_tokens, shape.kv_heads, shape.head_dim)),
        "v": (v, (step.local_tokens, shape.kv_heads, shape.v_head_dim)),
    }
    for name, (x, size) in wanted.items():
        if tuple(x.shape) != size:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but rank {step.rank} of this plan expects [tokens, heads, head size] = {size}"
            )
        if str(x.dtype).removeprefix("torch.") != shape.dtype:
            raise ValueError(
                f"{name} is {x.dtype}, but the plan counts bytes of {shape.dtype}; plan with Planner(dtype=...)"
            )
    check_call(q, {"k": k, "v": v, "sinks": sinks}, softcap)


def check_call(q: Tensor, others: dict[str, Tensor | None], softcap: float | None) -> None:
    """Raise for what no attention call accepts: tensors on several devices, sinks of another shape, a softcap of 0 or less."""
    for name, x in others.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; put them on one device")
    sinks = others.get("sinks")
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks holds one number per query head, shape ({q.shape[1]},); got {tuple(sinks.shape)}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, or None for none; got {softcap}")
