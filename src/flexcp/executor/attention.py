"""attention: the one differentiable call.

The forward runs the plan's forward program, adds the attention sink at home, and keeps q, k, v, the output and its LSE.
The backward needs only ``delta = rowsum(do * out) - dlse`` besides them: the LSE's own gradient and the sink's are in
it.

Both directions are registered operators, ``torch.ops.flexcp.attention`` and ``attention_backward``, so torch.compile
sees no graph break, selective recompute can name them, and recomputation may run in any thread. The step travels as its
handle (:mod:`flexcp.executor.step_handles`); everything that depends on it, the checks too, happens inside the
operators, where a compiled model guards nothing.

Where the plan keeps received keys for the backward, they are one more output of the forward, bytes whose size the fake
function makes dynamic: the autograd context of a compiled model holds tensors only, and whoever offloads or counts
saved tensors sees them. These plans have operators of their own, ``attention_keeping_keys`` and its ``_backward``, so
that others compile without a dynamic size. Whoever only looks on (telemetry) is called inside the operator.
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
from flexcp.executor.layer_masks import checked_name, mask_number, passable
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
    """Attention of the whole batch, seen from this rank.

    ``q`` is ``[local tokens, heads, head_dim]``; ``k`` and ``v`` have the KV heads, and ``v`` may have another head
    size. Returns ``[local tokens, heads, v_head_dim]``, and with ``return_lse`` also the log of the softmax denominator
    ``[local tokens, heads]``; both are differentiable.

    Rows are those that the plan keeps on this rank, ``step.shard(stream)``. A plan made without ``layout=`` places
    tokens as it likes, and rows that a loop cut itself look the same here when there are as many: plan with
    ``layout="contiguous"`` for those. A step that nobody asked for its rows warns. Either way the stream is the same on
    every rank before it is cut, positions (RoPE, ``arange``) are ``step.positions``, and labels are shifted before they
    are cut: ``step.labels(tokens)``.

    ``mask`` names one of the plan's masks, where it has several; ``window`` says it by the keys a query of this layer
    sees, itself included, 0 for a layer without a window, and a plan without such a mask is refused. ``scale`` defaults
    to ``head_dim ** -0.5``. ``softcap`` bounds logits by ``softcap * tanh(logits / softcap)``. ``sinks`` holds one
    extra logit per query head that takes probability and gives no value; its gradient, like any parameter's, is this
    rank's share.

    ``kernel`` overrides the choice of :func:`flexcp.choose_kernel`; ``step.kernels`` says which ran and why.
    ``deterministic`` makes gradients bitwise the same in every run. On a GPU every slot leaves as many multiprocessors
    to transfers as the plan says; ``sm_margin`` is a number for all of them in its place.
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
    layer = Layer(checked_name(mask), passable(window))
    out, lse = (_keep if step.keeps_keys else _forward)(q, k, v, sinks, step.handle, *numbers, *layer)[:2]
    if not torch.compiler.is_compiling() and out.grad_fn is not None:
        out.grad_fn.metadata["step"] = step  # whoever keeps the result for its backward keeps the step
    return (out, lse.to(accumulator_dtype(q.dtype))) if return_lse else out


class Layer(NamedTuple):
    """Which of the plan's masks a layer uses, by its name or by its window."""

    mask: str | None
    window: int | None

    def number(self, step: Step) -> int:
        """The place of that mask in the plan."""
        return mask_number(step.plan.batch, self.mask, self.window)


