"""Proves routes: every reader gets every token once, each token enters a node once, ports share what enters,
detours stay small.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import flexcp
from flexcp.clusters import Cluster, cluster
from flexcp.plan.placement import Traffic
from flexcp.schedule.needs import Pieces
from flexcp.schedule.routes import Routes, route_keys
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Kind, Shape

SHAPE = Shape(8, 4, 64, 64)


@st.composite
def readings(draw: st.DrawFn) -> tuple[Pieces, Cluster]:
    """Pieces as needs makes them: of one reader and owner disjoint, ``partial`` the same for everybody."""
    machine = cluster("a100", nodes=draw(st.integers(1, 3)), ranks_per_node=draw(st.integers(1, 4)))
    rows = []
    for rank in range(machine.ranks):
        for owner in set(range(machine.ranks)) - {rank}:
            start = 0
            for gap, length in draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 500)), max_size=3)):
                heads = draw(st.sampled_from([(0, 4), (0, 2), (2, 4)]))
                rows.append((rank, owner, start + gap, start + gap + length, *heads, 1))
                start += gap + length
    return Pieces(*np.array(rows, np.int64).reshape(-1, 7).T), machine


def delivered(routes: Routes) -> Counter[tuple[int, ...]]:
    """(reader, owner, token, head) with how often it comes, entries that only pass on included."""
    found: Counter[tuple[int, ...]] = Counter()
    for rank, owner, start, stop, h0, h1, _ in routes.first.matrix().T.tolist():
        found.update((rank, owner, t, h) for t in range(start, stop) for h in range(h0, h1))
    for piece, rank in zip(routes.relays.first.tolist(), routes.relays.rank.tolist(), strict=True):
        _, owner, start, stop, h0, h1, _ = (int(c[piece]) for c in routes.first.matrix())
        found.update((rank, owner, t, h) for t in range(start, stop) for h in range(h0, h1))
    return found


@settings(max_examples=60, deadline=None)
@given(readings(), st.integers(0, 1))
def test_every_reader_gets_every_token_once_and_each_enters_a_node_once(
    case: tuple[Pieces, Cluster], fast: int
) -> None:
    keys, machine = case
    # Without latency even the smallest detour is worth it.
    machine = replace(machine, latency_ns=machine.latency_ns * fast)
    routes = route_keys(keys, SHAPE, machine)
    found = delivered(routes)
    wanted = delivered(Routes(keys, routes.relays.take(slice(0, 0))))
    assert all(found[what] == 1 for what in wanted) and max(found.values(), default=1) == 1
    passing = set(routes.first.rank[np.unique(routes.relays.first)].tolist())
    assert all(what in wanted or what[0] in passing for what in found)
    size = machine.ranks_per_node
    same_node = routes.first.owner // size == routes.first.rank // size
    assert not np.any(same_node[routes.relays.first]), "keys of the own node come from their owner"
    entered: Counter[tuple[int, ...]] = Counter()
    for rank, owner, start, stop, h0, h1, _ in routes.first.take(~same_node).matrix().T.tolist():
        entered.update((rank // size, owner, t, h) for t in range(start, stop) for h in range(h0, h1))
    assert max(entered.values(), default=1) == 1
    for piece, rank in zip(routes.relays.first.tolist(), routes.relays.rank.tolist(), strict=True):
        entry = int(routes.first.rank[piece])
        assert entry != rank and entry // size == rank // size


def test_what_one_rank_reads_enters_through_several_ports_of_its_node() -> None:
    machine = cluster("a100", nodes=2, ranks_per_node=4)
    keys = Pieces(*np.array([(0, owner, 0, 16384, 0, 4, 0) for owner in range(4, 8)]).T)
    routes = route_keys(keys, SHAPE, machine)
    entering = np.bincount(routes.first.rank, routes.first.amount, minlength=8)
    assert entering[:4].max() <= 2.1 * entering[:4].mean() and np.count_nonzero(entering) >= 2
    assert entering.sum() == keys.amount.sum()


def test_a_small_read_makes_no_detour() -> None:
    machine = cluster("a100", nodes=2, ranks_per_node=4)
    keys = Pieces(*np.array([(0, 4, 0, 256, 0, 4, 0), (1, 5, 0, 256, 0, 4, 0)]).T)
    routes = route_keys(keys, SHAPE, machine)
    assert len(routes.relays) == 0 and routes.first.matrix().tolist() == keys.matrix().tolist()


def test_a_long_document_crosses_with_fewer_bytes_both_ways() -> None:
    machine = cluster("h100", nodes=2, ranks_per_node=4)
    planner = flexcp.Planner(heads=8, kv_heads=8, head_dim=128, cluster=machine, strategy="groups:team=1")
    with_relays = planner([65536], flexcp.masks.causal())
    placement = replace(with_relays.placement, traffic=Traffic(relay=False))
    without = make_plan(placement, with_relays.shape, machine, with_relays.cost, "groups:team=1")
    for plan in (with_relays, without):
        plan.check()
    for backward in (False, True):
        assert with_relays.inter_node_bytes(backward) <= 0.4 * without.inter_node_bytes(backward)
    t = with_relays.programs[0][1].transfers
    summed = t.take((t.kind == Kind.DKV) & (t.target != t.owner))
    assert len(summed) and np.all(summed.source // 4 == summed.target // 4)
