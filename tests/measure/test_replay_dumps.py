"""Tests of replaying dumps of a failed run: good plans pass on real ranks, a bad plan is found and not run, and ranks
that had different plans are named.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import flexcp
from flexcp.measure import replay_dumps
from flexcp.measure.ranks import RankPool
from flexcp.measure.replay_dumps import replay
from flexcp.plan.plan import Plan
from flexcp.telemetry.dump import write_dump
from flexcp.telemetry.records import StepRecord

MASKS = {"full": (flexcp.causal(), 1), "window": (flexcp.window(4), 3)}


def plan_for(ranks: int, lengths: list[int] | None = None, **more: Any) -> Plan:
    planner = flexcp.Planner(2, 1, 8, dtype="float64", cluster=flexcp.cluster("cpu", 1, ranks), strategy="zigzag")
    return planner(lengths or [33, 1, 20], **(more or {"mask": flexcp.causal()}))


def without_a_transfer(plan: Plan) -> Plan:
    """Return the plan without one of its messages, as a planner with a bug might make it."""
    forward, backward = plan.programs[0]
    short = replace(forward, transfers=forward.transfers.take(np.arange(1, len(forward.transfers))))
    return replace(plan, programs=((short, backward),))


def dumped(folder: Path, plans: list[Plan], rank: int = 0, reason: str = "error") -> Path:
    steps = [StepRecord(number, plan, 0, rank) for number, plan in enumerate(plans, 5)]
    return write_dump(folder, reason, "it broke", steps, rank)


def quiet(_: str) -> None:
    return


def command(*arguments: str) -> Any:
    """Run ``flexcp verify``. Its modules are imported here because ranks, too, import this file."""
    from typer.testing import CliRunner

    from flexcp.cli.main import app

    return CliRunner().invoke(app, ["verify", *arguments], catch_exceptions=False)


def on_breaking(group: dist.ProcessGroup, plan: Plan, options: Any) -> None:
    raise RuntimeError("the kernel broke")


def test_good_plans_pass_once_each_under_every_mask(pool: RankPool, tmp_path: Path) -> None:
    plans = [plan_for(3), plan_for(2, masks=MASKS), plan_for(3)]
    for rank in range(2):
        dumped(tmp_path, plans, rank)
    told: list[str] = []
    found = replay(tmp_path, 0, "cpu", told.append, pool)
    assert found.passed and not found.disagreements
    assert [p.plan for p in found.plans] == plans[:2]
    assert found.plans[0].held == [(0, 5), (0, 7), (1, 5), (1, 7)]
    assert [list(p.verdicts) for p in found.plans] == [["mask"], ["full", "window"]]
    assert sum("running" in words for words in told) == 2


def test_a_bad_plan_is_named_and_not_run(pool: RankPool, tmp_path: Path) -> None:
    plans = [plan_for(2), without_a_transfer(plan_for(3))]
    found = replay(dumped(tmp_path, plans), 0, "cpu", quiet, pool)
    assert not found.passed
    good, bad = found.plans
    assert good.passed and good.verdicts["mask"].errors["out"] <= 1e-10
    assert not bad.passed and not bad.verdicts
    assert bad.problem.startswith("symbolic execution: ")


def test_a_plan_that_breaks_its_ranks_is_named(pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_dumps, "verify_on", on_breaking)
    first, second = replay(dumped(tmp_path, [plan_for(2), plan_for(3)]), 0, "cpu", quiet, pool).plans
    assert not first.passed and "the kernel broke" in first.problem and "'mask'" in first.problem
    assert second.not_run == "a plan before it stopped the ranks"


def test_what_does_not_fit_here_is_checked_symbolically(tmp_path: Path) -> None:
    plans = [plan_for(20), plan_for(2, [20_000])]
    many, long = replay(dumped(tmp_path, plans), 0, "cpu", quiet).plans
    assert many.passed and "20 ranks" in many.not_run
    assert long.passed and "20000" in long.not_run
    (elsewhere,) = replay(dumped(tmp_path / "hopper", [plan_for(2)]), 0, "hopper", quiet).plans
    assert elsewhere.passed and "hopper" in elsewhere.not_run


def test_ranks_of_one_group_with_different_plans_are_named(tmp_path: Path) -> None:
    ours, theirs = plan_for(20), plan_for(20, [33, 2, 20])
    for rank, plan in enumerate((ours, theirs, ours)):
        dumped(tmp_path, [plan], rank)
    found = replay(tmp_path, 0, "cpu", quiet)
    assert not found.passed
    assert found.disagreements == [f"step 5: {ours.hash[:12]} on ranks [0, 2]; {theirs.hash[:12]} on ranks [1]"]


def test_several_groups_may_hold_different_plans(tmp_path: Path) -> None:
    for rank in range(4):
        dumped(tmp_path, [without_a_transfer(plan_for(2, [33, 1 + rank // 2]))], rank)
    assert not replay(tmp_path, 0, "cpu", quiet).disagreements


def test_the_command_says_which_plan_is_bad(tmp_path: Path) -> None:
    good, bad = plan_for(20), without_a_transfer(plan_for(3))
    path = dumped(tmp_path, [good, bad], 3, "stall")
    plain = command(f"@{path}")
    assert plain.exit_code == 1
    assert f"{path.name}: rank 3, stall: it broke" in plain.stdout
    assert f"{good!r} (step 5): passed" in plain.stdout
    assert f"{bad!r} (step 6): BAD" in plain.stdout
    result = command(f"@{tmp_path}", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert [(p["hash"], p["passed"], p["held"]) for p in data["plans"]] == [
        (good.hash, True, [{"rank": 3, "step": 5}]),
        (bad.hash, False, [{"rank": 3, "step": 6}]),
    ]
    assert data["dumps"] == [{"file": str(path), "rank": 3, "reason": "stall", "message": "it broke"}]
    assert data["passed"] is False and data["disagreements"] == []


def test_the_command_wants_a_dump_or_lengths(tmp_path: Path) -> None:
    for arguments in ([], ["@dump.json", "--lengths", "12"]):
        with pytest.raises(ValueError, match="either --lengths"):
            command(*arguments)
    with pytest.raises(ValueError, match=r"as in @dump\.json"):
        command("dump.json")
