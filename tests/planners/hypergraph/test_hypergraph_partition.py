"""Proves the hypergraph and its partitions: nets weigh exactly the bytes that the plan moves, and a placement that is
converted to a partition and back is unchanged.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypergraphs import CASES, forward_bytes, planned, shuffled, start_of

from flexcp.planners.hypergraph.model import make_tiling
from flexcp.planners.hypergraph.partition import Partition, placement_of
from flexcp.planners.request import Request


@pytest.mark.parametrize(("request_", "seed"), CASES)
def test_nets_weigh_what_moves(request_: Request, seed: int) -> None:
    search = shuffled(request_, seed)
    placement = placement_of(request_, start_of(request_), search.partition)
    plan = planned(request_, placement)
    plan.check()
    assert search.partition.bytes() == forward_bytes(plan)
    assert np.array_equal(search.partition.tokens, placement.tokens)
    assert np.array_equal(search.partition.loads, sum(m.layers * plan.work(i) for i, m in enumerate(plan.batch.masks)))


@pytest.mark.parametrize(("request_", "seed"), CASES)
def test_a_placement_is_a_partition_of_its_own_hypergraph(request_: Request, seed: int) -> None:
    start = start_of(request_)
    back = placement_of(request_, start, Partition(make_tiling(request_, start, 16 * seed), start))
    before, after = planned(request_, start), planned(request_, back)
    assert np.array_equal(back.runs.matrix(), start.runs.matrix())
    for mask in range(len(request_.batch.masks)):
        assert np.array_equal(before.work(mask), after.work(mask))
        assert np.array_equal(before.bytes(mask=mask), after.bytes(mask=mask))
