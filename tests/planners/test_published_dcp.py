"""Proves the planner after the DCP paper: it partitions from scratch, moves the bytes that its hypergraph says, cuts
over nodes first, gives the same plan twice, and its plans are shared between ranks.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from brute import owners
from numpy.typing import NDArray

from flexcp.arrays.totals import imbalance
from flexcp.batch import make_batch
from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.data.loader import may_differ
from flexcp.masks import Mask, causal, lambda_, shared_question
from flexcp.plan.placement import Divisions, Traffic, Wishes
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.planners.hypergraph.model import make_tiling
from flexcp.planners.hypergraph.mt_kahypar import initialised
from flexcp.planners.hypergraph.partition import Partition
from flexcp.planners.published.dcp import NODE_TOLERANCE, RANK_TOLERANCE, TOKEN_SHARES, dcp, placed_within
from flexcp.planners.request import Request
from flexcp.planners.strategies import STRATEGIES, find_strategy
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Kind, Shape

pytest.importorskip("mtkahypar")
Ints = NDArray[np.int64]
LENGTHS = [9_000, 2_500, 1_200, 800, 500, 300, 60, 24]


def planned(strategy: str = "dcp:256", nodes: int = 1, mask: Mask | None = None, lengths: Any = LENGTHS) -> Plan:
    plan = Planner(8, 2, 64, cluster=cluster("a100", nodes, 8 // nodes), strategy=strategy)(lengths, mask or causal())
    plan.check()
    return plan


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("mask", [causal(), lambda_(64, 512), shared_question()], ids=str)
def test_moves_what_its_hypergraph_says(nodes: int, mask: Mask) -> None:
    """The connectivity of the partition equals the forward bytes; a relayed key counts once for each reader."""
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


def test_the_better_balanced_of_two_foldings_is_kept() -> None:
    """With one of the two weightings of tokens the placement is that weighting's own, so its time can be measured
    alone.
    """
    request = Request(make_batch(LENGTHS, causal()), Shape(8, 2, 64, 64), cluster("a100", 2, 4), CostModel(), "256")
    alone = [placed_within(request, NODE_TOLERANCE, RANK_TOLERANCE, (share,)) for share in TOKEN_SHARES]
    plans = [make_plan(each, request.shape, request.cluster, request.cost, "dcp") for each in alone]
    worst = [max(imbalance(plan.work()), imbalance(plan.placement.tokens)) for plan in plans]
    kept = make_plan(dcp(request), request.shape, request.cluster, request.cost, "dcp")
    assert plans[0].hash != plans[1].hash
    assert kept.hash == plans[worst.index(min(worst))].hash


def test_tiles_may_run_away_from_their_tokens() -> None:
    plan = planned(lengths=[9_000])
    kept = plan.placement.kept
    regions = plan.placement.regions[0]
    owner = kept.rank[np.searchsorted(kept.stop, regions.q0, side="right")]
    assert (owner != regions.rank).any()
    assert (regions.h1 - regions.h0 < 8).any(), "a KV head by itself"


def test_nodes_are_cut_first() -> None:
    """Fewer bytes cross nodes than if ranks were numbered at random."""
    plan = planned(nodes=2, lengths=draw_lengths("longtail", 65_536, 0))
    moved, order = plan.bytes(), np.random.default_rng(0).permutation(8)
    across = np.arange(8)[:, None] // 4 != np.arange(8) // 4
    assert moved[across].sum() < moved[order][:, order][across].sum()


def test_divisions_share_what_nodes_send() -> None:
    """Keys that cross nodes arrive in three stages: in the first two a rank sends an even part, or less by under a
    block, and in the third the rest.

    Inside a node all keys arrive in the first stage.
    """
    plan = planned(nodes=2, lengths=[9_000, 500])
    t = plan.programs[0][0].transfers
    across = t.source // 4 != t.target // 4
    keys = t.take((t.kind == Kind.KV) & across & (t.source == t.owner))
    assert set(keys.stage.tolist()) == {1, 2, 3}
    asked = _asked_across(plan)
    even, block = -(-asked.sum(axis=1) // 3), int(np.diff(plan.placement.wishes.divisions.borders).max())
    assert (asked[:, :2] <= even[:, None]).all() and (asked[:, :2] > even[:, None] - block).all()
    assert np.count_nonzero(asked[:, 2]) == 5 and (asked[:, 2] < even + 2 * block).all()
    inside = planned(lengths=[9_000, 500]).programs[0][0].transfers
    assert set(inside.stage[inside.kind == Kind.KV].tolist()) == {1}


def _asked_across(plan: Plan) -> Ints:
    """Return how many of each rank's tokens ranks of the other node read in each of the three divisions: [owner,
    division].

    Each reader counts, also where a relay carries a token to a node once for several; both KV heads count as one.
    """
    owner_of, divisions = owners(plan), plan.placement.wishes.divisions
    mine = [np.flatnonzero(owner_of == rank) for rank in range(8)]
    wanted: set[tuple[int, int, int]] = set()
    t = plan.programs[0][0].transfers
    for source, target, owner, start, stop, kind in zip(
        t.source, t.target, t.owner, t.start, t.stop, t.kind, strict=True
    ):
        if kind == Kind.KV and owner // 4 != target // 4:
            wanted |= {(int(target), int(owner), int(token)) for token in mine[owner][start:stop]}
        assert source != target
    found = np.zeros((8, 3), np.int64)
    for target, owner, token in wanted:
        block = np.searchsorted(divisions.borders, token, side="right") - 1
        found[owner, divisions.stage[target, block] - 1] += 1
    return found


def test_a_division_is_the_stage_in_which_keys_travel() -> None:
    """A placement made by hand asks for the second half of each rank's keys in stage 2."""
    request = Request(make_batch([512], causal()), Shape(8, 2, 64, 64), cluster("h100", 1, 2), CostModel())
    placement = find_strategy("ring")[0](request)
    stage = np.array([[1, 2, 1, 2], [1, 2, 1, 2]])
    divisions = Divisions(np.array([0, 128, 256, 384, 512]), stage)
    wished = replace(placement, traffic=Traffic(), wishes=Wishes(divisions=divisions))
    plan = make_plan(wished, request.shape, request.cluster, request.cost, "by hand")
    plan.check()
    keys = plan.programs[0][0].transfers
    assert list(zip(keys.stage, keys.start, keys.stop, strict=True)) == [(1, 0, 128), (2, 128, 256)]


def test_is_seeded() -> None:
    assert planned().hash == planned().hash


def test_loaders_share_its_plans() -> None:
    """By default one rank plans for all where ranks could find different plans, and only there."""
    differing = {name for name in STRATEGIES if may_differ(name) and may_differ(f"{name}:256")}
    assert differing == {"hypergraph", "dcp"}


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    initialised.cache_clear()
    monkeypatch.setitem(sys.modules, "mtkahypar", None)
    with pytest.raises(ValueError, match=r"strategy dcp needs .* pip install flexcp\[hypergraph\]"):
        planned()
