"""Proves that clusters are what their presets say, that speed factors are whole numbers per mille, and that impossible
machines are refused.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcp.clusters import Cluster, cluster

PRESETS = ["a100", "h100", "h200", "h20", "gb200", "ascend910b", "cpu"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_made_of_whole_numbers(name: str) -> None:
    made = cluster(name, nodes=3, ranks_per_node=5)
    assert made.ranks == 15 and str(made) == f"{name}:3x5"
    assert all(isinstance(v, int) and v > 0 for k, v in asdict(made).items() if k not in ("name", "speeds"))
    assert made.intra_mbps >= made.inter_mbps


def test_links_are_those_of_the_named_settings() -> None:
    gigabits = {name: cluster(name).inter_mbps * 8 / 1000 for name in PRESETS}
    assert gigabits["a100"] * 8 == 4 * 100  # four 100 Gb/s ports for 8 GPUs
    assert gigabits["h100"] == gigabits["h200"] == 400
    assert gigabits["h20"] == 200


def test_a_node_has_the_presets_own_ranks_unless_told() -> None:
    assert cluster().ranks == 8
    assert cluster("gb200").ranks == 72
    assert cluster("gb200", ranks_per_node=4).ranks == 4


def test_text_forms() -> None:
    assert cluster("h100:4x8") == cluster("h100", nodes=4, ranks_per_node=8)
    assert cluster("h100:1x2", speeds=[1.0, 0.5]).speeds == (1000, 500)
    for wrong in ("h100:4by8", "h100:"):
        with pytest.raises(ValueError, match="NODESxRANKS"):
            cluster(wrong)
    with pytest.raises(ValueError, match=r"h100:4x8 already gives the shape; drop nodes="):
        cluster("h100:4x8", nodes=2)
    for name in (None, 5, ["h100"]):
        with pytest.raises(ValueError, match="preset's name, one of a100, h100"):
            cluster(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown cluster 'h100-2x8': did you mean 'h100:2x8'"):
        cluster("H100-2x8")
    with pytest.raises(ValueError, match="did you mean 'h100'"):
        cluster("h10O")


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(0, 8), (-1, 8), (4, 0), (2, -3), (1.5, 8), (True, 8)])
def test_a_shape_without_ranks_is_refused(nodes: Any, ranks_per_node: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        cluster("h100", nodes, ranks_per_node)


def test_more_nodes_than_ranks_is_refused_in_the_text_form() -> None:
    with pytest.raises(ValueError, match="16 nodes of 0 ranks"):
        cluster("h100:16x0")


def test_capitals_do_not_matter() -> None:
    assert cluster("A100:2x6") == cluster("a100:2X6") == cluster("a100", 2, 6)
    assert str(cluster("GB200")) == "gb200:1x72"


def test_ranks_are_numbered_node_by_node() -> None:
    assert [cluster("h100", 2, 3).node_of(r) for r in range(6)] == [0, 0, 0, 1, 1, 1]


def test_without_factors_all_ranks_are_nominal() -> None:
    assert cluster("h100", 1, 3).speeds == ()
    assert cluster("h100", 1, 3).rank_speeds == (1000, 1000, 1000)


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=9))
def test_factors_become_per_mille(speeds: list[float]) -> None:
    found = cluster("h100", 1, len(speeds), speeds=speeds).rank_speeds
    assert len(found) == len(speeds)
    assert all(abs(f - 1000 * s) <= 0.5001 and f >= 1 for f, s in zip(found, speeds, strict=True))


@pytest.mark.parametrize("wrong", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, 0.0004, 1001, 1e300, "1", None])
def test_a_rank_of_no_speed_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(ValueError, match="speed factor of rank 1"):
        cluster("h100", 1, 3, speeds=[1.0, wrong, 1.0])


@pytest.mark.parametrize("speeds", [[1.0], [1.0] * 5, []])
def test_there_is_one_factor_per_rank(speeds: list[float]) -> None:
    with pytest.raises(ValueError, match=r"one factor per rank|give one per rank"):
        cluster("h100", 2, 2, speeds=speeds)


def test_factors_are_checked_when_the_shape_changes() -> None:
    made = cluster("h100", 1, 2, speeds=[1.0, 0.9])
    with pytest.raises(ValueError, match="2 speed factors for 2 nodes x 2 ranks"):
        replace(made, nodes=2)


@pytest.mark.parametrize("field", ["gflops", "intra_mbps", "inter_mbps"])
def test_a_machine_without_speed_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        replace(cluster(), **{field: 0})


def test_speeds_by_rank_are_no_list_of_them() -> None:
    with pytest.raises(ValueError, match=r"speeds= is one factor per rank, .* got \{0: 1.0, 1: 0.5\}"):
        cluster("h100", 1, 2, speeds={0: 1.0, 1: 0.5})  # type: ignore[arg-type]


def test_own_numbers_need_no_preset() -> None:
    own = Cluster("mine", 1, 2, gflops=10, intra_mbps=20, inter_mbps=30, latency_ns=0, speeds=(900, 1100))
    assert own.rank_speeds == (900, 1100)
    with pytest.raises(ValueError, match="per mille"):
        replace(own, speeds=(0, 1000))
    with pytest.raises(ValueError, match="rank 1 has speed 1000001"):
        replace(own, speeds=(1000, 1_000_001))


def test_a_slow_device_under_another_name_has_a_computers_memory() -> None:
    slow = Cluster("paced", 2, 2, 4, 50_000, 12_000, 0)
    assert slow.memory_mbps == cluster("cpu", 1, 1).memory_mbps
    fast = Cluster("new", 1, 8, 2 * 989_000, 450_000, 50_000, 0)
    assert fast.memory_mbps == 2 * cluster("h100", 1, 8).memory_mbps
