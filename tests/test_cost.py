"""Proves that costs are exact integers and follow their formulas, and that a saved cost model is read
back unchanged.
"""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcp.clusters import Cluster, cluster
from flexcp.cost import H200_CONTENTION_ACROSS, LARGEST_SIZE, TILE_ROWS, Contention, CostModel, Model, dense_model
from flexcp.shape import Shape

SHAPE = Shape(8, 2, 64, 32)
ROUND = Cluster("round", 1, 2, gflops=1000, intra_mbps=1000, inter_mbps=100, latency_ns=7, speeds=(1000, 500))
amounts = st.integers(0, 10**13)  # times stay below 2**63 nanoseconds


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def test_attention_takes_its_flops_at_its_efficiency() -> None:
    cost = CostModel(forward_efficiency=500, backward_efficiency=250)
    # 2 * (64 + 32) FLOPs for each pair and head at 500 FLOPs a nanosecond; the second rank is half as fast.
    assert cost.attention_ns(ints(10**6, 10**6), SHAPE, ROUND, False).tolist() == [384_000, 768_000]
    # 2.5 times the FLOPs at half the efficiency.
    assert cost.attention_ns(ints(10**6, 10**6), SHAPE, ROUND, True).tolist() == [1_920_000, 3_840_000]


@given(amounts, amounts, st.booleans(), st.integers(1, 2000), st.integers(1, 2000))
def test_time_is_the_exact_fraction_rounded_up(a: int, b: int, backward: bool, efficiency: int, speed: int) -> None:
    cost = CostModel(forward_efficiency=efficiency, backward_efficiency=efficiency)
    for speeds in ((1000, speed), (speed, speed)):
        found = cost.attention_ns(ints(a, b), SHAPE, replace(ROUND, speeds=speeds), backward)
        for work, rank_speed, ns in zip((a, b), speeds, found, strict=True):
            exact = Fraction(work * (480 if backward else 192) * 10**6, 1000 * efficiency * rank_speed)
            assert int(ns) == -(-exact.numerator // exact.denominator)


def test_slower_dtypes_take_longer() -> None:
    times = [
        int(CostModel().attention_ns(ints(10**9), replace(SHAPE, dtype=d), cluster("h100", 1, 1), False)[0])
        for d in ("bfloat16", "float16", "float32", "float64")
    ]
    assert times[0] == times[1] < times[2] < times[3]


def test_rows_count_in_whole_tiles() -> None:
    cost = CostModel(row_tile_pairs=10)
    assert cost.row_tiles_work(ints(0, 1, TILE_ROWS, TILE_ROWS + 1)).tolist() == [0, 10, 10, 20]


@pytest.mark.parametrize(("documents", "measured"), [(1, 546), (16, 382), (64, 190)])
def test_attention_follows_what_an_h200_measured(documents: int, measured: int) -> None:
    shape, machine, cost = Shape(32, 8, 128, 128), cluster("h200", 1, 1), CostModel()
    n = 16_384 // documents
    area = n * (n + 1) // 2 * documents
    tiles = int(cost.row_tiles_work(ints(n))[0]) * documents
    ns = int(cost.attention_ns(ints((area + tiles) * shape.heads), shape, machine, False)[0])
    useful = 4 * area * shape.heads * shape.head_dim
    assert useful / ns / 1000 == pytest.approx(measured, rel=0.05)


def test_linear_time_counts_projections_and_feed_forward() -> None:
    model = Model("small", hidden=100, layers=4, feed_forward=300, experts_active=2)
    # q and o: 100 x 8 x (64 + 32); k and v: 100 x 2 x (64 + 32); three matrices of 100 x 300, twice.
    flops = 2 * (100 * 8 * 96 + 100 * 2 * 96 + 3 * 100 * 300 * 2)
    assert model.linear_flops_per_token(SHAPE) == flops
    cost = CostModel(model=model, linear_efficiency=1000)
    # Forward, and twice as much backward, at 1000 FLOPs a nanosecond.
    assert cost.linear_ns(ints(1000, 1000), SHAPE, ROUND).tolist() == [3 * flops, 6 * flops]


def test_without_a_model_a_dense_one_is_meant() -> None:
    dense = dense_model(SHAPE)
    assert (dense.hidden, dense.feed_forward) == (512, 1792)
    assert CostModel().linear_flops(SHAPE) == CostModel(model=dense).linear_flops(SHAPE)


@pytest.mark.parametrize("field", ["hidden", "layers", "feed_forward", "experts_active"])
def test_a_model_too_large_to_count_is_refused(field: str) -> None:
    """A step of such a model ended in an OverflowError."""
    model = Model("large", hidden=100, layers=4, feed_forward=300)
    assert replace(model, **{field: LARGEST_SIZE}) != model
    with pytest.raises(ValueError, match=f"needs {field} as a whole number from 1 to 4,194,304; got 99999999999999"):
        replace(model, **{field: 99_999_999_999_999})
    with pytest.raises(ValueError, match=r"a model of .* is too large to count: the product of these is at most"):
        Model("large", **dict.fromkeys(("hidden", "layers", "feed_forward"), 1 << 17))


@given(
    st.integers(1, 64), st.integers(1, 8), st.sampled_from([64, 128]), st.integers(100, 1000), st.integers(100, 1000)
)
def test_a_token_is_worth_its_pairs(queries: int, kv_heads: int, dim: int, forward: int, linear: int) -> None:
    shape, machine = Shape(queries * kv_heads, kv_heads, dim, dim), cluster("h100", 1, 1)
    cost = CostModel(forward_efficiency=forward, linear_efficiency=linear)
    pairs = cost.pairs_per_token(shape)
    many = 10**6
    tokens = int(cost.linear_ns(ints(many), shape, machine)[0])
    attention = [
        sum(int(cost.attention_ns(ints(many * p * shape.heads), shape, machine, b)[0]) for b in (False, True))
        for p in (pairs, pairs + 1)
    ]
    assert pairs == 1 or attention[0] <= tokens + 2
    assert tokens <= attention[1] + 2


@given(amounts, st.integers(1, 10**6))
def test_bytes_take_their_bandwidth(size: int, mbps: int) -> None:
    ns = int(CostModel(link_efficiency=800).link_ns(ints(size), mbps)[0])
    exact = Fraction(size * 1000 * 1000, mbps * 800)
    assert ns == -(-exact.numerator // exact.denominator)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [CostModel(), CostModel("fitted", 1, 2, 3, 4, 0, 0, 0, 0, Model("m", 1, 2, 3, 4))])
def test_a_cost_model_survives_its_file(cost: CostModel) -> None:
    assert CostModel.from_json(json.loads(json.dumps(cost.to_json()))) == cost


def test_what_a_file_leaves_out_has_its_default() -> None:
    assert CostModel.from_json({"format": "flexcp-cost-1", "kernel_ns": 3}) == CostModel(kernel_ns=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format"),
        ({"kernel_ns": -1}, "kernel_ns"),
        ({"link_efficiency": 0}, "link_efficiency"),
        ({"forward_efficiency": 0.5}, "forward_efficiency"),
        ({"forward_efficiency": True}, "forward_efficiency"),
        ({"error_permille": None}, "error_permille"),
        ({"colour": 1}, "no field 'colour'"),
        ({"name": 3}, "name"),
        ({"model": 3}, "null or an object"),
        ({"model": {"name": "m", "hidden": 1}}, "'layers'"),
        ({"model": {"name": "m", "hidden": 0, "layers": 1, "feed_forward": 1}}, "hidden"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel.from_json({**CostModel().to_json(), **change})


def test_a_file_that_is_no_object_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON object"):
        CostModel.from_json([1, 2])  # type: ignore[arg-type]


def test_both_tables_of_contention_are_read_back_and_have_the_same_margins() -> None:
    rows = (Contention(0, 1500, 1500, 1000, 1000, 800), Contention(8, 1100, 1100, 1050, 1050, 950))
    for cost in (
        CostModel(),
        CostModel(contention=rows),
        CostModel(contention=rows, contention_across=rows[:1] + rows[1:]),
    ):
        assert CostModel.from_json(json.loads(json.dumps(cost.to_json()))) == cost
    assert CostModel(contention=rows).rows_beside(True) == rows
    assert CostModel().rows_beside(True) == H200_CONTENTION_ACROSS != CostModel().rows_beside(False)
    with pytest.raises(ValueError, match=r"the same margins; got \[0, 8\] and \[0\]"):
        CostModel(contention=rows, contention_across=rows[:1])


def test_kernels_take_a_percentage_of_their_time() -> None:
    cost, machine, shape = CostModel(), cluster("h100", 1, 1), Shape(8, 1, 128, 128)
    work = np.array([10**12])
    for percent in (70, 130):
        other = cost.with_kernels(percent)
        for backward in (False, True):
            ns = [int(each.attention_ns(work, shape, machine, backward)[0]) for each in (cost, other)]
            assert ns[1] / ns[0] == pytest.approx(percent / 100, rel=0.01)
        assert other.row_tile_pairs == cost.row_tile_pairs * percent // 100
        assert other.link_efficiency == cost.link_efficiency
