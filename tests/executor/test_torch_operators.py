"""Proves that the arguments of flexcp's torch operators are the fields of its named tuples, and that they come back to
flexcp's functions in the right tuples; also that dispatch modes and other observers see the operators, while a plain
call computes the same without them.
"""

from __future__ import annotations

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
