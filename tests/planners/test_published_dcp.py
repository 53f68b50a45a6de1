"""Proves DCP's planner: a partition from nothing with the bytes its hypergraph says, over nodes first, the same twice, and shared."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from flexcp.arrays.totals import imbalance
from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.data.loader import may_differ
from flexcp.masks import Mask, causal, lambda_, shared_question
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.planners.hypergraph.model import make_tiling
from flexcp.planners.hypergraph.mt_kahypar import initialised
from flexcp.planners.hypergraph.partition import Partition
from flexcp.planners.strategies import STRATEGIES

pytest.importorskip("mtkahypar")
LENGTHS = [9_000, 2_500, 1_200, 800, 500, 300, 60, 24]


def planned(strategy: str = "dcp:256", nodes: int = 1, mask: Mask | None = None, lengths: Any = LENGTHS) -> Plan:
    plan = Planner(8, 2, 64, cluster=cluster("a100", nodes, 8 // nodes), strategy=strategy)(lengths, mask or causal())
    plan.check()
    return plan


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("mask", [causal(), lambda_(64, 512), shared_question()], ids=str)
def test_moves_what_its_hypergraph_says(nodes: int, mask: Mask) -> None:
    """The connectivity of the partition is the forward volume; what is relayed is in it once for each reader."""
    plan = planned(nodes=nodes, mask=mask)
    planner = Planner(8, 2, 64, cluster=plan.cluster)
    request = type("Asked", (), {"batch": plan.batch, "shape": planner.shape, "ranks": plan.ranks})
    partition = Partition(make_tiling(request, plan.placement, 256), plan.placement)  # type: ignore[arg-type]
    assert partition.bytes() == plan.bytes().sum()


def test_cuts_from_nothing_and_not_from_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("blocks was asked")

    monkeypatch.setattr("flexcp.planners.blocks.blocks.pack_rows", refused)
    plan = planned()
    assert 0 < plan.bytes().sum() < planned("zigzag").bytes().sum()
    assert imbalance(plan.work()) < 2 and imbalance(plan.placement.tokens) < 2


def test_tiles_may_run_away_from_their_tokens() -> None:
    plan = planned(lengths=[9_000])
    kept = plan.placement.kept
    regions = plan.placement.regions[0]
    owner = kept.rank[np.searchsorted(kept.stop, regions.q0, side="right")]
    assert (owner != regions.rank).any()
    assert (regions.h1 - regions.h0 < 8).any(), "a KV head by itself"


def test_nodes_are_cut_first() -> None:
    """Fewer bytes cross nodes than if ranks had been numbered at random."""
    plan = planned(nodes=2, lengths=draw_lengths("longtail", 65_536, 0))
    moved, order = plan.bytes(), np.random.default_rng(0).permutation(8)
    across = np.arange(8)[:, None] // 4 != np.arange(8) // 4
    assert moved[across].sum() < moved[order][:, order][across].sum()


def test_is_seeded() -> None:
    assert planned().hash == planned().hash


def test_loaders_share_its_plans() -> None:
    """Unless told, one rank plans for all where plans may differ, and only there."""
    differing = {name for name in STRATEGIES if may_differ(name) and may_differ(f"{name}:256")}
    assert differing == {"hypergraph", "dcp"}


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    initialised.cache_clear()
    monkeypatch.setitem(sys.modules, "mtkahypar", None)
    with pytest.raises(ValueError, match=r"strategy dcp needs .* pip install flexcp\[hypergraph\]"):
        planned()
