"""Proves stages with thin ends, whose first and last stages are small so that nothing travels beside the large one:
they are used where simulation agrees that they are faster; and keys are relayed where that is faster.
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
from flexcp.plan.placement import Placement, Traffic
from flexcp.plan.plan import Plan
from flexcp.planners.blocks.blocks import blocks
from flexcp.planners.groups.groups import groups
from flexcp.planners.request import Request
from flexcp.schedule import analysis
from flexcp.schedule.analysis import analyse, in_other_stages
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Kind, Shape
from flexcp.simulator.training import simulate

HALF = [262_144, *draw_lengths("web", 262_144, 0)]
"""A document of half the tokens: it is cut over nodes, and has much work that can hide its transfers."""


def request_of(lengths: list[int], shape: Shape) -> Request:
    batch = make_batch(lengths, flexcp.causal())
    return attention_only(Request(batch, shape, cluster("a100", 4, 4), CostModel()))


@pytest.fixture
def no_inside_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off ``inside_first`` stages, which are faster still for most placements with thin ends."""
    monkeypatch.setattr(analysis, "node_work", lambda *_: None)


def planned_in_both(request: Request, placement: Placement) -> tuple[Plan, Plan]:
    """Return the plan of a placement, and its plan in equal stages."""
    how = (request.shape, request.cluster, request.cost)
    found = analyse(placement, *how)
    equal = analyse(placement, *how, most_ahead=1)
    return make_plan(placement, *how, "x", analysis=found), make_plan(placement, *how, "x", analysis=equal)


def long_document() -> tuple[Request, Placement]:
    request = request_of(HALF, Shape(32, 8, 128, 128))
    return request, groups(replace(request, argument="team=4+slack=2+long=whole"))


@pytest.mark.usefixtures("no_inside_first")
def test_thin_ends_are_faster_by_events_where_they_are_taken() -> None:
    thin, equal = planned_in_both(*long_document())
    thin.check()
    equal.check()
    assert thin.bytes().sum() == equal.bytes().sum()
    assert simulate(thin).attention_ns < 0.97 * simulate(equal).attention_ns


@pytest.mark.usefixtures("no_inside_first")
def test_nothing_travels_beside_the_large_stage() -> None:
    thin, _ = planned_in_both(*long_document())
    program = thin.programs[0][1]
    t = program.transfers
    posted = program.execution.posted[t.stage]
    under_way = (posted <= 2) & (t.stage > 2) & (t.source != t.target)
    # Stage 3 is posted in slot 1, before the work that it travels beside.
    assert set(t.stage[under_way].tolist()) == {3} and set(t.kind[under_way].tolist()) == {Kind.KV}
    assert set(t.stage[t.kind == Kind.DKV].tolist()) == {4, 5}
    amount = (t.stop - t.start) * (t.h1 - t.h0)
    keys = [int(amount[(t.kind == Kind.KV) & (t.stage == stage)].sum()) for stage in (1, 2, 3)]
    assert keys[1] > keys[0] + keys[2]


@pytest.mark.usefixtures("no_inside_first")
def test_without_room_to_post_early_stages_are_equal() -> None:
    request, placement = long_document()
    found = analyse(placement, request.shape, request.cluster, request.cost, most_ahead=1)
    assert not found[0].forward.stages.thin_ends and not found[0].backward.stages.thin_ends
    assert in_other_stages(found, False) is None and in_other_stages(found, True) is None


@pytest.mark.parametrize(
    "machine, lengths, relays",
    [(("h100", 8, 2), ("libra256k", 32_768), False), (("a100", 4, 4), ("bimodal", 8192), True)],
)
def test_keys_are_relayed_where_events_agree(
    machine: tuple[str, int, int], lengths: tuple[str, int], relays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = draw_lengths(lengths[0], lengths[1] * 16, 0)
    request = replace(request_of(drawn, Shape(8, 1, 128, 128)), cluster=cluster(*machine))
    how = (request.shape, request.cluster, request.cost)
    placement = blocks(request)
    chosen = analyse(placement, *how)
    assert bool(len(chosen[0].needs.keys.relays)) == relays
    straight = analyse(replace(placement, traffic=Traffic(relay=False)), *how)
    monkeypatch.setattr(analysis, "FLATTERED_RELAYS_PERMILLE", 0)
    relayed = analyse(placement, *how)
    times = [simulate(make_plan(placement, *how, "x", analysis=found)).attention_ns for found in (straight, relayed)]
    assert (times[1] < times[0]) == relays
    assert simulate(make_plan(placement, *how, "x", analysis=chosen)).attention_ns == min(times)


def test_work_that_waits_for_queries_alone_is_counted() -> None:
    """A document is split by heads over a team of four ranks: a quarter of the keys is local, most queries on them are
    not.
    """
    request, placement = long_document()
    work = analyse(placement, request.shape, request.cluster, request.cost)[0].forward.work
    assert np.all(work.at_keys <= work.rest) and int(work.at_keys.max()) > int(work.rest.max()) // 20
