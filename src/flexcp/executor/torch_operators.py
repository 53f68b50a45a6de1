"""Torch operators: attention as a pair of operators that torch can trace, differentiate and name.

Both attention functions of flexcp, :func:`flexcp.attention` (over ranks) and :func:`flexcp.slice_attention` (one
device), have the same signature:

    forward(Inputs, Numbers, ...) -> Results
    backward(Gradients, Inputs, Results, Numbers, ...) -> dq, dk, dv, dsinks (empty without sinks)

A forward that keeps received keys for its backward also returns :class:`Kept`, bytes whose size is known only at run
time; the backward gets them after the results.

A torch operator takes single tensors and numbers, not tuples. The operator's schema is made of the fields of these
tuples, in order, and the arguments are packed into the tuples again before the functions see them. To add a number to a
call, add a field to its tuple.

Output shapes follow from q and v alone, so a compiled model accepts any token count. The exchange between ranks stays
eager inside the operator, because compiled collectives could be reordered against FSDP's.

A call through torch's dispatcher costs the host more time than a short kernel takes. So the operators are called only
when something has to see them (torch.compile, dispatch modes such as selective checkpointing, functorch transforms,
tensor subclasses). Plain tensors outside of these run the same functions through ``torch.autograd.Function``.

Both run without autocast: the dtype of q, k and v is the plan's, and a backward whose products were rounded otherwise
than the forward's would not match the forward's LSE.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.library import CustomOpDef  # type: ignore[attr-defined]  # documented, but not in its __all__

from flexcp.executor.arguments import refuse_meta
from flexcp.executor.autocast import without_autocast
from flexcp.executor.kernels import Settings, on_device
from flexcp.executor.run.message_layout import types_of


class Inputs(NamedTuple):
    """The tensors of a call; ``where`` says which queries see which keys.

    It is the handle of a step (:mod:`flexcp.executor.step_handles`), or a table of slices ``[slices, 6]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    where: Tensor


class Numbers(NamedTuple):
    """The arguments of a call that are not tensors, as :func:`flexcp.attention` describes them."""

    scale: float
    softcap: float | None
    deterministic: bool
    sm_margin: int | None
    kernel: str | None

    @property
    def settings(self) -> Settings:
        """The same numbers as a kernel takes them; an ``sm_margin`` of None becomes 0."""
        return Settings(self.scale, self.softcap, self.deterministic, self.sm_margin or 0)


class Results(NamedTuple):
    """The results of a forward: output in the model's dtype, and LSE in the dtype that the backward takes."""

    out: Tensor
    lse: Tensor


class Kept(NamedTuple):
    """Received keys and values that are kept for the backward, as bytes."""

    keys: Tensor


class Gradients(NamedTuple):
    """The gradients of output (``do``) and LSE (``dlse``, None if the LSE was not used)."""

    do: Tensor
    dlse: Tensor | None


Tuples = tuple[Any, ...]
"""Named-tuple types: those above, and others that hold numbers."""

PLAIN = (Tensor, torch.nn.Parameter, type(None))
"""Types of arguments that are no tensor subclass; with any other type the registered operator is called."""


def register_attention(
    names: tuple[str, str],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    numbers: Tuples,
    keeps: bool = False,
) -> Callable[..., Any]:
    """Register the operators ``flexcp::names[0]`` and ``flexcp::names[1]``, and return a differentiable forward.

    ``forward`` and ``backward`` are the functions that the operators run. ``numbers`` are the types of the tuples that
    both take after their tensors. ``keeps`` says that the forward returns :class:`Kept` besides :class:`Results`. The
    returned function takes the fields of all tuples one by one.
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
        # Second derivatives are not supported: the registered operator raises for them, the plain function would not.
        run = second if torch.is_grad_enabled() or _is_watched(do, dlse, *x) else plain_second
        dq, dk, dv, dsinks = run(do, dlse, *saved, *ctx.numbers)
        return dq, dk, dv, None if x.sinks is None else dsinks, *([None] * (1 + len(ctx.numbers)))

    first.register_autograd(gradients, setup_context=_save)

    class Plain(torch.autograd.Function):
        """The same two functions, without torch's dispatcher."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = plain_first(*given)
            _save(ctx, given, found)
            return found

        @staticmethod
        def backward(ctx: Any, *back: Any) -> Any:
            return gradients(ctx, *back)

    def call(*given: Any) -> Any:
        tensors = given[: len(Inputs._fields)]
        if not _is_watched(*tensors):
            return Plain.apply(*given)
        if _has_forward_derivatives() if torch.compiler.is_compiling() else _are_differentiated(tensors):
            raise NotImplementedError(
                f"flexcp.{names[0].removesuffix('_forward')} has no derivatives by torch.func (jvp, jacfwd, grad, "
                "jacrev, hessian), and no forward-mode or second derivatives; take gradients by torch.autograd.grad or "
                "loss.backward()"
            )
        return first(*given)

    return call