def _attend(x: Inputs, numbers: Numbers, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE, and the received keys that the plan keeps for the backward."""
    q, k, v, sinks, handle = x
    step, settings = step_of(handle), numbers.settings
    with step.collectives.checking("attention"):
        _check(q, k, v, step)
        number = layer.number(step)
    runtime = _runtime(step, q, numbers, number, backward=False)
    prepared = step.prepared(number, False, step.choose_kernel(q.device, numbers.kernel), runtime.types)
    step.note_call()
    kept_q, kept_k, kept_v = (step.in_stream_order(rows) for rows in (q, k, v))
    out, lse, keys = run_forward(prepared, runtime, kept_q, kept_k, kept_v, rounded=sinks is None)
    out, lse = step.in_local_order(out), step.in_local_order(lse)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    out = out.to(q.dtype)
    if step.telemetry is not None:
        step.telemetry.after_forward(step, number, settings, (q, k, v), sinks, out, lse)
    return out, lse, keys


def _attend_keeping_nothing(x: Inputs, numbers: Numbers, layer: Layer) -> tuple[Tensor, Tensor]:
    return _attend(x, numbers, layer)[:2]


def _gradients(
    back: Gradients, x: Inputs, made: Results, kept: Kept, numbers: Numbers, layer: Layer
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dsinks (empty without sinks)."""
    q, k, v, sinks, handle = x
    step = step_of(handle)
    step.losses.note_backward()
    number = layer.number(step)
    runtime = _runtime(step, q, numbers, number, backward=True)
    prepared = step.prepared(number, True, step.choose_kernel(q.device, numbers.kernel), runtime.types)
    gradient = OutputGradient(back.do.to(made.out.dtype), made.out, back.dlse, made.lse.dtype)
    if step.kept_order_on(q.device) is not None:
        gradient = gradient.in_order(step.in_stream_order)
    kept_q, kept_k, kept_v, kept_lse = (step.in_stream_order(rows) for rows in (q, k, v, made.lse))
    found = list(run_backward(prepared, runtime, kept.keys, kept_q, kept_k, kept_v, kept_lse, gradient))
    dsinks = q.new_empty(0) if sinks is None else sinks_gradient(sinks, kept_lse, gradient.delta)
    del kept_q, kept_k, kept_v, kept_lse, gradient
    # A sum is let go before the next one is rounded: that is what plan.memory counts.
    dq, dk, dv = (step.in_local_order(found.pop(0).to(x.dtype)) for x in (q, k, v))
    return dq, dk, dv, dsinks


def _gradients_without_keys(
    back: Gradients, x: Inputs, made: Results, numbers: Numbers, layer: Layer
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(back, x, made, Kept(made.out.new_empty(0)), numbers, layer)


_forward = register_attention(
    ("attention", "attention_backward"), _attend_keeping_nothing, _gradients_without_keys, (Numbers, Layer)
)
_keep = register_attention(
    ("attention_keeping_keys", "attention_keeping_keys_backward"), _attend, _gradients, (Numbers, Layer), keeps=True
)


def _runtime(step: Step, q: Tensor, numbers: Numbers, mask: int, backward: bool) -> Runtime:
    exchange = step.open_exchange(mask, backward, q.device)
    watch = None if step.telemetry is None else step.telemetry.watch(step, mask, backward, q.device)
    return Runtime(step.plan.shape, types_of(q), numbers.settings, exchange, step.arena, watch, numbers.sm_margin)


def _check(q: Tensor, k: Tensor, v: Tensor, step: Step) -> None:
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
    """What to say of tensors in another dtype than the plan's."""
    if q.dtype == k.dtype == v.dtype:
        return f'plan with Planner(dtype="{str(q.dtype).removeprefix("torch.")}")'
    return (
        f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: cast them to one (RoPE in float32 under autocast leaves q "
        f"and k in it), here torch.{planned} or that of Planner(dtype=...)"
    )


def _way_out(name: str, x: Tensor, size: tuple[int, int, int], step: Step) -> str:
    """What to say of a likely cause: another axis order or number of heads, or rows that the plan keeps elsewhere.

    A plan places tokens itself unless it is told where they are.
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
        '; cut the batch with step.shard, or plan with layout="contiguous" where every rank keeps a part that it cut '
        "itself, by "
        "stream.tensor_split(ranks)[rank]"
    )
