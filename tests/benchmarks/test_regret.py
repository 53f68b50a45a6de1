"""Proves that plans which do the same are timed once, so that ``auto`` has no regret against itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flexcp
import regret


def made(strategy: str) -> Any:
    return flexcp.Planner(4, 2, 8, cluster=flexcp.cluster("cpu", 1, 2), strategy=strategy)([300, 20])


def test_plans_that_do_the_same_have_one_time_and_the_shorter_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = made("auto")
    plans = {"auto": auto, auto.strategy: made(auto.strategy), "ring": made("ring"), "allgather": made("allgather")}
    assert auto.hash != plans[auto.strategy].hash
    timed: list[Any] = []

    def slot_times(plan: Any, mask: int, backward: bool, device: str) -> Any:
        timed.append((plan, backward))
        slots = plan.programs[mask][backward].stages
        return np.full((plan.ranks, slots), 1_000_000 * (20 - len(timed) // 2), np.int64)

    monkeypatch.setattr(regret, "slot_times", slot_times)
    ((batch, times),) = regret.measured({"web:0": plans}, "cpu")
    order = [regret.tables_hash(plan) for plan, backward in timed if not backward]
    assert batch == "web:0" and len(order) == 6 and order == order[::-1]
    best, mine, least = regret.regret(plans, times, "cpu")
    assert mine >= least > 0
    later = {name: [one[1]] for name, one in times.items()}
    assert regret.regret(plans, later, "cpu") == (best, mine, least)
    earlier = {name: [one[0]] for name, one in times.items()}
    assert regret.regret(plans, earlier, "cpu")[2] > least
