"""Proves communication on random plans of every strategy, mask and machine: rounds, calls, relays, and the symbolic
check.

A stage has as many rounds as its largest degree, no rank has two peers in one round, and chunks cover every message
once (as counted in test_rounds.py). What one rank posts as a call's send, its peer posts as that call's receive. No key
enters a node, and no gradient leaves it, over the network twice. A quarter as many plans as in test_properties.py are
tried; ``make properties`` tries hundreds.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_properties import OFTEN, PARTITIONED, cases, planned

from flexcp.clusters import cluster
from flexcp.executor.exchange.rank_calls import AS_PLANNED, CallSettings, rank_calls
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.planners.strategies import STRATEGIES
from flexcp.schedule import analysis
from flexcp.shape import Kind
from judged_rounds import judge

SOME = OFTEN // 4


def check_calls(plan: Plan, mask: int, backward: bool, how: CallSettings) -> None:
    """Check that both sides of every call agree, that every byte of every message is in one call, and that no call is
    empty.
    """
    sent: Counter[tuple[int, ...]] = Counter()
    received: Counter[tuple[int, ...]] = Counter()
    bytes_between: Counter[tuple[int, int, int]] = Counter()
    for rank in range(plan.ranks):
        for stage, calls in enumerate(rank_calls(plan, rank, mask, backward, how)):
            numbers = [call.number for call in calls]
            assert numbers == sorted(set(numbers)) and (how != AS_PLANNED or numbers in ([], [0]))
            for call in calls:
                assert call.sends or call.receives
                sent.update((stage, call.number, rank, *part) for part in call.sends)
                received.update((stage, call.number, part.peer, rank, *part[1:]) for part in call.receives)
                for part in call.sends:
                    assert 0 <= part.start < part.stop and part.peer != rank
                    bytes_between[stage, rank, part.peer] += part.stop - part.start
    assert sent == received and max(sent.values(), default=1) == 1
    planned: Counter[tuple[int, int, int]] = Counter()
    t, size = plan.programs[mask][backward].transfers, plan.programs[mask][backward].transfers.bytes(plan.shape)
    for stage, source, target, n in zip(
        t.stage.tolist(), t.source.tolist(), t.target.tolist(), size.tolist(), strict=True
    ):
        planned[stage, source, target] += n
    assert bytes_between == +planned
    # A message's parts are disjoint and cover it completely.
    ends: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for stage, _, rank, peer, start, stop in sent:
        ends.setdefault((stage, rank, peer), []).append((start, stop))
    for message, parts in ends.items():
        edges = [0] + [edge for part in sorted(parts) for edge in part] + [planned[message]]
        assert edges[::2] == edges[1::2]


def check_crossings(plan: Plan, mask: int, backward: bool) -> bool:
    """Check that under relayed ``needed`` traffic every key enters a node once, and every gradient of keys leaves it
    once; return whether anything is relayed.

    Where relays are allowed but not faster, keys come directly from their owners.
    """
    traffic = plan.placement.traffic
    if traffic.kind != "needed" or not traffic.relay or plan.placement.assemble_own:  # no relays for scattered tokens
        return False
    t, node = plan.programs[mask][backward].transfers, plan.cluster.ranks_per_node
    keys, gradients = t.take(t.kind == Kind.KV), t.take(t.kind == Kind.DKV)
    if (keys.source == keys.owner).all() and (gradients.target == gradients.owner).all():
        return False
    t = t.take(t.source // node != t.target // node)
    entered: Counter[tuple[int, ...]] = Counter()
    left: Counter[tuple[int, ...]] = Counter()
    for _, source, target, kind, owner, start, stop, h0, h1, _ in t.matrix().T.tolist():
        tokens = [(owner, token, head) for token in range(start, stop) for head in range(h0, h1)]
        if kind == Kind.KV:
            entered.update((target // node, *one) for one in tokens)
        elif kind == Kind.DKV:
            left.update((source // node, *one) for one in tokens)
    assert max(entered.values(), default=1) == 1, "a key crosses into a node twice"
    assert max(left.values(), default=1) == 1, "a gradient leaves a node twice"
    if backward and not plan.programs[mask][1].keys_kept:
        assert entered == left, "gradients take the way of the keys back"
    return True


@pytest.mark.parametrize("strategy", ["blocks", "groups"])
def test_relayed_keys_cross_once(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small random plans are hardly ever faster with relays, so here the schedule with most relays is taken."""
    monkeypatch.setattr(analysis, "_contended_ns", lambda found: -len(found.needs.keys.relays))
    plan = Planner(4, 2, 8, cluster=cluster("h100", 2, 3), strategy=strategy)([500, 30])
    plan.check()
    assert [check_crossings(plan, 0, backward) for backward in (False, True)] == [True, True]
    for backward in (False, True):
        check_calls(plan, 0, backward, AS_PLANNED)


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=SOME, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_rounds_calls_and_relays_of_any_plan(name: str, data: st.DataObject) -> None:
    if name in PARTITIONED:
        pytest.importorskip("mtkahypar")
    planner, call = data.draw(cases(name))
    plan = planned(planner, call)
    if plan is None:
        return
    plan.check()
    chunk_bytes = data.draw(st.sampled_from([None, 64, 1000]))
    rounds_per_call = data.draw(st.integers(1, 5))
    for mask in range(len(plan.batch.masks)):
        for backward in (False, True):
            program = plan.programs[mask][backward]
            rounds = plan.rounds(mask, backward, chunk_bytes, rounds_per_call)
            assert rounds is plan.rounds(mask, backward, chunk_bytes, rounds_per_call)
            judge(rounds, program, plan.shape, plan.cluster)
            check_calls(plan, mask, backward, AS_PLANNED)
            check_calls(plan, mask, backward, CallSettings(rounds_per_call, chunk_bytes))
            check_crossings(plan, mask, backward)
    for rank in range(plan.ranks):
        moved = sum(plan.bytes(backward, mask) for mask in range(len(plan.batch.masks)) for backward in (False, True))
        assert plan.peers(rank) == [p for p in range(plan.ranks) if moved[rank, p] or moved[p, rank]]
