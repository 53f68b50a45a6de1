"""Proves that a plan whose one direction is made again from other stages equals one that is made anew, and that models
of its unchanged passes, taken from the plan before, give the same simulated times.
"""

from __future__ import annotations

import pytest

from flexcp.batch import Batch, make_batch
from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.masks import causal, full, window
from flexcp.planners.blocks.blocks import blocks
from flexcp.planners.request import Request
from flexcp.schedule.analysis import analyse, in_other_stages
from flexcp.schedule.transfers import make_plan, with_analysis
from flexcp.shape import Shape
from flexcp.simulator.training import pass_models, simulate

COST, SHAPE = CostModel(), Shape(8, 2, 64, 64)
BATCHES = [
    make_batch([30_000, 30_000, 5000], causal()),
    make_batch([30_000, *[900] * 20], masks={"causal": (causal(), 2), "full": (full(), 1)}),
    make_batch([20_000, 9000, 9000, 700], masks={"causal": (causal(), 1), "window": (window(600), 3)}),
]


@pytest.mark.parametrize(
    "batch, nodes, each, keep_kv, kept",
    [
        (BATCHES[0], 2, 4, 0, [False]),
        (BATCHES[1], 3, 2, 0, [False, False]),
        (BATCHES[1], 3, 2, 24 << 20, [True, False]),
        (BATCHES[2], 3, 2, 0, [False, False]),
        (BATCHES[2], 3, 2, 10 << 20, [True, False]),
    ],
)
def test_one_direction_in_other_stages_is_all_that_changes(
    batch: Batch, nodes: int, each: int, keep_kv: int, kept: list[bool]
) -> None:
    known = (SHAPE, cluster("h100", nodes, each), COST)
    placement = blocks(Request(batch, *known))
    masks = analyse(placement, *known, keep_kv)
    assert [found.keys_kept for found in masks] == kept
    plan = make_plan(placement, *known, "blocks", keep_kv, analysis=masks)
    models = pass_models(plan)
    for backward in (False, True):
        others = in_other_stages(masks, backward)
        if others is None:
            continue
        anew = make_plan(placement, *known, "blocks", keep_kv, analysis=others)
        made = with_analysis(plan, others, backward)
        assert made == anew != plan
        assert all(a[not backward] is b[not backward] for a, b in zip(made.programs, plan.programs, strict=True))
        reused = pass_models(made, like=plan, known=models)
        # The backward of a mask whose keys are kept reads them from where its forward received them.
        same = [a[not backward] is b[not backward] for a, b in zip(reused, models, strict=True)]
        assert same == [backward or not keys_kept for keys_kept in kept]
        times = [simulate(made, models=again).attention_ns for again in (reused, pass_models(anew))]
        assert times[0] == times[1] != simulate(plan, models=models).attention_ns
    assert in_other_stages(masks, False)
