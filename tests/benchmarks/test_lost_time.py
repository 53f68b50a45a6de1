"""Tests of ``lib.lost_time``, which splits a plan's time beyond perfectly divided compute into terms: the terms add up
to that time, and each is there only when its cause is.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexcp.clusters import cluster
from flexcp.compare.compare import planned
from flexcp.cost import NO_CONTENTION
from flexcp.models.find import find_model
from flexcp.schedule.predict import lower_bound
from flexcp.simulator.training import simulate
from lib.lost_time import LostTime, lost_time
from simulated import Experiment, step_of

LENGTHS = [40_000, 9_000, 5_000, 5_000, 3_000, 1_200, 700, 90]


def found(experiment: Experiment, strategy: str) -> tuple[LostTime, int, int]:
    """Return the terms of the lost time, the plan's time, and the time of perfectly divided compute, in ns."""
    request = experiment.request(LENGTHS)
    _, plan = planned(request, strategy, search=False)
    head = 0 if experiment.training is None else experiment.training.model.head_flops_per_token
    perfect = lower_bound(request.batch, request.shape, request.cluster, request.cost, head)
    ran = simulate(plan, training=experiment.training)
    return (
        lost_time(plan, experiment.training, perfect),
        ran.attention_ns if ran.step is None else ran.step.total_ns,
        perfect,
    )


@pytest.mark.parametrize("strategy", ["groups", "dp", "usp:4,2"])
def test_the_terms_add_up_to_the_step(strategy: str) -> None:
    lost, total, perfect = found(step_of(find_model("llama3-8b"), cluster("h100", 2, 4)), strategy)
    assert perfect + round(sum(lost.shares(1))) == total
    assert min(lost.pieces, lost.copies, lost.contention, lost.imbalance, lost.sync) >= 0


def test_a_term_is_there_when_its_cause_is() -> None:
    experiment = step_of(find_model("llama3-8b"), cluster("h100", 2, 4))
    alone, _, _ = found(experiment, "dp")
    assert alone.copies == alone.contention == 0 < alone.imbalance
    shared, _, _ = found(experiment, "usp:4,2")
    assert shared.copies > 0 and shared.contention > 0 and shared.imbalance < alone.imbalance
    calm, _, _ = found(replace(experiment, cost=replace(experiment.cost, contention=NO_CONTENTION)), "usp:4,2")
    assert calm.contention == 0 < calm.copies
