"""Proves ``inside_first`` stages, which move keys inside nodes before keys between nodes: what travels in which stage,
that they are used where simulation agrees, and how their work is counted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import flexcp
from flexcp.batch import make_batch
from flexcp.clusters import cluster
from flexcp.compare.compare import attention_only
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan
from flexcp.planners.groups.groups import groups
from flexcp.planners.request import Request
from flexcp.schedule import analysis, stages
from flexcp.schedule.analysis import MaskAnalysis, analyse, in_other_stages
from flexcp.schedule.inside_first import cuts_across, node_work
from flexcp.schedule.stages import PARTS
from flexcp.schedule.transfers import make_plan
from flexcp.schedule.work import count_pairs, cut_regions
from flexcp.shape import Kind, Shape
from flexcp.simulator.training import simulate

RANKS_PER_NODE = 4


def placed(name: str, shape: Shape = Shape(32, 8, 128, 128)) -> tuple[Request, Placement]:
    """Place documents, the longest of them over all nodes, in teams that split heads."""
    lengths = [65_536, *draw_lengths("web", 65_536, 0)] if name == "half" else draw_lengths(name, 131_072, 0)
    batch = make_batch(lengths, flexcp.causal())
    request = attention_only(Request(batch, shape, cluster("a100", 4, RANKS_PER_NODE), CostModel()))
    return request, groups(replace(request, argument="team=4+slack=2+long=poured"))


def planned(request: Request, placement: Placement) -> tuple[list[MaskAnalysis], Plan]:
    how = (request.shape, request.cluster, request.cost)
    found = analyse(placement, *how)
    return found, make_plan(placement, *how, "x", analysis=found)


def never(*_: object) -> stages.Stages:
    """Return stages that are never chosen, in the place of those whose inputs are all posted first."""
    nothing = np.zeros(1, np.int64)
    return stages.Stages(nothing, nothing, nothing, nothing[:, None], contended_ns=1 << 60)


@pytest.mark.parametrize("name", ["half", "video"])
def test_inside_first_is_faster_by_events_where_it_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = placed(name)
    found, plan = planned(*case)
    assert found[0].backward.stages.inside_first
    monkeypatch.setattr(analysis, "node_work", lambda *_: None)
    others, without = planned(*case)
    assert not others[0].backward.stages.inside_first
    plan.check()
    assert plan.bytes().sum() == without.bytes().sum()
    assert simulate(plan).attention_ns < 0.95 * simulate(without).attention_ns


@pytest.mark.parametrize("backward", [False, True])
def test_between_the_ends_everything_crosses_nodes(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis, "inputs_first", never)
    found, plan = planned(*placed("half"))
    chosen = (found[0].backward if backward else found[0].forward).stages
    assert chosen.inside_first
    t = plan.programs[0][backward].transfers
    inside = t.source // RANKS_PER_NODE == t.target // RANKS_PER_NODE
    last = int(t.stage.max())
    assert set(t.stage[inside].tolist()) == {1, last}
    assert set(t.kind[inside & (t.stage == 1)].tolist()) >= {Kind.Q, Kind.KV}
    keys = t.stage[~inside & (t.kind == Kind.KV)]
    assert set(keys.tolist()) == set(range(2, int(chosen.number.max()) + 1))
    if backward:
        home = t.stage[~inside & (t.kind == Kind.DKV)]
        assert home.min() == keys.min() + 2 and home.max() == keys.max() + 2


def test_work_on_keys_of_the_node_is_counted_pair_by_pair() -> None:
    request, placement = placed("half", Shape(8, 4, 16, 16))
    mask, regions = request.batch.masks[0], placement.regions[0]
    cuts = cut_regions(placement, mask, regions)
    pairs = count_pairs(placement, regions, cuts)
    needs = analyse(placement, request.shape, request.cluster, request.cost)[0].needs
    counted = node_work(needs, placement, regions, cuts, pairs, request.cluster, request.cost)
    assert counted is not None
    # Count row by row, by hand, which of the keys before each row are kept by other ranks of the node and which by
    # other nodes.
    keeper = np.empty(request.batch.tokens, np.int64)
    for rank, start, stop in zip(placement.runs.rank, placement.runs.start, placement.runs.stop, strict=True):
        keeper[start:stop] = rank
    near, far = np.zeros(16, np.int64), np.zeros(16, np.int64)
    for rank, document, q0, q1, h0, h1 in zip(
        *(getattr(regions, name) for name in ("rank", "document", "q0", "q1", "h0", "h1")), strict=True
    ):
        begin = request.batch.starts[document]
        owner = keeper[begin : begin + q1]
        not_mine = np.cumsum(owner != rank)
        of_node = np.cumsum((owner // RANKS_PER_NODE == rank // RANKS_PER_NODE) & (owner != rank))
        near[rank] += of_node[q0:q1].sum() * (h1 - h0)
        far[rank] += (not_mine - of_node)[q0:q1].sum() * (h1 - h0)
    # Work of other ranks' rows on local keys is in neither count.
    assert np.array_equal(counted.near, np.where(far > 0, near * PARTS // np.maximum(near + far, 1), PARTS))


def test_other_ways_that_might_be_faster_are_left_for_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis, "inputs_first", never)
    found, _ = planned(*placed("half"))
    chosen = found[0].backward.stages
    assert chosen.inside_first and in_other_stages(found, backward=True) is None
    monkeypatch.setattr(stages, "UNSURE_PERMILLE", 2000)
    tried = in_other_stages(found, backward=True)
    assert tried is not None and tried[0].forward is found[0].forward
    other = tried[0].backward.stages
    assert not other.inside_first and other.contended_ns == min(way.contended_ns for way in chosen.others)


@pytest.mark.parametrize("backward", [False, True])
def test_the_smallest_part_that_crosses_nodes_comes_first_or_last(backward: bool) -> None:
    """The first part of the forward has the work inside nodes beside it; gradients of the last part have little."""
    ways = cuts_across(backward)
    assert ways[0] == (0, PARTS) and len(set(ways)) == len(ways)
    for way in ways:
        sizes = np.diff(way)
        assert way[0] == 0 and way[-1] == PARTS and sizes.min() > 0
        assert np.all(np.diff(sizes) <= 1 if backward else np.diff(sizes) >= -1)  # rounded by at most one part
    assert (0, 400, 800, 1200) in ways and ((0, 800, 1200) if backward else (0, 400, 1200)) in ways
