"""Proves that a dq which kernels leave open, in a layout of their own, is converted back once, after the last kernel
that adds to it and before anything else reads it or adds to it.

The CPU kernel gets ``open_dq`` and ``close_dq`` functions. dq holds NaN until it is opened. While dq is open, its
columns are reversed and halved, both of which are exact. Reading dq too early, adding to it in the wrong order, or
closing it twice or never therefore changes the gradient; otherwise the gradient equals the plain kernel's bit for bit.
A kernel that finishes rows closes dq into another tensor, and leaves NaN in the open one. It clears, closes and writes
only what it is told that lists add to; the rest of dq stays NaN, and what messages lay in the other tensor stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp.executor.kernels import Settings, cpu
from flexcp.executor.kernels.dq_states import ADDED, EMPTY, OTHERS
from flexcp.executor.run import message_layout, pass_memory, pass_recipe, prepared
from flexcp.executor.run import rank_program as rank_programs
from flexcp.executor.run.laid_rows import NO_AREAS
from flexcp.executor.run.message_layout import types_of
from flexcp.executor.run.rank_program import RankProgram, rank_program
from flexcp.measure.ranks import RankPool
from flexcp.plan.memory import QUERIES
from flexcp.plan.plan import Plan
from flexcp.shape import Kind

LENGTHS = [33, 1, 50, 2, 8]
HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM = 4, 2, 8, 6
LSE, DQ = 4, 8  # positions among the arguments of backward; the settings come before dq


def plan_for(ranks: int, strategy: str) -> Plan:
    where = flexcp.cluster("cpu", 1, ranks)
    return flexcp.Planner(HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, "float64", where, strategy=strategy)(LENGTHS)


@contextmanager
def opening(slots: int | None, finishing: bool) -> Iterator[list[str]]:
    """Make the CPU kernel leave dq open; yields the list of what it is asked to do.

    With ``slots``, dq is left open only before that slot; with ``finishing``, the kernel closes dq into the final
    tensor.
    """
    plain, touched, laid_out = cpu.backward, pass_recipe.touched_dq, message_layout.laid_out
    calls: list[str] = []

    def backward(*arguments: Any, opened: Tensor | None = None, first_head: int = 0) -> None:
        settings, dq = arguments[DQ - 1 : DQ + 1]
        calls.append("open" if settings.open_dq else "closed")
        if not settings.open_dq:
            assert opened is None
            plain(*arguments)
            return
        assert opened is not None
        lse = arguments[LSE]
        assert torch.equal(opened[:, first_head : first_head + lse.shape[1]], lse), "statistics of the list's heads"
        close_dq(dq, settings)
        plain(*arguments)
        dq.copy_(dq.flip(-1) * 0.5)

    def open_dq(dq: Tensor, lse: Tensor, delta: Tensor, work: Any, states_TH: Tensor | None = None) -> Tensor:
        calls.append("clear")
        assert lse.shape == delta.shape == dq.shape[:2]
        assert dq.isnan().all(), "nothing clears it twice"
        dq[states_TH == ADDED if states_TH is not None else ...] = 0.0
        return lse.clone()

    def uninitialised(*arguments: Any) -> dict[str, Tensor]:
        return {name: x.fill_(torch.nan) for name, x in laid_out(*arguments).items()}

    def close_dq(dq: Tensor, settings: Settings) -> None:
        dq.copy_(dq.flip(-1) * 2.0)

    def closed(dq: Tensor, settings: Settings, states_TH: Tensor, finished_THD: Tensor | None = None) -> None:
        calls.append("close" if finished_THD is None else "finish")
        close_dq(dq, settings)
        assert states_TH.shape == dq.shape[:2]
        if finished_THD is None:
            assert not dq[states_TH != ADDED].any(), "lists add to nothing else"
        else:
            calls.extend(["others"] if bool((states_TH == OTHERS).any()) else [])
            finished_THD[states_TH == ADDED] = dq[states_TH == ADDED]
            finished_THD[states_TH == EMPTY] = 0.0
            dq.fill_(torch.nan)

    def sooner(program: RankProgram) -> dict[int, int]:
        return {number: at if slots is None else min(at, slots) for number, at in touched(program).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "backward", backward)
        patch.setattr(cpu, "open_dq", open_dq, raising=False)
        patch.setattr(cpu, "close_dq", closed, raising=False)
        for module in (message_layout, pass_memory):
            patch.setattr(module, "laid_out", uninitialised)
        patch.setattr(pass_recipe, "touched_dq", sooner)
        patch.setattr(cpu, "FINISHES", finishing, raising=False)
        patch.setattr(pass_recipe, "finished_rows", lambda program: None)
        yield calls


def gradients(
    group: dist.ProcessGroup, plan: Plan, slots: int | None, deterministic: bool, finishing: bool = False
) -> dict[str, Any]:
    """Return whether dq, dk and dv equal the plain kernel's when dq is left open, and the kernel's calls."""
    plain = backward_of(flexcp.bind(plan, group), deterministic)
    with opening(slots, finishing) as calls:
        found = backward_of(flexcp.bind(plan, group), deterministic)
    return {"same": [np.array_equal(a, b) for a, b in zip(plain, found, strict=True)], "calls": calls}


def backward_of(step: Any, deterministic: bool) -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, V_HEAD_DIM), (HEADS, V_HEAD_DIM))
    q, k, v, do = (
        step.shard(torch.randn(sum(LENGTHS), *size, generator=generator, dtype=torch.float64)) for size in sizes
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flexcp.attention(*leaves, step, deterministic=deterministic, kernel="cpu")
    assert isinstance(out, Tensor)
    out.backward(do)
    return [x.grad.numpy() for x in leaves if x.grad is not None]


@pytest.mark.parametrize(
    ("strategy", "slots"),
    [
        ("ring", None),
        ("ring", 2),
        ("ulysses", None),
        ("usp:2,2", None),
        ("usp:2,2", 2),
        ("blocks", None),
        ("blocks", 1),
    ],
)
def test_a_dq_left_open_becomes_the_same_gradient(pool: RankPool, strategy: str, slots: int | None) -> None:
    found = pool.run(gradients, plan_for(4, strategy), slots, False, ranks=4)
    assert all(all(rank["same"]) for rank in found)
    calls = [call for rank in found for call in rank["calls"]]
    assert "open" in calls and ("closed" in calls) == (slots is not None)
    assert calls.count("clear") == calls.count("close")
    for asked in (rank["calls"] for rank in found if "open" in rank["calls"]):
        last = max(i for i, call in enumerate(asked) if call == "open")
        assert "close" in asked[last:] and asked.count("close") <= asked.count("open")


@pytest.mark.parametrize(
    ("strategy", "slots", "ends"),
    [("ring", None, {"finish"}), ("ring", 2, {"close"}), ("ulysses", None, {"finish", "others", "close"})],
)
def test_a_dq_that_nobody_else_adds_to_is_closed_where_it_stays(
    pool: RankPool, strategy: str, slots: int | None, ends: set[str]
) -> None:
    found = pool.run(gradients, plan_for(4, strategy), slots, False, True, ranks=4)
    assert all(all(rank["same"]) for rank in found)
    asked = [set(rank["calls"]) for rank in found if "open" in rank["calls"]]
    assert asked and all(calls - {"clear", "open", "closed"} == ends for calls in asked)


def test_deterministic_gradients_are_never_left_open(pool: RankPool) -> None:
    for rank in pool.run(gradients, plan_for(4, "usp:2,2"), None, True, ranks=4):
        assert all(rank["same"]) and set(rank["calls"]) == {"closed"}


def test_lists_after_the_first_message_of_a_dq_add_to_the_gradient_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "close_dq", lambda dq, settings, states: None, raising=False)
    monkeypatch.setattr(rank_programs, "_mark_laid", lambda shelves, slots: (NO_AREAS, NO_AREAS))
    planner = flexcp.Planner(4, 2, 128, dtype="float64", cluster=flexcp.cluster("h100", 1, 8), strategy="blocks")
    plan = planner([8000])
    open_lists, others = 0, 0
    for rank in range(plan.ranks):
        program = rank_program(plan, rank, 0, True)
        recipe = pass_recipe.pass_recipe(program, True, plan.shape)
        made = prepared.prepare(recipe, plan.shape, "cpu", types_of(torch.zeros(1, dtype=torch.float64)), {})
        state = dict.fromkeys(range(len(program.shelves)), "closed")
        for at, slot in enumerate(program.slots):
            blocks = [b for m in slot.receive + slot.send for b in m.blocks] + [b for pair in slot.own for b in pair]
            for block in blocks:
                if block.kind == Kind.DQ:
                    assert state[block.shelf] != "open"
                    state[block.shelf] = "touched"
            for work in made.work[at]:
                shelf = work.work.q_shelf
                assert work.open_dq == (state[shelf] != "touched")
                open_lists, others = open_lists + work.open_dq, others + (not work.open_dq)
                state[shelf] = "open" if work.open_dq else state[shelf]
            for number in made.closes[at]:
                assert state[number] == "open"
                state[number] = "closed"
        assert "open" not in state.values()
    assert open_lists and others


def test_laid_blocks_of_a_dq_leave_it_open() -> None:
    planner = flexcp.Planner(4, 2, 128, dtype="float64", cluster=flexcp.cluster("h100", 1, 8), strategy="blocks")
    plan, early = planner([8000]), 0
    for rank in range(plan.ranks):
        program = rank_program(plan, rank, 0, True)
        assert pass_recipe.touched_dq(program)[QUERIES] == len(program.slots)
        last = max(at for at, slot in enumerate(program.slots) for work in slot.work if work.q_shelf == QUERIES)
        blocks = [b for slot in program.slots[: last + 1] for message in slot.receive for b in message.blocks]
        early += sum(block.kind == Kind.DQ for block in blocks)
    assert early, "some arrive while lists still add to dq"
