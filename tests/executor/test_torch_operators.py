"""Proves that an operator of torch is made of the fields of its tuples, and that they come back to our functions in their places."""

from __future__ import annotations

import torch

import flexcp
from flexcp.executor.attention import Layer
from flexcp.executor.torch_operators import Gradients, Inputs, Kept, Numbers, Results, _packing


def arguments(name: str) -> list[str]:
    assert flexcp.attention  # imported: its operators are registered
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

    assert _packing(run, (Results, Layer))(1, 2, "full", 5) == (Results(1, 2), Layer("full", 5))  # type: ignore[arg-type]
