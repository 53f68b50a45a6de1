"""Proves the lower bound on the time of copies: it never exceeds what the copies of a plan cost, and is most of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexcp.batch import make_batch
from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.masks import causal, window
from flexcp.planners.request import Request
from flexcp.planners.strategies import find_strategy
from flexcp.schedule.predict import predict
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Shape
from flexcp.simulator.copies import copy_mbps, find_copies
from flexcp.simulator.least_copies import least_copies_ns

LENGTHS = [90_000, 20_000, 9_000, 5_000, 5_000, 3_000, 1_200, 700, 90]
BATCH = make_batch(LENGTHS, masks={"full": (causal(), 2), "window": (window(999, 0), 3)})
ASKED = Request(BATCH, Shape(32, 8, 128, 128), cluster("h100", 2, 4), CostModel())


@pytest.mark.parametrize("name", ["groups", "blocks", "ulysses:4", "usp:4,2", "zigzag:4", "allgather:4"])
def test_it_is_most_of_what_a_plan_copies(name: str) -> None:
    place, argument = find_strategy(name)
    placement = place(replace(ASKED, argument=argument))
    known = (ASKED.shape, ASKED.cluster, ASKED.cost)
    found = predict(placement, *known)
    least = least_copies_ns(found, placement, ASKED.shape)
    plan = make_plan(placement, *known, name)
    copies = np.zeros(placement.ranks, np.int64)
    for number, mask in enumerate(plan.batch.masks):
        for backward in (False, True):
            both = find_copies(plan, number, backward, copy_mbps(ASKED.cluster), launch_ns=0)
            copies += mask.layers * sum(each.sum(axis=1) for each in both)
    assert np.all(least <= copies) and least.sum() > copies.sum() * 0.6


def test_documents_that_stay_whole_copy_nothing() -> None:
    place, argument = find_strategy("dp")
    placement = place(replace(ASKED, argument=argument))
    found = predict(placement, ASKED.shape, ASKED.cluster, ASKED.cost)
    assert not least_copies_ns(found, placement, ASKED.shape).any()
