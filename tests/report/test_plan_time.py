"""Tests of the times of a plan in a report: each part is that of the simulation, and perfectly divided compute covers
the same work (attention, layers or a whole step) as the time it is compared with.
"""

from __future__ import annotations

import numpy as np

import flexcp
from flexcp.models.find import find_model
from flexcp.report.plan_time import PlanTime
from flexcp.schedule.predict import lower_bound
from flexcp.simulator.step_parts import Training
from flexcp.simulator.training import StepTime, simulate

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


def test_a_steps_parts_are_its_attention_waits_and_everything_else() -> None:
    """Gradient sync is counted with the rest of each layer; a rank that finishes early waits for the slowest rank."""
    parts = np.array([[40, 10, 0], [5, 0, 90], [30, 20, 0], [10, 3, 0]])
    found = PlanTime.of_step(StepTime(90, 40, 5, 30, 10, parts), 7, "pass", "words")
    assert found.attention_ns.tolist() == [40, 10, 0] and found.linear_ns.tolist() == [40, 23, 0]
    assert found.exposed_ns.tolist() == [10, 57, 90] and found.rank_ns.tolist() == [90] * 3
    assert (found.total_ns, found.what, found.says, found.head_flops, found.slowest) == (90, "pass", "words", 7, 0)
    assert str(PlanTime(3_000_000, *(np.array([10**6]) for _ in range(3)))) == (
        "3.000 ms on rank 0 (attention 1.000 + waiting 1.000 + the rest 1.000)"
    )


def test_the_slowest_rank_is_the_one_that_computes_longest_of_those_that_take_longest() -> None:
    attention, waits, linear = np.array([9, 2, 1, 3]), np.array([0, 8, 7, 4]), np.array([0, 0, 2, 3])
    assert PlanTime(10, attention, waits, linear).rank_ns.tolist() == [9, 10, 10, 10]
    assert PlanTime(10, attention, waits, linear).slowest == 3
    nothing = np.zeros(2, np.int64)
    assert PlanTime(5, nothing, np.array([0, 5]), nothing).slowest == 1, "a rank may only wait"


def test_attention_alone_is_the_compute_of_both_passes_in_all_layers_and_waiting() -> None:
    planner = flexcp.Planner(4, 2, 64, cluster=flexcp.cluster("h100:1x2"), strategy="zigzag")
    masks = {"full": (flexcp.causal(), 3), "window": (flexcp.window(100, 0), 5)}
    simulated = simulate(planner([3000, 700], masks=masks))
    found = PlanTime.of_simulation(simulated, None)
    for rank in range(2):
        compute = [sum(int(one.compute_ns[rank]) for one in pair) for pair in simulated.passes]
        assert found.attention_ns[rank] == 3 * compute[0] + 5 * compute[1] > 0
    assert (found.attention_ns + found.exposed_ns).tolist() == [found.total_ns] * 2
    assert found.linear_ns.tolist() == [0, 0] and found.total_ns == simulated.attention_ns
    assert found.perfect_ns(simulated.plan) == int(found.attention_ns.sum()) // 2


def test_one_rank_waits_for_nobody() -> None:
    simulated = simulate(flexcp.Planner(4, 2, 64, cluster=flexcp.cluster("h100:1x1"))([3000, 700]))
    found = PlanTime.of_simulation(simulated, None)
    assert found.exposed_ns.tolist() == [0] and found.attention_ns.tolist() == [found.total_ns]
