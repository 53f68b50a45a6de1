"""Proves that plans which do the same are timed once, so that ``auto`` has no regret against itself, which times of
several rounds count, and that plans far behind are not timed in later rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flexcp
import regret


def made(strategy: str) -> Any:
    return flexcp.Planner(4, 2, 8, cluster=flexcp.cluster("cpu", 1, 2), strategy=strategy)([300, 20])


def test_plans_that_do_the_same_have_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
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
    later, earlier = ({name: [one[turn]] for name, one in times.items()} for turn in (1, 0))
    assert regret.regret(plans, later, "cpu") == (best, mine, least)  # the fastest round counts
    assert regret.regret(plans, earlier, "cpu")[2] > least
    # One quick slot in one round of three does not move medians.
    spoiled = {name: {way: slots.copy() for way, slots in one[1].items()} for name, one in times.items()}
    for one in spoiled.values():
        one[0, False] //= 50
    thrice = {name: [one[1], spoiled[name], one[1]] for name, one in times.items()}
    assert regret.regret(plans, thrice, "cpu")[2] < least
    assert regret.regret(plans, thrice, "cpu", regret.median_slots_ms) == (best, mine, least)


def test_plans_far_behind_are_not_timed_in_later_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {name: made(name) for name in ("auto", "ring", "allgather")}
    slow = {"auto": 30, "ring": 10, "allgather": 12}  # milliseconds of a slot
    names = {regret.tables_hash(plan): name for name, plan in plans.items()}

    def slot_times(plan: Any, mask: int, backward: bool, device: str) -> Any:
        slots = plan.programs[mask][backward].stages
        return np.full((plan.ranks, slots), slow[names[regret.tables_hash(plan)]] * 1_000_000 // slots, np.int64)

    monkeypatch.setattr(regret, "slot_times", slot_times)
    ((_, times),) = regret.measured({"web:0": plans}, "cpu", rounds=4)
    assert {names[name]: len(rounds) for name, rounds in times.items()} == {"auto": 4, "ring": 4, "allgather": 2}
