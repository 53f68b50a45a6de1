"""Proves the simulator's work for each slot: for any plan, pairs and kernels of every rank and slot are those of the
program that the executor would run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexcp
from flexcp.executor.run.rank_program import rank_program
from flexcp.masks import area
from flexcp.plan.placement import Regions
from flexcp.plan.plan import Plan
from flexcp.schedule.rings import count_static_pairs, rings_of
from flexcp.schedule.work import Pairs, count_pairs, cut_regions, rank_work
from flexcp.simulator.slot_work import slot_ns, slot_work

STRATEGIES = [
    "dp",
    "ring",
    "zigzag:2",
    "allgather",
    "ulysses:2",
    "usp:2,2",
    "blocks",
    "groups",
    "minheap:512",
    "hdp",
    "wlb",
]
MASKS = [
    flexcp.causal(),
    flexcp.full(),
    flexcp.masks.lambda_(16, 200),
    flexcp.masks.shared_question(3, 0.2),
    flexcp.masks.causal_blockwise(64, 1),
]


def by_program(plan: Plan, mask: int, backward: bool) -> tuple[Any, Any]:
    """Return pairs x heads and kernels as ``[rank, slot]``, from each rank's own program."""
    slots = plan.programs[mask][backward].stages
    pairs, kernels = np.zeros((2, plan.ranks, slots), np.int64)
    for rank in range(plan.ranks):
        for number, slot in enumerate(rank_program(plan, rank, mask, backward).slots):
            for work in slot.work:
                pairs[rank, number] += int(area(work.slices).sum()) * (work.h1 - work.h0)
                kernels[rank, number] += 1
    return pairs, kernels


def assert_same(plan: Plan, mask: int = 0) -> None:
    for backward in (False, True):
        found = slot_work(plan, mask, backward)
        pairs, kernels = by_program(plan, mask, backward)
        np.testing.assert_array_equal(found.pairs.sum(axis=1), pairs.sum(axis=1))
        held = plan.programs[mask][backward].held
        if held:  # the executor cuts held-back work at whole tiles, the simulator at the plan's share
            other = [s for s in range(pairs.shape[1]) if s != 0]
            assert abs(found.pairs[:, 0] - pairs[:, 0]).max() <= 128 * plan.batch.lengths.max() * plan.shape.heads
            assert (kernels[:, other] <= found.kernels[:, other] + 1).all()
        else:
            np.testing.assert_array_equal(found.pairs, pairs)
            np.testing.assert_array_equal(found.kernels, kernels)
        assert ((found.work > found.pairs) == (found.pairs > 0)).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_work_is_the_executors(strategy: str, mask: flexcp.Mask) -> None:
    machine = flexcp.cluster("a100", 2, 2)
    plan = flexcp.Planner(8, 4, 32, cluster=machine, strategy=strategy)([3000, 700, 40, 900, 1], mask)
    assert_same(plan)


@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 1500), min_size=1, max_size=5),
    st.sampled_from(MASKS),
    st.sampled_from(["zigzag", "contiguous", "scattered"]),
)
def test_fixed_layouts(lengths: list[int], mask: flexcp.Mask, layout: Any) -> None:
    tokens = sum(lengths)
    if layout == "scattered":
        layout = [list(range(rank, tokens, 3)) for rank in range(3)]
    machine = flexcp.cluster("h20", 1, 3)
    plan = flexcp.Planner(4, 2, 32, cluster=machine, strategy="blocks")(lengths, mask, layout=layout)
    assert_same(plan)


def test_kept_keys_are_worked_on_without_arriving_again() -> None:
    planner = flexcp.Planner(8, 4, 32, cluster=flexcp.cluster("a100", 2, 2), strategy="blocks", keep_kv=10**9)
    plan = planner([3000, 700, 40, 900, 1])
    assert plan.programs[0][1].keys_kept
    assert_same(plan)


def test_several_masks_and_moved_queries() -> None:
    machine = flexcp.cluster("a100", 2, 4)
    planner = flexcp.Planner(16, 8, 64, cluster=machine, strategy="blocks")
    plan = planner([9000, 500, 300], masks={"all": (flexcp.causal(), 1), "near": (flexcp.window(100), 3)})
    for mask in (0, 1):
        assert_same(plan, mask)


