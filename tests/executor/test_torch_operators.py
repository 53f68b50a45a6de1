"""Proves that the arguments of flexcp's torch operators are the fields of its named tuples, and that they come back to
flexcp's functions in the right tuples; also that dispatch modes and other observers see the operators, while a plain
call computes the same without them; and that autocast and derivatives that they do not have change no result silently.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flexcp
from flexcp.executor.attention import Layer
from flexcp.executor.torch_operators import Gradients, Inputs, Kept, Numbers, Results, _is_watched, _packing


def arguments(name: str) -> list[str]:
    assert flexcp.attention  # importing it registers the operators
    return [argument.name for argument in getattr(torch.ops.flexcp, name).default._schema.arguments]


def test_operators_take_the_fields_of_their_tuples_in_order() -> None:
    numbers = [*Numbers._fields, *Layer._fields]
    given, made, back = Inputs._fields, Results._fields, Gradients._fields
    for name in ("attention", "attention_keeping_keys"):
        assert arguments(name) == [*given, *numbers]
    assert arguments("attention_backward") == [*back, *given, *made, *numbers]
    assert arguments("attention_keeping_keys_backward") == [*back, *given, *made, *Kept._fields, *numbers]


def test_single_arguments_come_back_in_their_tuples() -> None:
    def run(made: Results, layer: Layer) -> tuple[Results, Layer]:
        return made, layer

    made, layer = _packing(run, (Results, Layer))(1, 2, "full", 5)
    assert made == Results(1, 2) and layer == Layer("full", 5)  # type: ignore[arg-type]


class Watching(TorchDispatchMode):
    """Collects the names of flexcp's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "flexcp":
            self.seen.append(function.__name__.partition(".")[0])
        return function(*args, **(kwargs or {}))


