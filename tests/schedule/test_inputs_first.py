"""Proves passes whose inputs are all posted first: what travels in which stage and when it is posted, that plans are
valid and move the same bytes, and that they are used where the event simulator finds them faster.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import flexcp
from flexcp.batch import make_batch
from flexcp.clusters import Cluster, cluster
from flexcp.compare.compare import attention_only
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan
from flexcp.planners.groups.groups import groups
from flexcp.planners.request import Request
from flexcp.schedule.analysis import MaskAnalysis, analyse
from flexcp.schedule.compiled_contention import ACROSS
from flexcp.schedule.compiled_inputs_first import lay, posted_first_ns, travel
from flexcp.schedule.stages import PARTS
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Kind, Shape
from flexcp.simulator.training import simulate

ALONE, PAIRS = cluster("h100", 32, 1), cluster("h100", 16, 2)
"""One rank a node, where everything crosses nodes, and two."""


def placed(machine: Cluster, lengths: str, tokens: int = 32_768) -> tuple[Request, Placement]:
    batch = make_batch(draw_lengths(lengths, tokens * machine.ranks, 0), flexcp.causal())
    request = attention_only(Request(batch, Shape(8, 1, 128, 128), machine, CostModel()))
    return request, groups(replace(request, argument="team=1+slack=2+long=whole"))


def planned(request: Request, placement: Placement, most_ahead: int = 2) -> tuple[MaskAnalysis, Plan]:
    how = (request.shape, request.cluster, request.cost)
    found = analyse(placement, *how, most_ahead=most_ahead)
    return found[0], make_plan(placement, *how, "x", most_ahead=most_ahead, analysis=found)


@pytest.mark.parametrize("machine, lengths", [(ALONE, "web"), (ALONE, "longalign"), (PAIRS, "web")], ids=str)
def test_they_are_faster_by_events_where_they_are_taken(machine: Cluster, lengths: str) -> None:
    case = placed(machine, lengths)
    found, plan = planned(*case)
    assert found.forward.stages.inputs_first and found.backward.stages.inputs_first
    others, without = planned(*case, most_ahead=1)
    assert not others.forward.stages.inputs_first and not others.backward.stages.inputs_first
    plan.check()
    for backward in (False, True):
        assert plan.bytes(backward).sum() == without.bytes(backward).sum()
    assert simulate(plan).attention_ns < 0.99 * simulate(without).attention_ns


@pytest.mark.parametrize("machine", [ALONE, PAIRS], ids=str)
def test_inputs_are_posted_before_all_work_and_gradients_when_they_are_computed(machine: Cluster) -> None:
    found, plan = planned(*placed(machine, "web"))
    last = int(found.backward.stages.number.max())
    program = plan.programs[0][1]
    t, posted = program.transfers, program.execution.posted
    inputs = ~t.is_output
    assert set(posted[t.stage[inputs]].tolist()) == {0} and int(t.stage[inputs].max()) == last
    # The slot after the last inputs runs own work that was held back; it waits for nothing.
    assert not (t.stage == last + 1).any() and min(program.held) >= 0 < max(program.held)
    # Gradients are still on their way in the slots after it.
    margin = program.execution.margin
    assert margin[last + 1] > 0 and set(margin[last + 1 :].tolist()) == {int(margin[last + 1])}
    crosses = t.source // machine.ranks_per_node != t.target // machine.ranks_per_node
    first = 2 if machine is PAIRS else 1
    stage_of = {
        (int(r), int(o), int(s), int(e)): int(stage)
        for r, o, s, e, stage in zip(*(c[inputs] for c in (t.target, t.source, t.start, t.stop, t.stage)), strict=True)
    }
    for i in np.flatnonzero((t.kind == Kind.DKV) & crosses):
        slot = stage_of[int(t.source[i]), int(t.owner[i]), int(t.start[i]), int(t.stop[i])]
        assert slot >= first and posted[t.stage[i]] == slot + 1
    inside = (t.kind == Kind.DKV) & ~crosses
    assert set(posted[t.stage[inside]].tolist()) <= {last + 1}


def test_nothing_is_posted_early_if_messages_may_not_wait() -> None:
    found, plan = planned(*placed(ALONE, "web"), most_ahead=1)
    assert not found.forward.stages.inputs_first
    assert all(int(p.execution.ahead.max()) == 1 for p in plan.programs[0])


def test_a_rank_that_computes_for_long_makes_nobody_wait_for_its_keys() -> None:
    """Rank 0 computes 900 ns of its own and sends keys to rank 1, which has 10 ns of its own and 100 ns on those keys.

    The keys take 20 ns and 20 more with a latency of 4, in two parts. Rank 1 waits for the first of them only.
    """
    one = np.ones(2, np.int64)
    own, rest = np.array([900, 10]), np.array([0, 100])
    near, there, none = np.array([PARTS, 0]), np.array([[0, 0], [36, 36]]), np.zeros((2, 2), np.int64)
    held = np.zeros(2, np.int64)
    borders = np.array([0, PARTS // 2, PARTS])
    work, into, out = lay(held, own, rest, near, 0 * one, 0 * one, there, none, 0 * one, borders, False, 4, 0)
    assert into[1:3].tolist() == [[20, 20], [20, 20]] and not out.any() and not held.any()
    assert work.tolist() == [[900, 10], [0, 50], [0, 50], [0, 0]]
    rows = np.full((2, 1, 3), 1000)  # transfers and work do not slow each other
    known = (False, np.zeros(2, np.int64), rows, np.array([0]), np.array([0, 0, 0, 0, 1]))
    assert posted_first_ns(work, into, out, *known, 1) == 900
    work[0, 0] = 0
    assert posted_first_ns(work, into, out, *known, 1) == 20 + 50 + 50


def test_gradients_leave_in_the_slot_after_their_work() -> None:
    """One rank returns gradients of two parts, 30 ns each, after 50 ns of work on each of them.

    Its peer, which keeps the keys, computes nothing. The gradients of the second part leave when all work is done.
    """
    one = np.ones(2, np.int64)
    own, rest, near = np.array([0, 10]), np.array([0, 100]), np.array([PARTS, 0])
    there, back = np.array([[0, 0], [20, 20]]), np.array([[0, 0], [60, 60]])
    borders, held = np.array([0, PARTS // 2, PARTS]), np.zeros(2, np.int64)
    work, into, out = lay(held, own, rest, near, 0 * one, 0 * one, there, back, 0 * one, borders, False, 0, 1)
    assert held[1] == 1000 and work[:, 1].tolist() == [0, 50, 50, 10]
    assert out[1, 1] == out[2, 1] >= 30  # longer by the unevenness of two parts
    rows = np.full((2, 1, 3), 1000)
    known = (False, np.zeros(2, np.int64), rows, np.array([1, 0]), np.array([0, 0, 1, 1, 2]))
    ended = posted_first_ns(work, into, out, *known, 1)
    assert ended == int(into[1, 1]) + 50 + 50 + int(out[2, 1])


def test_a_stage_begins_when_the_ranks_own_stage_before_it_is_done() -> None:
    """Rank 1 receives 70 ns from rank 0 in stage 1 and 20 ns from rank 2, which has sent nothing before, in stage 2."""
    work = np.zeros((4, 3), np.int64)
    into, out = np.zeros_like(work), np.zeros_like(work)
    into[1], into[2] = [70, 70, 0], [0, 20, 20]
    rows = np.full((2, 1, 3), 1000)
    known = (False, np.zeros(3, np.int64), rows, np.array([0, 2]), np.array([0, 0, 0, 0, 2, 2, 2]))
    assert posted_first_ns(work, into, out, *known, 1) == 90


@pytest.mark.parametrize("inside", [False, True])
def test_every_further_part_is_another_pass_over_the_rows(inside: bool) -> None:
    """A quarter of 100 ns of work is on keys of the node, if there are any; a pass over the rows costs 7 ns."""
    one = np.ones(1, np.int64)
    near, there = one * (PARTS // 4 if inside else 0), np.array([[5 * inside], [20]])
    none, borders, held = np.zeros((2, 1), np.int64), np.array([0, PARTS // 2, PARTS]), np.zeros(1, np.int64)
    work, _, _ = lay(held, 0 * one, 100 * one, near, 7 * one, 0 * one, there, none, 0 * one, borders, inside, 0, 0)
    assert work[1:-1, 0].tolist() == ([25, 37 + 7, 37 + 7] if inside else [50, 50 + 7])


def test_a_stage_travels_when_the_rank_and_its_senders_are_ready() -> None:
    """Ranks 0 and 1 receive from rank 2 across nodes; rank 2 receives nothing."""
    no_contention = np.array([1000, 1000, 1000])
    senders = np.array([0, 0, 1, 1, 2, 2, 2])
    for before, done in (([100, 0, 40], [150, 90, 7]), ([10, 70, 40], [90, 120, 7])):
        gone = np.full(3, 7)
        travel(gone, np.array(before), np.array([50, 50, 0]), ACROSS, no_contention, np.array([2, 2]), senders)
        assert gone.tolist() == done
