"""Proves that statistics over all layers of a plan count every layer under its own mask."""

from __future__ import annotations

import numpy as np

import flexcp
from flexcp.arrays.totals import imbalance
from flexcp.batch import make_batch
from flexcp.cli.commands.plan import summary
from flexcp.compare.compare import compare
from flexcp.cost import CostModel
from flexcp.plan.statistics import bytes_a_layer
from flexcp.planners.request import Request
from flexcp.shape import Shape

MASKS = {"full": (flexcp.causal(), 1), "window": (flexcp.window(99), 5)}


def test_balance_and_bytes_are_of_all_layers() -> None:
    shape, machine = Shape(4, 2, 64, 64), flexcp.cluster("h100", 2, 2)
    request = Request(make_batch([4000, *[200] * 10], masks=MASKS), shape, machine, CostModel())
    (row,) = compare(request, ["blocks"]).rows
    assert row.simulation is not None
    plan = row.simulation.plan
    work = plan.work(0) + 5 * plan.work(1)
    assert np.array_equal(plan.work_of_layers(), work)
    assert imbalance(work) != imbalance(plan.work()), "a test of nothing"
    assert row.work_imbalance == imbalance(work)
    assert summary(plan)["compute_imbalance"] == round(imbalance(work), 6)
    assert f"imbalance: compute {imbalance(work):.3f}" in str(plan)
    full, window = (sum(int(plan.bytes(way, m).sum()) for way in (False, True)) for m in (0, 1))
    assert full != window and row.moved_bytes == bytes_a_layer(plan) == (full + 5 * window) // 6
