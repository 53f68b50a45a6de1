"""Proves that what a kernel makes of LSE and delta is made once a pass for own rows and the heads of a list, and is that list's.

The CPU kernel is given a ``make_statistics`` that keeps LSE and delta, and its backward takes them from there: statistics of other rows or
heads, or of another pass, change the gradient or its shape; else it is the plain kernel's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.executor.run.test_open_dq import backward_of, plan_for
from torch import Tensor

import flexcp
from flexcp.executor.kernels import cpu
from flexcp.measure.ranks import RankPool
from flexcp.plan.memory import QUERIES
from flexcp.plan.plan import Plan

LSE, DELTA = 4, 5  # where backward has them among its arguments


@contextmanager
def making() -> Iterator[list[int]]:
    """The CPU kernel makes statistics; yields how many heads each of them has, and a 0 for every backward that was given none."""
    plain, made = cpu.backward, []

    def make_statistics(lse: Tensor, delta: Tensor, work: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        made.append(lse.shape[1])
        return lse.clone(), delta.clone()

    def backward(*arguments: Any, statistics: tuple[Tensor, Tensor] | None = None) -> None:
        given = list(arguments)
        if statistics is None:
            made.append(0)
        else:
            assert all(a.shape == b.shape for a, b in zip(statistics, given[LSE : DELTA + 1], strict=True))
            given[LSE], given[DELTA] = statistics
        plain(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "backward", backward)
        patch.setattr(cpu, "make_statistics", make_statistics, raising=False)
        yield made


def gradients(group: dist.ProcessGroup, plan: Plan) -> dict[str, Any]:
    """Whether dq, dk, dv of the rank are the plain kernel's, and what was made on the way, in two passes of one step."""
    step = flexcp.bind(plan, group)
    plain = backward_of(step, False)
    with making() as made:
        found = backward_of(step, False)
        first = list(made)
        again = backward_of(step, False)
    same = [np.array_equal(a, b) and np.array_equal(a, c) for a, b, c in zip(plain, found, again, strict=True)]
    return {"same": all(same), "made": first, "again": made[len(first) :]}


@pytest.mark.parametrize("strategy", ["ring", "zigzag", "usp:2,2", "blocks", "groups"])
def test_statistics_of_own_rows_are_made_once_a_pass(pool: RankPool, strategy: str) -> None:
    from flexcp.executor.run.rank_program import rank_program

    plan = plan_for(4, strategy)
    for rank, found in enumerate(pool.run(gradients, plan, ranks=4)):
        lists = [work for slot in rank_program(plan, rank, 0, True).slots for work in slot.work]
        own = {(work.h0, work.h1) for work in lists if work.q_shelf == QUERIES}
        assert found["same"] and found["made"] == found["again"]
        if len(lists) > 1:  # a single list over own rows is no pass of the executor's
            assert sorted(x for x in found["made"] if x) == sorted(h1 - h0 for h0, h1 in own)
            assert found["made"].count(0) == sum(work.q_shelf != QUERIES for work in lists)
