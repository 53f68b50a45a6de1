"""Tests of the step timer: "communication" sends messages without computing, "compute" computes without real
messages, and "whole" gives the same results for all plans.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flexcp
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan
from lib import step_time
from lib.step_time import StepPart, Timed, difference, slowest_ms, time_steps

LENGTHS = [200, 31, 90]


def plan_of(strategy: str) -> Plan:
    machine = flexcp.cluster("cpu", nodes=1, ranks_per_node=2)
    return flexcp.Planner(2, 2, 8, cluster=machine, dtype="float64", strategy=strategy)(LENGTHS)


def timed(pool: RankPool, plan: Plan, part: StepPart, *more: Any) -> list[Timed]:
    return pool.run(time_steps, plan, part, 2, *more, ranks=2)


def test_all_plans_give_the_same_results_and_send_their_bytes(pool: RankPool) -> None:
    found = []
    for strategy in ("ring", "allgather"):
        plan = plan_of(strategy)
        ranks = timed(pool, plan, "whole", None, True)
        total = plan.bytes().sum() + plan.bytes(backward=True).sum()
        assert [len(rank.seconds) for rank in ranks] == [2, 2]
        assert sum(rank.sent_bytes for rank in ranks) == 2 * total
        assert ranks[0].results is not None and ranks[1].results is None
        found.append(ranks[0].results)
    assert set(found[0]) == {"out", "dq", "dk", "dv"} and found[0]["out"].shape == (sum(LENGTHS), 2, 8)
    assert difference(*found) < 1e-12 and np.abs(found[0]["dk"]).max() > 0.1


def on_messages_of_compute(group: dist.ProcessGroup, plan: Plan) -> float:
    """Time "compute"; return what a sum over both ranks' own numbers, 1 and 2, is in the group that it used."""
    made: list[dist.ProcessGroup] = []
    silent = step_time._silent
    with patch.object(step_time, "_silent", lambda ranks: made.append(silent(ranks)) or made[0]):
        time_steps(group, plan, "compute", 1)
    found = torch.tensor(dist.get_rank(group) + 1.0)
    dist.all_reduce(found, group=made[0])
    return found.item()


def test_communication_computes_nothing_and_compute_receives_nothing(pool: RankPool) -> None:
    plan = plan_of("allgather")
    moved = timed(pool, plan, "communication", None, True)[0].results
    whole = timed(pool, plan, "whole", None, True)[0].results
    assert moved is not None and whole is not None
    assert not moved["out"].any() and not moved["dq"].any()
    alone = timed(pool, plan, "compute")
    assert sum(rank.sent_bytes for rank in alone) == 2 * (plan.bytes().sum() + plan.bytes(backward=True).sum())
    assert pool.run(on_messages_of_compute, plan, ranks=2) == [1.0, 2.0]
    # The functions that a part patches are restored afterwards.
    again = timed(pool, plan, "whole", None, True)[0].results
    assert again is not None and difference(again, whole) == 0


def test_a_paced_device_takes_the_time_of_its_pairs(pool: RankPool) -> None:
    plan = plan_of("allgather")
    gflops = 0.02
    flops = 7 * 16 * int(plan.work().max())
    assert slowest_ms(timed(pool, plan, "compute", gflops)) >= flops / gflops / 1e6
    # Half the pace takes twice the time.
    assert slowest_ms(timed(pool, plan, "whole", gflops / 2)) >= 2 * flops / gflops / 1e6


@pytest.mark.parametrize(("other", "expected"), [(3.0, 0.5), (0.0, 1.5)])
def test_a_difference_is_relative_to_what_is_large(other: float, expected: float) -> None:
    assert difference({"x": np.array([1.5])}, {"x": np.array([other])}) == expected