def on_their_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` as a function that runs on the device of the first tensor of its first argument, a tuple.

    It runs without autocast, whatever is on around the call.
    """

    def call(first: Any, *others: Any) -> Any:
        device = first[0].device
        refuse_meta(device)
        with on_device(device), without_autocast(device.type):
            return run(first, *others)

    return call


def _are_differentiated(tensors: tuple[Tensor | None, ...]) -> bool:
    """Return whether a transform of ``torch.func`` takes a derivative of a call with these tensors.

    Such a call must be refused: the forward-mode derivative of a registered operator is zero, silently, and others
    raise torch's advice to those who write operators.
    """
    numbers = [x for x in tensors if x is not None and x.is_floating_point()]
    given = [x for x in numbers if torch._C._functorch.is_functorch_wrapped_tensor(x)]
    # Inside vmap a tensor does not show that grad differentiates it, so such a call gets torch's own error.
    return any(x.requires_grad for x in given) or (bool(given) and _has_forward_derivatives())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_forward_derivatives() -> bool:
    """Return whether a transform of ``torch.func`` takes forward-mode derivatives.

    torch.compile calls this while it traces, when it has entered the transforms of the code that it traces, and guards
    on those around it.
    """
    # torch has no public function for this.
    return any(layer.key() == TransformType.Jvp for layer in torch._C._functorch.get_interpreter_stack() or ())


def _is_watched(*tensors: Tensor | None) -> bool:
    """Return whether something in torch has to see the operators of a call with these tensors.

    That is torch.compile, a dispatch mode, a functorch transform or a tensor subclass.
    """
    if torch.compiler.is_compiling() or any(type(x) not in PLAIN for x in tensors):
        return True
    # torch has no public function for either of these.
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _operator(name: str, call: Callable[..., Any], takes: Tuples, results: int) -> CustomOpDef:
    """Return ``call`` as the operator ``flexcp::name`` with ``results`` output tensors.

    ``call`` takes the fields of the tuple types ``takes`` one by one.
    """
    arguments = [
        Parameter(argument, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        for fields in takes
        for argument, kind in get_type_hints(fields).items()
    ]
    signature = Signature(arguments, return_annotation=tuple[(Tensor,) * results])  # type: ignore[misc]
    call.__signature__ = signature  # type: ignore[attr-defined]
    return torch.library.custom_op(f"flexcp::{name}", call, mutates_args=())


def _packing(run: Callable[..., Any], takes: Tuples) -> Callable[..., Any]:
    """Return ``run``, which takes tuples of the types ``takes``, as a function of their fields one by one.

    Arguments beyond these fields are dropped.
    """
    parts, at = [], 0
    for fields in takes:
        parts.append((fields._make, slice(at, at + len(fields._fields))))
        at += len(fields._fields)

    def call(*given: Any) -> Any:
        return run(*[pack(given[part]) for pack, part in parts])

    return call


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save a forward's tensors for the backward, in the order in which the backward takes them."""
    tensors = len(Inputs._fields)
    ctx.save_for_backward(*inputs[:tensors], *output)
    ctx.numbers = inputs[tensors:]
    ctx.set_materialize_grads(False)


def _forward_shapes(x: Inputs) -> tuple[Tensor, Tensor]:
    """Return empty tensors of the forward's shapes and dtypes, for tracing."""
    size = (x.q.shape[0], x.q.shape[1], x.v.shape[2])
    return x.q.new_empty(size), x.q.new_empty(size[:2], dtype=types_of(x.q).statistics)


def _keeping_shapes(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors like those of a forward that also returns kept keys, for tracing."""
    size = torch.library.get_ctx().new_dynamic_size()
    return *_forward_shapes(x), x.q.new_empty(size, dtype=torch.uint8)


def _backward_shapes(_: Gradients, x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty tensors of the backward's shapes and dtypes, for tracing."""
    dsinks = x.q.new_empty(0) if x.sinks is None else torch.empty_like(x.sinks)
    dq, dk, dv = (given.new_empty(given.shape) for given in (x.q, x.k, x.v))
    return dq, dk, dv, dsinks
