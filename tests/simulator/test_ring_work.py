"""Proves the fast count of work in ring plans: it equals the count from cutting every region, to the pair and the
kernel launch, and applies to nothing that is not a ring.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexcp
from flexcp.clusters import Cluster
from flexcp.data.lengths import draw_lengths
from flexcp.plan.plan import Plan
from flexcp.simulator.ring_counts import count_ring
from flexcp.simulator.ring_work import find_slots
from flexcp.simulator.slot_work import SlotWork, cut_work, slot_work

MASKS = [
    flexcp.causal(),
    flexcp.full(),
    flexcp.window(300, 0),
    flexcp.window(40, 25),
    flexcp.masks.lambda_(16, 200),
    flexcp.masks.shared_question(3, 0.2),
    flexcp.masks.causal_blockwise(64, 1),
]
RINGS = {
    4: ["ring", "zigzag", "zigzag:2", "ulysses", "usp:2,2", "pow2"],
    6: ["ring", "zigzag:3", "usp:2,3", "pow2"],
    8: ["ring:4", "zigzag", "ulysses:2", "ulysses", "usp:2,4", "usp:4,2", "usp:8,1", "usp:2,2", "pow2"],
}


def assert_equal(found: SlotWork, expected: SlotWork) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def is_counted_by_rule(plan: Plan, backward: bool, mask: int = 0) -> bool:
    counts = count_ring(plan, mask)
    return counts is not None and find_slots(plan, mask, backward, counts.seats) is not None


def lengths_of(most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, most), min_size=1, max_size=9)


@settings(max_examples=120)
@given(
    st.sampled_from([20, 300, 5000]).flatmap(lengths_of),
    st.sampled_from([(ranks, name) for ranks, names in RINGS.items() for name in names]),
    st.lists(st.sampled_from(MASKS), min_size=1, max_size=9),
    st.sampled_from(["balanced", "equal"]),
    st.sampled_from([4, 2]),
    st.integers(1, 2),
)
def test_the_rule_counts_what_cutting_counts(
    lengths: list[int], ring: tuple[int, str], masks: list[flexcp.Mask], tokens: Any, kv_heads: int, nodes: int
) -> None:
    ranks, strategy = ring
    machine = flexcp.cluster("a100", nodes, ranks // nodes)
    of_each = [masks[d % len(masks)] for d in range(len(lengths))]
    plan = flexcp.Planner(16, kv_heads, 32, cluster=machine, strategy=strategy)(lengths, of_each, tokens=tokens)
    for backward in (False, True):
        assert is_counted_by_rule(plan, backward)
        assert_equal(slot_work(plan, 0, backward), cut_work(plan, 0, plan.programs[0][backward]))


@settings(max_examples=40)
@given(
    lengths_of(3000),
    st.sampled_from([flexcp.causal(), flexcp.full(), flexcp.window(300, 0)]),
    st.sampled_from(["zigzag", "contiguous"]),
    st.sampled_from(["ring", "usp:2,2"]),
)
def test_tokens_that_stay_where_they_are(lengths: list[int], mask: flexcp.Mask, layout: Any, strategy: str) -> None:
    planner = flexcp.Planner(8, 4, 32, cluster=flexcp.cluster("h20", 1, 4), strategy=strategy)
    plan = planner(lengths, mask, layout=layout)
    for backward in (False, True):
        assert is_counted_by_rule(plan, backward)
        assert_equal(slot_work(plan, 0, backward), cut_work(plan, 0, plan.programs[0][backward]))


def test_several_masks_and_ranks_of_different_speeds() -> None:
    machine = flexcp.cluster("h100", 1, 4, speeds=[1.0, 0.5, 1.0, 0.8])
    planner = flexcp.Planner(8, 4, 32, cluster=machine, strategy="zigzag")
    plan = planner([5000, 4000, 3000, 900], masks={"all": (flexcp.causal(), 1), "near": (flexcp.window(100, 0), 3)})
    for mask in (0, 1):
        assert is_counted_by_rule(plan, True, mask)
        assert_equal(slot_work(plan, mask, True), cut_work(plan, mask, plan.programs[mask][1]))


def ring_plan() -> Plan:
    return flexcp.Planner(8, 4, 32, cluster=flexcp.cluster("h100", 1, 4), strategy="usp:2,2")([3000, 700, 900])


def test_other_work_is_no_ring() -> None:
    plan = ring_plan()
    (regions,) = plan.placement.regions
    for column, value in (("k0", 1), ("q1", 5), ("h1", 5), ("rank", 3)):
        changed = getattr(regions, column).copy()
        changed[0] = value
        wrong = replace(plan.placement, regions=(replace(regions, **{column: changed}),))
        assert count_ring(replace(plan, placement=wrong), 0) is None, column
    fewer = replace(plan.placement, regions=(regions.take(np.arange(len(regions) - 1)),))
    assert count_ring(replace(plan, placement=fewer), 0) is None
    assert count_ring(flexcp.Planner(8, 4, 32, cluster=plan.cluster, strategy="allgather")([3000]), 0) is None


@pytest.mark.parametrize("column", ["stage", "owner", "stop", "h1"])
def test_other_transfers_are_no_ring(column: str) -> None:
    plan = ring_plan()
    counts = count_ring(plan, 0)
    assert counts is not None
    forward, backward = plan.programs[0]
    keys = np.flatnonzero((forward.transfers.kind == flexcp.shape.Kind.KV) & (forward.transfers.stage == 2))
    changed = getattr(forward.transfers, column).copy()
    changed[keys[0]] += -1 if column == "owner" and changed[keys[0]] == 3 else 1
    wrong = replace(forward, transfers=replace(forward.transfers, **{column: changed}))
    program = replace(plan, programs=((wrong, backward),))
    assert find_slots(program, 0, False, counts.seats) is None
    assert_equal(slot_work(program, 0, False), cut_work(program, 0, wrong))


# Digests of [rank, slot] work, pairs and kernels of both directions, counted by cutting regions.
BEFORE = {
    "zigzag": "8ef37bfc1afd2b89",
    "usp:4,4": "f4b2ce0dcd57aa46",
    "pow2": "bfb66cc98685f5cc",
}


@pytest.mark.parametrize("strategy", BEFORE)
def test_counts_are_those_before_the_rule(strategy: str) -> None:
    machine = Cluster("slow", 2, 8, gflops=100_000, intra_mbps=3000, inter_mbps=500, latency_ns=700)
    plan = flexcp.Planner(16, 4, 64, cluster=machine, strategy=strategy)(draw_lengths("libra256k", 16 * 8192, 0))
    digest = hashlib.sha256()
    for backward in (False, True):
        found = slot_work(plan, 0, backward)
        for column in (found.work, found.pairs, found.kernels):
            digest.update(column.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == BEFORE[strategy]
