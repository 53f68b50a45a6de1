"""Proves the routes of keys between nodes: every reader gets every token once, each token enters a node once, the
node's network ports share what enters, and detours inside the node stay small.
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
from flexcp.schedule import routes as schedule_routes
from flexcp.schedule.needs import Pieces
from flexcp.schedule.routes import OVER, STARTS, Relays, Routes, kept_bytes, route_keys
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Kind, Shape

SHAPE = Shape(8, 4, 64, 64)


@st.composite
def readings(draw: st.DrawFn) -> tuple[Pieces, Cluster]:
    """Draw pieces of keys as the planner's analysis makes them: those of one reader and owner are disjoint."""
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
    """Return how often each (reader, owner, token, head) is delivered, including to ranks that only pass it on."""
    found: Counter[tuple[int, ...]] = Counter()
    for rank, owner, start, stop, h0, h1, _ in routes.direct.matrix().T.tolist():
        found.update((rank, owner, t, h) for t in range(start, stop) for h in range(h0, h1))
    for piece, rank in zip(routes.relays.piece.tolist(), routes.relays.rank.tolist(), strict=True):
        _, owner, start, stop, h0, h1, _ = (int(c[piece]) for c in routes.direct.matrix())
        found.update((rank, owner, t, h) for t in range(start, stop) for h in range(h0, h1))
    return found


@settings(max_examples=30, deadline=None)
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
    passing = set(routes.direct.rank[np.unique(routes.relays.piece)].tolist())
    assert all(what in wanted or what[0] in passing for what in found)
    size = machine.ranks_per_node
    same_node = routes.direct.owner // size == routes.direct.rank // size
    assert not np.any(same_node[routes.relays.piece]), "keys of the own node come from their owner"
    entered: Counter[tuple[int, ...]] = Counter()
    for rank, owner, start, stop, h0, h1, _ in routes.direct.take(~same_node).matrix().T.tolist():
        entered.update((rank // size, owner, t, h) for t in range(start, stop) for h in range(h0, h1))
    assert max(entered.values(), default=1) == 1
    for piece, rank in zip(routes.relays.piece.tolist(), routes.relays.rank.tolist(), strict=True):
        entry = int(routes.direct.rank[piece])
        assert entry != rank and entry // size == rank // size


def test_what_one_rank_reads_enters_through_several_ports_of_its_node() -> None:
    machine = cluster("a100", nodes=2, ranks_per_node=4)
    keys = Pieces(*np.array([(0, owner, 0, 16384, 0, 4, 0) for owner in range(4, 8)]).T)
    routes = route_keys(keys, SHAPE, machine)
    entering = np.bincount(routes.direct.rank, routes.direct.amount, minlength=8)
    assert entering[:4].max() <= 2.1 * entering[:4].mean() and np.count_nonzero(entering) >= 2
    assert entering.sum() == keys.amount.sum()


def test_a_small_read_makes_no_detour() -> None:
    machine = cluster("a100", nodes=2, ranks_per_node=4)
    keys = Pieces(*np.array([(0, 4, 0, 256, 0, 4, 0), (1, 5, 0, 256, 0, 4, 0)]).T)
    routes = route_keys(keys, SHAPE, machine)
    assert len(routes.relays) == 0 and routes.direct.matrix().tolist() == keys.matrix().tolist()


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


def test_what_all_ranks_of_a_node_read_enters_in_turns_whatever_its_heads() -> None:
    """Each port gets four chunks, dealt out in turns."""
    machine = cluster("a100", nodes=2, ranks_per_node=4)
    owned = {4: (0, 2), 5: (2, 4)}
    keys = Pieces(*np.array([(r, owner, 100, 32_868, *owned[owner], 1) for r in range(4) for owner in owned]).T)
    direct, relays = route_keys(keys, SHAPE, machine)
    turns = [(owner, 100 + 4096 * turn) for owner in owned for turn in range(8)]
    assert direct.matrix().T.tolist() == [
        [turn % 4, owner, start, start + 4096, *owned[owner], 1] for turn, (owner, start) in enumerate(turns)
    ]
    passed_on = [(turn, rank) for turn in range(16) for rank in range(4) if rank != turn % 4]
    assert list(zip(relays.piece.tolist(), relays.rank.tolist(), strict=True)) == passed_on


def entries_by_hand(chunks: Pieces, readers: Relays, machine: Cluster, least: int) -> list[int]:
    """Return the rank through which each chunk enters its node, chunk by chunk.

    The readers of chunks take turns; what exceeds a port's share goes to ranks of the node that have room.
    """
    size = machine.ranks_per_node
    amount = chunks.amount.tolist()
    mine = [readers.rank[readers.piece == chunk].tolist() for chunk in range(len(chunks))]
    entry = [ranks[chunk % len(ranks)] for chunk, ranks in enumerate(mine)]
    for node in range(machine.nodes):
        here = [chunk for chunk in range(len(chunks)) if chunks.rank[chunk] == node]
        share = max(-(-OVER * sum(amount[chunk] for chunk in here) // size), least)
        filled, kept, over = Counter[int](), Counter[int](), []
        for chunk in here:
            filled[entry[chunk]] += amount[chunk]
            if filled[entry[chunk]] > share:
                over.append(chunk)
            else:
                kept[entry[chunk]] += amount[chunk]
        line = [rank for rank in range(node * size, node * size + size) for _ in range(max(share - kept[rank], 0))]
        laid = 0
        for chunk in over:
            entry[chunk] = line[laid]
            laid += amount[chunk]
    return entry


def test_ports_share_what_enters_as_counted_chunk_by_chunk() -> None:
    """Few ranks read much, in pieces of uneven lengths; with latency a port may take more, as each start costs time."""
    detours = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        machine = replace(cluster("a100", nodes=2, ranks_per_node=4), latency_ns=int(rng.integers(0, 3)) * 20)
        rows = []
        for rank in rng.choice(8, 3, replace=False).tolist():
            for owner in rng.choice(8, 5, replace=False).tolist():
                start = int(rng.integers(0, 50))
                if owner // 4 != rank // 4:
                    rows.append((rank, owner, start, start + int(rng.integers(1, 2000)), 0, 1, 1))
        chunks, readers, _ = schedule_routes._chunks(Pieces(*np.array(rows).T), machine)
        each = SHAPE.element_bytes * (SHAPE.head_dim + SHAPE.v_head_dim)
        least = STARTS * machine.latency_ns * machine.inter_mbps // (1000 * each)
        entry = schedule_routes._entries(chunks, readers, SHAPE, machine)
        assert entry.tolist() == entries_by_hand(chunks, readers, machine, least)
        reading = set(zip(readers.piece.tolist(), readers.rank.tolist(), strict=True))
        detours += sum(pair not in reading for pair in enumerate(entry.tolist()))
    assert detours > 20


def test_kept_keys_are_all_that_arrive_relayed_ones_too() -> None:
    machine = cluster("a100", nodes=2, ranks_per_node=2)
    direct = Pieces(*np.array([(0, 2, 0, 10, 0, 4, 0), (0, 3, 0, 5, 0, 2, 0), (1, 3, 5, 7, 0, 4, 0)]).T)
    found = kept_bytes(Routes(direct, Relays(np.array([1]), np.array([1]))), SHAPE, machine)
    each, lines = 2 * (64 + 64), schedule_routes.SHELF_LINES
    assert found.tolist() == [50 * each + 2 * lines, 18 * each + 2 * lines, 0, 0]
