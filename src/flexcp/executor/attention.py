"""attention: the differentiable attention call that runs a plan on all its ranks.

The forward runs the plan's forward program, adds the attention sinks to this rank's own rows, and saves q, k, v, the
output and its LSE. The backward needs besides them only ``delta = rowsum(do * out) - dlse``, which carries the gradient
of the LSE and that of the sinks.

Both directions are registered operators, ``torch.ops.flexcp.attention`` and ``attention_backward``. So torch.compile
sees no graph break, selective checkpointing can name them, and recomputation may run in any thread. The step is passed
as its handle (:mod:`flexcp.executor.step_handles`). Everything that depends on the step, checks included, happens
inside the operators, so a compiled model has no guards on it.

If the plan keeps received keys for the backward, they are one more output of the forward: bytes, with a dynamic size in
the fake function. They are an output because the autograd context of a compiled model can only hold tensors, and
because tools that offload or count saved tensors should see them. Such plans use operators of their own,
``attention_keeping_keys`` and ``attention_keeping_keys_backward``, so that other plans compile without a dynamic size.
Telemetry is called inside the operator.
"""

from __future__ import annotations

from typing import NamedTuple, Never

import torch
from torch import Tensor

from flexcp.executor.arguments import (
    attention_scale,
    check_call,
    check_running,
    check_tensors,
    named_kind,
    refuse_keywords,
)
from flexcp.executor.kernels import accumulator_dtype
from flexcp.executor.kernels.sinks_and_delta import OutputGradient, sinks_gradient, with_sinks
from flexcp.executor.layer_masks import checked_name, checked_window, mask_number
from flexcp.executor.run.executor import Runtime, run_backward, run_forward
from flexcp.executor.run.message_layout import types_of
from flexcp.executor.step import Step, check_bound
from flexcp.executor.step_handles import step_of
from flexcp.executor.torch_operators import Gradients, Inputs, Kept, Numbers, Results, register_attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    *,
    mask: str | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    kernel: str | None = None,
    deterministic: bool = False,
    sm_margin: int | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of the whole batch and return this rank's rows.

    ``q`` is ``[local tokens, heads, head_dim]``; ``k`` and ``v`` have the KV heads, and ``v`` may have another head
    size. Returns ``[local tokens, heads, v_head_dim]``, and with ``return_lse`` also the log of the softmax denominator
    ``[local tokens, heads]``; both are differentiable.

    The rows must be those that the plan keeps on this rank, ``step.shard(stream)``. A plan made without ``layout=``
    places tokens freely, and rows that a training loop cut by itself cannot be told from them if their number is the
    same: plan with ``layout="contiguous"`` for such loops. The call warns if the step's rows were never asked for. With
    or without ``layout=``, the whole stream must be the same on every rank, positions (for RoPE) come from
    ``step.positions``, and labels are shifted before they are cut: ``step.labels(tokens)``.

    ``mask`` names one of the plan's masks, if it has several. Instead, ``window`` gives the number of keys that a query
    of this layer sees, itself included, or 0 for a layer without a window; a plan without such a mask raises
    ValueError. ``scale`` defaults to ``head_dim ** -0.5``. ``softcap`` bounds logits by
    ``softcap * tanh(logits / softcap)``. ``sinks`` holds one extra logit per query head, which takes part in the
    softmax but has no value; its gradient, like that of any parameter, is this rank's share. ``dropout`` other than
    0, a ``bias``, and a ``scale`` or ``softcap`` that requires a gradient raise NotImplementedError. So do derivatives
    by ``torch.func``; second derivatives are refused in their backward.

    ``kernel`` overrides the choice of :func:`flexcp.executor.kernels.choose.choose_kernel`; ``step.kernels`` says which
    kernel ran and why. ``deterministic`` makes gradients bitwise the same in every run. On a GPU the kernels leave some
    multiprocessors to transfers, as many as the plan says for each slot (one part of a pass, computed while messages
    travel); ``sm_margin`` sets one number for all slots instead.
    """
    if unknown:
        refuse_keywords(unknown)
    if dropout is not None and not isinstance(dropout, int | float):
        raise ValueError(f"dropout= is a number, and 0 alone is supported; got {named_kind(dropout)}")
    if dropout:
        raise NotImplementedError(f"attention dropout is not supported (got {dropout}); train with dropout=0")
    if bias is not None:
        raise NotImplementedError("an additive attention bias is not supported; express visibility as a mask")
    check_bound(step)
    check_tensors({"q": q, "k": k, "v": v}, sinks)
    check_running(kernel, deterministic, sm_margin, return_lse)
    check_call(q, {"k": k, "v": v, "sinks": sinks}, scale, softcap)
    numbers = Numbers(attention_scale(q, scale), softcap, deterministic, sm_margin, kernel)
    layer = Layer(checked_name(mask), checked_window(window))
    out, lse = (_keep if step.keeps_keys else _forward)(q, k, v, sinks, step.handle, *numbers, *layer)[:2]
    if not torch.compiler.is_compiling() and out.grad_fn is not None:
        out.grad_fn.metadata["step"] = step  # keeps the step alive until the backward has run
    return (out, lse.to(accumulator_dtype(q.dtype))) if return_lse else out


class Layer(NamedTuple):
    """Which of the plan's masks a layer uses: by its name, by its window, or the only one if both are None."""

    mask: str | None
    window: int | None

    def number(self, step: Step) -> int:
        """Return the index of this layer's mask in ``step.plan.batch.masks``; raise ValueError if none fits."""
        return mask_number(step.plan.batch, self.mask, self.window)


