"""Proves the times of a plan on a page: perfect compute is of the same things as the time it is set beside."""

from __future__ import annotations

import flexcp
from flexcp.models.find import find_model
from flexcp.report.plan_time import PlanTime
from flexcp.schedule.predict import lower_bound
from flexcp.simulator.step_parts import Training
from flexcp.simulator.training import simulate

PRESET = find_model("llama3-8b")


def test_perfect_compute_has_the_vocabulary_where_the_time_has_it() -> None:
    shape = PRESET.shape
    planner = flexcp.Planner(
        shape.heads, shape.kv_heads, shape.head_dim, cluster=flexcp.cluster("h100:1x4"), model=PRESET.model
    )
    plan = planner([9000, 800, 31])
    known = (plan.batch, plan.shape, plan.cluster, plan.cost)
    training = Training(PRESET)
    step = PlanTime.of_simulation(simulate(plan, training=training), training)
    layers = PlanTime.of_plan(plan)
    assert step.perfect_ns(plan) == lower_bound(*known, PRESET.head_flops_per_token) > layers.perfect_ns(plan)
    assert layers.perfect_ns(plan) == lower_bound(*known)
    assert PlanTime.of_plan(plan, training).total_ns == step.total_ns > layers.total_ns
    attention = PlanTime.of_simulation(simulate(plan), None)
    assert attention.what == "attention" and attention.perfect_ns(plan) <= attention.total_ns < step.total_ns
