"""Tests of the table of rounds: the plan's numbers, a line for each stage and level, of many only the largest."""

from __future__ import annotations

import flexcp
from flexcp.plan.plan import Plan
from flexcp.report.rounds_table import SHOWN, rounds_columns, rounds_table


def plan_for(strategy: str, nodes: int, ranks: int) -> Plan:
    return flexcp.Planner(8, 8, 64, cluster=flexcp.cluster("h100", nodes, ranks), strategy=strategy)([900, 31, 1])


def test_an_exchange_of_all_with_all_worked_out_by_hand() -> None:
    """With two nodes of two ranks, each rank has one peer inside its node and two across, and no rank waits."""
    plan = plan_for("allgather", 2, 2)
    assert rounds_columns(plan, False) == {
        "stage": [1, 1],
        "across": [0, 1],
        "rounds": [1, 2],
        "efficiency": [1.0, 1.0],
    }
    lines = rounds_table(plan).splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [
        ["1", "inside", "nodes", "forward"],
        ["1", "across", "nodes", "forward"],
    ]
    assert len(lines) == 1 + sum(len(rounds_columns(plan, way)["stage"]) for way in (False, True))


def test_many_stages_show_the_largest() -> None:
    plan = plan_for("ring", 1, 16)
    assert len(plan.rounds().exchanges) == 15
    text = rounds_table(plan)
    assert f"... {15 - SHOWN} smaller ones of the forward ..." in text
    assert sum("forward" in line for line in text.splitlines()) == SHOWN + 1


def test_nothing_moves() -> None:
    assert rounds_table(plan_for("dp", 1, 4)) == "rounds: none, because nothing moves"