def tensors() -> tuple[list[torch.Tensor], torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    leaves = [torch.randn(40, heads, 8, generator=drawn).requires_grad_() for heads in (4, 2, 2)]
    return leaves, torch.randn(40, 4, 8, generator=drawn)


def attend(leaves: list[torch.Tensor]) -> torch.Tensor:
    out = flexcp.slice_attention(*leaves, flexcp.causal(), lengths=[30, 10])
    assert isinstance(out, torch.Tensor)
    return out


def test_operators_are_seen_by_those_who_watch_and_compute_the_same() -> None:
    leaves, do = tensors()
    plain_out = attend(leaves)
    plain = torch.autograd.grad(plain_out, leaves, do)
    with Watching() as watching:
        out = attend(leaves)
        found = torch.autograd.grad(out, leaves, do)
    assert watching.seen == ["slice_attention_forward", "slice_attention_backward"]
    assert torch.equal(out, plain_out) and all(map(torch.equal, found, plain))


def test_a_plain_call_needs_no_operator() -> None:
    leaves, do = tensors()
    out = attend(leaves)
    assert type(out.grad_fn).__name__ == "PlainBackward"
    with Watching() as watching:
        torch.autograd.grad(out, leaves, do)
    assert watching.seen == ["slice_attention_backward"]  # a dispatch mode is active by now


def test_subclasses_and_transforms_get_the_operators() -> None:
    class Named(torch.Tensor):
        pass

    plain = torch.ones(2)
    assert not _is_watched(plain, torch.nn.Parameter(plain), None)
    assert _is_watched(plain, plain.as_subclass(Named))
    watched: list[bool] = []
    torch.func.vmap(lambda x: (watched.append(_is_watched(plain)), x)[1])(plain)
    assert watched == [True]


def test_a_gradient_of_the_gradient_is_refused() -> None:
    leaves, do = tensors()
    first = torch.autograd.grad(attend(leaves), leaves, do, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(first.sum(), leaves)


# --- what surrounds a call -------------------------------------------------------------------------------------------

Call = Callable[..., torch.Tensor]


def calls(dtype: str = "float64") -> dict[str, Call]:
    """Both attention functions, of q, k and v alone, over documents of 30 and 10 tokens."""
    where = flexcp.cluster("cpu", ranks_per_node=1)
    step = flexcp.bind(flexcp.Planner(4, 2, 8, dtype=dtype, cluster=where, strategy="dp")([30, 10]))

    def over_ranks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flexcp.attention(q, k, v, step)
        assert isinstance(out, torch.Tensor)
        return out

    return {"attention": over_ranks, "slice_attention": lambda *qkv: attend(list(qkv))}


@pytest.mark.parametrize("name", ["attention", "slice_attention"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("watched", [False, True])
def test_autocast_changes_no_bit(name: str, dtype: torch.dtype, other: torch.dtype, watched: bool) -> None:
    call = calls(str(dtype).removeprefix("torch."))[name]
    leaves, do = tensors()
    leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]

    def results(run: Call) -> list[torch.Tensor]:
        out = run(*leaves)
        return [out, *torch.autograd.grad(out, leaves, do.to(dtype))]

    plain = results(call)
    with torch.autocast("cpu", other), Watching() if watched else nullcontext():
        found = results(call)
    assert all(map(torch.equal, found, plain))


REVERSE: dict[str, Callable[[Call, Any], Any]] = {
    "grad": lambda call, x: torch.func.grad(lambda *y: call(*y).sum())(*x),
    "jacrev": lambda call, x: torch.func.jacrev(call)(*x),
    "hessian": lambda call, x: torch.func.hessian(lambda *y: call(*y).sum())(*x),
}
FORWARD: dict[str, Callable[[Call, Any], Any]] = {
    "jvp": lambda call, x: torch.func.jvp(call, x, x),
    "jacfwd": lambda call, x: torch.func.jacfwd(call, argnums=1)(*x),
    "jvp of vmap": lambda call, x: torch.func.jvp(torch.func.vmap(call), *[tuple(y[None] for y in x)] * 2),
    "compiled jvp": lambda call, x: torch.compile(lambda *y: torch.func.jvp(call, y, y), backend="eager")(*x),
    "jvp of compiled": lambda call, x: torch.func.jvp(torch.compile(call, backend="eager"), x, x),
}


@pytest.mark.parametrize("name", ["attention", "slice_attention"])
@pytest.mark.parametrize("transform", [*REVERSE, *FORWARD])
def test_derivatives_by_torch_func_are_refused(name: str, transform: str) -> None:
    torch._dynamo.reset()
    call = calls()[name]
    if name == "slice_attention":
        slices = flexcp.packed_slices([30, 10], flexcp.causal())  # torch.compile needs the mask as a tensor

        def call(*qkv: torch.Tensor) -> torch.Tensor:
            out = flexcp.slice_attention(*qkv, slices)
            assert isinstance(out, torch.Tensor)
            return out

    x = tuple(leaf.detach().double() for leaf in tensors()[0])
    with pytest.raises(NotImplementedError, match=rf"flexcp\.{name} has no.*torch\.autograd\.grad"):
        (REVERSE | FORWARD)[transform](call, x)


@pytest.mark.parametrize("name", ["attention", "slice_attention"])
def test_attention_may_be_a_constant_of_a_transformed_function(name: str) -> None:
    call, x = calls()[name], tuple(leaf.detach().double() for leaf in tensors()[0])
    total = call(*x).sum()
    assert torch.equal(torch.func.grad(lambda y: y * call(*x).sum())(torch.ones(())), total.float())
    assert torch.equal(torch.func.jvp(lambda y: y * call(*x).sum(), (total,), (total.new_ones(()),))[1], total)
    assert torch.equal(torch.func.vmap(lambda q: call(q, *x[1:]))(x[0][None])[0], call(*x))


@pytest.mark.parametrize("name", ["attention", "slice_attention"])
def test_tensors_without_values_are_refused_unless_shapes_alone_are_traced(name: str) -> None:
    call, x = calls()[name], tuple(leaf.detach().double().to("meta") for leaf in tensors()[0])
    with pytest.raises(NotImplementedError, match=r"on the meta device.*move"):
        call(*x)
    with Watching():
        assert call(*x).shape == (40, 4, 8)