def _attend(x: Inputs, numbers: Numbers, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward and return output, LSE, and the received keys that the plan keeps for the backward, as bytes."""
    q, k, v, sinks, handle = x
    step, settings = step_of(handle), numbers.settings
    with step.collectives.checking("attention"):
        _check(q, k, v, step)
        number = layer.number(step)
    runtime = _runtime(step, q, numbers, number, backward=False)
    prepared = step.prepared(number, False, step.choose_kernel(q.device, numbers.kernel), runtime.types)
    step.note_call()
    kept_q, kept_k, kept_v = (step.tables.in_stream_order(rows) for rows in (q, k, v))
    out, lse, keys = run_forward(prepared, runtime, kept_q, kept_k, kept_v, rounded=sinks is None)
    out, lse = step.tables.in_local_order(out), step.tables.in_local_order(lse)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    out = out.to(q.dtype)
    if step.telemetry is not None:
        step.telemetry.after_forward(step, number, settings, (q, k, v), sinks, out, lse)
    return out, lse, keys


def _attend_keeping_nothing(x: Inputs, numbers: Numbers, layer: Layer) -> tuple[Tensor, Tensor]:
    """Run the forward of a plan that keeps no keys for the backward; return output and LSE."""
    return _attend(x, numbers, layer)[:2]


def _gradients(
    back: Gradients, x: Inputs, made: Results, kept: Kept, numbers: Numbers, layer: Layer
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the backward and return dq, dk, dv and dsinks, the gradient of the sinks (empty without sinks)."""
    q, k, v, sinks, handle = x
    step = step_of(handle)
    step.losses.note_backward()
    number = layer.number(step)
    runtime = _runtime(step, q, numbers, number, backward=True)
    prepared = step.prepared(number, True, step.choose_kernel(q.device, numbers.kernel), runtime.types)
    gradient = OutputGradient(back.do.to(made.out.dtype), made.out, back.dlse, made.lse.dtype)
    if step.tables.order_on(q.device) is not None:
        gradient = gradient.in_order(step.tables.in_stream_order)
    kept_q, kept_k, kept_v, kept_lse = (step.tables.in_stream_order(rows) for rows in (q, k, v, made.lse))
    found = list(run_backward(prepared, runtime, kept.keys, kept_q, kept_k, kept_v, kept_lse, gradient))
    dsinks = q.new_empty(0) if sinks is None else sinks_gradient(sinks, kept_lse, gradient.delta)
    del kept_q, kept_k, kept_v, kept_lse, gradient
    # Free each float32 gradient before the next one is rounded, as plan.memory counts it.
    dq, dk, dv = (step.tables.in_local_order(found.pop(0).to(x.dtype)) for x in (q, k, v))
    return dq, dk, dv, dsinks


def _gradients_without_keys(
    back: Gradients, x: Inputs, made: Results, numbers: Numbers, layer: Layer
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the backward of a plan that kept no keys from the forward; the results are those of :func:`_gradients`."""
    return _gradients(back, x, made, Kept(made.out.new_empty(0)), numbers, layer)


_forward = register_attention(
    ("attention", "attention_backward"), _attend_keeping_nothing, _gradients_without_keys, (Numbers, Layer)
)
_keep = register_attention(
    ("attention_keeping_keys", "attention_keeping_keys_backward"), _attend, _gradients, (Numbers, Layer), keeps=True
)


def _runtime(step: Step, q: Tensor, numbers: Numbers, mask: int, backward: bool) -> Runtime:
    """Open the exchange of the step's next pass, and return what the pass runs with.

    ``mask`` is the index of the pass's mask in the plan's batch.
    """
    exchange = step.open_exchange(mask, backward, q.device)
    watch = None if step.telemetry is None else step.telemetry.watch(step, mask, backward, q.device)
    return Runtime(step.plan.shape, types_of(q), numbers.settings, exchange, step.arena, watch, numbers.sm_margin)


def _check(q: Tensor, k: Tensor, v: Tensor, step: Step) -> None:
    """Raise ValueError unless q, k and v have the shapes and the dtype of the step's plan.

    A plan for latents (multi-latent attention) raises too.
    """
    shape = step.plan.shape
    if shape.latent is not None:
        raise ValueError(
            f"this plan moves latents of {shape.latent} numbers a token; call flexcp.latent_attention under it"
        )
    wanted = {
        "q": (q, (step.local_tokens, shape.heads, shape.head_dim)),
        "k": (k, (step.local_tokens, shape.kv_heads, shape.head_dim)),
        "v": (v, (step.local_tokens, shape.kv_heads, shape.v_head_dim)),
    }
    for name, (x, size) in wanted.items():
        if tuple(x.shape) != size:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but rank {step.rank} of this plan expects [tokens, heads, head "
                f"size] = {size}" + _way_out(name, x, size, step)
            )
        if str(x.dtype).removeprefix("torch.") != shape.dtype:
            raise ValueError(
                f"{name} is {x.dtype}, but the plan counts bytes of {shape.dtype}; " + _dtype_hint(q, k, v, shape.dtype)
            )


def _dtype_hint(q: Tensor, k: Tensor, v: Tensor, planned: str) -> str:
    """Return the advice for tensors whose dtype is not ``planned``, the plan's."""
    if q.dtype == k.dtype == v.dtype:
        return f'plan with Planner(dtype="{str(q.dtype).removeprefix("torch.")}")'
    return (
        f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: cast them to one dtype, torch.{planned} or that of "
        "Planner(dtype=...) (RoPE in float32 under autocast leaves q and k in float32)"
    )


def _way_out(name: str, x: Tensor, size: tuple[int, int, int], step: Step) -> str:
    """Return advice for the tensor ``name`` of the wrong shape by its likely cause, or "" if none is likely.

    Causes are another axis order, another number of heads, or rows that were not cut by the plan. ``size`` is the right
    shape.
    """
    if tuple(x.shape) == (1, *size):
        return f"; pass {name}[0]"
    if tuple(x.shape) in (turned := (size[1], size[0], size[2]), (1, *turned)):
        return "; tokens come before heads: transpose the two"
    if x.dim() == 3 and (len(x), x.shape[2]) == (size[0], size[2]):
        return f"; the plan was made by Planner(heads={step.plan.shape.heads}, kv_heads={step.plan.shape.kv_heads})"
    if x.dim() != 3 or len(x) == step.local_tokens or step.plan.ranks == 1:
        return ""
    return (
        '; cut the batch with step.shard, or plan with layout="contiguous" if every rank cuts its own part, by '
        f"stream.tensor_split(ranks)[rank]; the plan's lengths add up to {step.plan.batch.tokens} tokens, so a stream "
        "with pads needs them as a document of its own, or has to leave them out"
    )
