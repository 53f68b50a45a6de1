"""Proves the planner after the DHP paper: its dynamic program finds what trying all degrees finds, its packing is best
fit in decreasing order, and rings have any size.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp.batch import make_batch
from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.masks import causal, full
from flexcp.plan.placement import Placement
from flexcp.planners.published.dhp import _times, dhp, in_nodes, least_slowest
from flexcp.planners.published.ranges import best_fit
from flexcp.planners.request import Refused, Request
from flexcp.shape import Shape


def asked(lengths: list[int], ranks: int, argument: str = "", nodes: int = 1, **more: Any) -> Request:
    where = cluster("h100", nodes, ranks // nodes)
    return Request(make_batch(lengths, causal()), Shape(8, 2, 64, 64), where, CostModel(), argument, **more)


@given(data=st.data(), ranks=st.integers(1, 8))
@settings(max_examples=80, deadline=None)
def test_the_dynamic_program_equals_brute_force(data: st.DataObject, ranks: int) -> None:
    """Times are arbitrary, and no group gets fewer ranks than it needs."""
    least = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5).filter(lambda each: sum(each) <= ranks))
    times = np.array([[data.draw(st.integers(1, 30)) for _ in range(ranks)] for _ in least])
    every = [
        max(int(times[group, degree - 1]) for group, degree in enumerate(degrees))
        for degrees in product(range(1, ranks + 1), repeat=len(least))
        if sum(degrees) <= ranks and all(d >= fewest for d, fewest in zip(degrees, least, strict=True))
    ]
    found = least_slowest(times, least, ranks)
    assert sum(found) <= ranks and all(d >= fewest for d, fewest in zip(found, least, strict=True))
    assert max(int(times[group, degree - 1]) for group, degree in enumerate(found)) == min(every)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(5, 40))
@settings(max_examples=60, deadline=None)
def test_packing_is_best_fit_in_decreasing_order(lengths: list[int], budget: int) -> None:
    """Each document goes into the tightest room that holds it, or opens a group of its own."""
    rooms: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room[0] >= length]
        if fitting:
            min(fitting, key=lambda room: room[0])[0] -= length
        else:
            rooms.append([-(-length // budget) * budget - length])
    groups, least = best_fit(np.array(lengths), budget)
    found = [d * budget - sum(lengths[i] for i in group) for group, d in zip(groups, least, strict=True)]
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert sorted(found) == sorted(room[0] for room in rooms)


def degrees(placement: Placement) -> list[int]:
    return [len(grid) for grid in placement.traffic.groups]


def test_degrees_are_any_integer_and_the_largest_come_first() -> None:
    placement = dhp(asked([70_000, 30_000, 9_000, 8_000], 12, "10000"))
    found = degrees(placement)
    assert sum(found) == 12 and found == sorted(found, reverse=True)
    assert found[0] >= 7 and found[1] >= 3, "no fewer ranks than memory needs"
    assert found[0] & (found[0] - 1), "a ring of no power of two"


def test_a_short_document_packed_beside_a_long_one_inherits_its_degree() -> None:
    # 25,000 tokens open 3 ranks of 10,000, and the 4,000 fit in the remaining room.
    placement = dhp(asked([25_000, 4_000], 3, "10000"))
    assert degrees(placement) == [3] and placement.tokens.tolist() == [9_666, 9_668, 9_666]


def test_times_are_the_papers_terms() -> None:
    """The terms of the paper's cost.

    Doubling ranks halves computation, links beyond a node are slower, transfers that attention hides cost nothing, and
    on one rank nothing moves.
    """
    request = asked([40_000], 16, nodes=2)
    one = _times(request, [[0]])[0]
    assert one[1] * 2 == pytest.approx(one[0], rel=0.2)
    cost, shape, where = request.cost, request.shape, request.cluster
    pairs = np.array([40_000 * 40_001 // 2 + int(cost.row_tiles_work(np.array([40_000]))[0])])
    attention = sum(int(cost.attention_ns(pairs * 8, shape, where, way)[0]) for way in (False, True))
    linear = int(cost.linear_ns(np.array([40_000]), shape, where)[0])
    assert int(one[0]) == attention + linear + 2 * cost.kernel_ns
    # keys twice, and their partial gradients in float32
    moved = 40_000 * 2 * (64 + 64) * (2 * 2 + 4)
    across = int(cost.link_ns(np.array([moved]), where.inter_mbps)[0]) + 2 * where.latency_ns
    share = -(-attention // 16)
    assert int(one[15]) == share + -(-linear // 16) + 2 * cost.kernel_ns + across - min(share, across)
    wider = Request(make_batch([40_000], full()), shape, where, cost)
    assert _times(wider, [[0]])[0][0] > 1.5 * (one[0] - linear), "pairs of the mask, not of a causal one"


def test_too_little_memory_is_refused_by_name() -> None:
    with pytest.raises(Refused, match=r"need 7 ranks with dhp:10, and there are 4; raise it"):
        dhp(asked([45, 20], 4, "10"))
    with pytest.raises(Refused, match="with max_tokens_per_rank=10"):
        dhp(asked([45, 20], 4, max_tokens_per_rank=10))


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ([4, 2, 8, 10, 4, 2, 2], [10, 4, 2, 8, 4, 2, 2]),
        ([3, 8, 1, 3, 1], [8, 3, 3, 1, 1]),
        ([5, 5, 5, 1], [5, 1, 5, 5]),
    ],
    ids=["none crosses but the largest", "all inside", "one must cross"],
)
def test_groups_that_fit_into_a_node_seldom_cross_nodes(degrees: list[int], expected: list[int]) -> None:
    order = in_nodes(degrees, 8)
    assert sorted(order) == list(range(len(degrees)))
    assert [degrees[group] for group in order] == expected
