"""Torch operators: attention as a pair of operators that torch can trace, differentiate and name.

Both of flexcp's attentions, :func:`flexcp.attention` (over ranks) and :func:`flexcp.slice_attention` (one device), have
the same outside:

    forward(Inputs, Numbers, ...) -> Results
    backward(Gradients, Inputs, Results, Numbers, ...) -> dq, dk, dv, dsinks (empty without sinks)

A forward that keeps more for its backward than these returns :class:`Kept` too, bytes of a size that only it knows,
which the backward gets after the results.

An operator of torch takes tensors and numbers one by one. They are the fields of these tuples, in their order: the
schema is made of them, and what arrives is packed into them again before our functions see it. So a new number of a
call is a new field, and nothing else.

Shapes follow from q and v alone, so token counts are free in a compiled model, and the exchange between ranks stays
eager inside: compiled collectives could be reordered against FSDP's.

An operator's way through torch's dispatcher costs the host more than a short kernel runs. So the operators are called
only where somebody watches for them (torch.compile, dispatch modes such as selective checkpointing's, transforms,
subclasses of tensors); plain tensors in a plain call take the same functions through ``torch.autograd.Function``.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]  # documented, but not in its __all__

from flexcp.executor.kernels import Settings, on_device
from flexcp.executor.run.message_layout import types_of


class Inputs(NamedTuple):
    """What a call computes with. ``where`` is the one tensor that says what attends to what:
    a step's handle, or slices.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    where: Tensor


class Numbers(NamedTuple):
    """How a call computes."""

    scale: float
    softcap: float | None
    deterministic: bool
    sm_margin: int | None
    kernel: str | None

    @property
    def settings(self) -> Settings:
        """What a kernel is told of them."""
        return Settings(self.scale, self.softcap, self.deterministic, self.sm_margin or 0)


class Results(NamedTuple):
    """Output in the model's dtype and LSE in the dtype the backward wants."""

    out: Tensor
    lse: Tensor


class Kept(NamedTuple):
    """Received keys, as bytes."""

    keys: Tensor


class Gradients(NamedTuple):
    """What comes back for the results; for the LSE only where it was used."""

    do: Tensor
    dlse: Tensor | None


Tuples = tuple[Any, ...]
"""Types from among the tuples above, and further ones of numbers."""

PLAIN = (Tensor, torch.nn.Parameter, type(None))
"""What a call's tensors are if no subclass has a say in it."""


def register_attention(
    names: tuple[str, str],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    numbers: Tuples,
    keeps: bool = False,
) -> Callable[..., Any]:
    """Register a pair of functions as ``flexcp::`` operators of these names; returns what calls the forward,
    with its gradient.

    ``numbers`` are the types of the tuples that both take after their tensors; ``keeps``: the forward returns what it
    keeps.
    """
    made: Tuples = (Results, Kept) if keeps else (Results,)
    plain_first = _packing(on_their_device(forward), (Inputs, *numbers))
    plain_second = _packing(on_their_device(backward), (Gradients, Inputs, *made, *numbers))
    first = _operator(names[0], plain_first, (Inputs, *numbers), sum(len(fields._fields) for fields in made))
    second = _operator(names[1], plain_second, (Gradients, Inputs, *made, *numbers), 4)
    first.register_fake(_packing(_keeping_shapes if keeps else _forward_shapes, (Inputs,)))
    second.register_fake(_packing(_backward_shapes, (Gradients, Inputs)))

    def gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        x = Inputs._make(saved[: len(Inputs._fields)])
        if do is None:
            do = torch.zeros_like(saved[len(x)])
        # Whoever wants a gradient of the gradient must meet an operator that says that it has none.
        run = second if torch.is_grad_enabled() or _is_watched(do, dlse, *x) else plain_second
        dq, dk, dv, dsinks = run(do, dlse, *saved, *ctx.numbers)
        return dq, dk, dv, None if x.sinks is None else dsinks, *([None] * (1 + len(ctx.numbers)))

    first.register_autograd(gradients, setup_context=_save)

    class Plain(torch.autograd.Function):
        """The same pair without operators."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = plain_first(*given)
            _save(ctx, given, found)
            return found

        @staticmethod
        def backward(ctx: Any, *back: Any) -> Any:
            return gradients(ctx, *back)

    def call(*given: Any) -> Any:
        return (first if _is_watched(*given[: len(Inputs._fields)]) else Plain.apply)(*given)

    return call


def on_their_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with the device of its first tuple's first tensor as the current one."""

    def call(first: Any, *others: Any) -> Any:
        with on_device(first[0].device):
            return run(first, *others)

    return call


def _is_watched(*tensors: Tensor | None) -> bool:
    """Whether anybody may want to see the operators of a call with these tensors."""
    if torch.compiler.is_compiling() or any(type(x) not in PLAIN for x in tensors):
        return True
    # Neither question has a public name in torch.
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _operator(name: str, call: Callable[..., Any], takes: Tuples, results: int) -> CustomOpDef:
    """``call``, which takes the fields of these tuples one by one, as an operator."""
    arguments = [
        Parameter(argument, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        for fields in takes
        for argument, kind in get_type_hints(fields).items()
    ]
    signature = Signature(arguments, return_annotation=tuple[(Tensor,) * results])  # type: ignore[misc]
    call.__signature__ = signature  # type: ignore[attr-defined]
    return torch.library.custom_op(f"flexcp::{name}", call, mutates_args=())


def _packing(run: Callable[..., Any], takes: Tuples) -> Callable[..., Any]:
    """``run`` as a function of single arguments, packed into the tuples it takes; further ones are dropped."""
    parts, at = [], 0
    for fields in takes:
        parts.append((fields._make, slice(at, at + len(fields._fields))))
        at += len(fields._fields)

    def call(*given: Any) -> Any:
        return run(*[pack(given[part]) for pack, part in parts])

    return call


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep a forward's tensors in the order in which its backward takes them."""
    tensors = len(Inputs._fields)
    ctx.save_for_backward(*inputs[:tensors], *output)
    ctx.numbers = inputs[tensors:]
    ctx.set_materialize_grads(False)


def _forward_shapes(x: Inputs) -> tuple[Tensor, Tensor]:
    size = (x.q.shape[0], x.q.shape[1], x.v.shape[2])
    return x.q.new_empty(size), x.q.new_empty(size[:2], dtype=types_of(x.q).statistics)


def _keeping_shapes(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return *_forward_shapes(x), x.q.new_empty(size, dtype=torch.uint8)


def _backward_shapes(_: Gradients, x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = x.q.new_empty(0) if x.sinks is None else torch.empty_like(x.sinks)
    dq, dk, dv = (given.new_empty(given.shape) for given in (x.q, x.k, x.v))
    return dq, dk, dv, dsinks
