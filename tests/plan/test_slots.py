"""Proves by hand which slot (step of a pass's schedule) work runs in: when its inputs are available, and where local
work goes that is held back for later.
"""

from __future__ import annotations

import numpy as np
import pytest

import flexcp
from flexcp.executor.run.rank_program import rank_program
from flexcp.plan.execution import one_call_ahead
from flexcp.plan.plan import Plan
from flexcp.plan.program import Program, Transfers
from flexcp.plan.slots import held_slot, pass_inputs, work_slot
from flexcp.shape import Kind

NOTHING = Transfers.make(0, **dict.fromkeys(Transfers.names(), 0))


def plan(keep_kv: int) -> Plan:
    where = flexcp.cluster("h100", 2, 4)
    return flexcp.Planner(8, 2, 64, cluster=where, strategy="blocks", keep_kv=keep_kv)([60_000, 9_000, 500])


def test_work_runs_when_queries_and_keys_are_there() -> None:
    assert work_slot(np.array([0, 1, 3]), np.array([2, 1, 0])).tolist() == [2, 1, 3]


@pytest.mark.parametrize(
    ("keys_kept", "stages", "expected"),
    [(False, 9, [2, 2, 4]), (True, 9, [1, 2, 4]), (False, 4, [2, 2, 3]), (True, 2, [1, 1, 1])],
)
def test_held_work_runs_after_the_last_inputs(keys_kept: bool, stages: int, expected: list[int]) -> None:
    """Ranks without inputs, with inputs in stage 1, and in stage 3; held-back work never runs after the last slot."""
    program = Program(NOTHING, 0, stages, (500, 500, 500), keys_kept, execution=one_call_ahead(stages))
    assert held_slot(program, np.array([0, 1, 3])).tolist() == expected


def test_kept_keys_are_there_one_slot_before_the_stage_that_brought_them() -> None:
    kept = plan(1 << 34)
    assert kept.programs[0][1].keys_kept
    assert not (kept.programs[0][1].transfers.kind == Kind.KV).any()
    brought, found = pass_inputs(kept, 0, False), pass_inputs(kept, 0, True)
    brought, found = brought.take(brought.kind == Kind.KV), found.take(found.kind == Kind.KV)
    assert len(found) > 0
    np.testing.assert_array_equal(found.stage, brought.stage - 1)
    np.testing.assert_array_equal(found.matrix()[1:], brought.matrix()[1:])


@pytest.mark.parametrize("keep_kv", [0, 1 << 34])
@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_holds_its_own_work_until_its_last_shelf_is_done(keep_kv: int, backward: bool) -> None:
    made = plan(keep_kv)
    program = made.programs[0][backward]
    held = [rank for rank, share in enumerate(program.held) if 0 < share < 1000]
    assert held
    for rank in held:
        found = rank_program(made, rank, 0, backward)
        own = {
            slot for slot, at in enumerate(found.slots) for work in at.work if work.q_shelf == 0 and work.kv_shelf == 1
        }
        last = max([shelf.stage for shelf in found.shelves[2:]], default=0)
        assert own <= {program.own_stage, min(max(last, not program.keys_kept) + 1, program.stages - 1)}
        assert len(own) == 2


@pytest.mark.parametrize("strategy", ["blocks", "groups:team=4+slack=2+long=poured"])
def test_kept_keys_lie_in_the_memory_that_the_plan_counts(strategy: str) -> None:
    """In plans that move all KV heads, and in plans whose ranks read one of several KV heads."""
    where = flexcp.cluster("h100", 2, 4)
    kept = flexcp.Planner(8, 4, 64, cluster=where, strategy=strategy, keep_kv=1 << 40)([60_000, 9_000, 500])
    assert kept.programs[0][1].keys_kept
    for rank in range(kept.ranks):
        program = rank_program(kept, rank, 0, False)
        assert program.kept_size == kept.memory(rank).kept_keys
        assert sorted(program.kept.values())[:1] in ([], [0]) and len(set(program.kept.values())) == len(program.kept)
    assert any(kept.memory(rank).kept_keys for rank in range(kept.ranks))
