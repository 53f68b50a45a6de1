"""Proves that views of a pass's memory lie where the plan lays them, are made once, and are used by every layer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp.executor.run import executor
from flexcp.executor.run.message_layout import Types, new_inputs, new_results
from flexcp.executor.run.message_parts import message_bytes
from flexcp.executor.run.pass_memory import PassMemory
from flexcp.executor.run.rank_program import rank_program
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan

CPU = torch.device("cpu")
TYPES = Types(torch.bfloat16, torch.float32, torch.float64, CPU)


def a_plan(strategy: str = "blocks") -> Plan:
    planner = flexcp.Planner(4, 2, 8, 6, "bfloat16", flexcp.cluster("cpu", 1, 3), strategy=strategy)
    return planner([40, 1, 22, 2], flexcp.causal())


def memory_of(plan: Plan, rank: int, backward: bool) -> tuple[PassMemory, Tensor]:
    program = rank_program(plan, rank, 0, backward)
    sizes = [
        [[(m.peer, message_bytes(m, plan.shape)) for m in side] for side in sides]
        for sides in zip(*((slot.send, slot.receive) for slot in program.slots), strict=True)
    ]
    bytes_ = torch.full((program.layout.size,), 7, dtype=torch.uint8)
    return PassMemory(program, *sizes, plan.shape, TYPES, backward, bytes_), bytes_


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("strategy", ["ring", "usp:1,3", "blocks"])
def test_shelves_have_the_fields_of_new_ones_and_lie_in_the_memory(strategy: str, backward: bool) -> None:
    plan, seen = a_plan(strategy), 0
    for rank in range(plan.ranks):
        views, memory = memory_of(plan, rank, backward)
        program = rank_program(plan, rank, 0, backward)
        for number, shelf in enumerate(program.shelves[2:], 2):
            found = views.shelf(number)
            wanted = new_inputs(shelf, backward, plan.shape, TYPES), new_results(shelf, backward, plan.shape, TYPES)
            for mine, new in zip((found.inputs, found.results), wanted, strict=True):
                assert {n: (x.shape, x.dtype) for n, x in mine.items()} == {
                    n: (x.shape, x.dtype) for n, x in new.items()
                }
            first, last = memory.data_ptr(), memory.data_ptr() + len(memory)
            tensors = [*found.inputs.values(), *found.results.values()]
            assert all(first <= x.data_ptr() and x.data_ptr() + x.nbytes <= last for x in tensors)
            places = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors if x.numel())
            assert all(a[1] <= b[0] for a, b in pairwise(places)), "fields do not overlap"
            for _, part, value in found.cleared:
                part.fill_(value)
            for name, x in found.results.items():
                torch.testing.assert_close(x, wanted[1][name], rtol=0, atol=0)
            assert views.shelf(number) is found
            seen += 1
    assert seen


def test_messages_are_made_once() -> None:
    plan = a_plan()
    views, memory = memory_of(plan, 1, False)
    leaving = views.messages("sends", 1)
    assert views.messages("sends", 1) is leaving is not views.messages("receives", 1)
    assert leaving.memory.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def test_views_made_under_inference_mode_may_be_written_in_training() -> None:
    views, _ = memory_of(a_plan(), 1, True)
    with torch.inference_mode():
        shelf, message = views.shelf(2), views.messages("sends", 1).memory
    assert not any(x.is_inference() for x in (*shelf.inputs.values(), *shelf.results.values(), message))


def on_layers(group: dist.ProcessGroup, plan: Plan, layers: int) -> list[bool]:
    """Run layers forward and backward; return for each time that views were made whether it was in a backward."""
    made: list[bool] = []

    class Counted(PassMemory):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(given[5])

    step = flexcp.bind(plan, group)
    with patch.object(executor, "PassMemory", Counted):
        for _ in range(layers):
            q, k, v = (torch.randn(step.local_tokens, *size).bfloat16() for size in ((4, 8), (2, 8), (2, 6)))
            out = flexcp.attention(*(x.requires_grad_() for x in (q, k, v)), step)
            out.sum().backward()  # type: ignore[union-attr]
    return made


def test_layers_of_a_step_share_their_views(pool: RankPool) -> None:
    assert pool.run(on_layers, a_plan("ring"), 3, ranks=3) == [[False, True]] * 3