def test_time_is_the_cost_models() -> None:
    plan = flexcp.Planner(8, 8, 64, cluster=flexcp.cluster("h100", 1, 2), strategy="zigzag")([2048])
    found = slot_work(plan, 0, True)
    ns = slot_ns(found, plan, plan.cost, True)
    rings = rings_of(plan.placement)
    regions = plan.placement.regions[0]
    pairs = count_static_pairs(plan.placement, plan.batch.masks[0], regions, rings)
    own, rest, *_ = rank_work(plan.placement, regions, pairs, plan.cost)
    np.testing.assert_array_equal(found.work[:, :2], np.stack([own, rest], axis=1))
    np.testing.assert_array_equal(
        ns[:, 0],
        plan.cost.attention_ns(own, plan.shape, plan.cluster, True) + plan.cost.kernel_ns * found.kernels[:, 0],
    )
    assert (ns[:, 2:] == 0).all()


def test_a_region_pays_for_its_row_tiles_once_where_it_sees_nothing_or_only_other_ranks_keys() -> None:
    """Rank 1 has three regions: one sees no key, one sees own and other keys, one sees others' keys in two hops."""
    plan = flexcp.Planner(8, 8, 64, cluster=flexcp.cluster("h100", 1, 2), strategy="zigzag")([2048])
    cost = replace(plan.cost, row_tile_pairs=1000)
    rows = {"q0": 0, "q1": np.array([1, 128, 129]), "k0": 0, "k1": 2048, "document": 0, "rank": 1}
    regions = Regions.make(3, h0=2, h1=np.array([3, 4, 6]), **rows)
    pairs = Pairs(np.array([0, 50, 70]), np.array([0, 30, 0]), np.array([0, 1, 2]))
    own, rest, again, at_keys = rank_work(plan.placement, regions, pairs, cost)
    assert own.tolist() == [0, 1000 + 2 * 1030]
    assert rest.tolist() == [0, 2 * (20 + 1000) + 4 * (70 + 2 * 2000)]
    assert again.tolist() == [0, 2 * 1000 + 4 * 2000] and at_keys.tolist() == [0, 0]


@pytest.mark.parametrize("strategy", ["ulysses", "groups:team=4+split=all"])
def test_where_heads_are_split_the_first_pass_pays_for_the_ranks_own_rows_only(strategy: str) -> None:
    plan = flexcp.Planner(16, 4, 64, cluster=flexcp.cluster("h100", 1, 4), strategy=strategy)([4096])
    price, rows = plan.cost.row_tile_pairs, 4096
    for backward in (False, True):
        found = slot_work(plan, 0, backward)
        tiles = (found.work - found.pairs).sum(axis=1)
        assert tiles.tolist() == [price * 4 * (rows // 4 // 128 + rows // 128)] * 4


def test_the_closed_form_counts_the_row_tiles_of_own_rows() -> None:
    machine = flexcp.cluster("h100", 1, 4)
    plan = flexcp.Planner(16, 4, 64, cluster=machine, strategy="groups:team=4+split=all")([4096, 1000])
    placement, (regions,) = plan.placement, plan.placement.regions
    pairs = count_pairs(placement, regions, cut_regions(placement, plan.batch.masks[0], regions))
    begin, runs = plan.batch.starts[regions.document], placement.runs
    first, last = begin + regions.q0, begin + regions.q1
    rows = np.minimum(last[:, None], runs.stop) - np.maximum(first[:, None], runs.start)
    tiles = -(-np.maximum(rows, 0) // 128) * (regions.rank[:, None] == runs.rank)
    assert pairs.own_tiles is not None and (tiles.sum(axis=1) < -(-(last - first) // 128)).any()
    np.testing.assert_array_equal(pairs.own_tiles, tiles.sum(axis=1))
    own, *_ = rank_work(placement, regions, pairs, plan.cost)
    heads = regions.h1 - regions.h0
    expected = np.bincount(regions.rank, (pairs.own + pairs.own_tiles * plan.cost.row_tile_pairs) * heads)
    np.testing.assert_array_equal(own, expected)
