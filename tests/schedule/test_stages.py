"""Proves stages: their parts cover every piece of keys once, an exchange is cut into stages where it is exposed and not
where it is hidden, and own work is placed where it hides transfers.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import flexcp
from flexcp.batch import make_batch
from flexcp.clusters import Cluster, cluster
from flexcp.compare.compare import attention_only, planned
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.executor.run.rank_program import rank_program
from flexcp.masks import area
from flexcp.plan.memory import KEYS, QUERIES
from flexcp.plan.placement import Divisions
from flexcp.planners.request import Request
from flexcp.schedule import analysis, stages
from flexcp.schedule.flows import Flows, Moves
from flexcp.schedule.needs import Pieces
from flexcp.schedule.parts import CUT_TOKENS, cut_by_divisions, cut_into_stages, shares_are_long
from flexcp.schedule.stages import (
    PARTS,
    ExchangeTimes,
    Peers,
    Stages,
    choose_stages,
    equal_borders,
    faster_way,
    find_peers,
    slots_of,
    worth_simulating,
)
from flexcp.schedule.work import Work
from flexcp.shape import Kind, Shape
from flexcp.simulator.passes import Rules
from flexcp.simulator.training import simulate

Ints = NDArray[np.int64]


@st.composite
def key_pieces(draw: st.DrawFn) -> tuple[Pieces, Ints, Cluster]:
    machine = cluster("h100", nodes=draw(st.integers(1, 3)), ranks_per_node=draw(st.integers(1, 4)))
    rows = []
    for rank in range(machine.ranks):
        for owner in range(machine.ranks):
            start = 0
            for length in draw(st.lists(st.integers(1, 700), max_size=3)) if owner != rank else []:
                h0 = draw(st.integers(0, 1))
                rows.append(
                    (rank, owner, start, start + length, h0, draw(st.integers(h0 + 1, 3)), draw(st.integers(0, 1)))
                )
                start += length + draw(st.integers(0, 5))
    pieces = Pieces(*np.array(rows, np.int64).reshape(-1, 7).T)
    return pieces, np.array(draw(st.lists(st.integers(1, 4), min_size=machine.ranks, max_size=machine.ranks))), machine


@settings(max_examples=80, deadline=None)
@given(key_pieces())
def test_parts_cover_every_piece_once_in_stages_that_exist(case: tuple[Pieces, Ints, Cluster]) -> None:
    pieces, count, machine = case
    parts, stage, _ = cut_into_stages(pieces, equal_borders(count), machine)
    assert np.all((stage >= 1) & (stage <= count[parts.rank]))
    tokens = {}
    for table in (pieces, parts):
        found = [(*row[:2], token, *row[4:]) for row in table.matrix().T.tolist() for token in range(row[2], row[3])]
        tokens[len(tokens)] = sorted(found)
    assert tokens[0] == tokens[1]
    starts = {(r, o, s, a, b) for r, o, s, _, a, b, _ in pieces.matrix().T.tolist()}
    for rank, owner, start, _, h0, h1, _ in parts.matrix().T.tolist():
        whole = max(s for r, o, s, a, b in starts if (r, o, a, b) == (rank, owner, h0, h1) and s <= start)
        assert (start - whole) % CUT_TOKENS == 0


def test_the_parts_of_a_large_piece_are_equal() -> None:
    machine = cluster("h100", nodes=2, ranks_per_node=1)
    pieces = Pieces(*np.array([[0, 1, 0, 4096, 0, 2, 0]]).T)
    parts, stage, _ = cut_into_stages(pieces, equal_borders(np.array([4, 1])), machine)
    assert parts.stop.tolist() == [1024, 2048, 3072, 4096] and stage.tolist() == [1, 2, 3, 4]


def plan_of(inter_mbps: int) -> flexcp.Plan:
    machine = replace(cluster("h100", nodes=2, ranks_per_node=2), inter_mbps=inter_mbps)
    planner = flexcp.Planner(heads=32, kv_heads=8, head_dim=128, cluster=machine, strategy="blocks")
    return planner([65536, 1000, 3000, 512], flexcp.masks.causal())


def test_a_slow_link_is_cut_into_stages_and_a_fast_one_is_not() -> None:
    fast, slow = plan_of(10**9), plan_of(2_000)
    for plan, most in ((fast, 1), (slow, 4)):
        plan.check()
        t = plan.programs[0][1].transfers
        crosses = (t.kind == Kind.KV) & (t.source == t.owner) & (t.source // 2 != t.target // 2)
        assert len(set(t.stage[crosses].tolist())) == most


def test_relays_follow_one_stage_behind_and_gradients_leave_when_their_work_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(analysis, "_contended_ns", lambda found: -len(found.needs.keys.relays))
    t = plan_of(2_000).programs[0][1].transfers
    names = ["stage", "source", "target", "owner", "start", "stop", "h0", "h1"]

    def rows(kind: Kind) -> list[tuple[int, ...]]:
        return list(zip(*(getattr(t.take(t.kind == kind), n).tolist() for n in names), strict=True))

    entered = {(r[2], *r[3:]): r[0] for r in rows(Kind.KV) if r[1] == r[3]}
    relayed = {(r[1], *r[3:]): r[0] for r in rows(Kind.KV) if r[1] != r[3]}
    assert relayed and all(stage == entered[piece] + 1 for piece, stage in relayed.items())
    home = {(r[1], *r[3:]): r[0] for r in rows(Kind.DKV) if r[2] == r[3]}
    back = {(r[2], *r[3:]): r[0] for r in rows(Kind.DKV) if r[2] != r[3]}
    assert back == {piece: stage + 2 for piece, stage in relayed.items()}
    assert home == {piece: stage + (4 if piece in relayed else 2) for piece, stage in entered.items()}


def test_own_work_is_shared_between_both_ends_as_the_plan_says() -> None:
    plan = plan_of(50_000)
    program = plan.programs[0][1]
    assert program.held and 0 < max(program.held) < 1000
    for rank, held in enumerate(program.held):
        slots = rank_program(plan, rank, 0, backward=True).slots
        own = np.zeros(len(slots), np.int64)
        everything = 0
        for number, slot in enumerate(slots):
            for work in slot.work:
                amount = int(area(work.slices).sum()) * (work.h1 - work.h0)
                everything += amount
                if (work.q_shelf, work.kv_shelf) == (QUERIES, KEYS):
                    own[number] += amount
        assert everything == plan.work()[rank]
        t = program.transfers
        last = int(t.stage[(t.target == rank) & np.isin(t.kind, (Kind.Q, Kind.KV))].max(initial=1))
        assert np.flatnonzero(own).tolist() in ([0, last + 1], [0], [last + 1])
        # The cut is only as fine as one tile of rows against all keys of a document.
        coarse = CUT_TOKENS * 65536 * 32
        assert abs(int(own[last + 1]) - int(own.sum()) * held // 1000) <= coarse


def test_without_results_to_return_nothing_is_held() -> None:
    """A forward to which only keys travel has no results to return; its backward returns gradients of keys."""
    nodes = replace(cluster("h100", nodes=2, ranks_per_node=2), inter_mbps=50_000)
    forward, backward = flexcp.Planner(heads=32, kv_heads=8, head_dim=128, cluster=nodes, strategy="blocks")(
        [4096, 4096], flexcp.masks.causal(), layout="zigzag"
    ).programs[0]
    assert set(forward.transfers.kind.tolist()) == {Kind.KV} and forward.held == ()
    assert Kind.DKV in backward.transfers.kind and min(backward.held) > 0
    machine = cluster("h100", nodes=1, ranks_per_node=2)
    alone = flexcp.Planner(heads=8, kv_heads=2, head_dim=64, cluster=machine, strategy="blocks")(
        [512, 512], flexcp.masks.causal()
    )
    assert [p.held for p in alone.programs[0]] == [(), ()]


def test_stages_are_part_of_the_plans_identity() -> None:
    plan = plan_of(50_000)
    program = plan.programs[0][1]
    other = replace(plan, programs=((plan.programs[0][0], replace(program, held=tuple(h // 2 for h in program.held))),))
    other.check()
    assert other.hash != plan.hash


def test_stages_are_capped_where_waiting_for_each_other_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """On four nodes simulation, which the choice does not use, confirms that fewer stages than each rank would take are
    faster.
    """
    batch = make_batch(draw_lengths("libra256k", 8192 * 32, 0), flexcp.causal())
    request = attention_only(Request(batch, Shape(32, 8, 128, 128), cluster("h100", 4, 8), CostModel()))
    monkeypatch.setattr(analysis, "_contended_ns", lambda found: -len(found.needs.keys.relays))
    _, capped = planned(request, "blocks")
    monkeypatch.setattr(stages, "TOGETHER_PERMILLE", 10**9)
    _, free = planned(request, "blocks")
    assert capped.programs[0][0].stages < free.programs[0][0].stages
    times = [simulate(plan, rules=Rules(contention=False)).pass_ns(False) for plan in (capped, free)]
    assert times[0] < 0.9 * times[1]


@pytest.mark.parametrize("relayed", [False, True])
def test_ranks_of_a_node_begin_with_different_owners_of_another(relayed: bool) -> None:
    """A team of four ranks reads all tokens of four others, one head each: in every stage each owner sends to one of
    them if the order is that of distance, and never to all of them.
    """
    machine = cluster("h100", 2, 4)
    rows = [(rank, owner, 0, 512, rank - 4, rank - 3, 0) for rank in range(4, 8) for owner in range(4)]
    pieces, borders = Pieces(*np.array(rows, np.int64).T), equal_borders(np.full(8, 4))
    parts, stage, _ = cut_into_stages(pieces, borders, machine, relayed=relayed)
    for number in range(1, 5):
        owners = np.bincount(parts.owner[stage == number], minlength=4)
        assert owners.max() <= 2 and (not relayed or owners.tolist() == [1, 1, 1, 1])


def test_shares_bring_some_of_every_owner_in_every_stage() -> None:
    """Two ranks read 1,024 and 640 tokens of three others; with shares every stage has its part of both."""
    rows = [(rank, owner, 0, tokens, 0, 1, 0) for rank in (3, 4) for owner, tokens in ((0, 1024), (1, 640), (2, 1024))]
    pieces, machine = Pieces(*np.array(rows, np.int64).T), cluster("h100", 5, 1)
    borders = np.tile([0, PARTS // 4, PARTS], (5, 1))
    parts, stage, piece = cut_into_stages(pieces, borders, machine, in_shares=True)
    for number, share in ((1, 0.25), (2, 0.75)):
        mine = stage == number
        got = np.bincount(piece[mine], (parts.stop - parts.start)[mine], len(rows))
        assert np.abs(got - share * (pieces.stop - pieces.start)).max() <= CUT_TOKENS // 2
    assert np.bincount(piece, parts.stop - parts.start).tolist() == (pieces.stop - pieces.start).tolist()


def test_shares_are_for_long_messages() -> None:
    """A share of 400 tokens of a KV head is 204,800 bytes: 5.1 microseconds of a link of 50 GB/s at 80 %."""
    machine, shape, cost = cluster("h100", 3, 1), Shape(8, 1, 128, 128), CostModel(message_ns=1000)
    two = Stages(np.full(3, 2), np.zeros(3), np.zeros(3), equal_borders(np.full(3, 2)))
    for tokens, long in ((2 * 300, False), (2 * 400, True)):
        pieces = Pieces(*np.array([(0, 1, 0, tokens, 0, 1, 0), (0, 2, 0, tokens, 0, 1, 0)], np.int64).T)
        assert shares_are_long(pieces, two, shape, machine, cost) == long
    one = two._replace(number=np.ones(3, np.int64))
    assert not shares_are_long(pieces, one, shape, machine, cost)
    many, owners = cluster("h100", 64, 1), np.arange(1, 40)
    rows = np.column_stack(
        [0 * owners, owners, 0 * owners, 0 * owners + 99_000, 0 * owners, 1 + 0 * owners, 0 * owners]
    )
    assert not shares_are_long(Pieces(*rows.T), two, shape, many, cost)
    assert shares_are_long(Pieces(*rows[:32].T), two, shape, many, cost)


@pytest.mark.parametrize("heads", [1, 4])
def test_shares_of_few_tokens_would_be_uneven(heads: int) -> None:
    """However slow the link is: pieces are cut at multiples of 128 tokens, whatever their heads."""
    machine, shape, cost = cluster("cpu", 3, 1), Shape(8, 4, 128, 128), CostModel(message_ns=0)
    two = Stages(np.full(3, 2), np.zeros(3), np.zeros(3), equal_borders(np.full(3, 2)))
    for tokens, enough in ((2 * 191, False), (2 * 192, True)):
        pieces = Pieces(*np.array([(0, 1, 0, tokens, 0, heads, 0), (0, 2, 0, tokens, 0, heads, 0)], np.int64).T)
        assert shares_are_long(pieces, two, shape, machine, cost) == enough


def test_divisions_put_every_token_into_the_stage_of_its_block() -> None:
    """Compares with a count token by token; neighbouring tokens of one stage form one part."""
    planner = flexcp.Planner(4, 2, 64, cluster=cluster("h100", 1, 2), strategy="zigzag")
    placement = planner([300, 100]).placement
    stream = {0: [], 1: []}
    for rank, a, b in zip(placement.runs.rank.tolist(), placement.runs.start, placement.runs.stop, strict=True):
        stream[rank] += range(a, b)
    borders = np.array([0, 90, 160, 310, 400])
    keys = Pieces(*np.array([(0, 1, 3, 70, 0, 2, 0), (0, 1, 70, 199, 0, 2, 1), (1, 0, 0, 200, 0, 1, 0)]).T)
    divisions = Divisions(borders, np.array([[1, 1, 3, 2], [2, 1, 1, 3]]))
    parts, stage, piece = cut_by_divisions(keys, divisions, placement)
    found = []
    for row, (rank, owner, start, stop, *rest) in enumerate(parts.matrix().T.tolist()):
        assert start < stop and [rank, owner, *rest] == keys.matrix()[[0, 1, 4, 5, 6], piece[row]].tolist()
        found += [(int(piece[row]), token, int(stage[row])) for token in range(start, stop)]
    by_hand = []
    for number, (rank, owner, start, stop, *_) in enumerate(keys.matrix().T.tolist()):
        for token in range(start, stop):
            block = sum(stream[owner][token] >= border for border in borders[1:])
            by_hand.append((number, token, int(divisions.stage[rank, block])))
    assert found == by_hand
    changes = sum(a[0] != b[0] or a[2] != b[2] for a, b in pairwise(by_hand))
    assert len(parts) == 1 + changes


def test_divisions_give_each_rank_that_reads_keys_the_last_of_its_own_stages() -> None:
    """Three ranks and four blocks; the third rank reads no keys."""
    divisions = Divisions(np.array([0, 10, 20, 30, 40]), np.array([[1, 3, 2, 1], [1, 1, 1, 2], [4, 4, 4, 4]]))
    none = np.zeros(3, np.int64)
    work, times = Work(none + 100, none + 60, none, none), ExchangeTimes(*[none] * 5)
    assert chosen_for(work, times, [0, 1], divisions=divisions).number.tolist() == [3, 2, 1]


@pytest.mark.parametrize(("back", "home"), [(900, 50), (900, 0), (0, 50), (0, 1), (0, 0)])
def test_a_backward_on_kept_keys_takes_the_sum_of_its_slots(back: int, home: int) -> None:
    """Computed slot by slot, for ranks that receive queries and ranks that receive none.

    A rank that receives none holds back all its own work, even if results take only 1 ns.
    """
    number, queries = np.array([1, 2, 3, 1, 2, 3]), np.array([0, 0, 0, 70, 70, 70])
    own, rest, again = 1000, 600, 30
    work = Work(*(np.full(6, ns) for ns in (own, rest, again, 0)))
    times = ExchangeTimes(queries, 0 * queries, np.full(6, back), 0 * queries, np.full(6, home))
    machine = replace(cluster("h100", 1, 6), latency_ns=10)
    kept = Stages(number, 0 * number, 0 * number, equal_borders(number))
    nothing: Any = None
    with np.errstate(all="raise"):  # some ranks exchange nothing
        found = choose_stages(nothing, nothing, work, times, nothing, machine, kept)
    for rank, (stages_here, there) in enumerate(zip(number.tolist(), queries.tolist(), strict=True)):
        start = 10 if stages_here > 1 and back else 0
        out = -(-back // stages_here) + start
        each = -(-(rest + (stages_here - 1) * again) // stages_here)
        last = out + home - (10 if back and home else 0)  # both leave in one exchange
        held = 1000 * last // (there + last) if there + last else 0
        after = own * held // 1000
        slots = [max(own - after, there), each] if there else [own - after + each]
        slots += [max(each, out)] * (stages_here - 1)
        assert found.held[rank] == held and found.ns[rank] == sum(slots) + max(after, last)


def test_slots_are_those_of_the_picture() -> None:
    """A rank of two stages with relays, one that receives nothing, and one that computes queries moved
    to it, by hand.
    """
    work = Work(*np.array([[1000, 70, 1000], [600, 0, 300], [20, 5, 0], [100, 0, 0]]))
    times = ExchangeTimes(*np.array([[200, 0, 100], [40, 0, 0], [300, 0, 0], [0, 0, 0], [50, 0, 200]]))
    machine = replace(cluster("h100", 1, 3), latency_ns=10)
    with np.errstate(all="raise"):
        found = slots_of(np.array([2, 1, 1]), work, times, machine)
    # Rank 0: half of 200 and half of 40 ns arrive first, each with a start of 10 ns; gradients and results leave in one
    # exchange of 160 + 50 - 10 ns, hidden behind 200 / (140 + 200) of the own work. The first stage has all the work
    # that waits for queries.
    assert found[0].tolist() == [[412, 70, 334], [360, 0, 300], [260, 0, 666], [588, 0, 0]]
    assert found[1].tolist() == [[140, 0, 100], [110, 0, 0], [160, 0, 200], [200, 0, 0]]


def chosen_for(
    work: Work,
    times: ExchangeTimes,
    readers: list[int],
    assemble_own: bool = False,
    divisions: Divisions | None = None,
) -> Stages:
    ranks, wishes = len(work.own), SimpleNamespace(divisions=divisions)
    placement: Any = SimpleNamespace(ranks=ranks, assemble_own=assemble_own, wishes=wishes)
    needs: Any = SimpleNamespace(keys=SimpleNamespace(direct=SimpleNamespace(rank=np.array(readers))))
    alone = Peers(*np.zeros((3, 0), np.int64), np.zeros(2 * ranks + 1, np.int64))
    return choose_stages(placement, needs, work, times, alone, replace(cluster("h100", 1, ranks), latency_ns=0))


def test_only_ranks_that_read_keys_and_wait_for_them_take_more_stages() -> None:
    """With as much to receive as to compute, s stages take (s + 1) / s of either time, and there are at most four."""
    some, none = np.full(3, 1200), np.zeros(3, np.int64)
    times = ExchangeTimes(np.array([1200, 1200, 0]), none, none, none, none)
    found = chosen_for(Work(none, some, none, none), times, [0, 2])
    assert found.number.tolist() == [4, 1, 1] and found.ns.tolist() == [1500, 2400, 1200]
    assert found.borders.tolist() == [[0, 300, 600, 900, 1200], [0, *[1200] * 4], [0, *[1200] * 4]]


def test_one_more_stage_is_taken_if_it_saves_more_than_a_hundredth() -> None:
    """One stage takes 2400 ns, two 1800, three 1600 and four 1500, plus what each further stage costs for ``again``."""
    one, none = np.array([1200]), np.zeros(1, np.int64)
    for again, number in ((0, 4), (170, 3), (574, 2), (576, 1)):
        work = Work(none, one, np.array([again]), none)
        assert chosen_for(work, ExchangeTimes(one, none, none, none, none), [0]).number.tolist() == [number], again


def test_with_own_tokens_to_assemble_everything_comes_one_after_the_other() -> None:
    work = Work(*np.array([[1], [20], [7], [5]]))
    found = chosen_for(work, ExchangeTimes(*np.array([[300], [9], [4000], [9], [50000]])), [0], assemble_own=True)
    assert (found.ns.tolist(), found.number.tolist(), found.held.tolist()) == ([54321], [1], [0])


def test_peers_are_the_pairs_of_ranks_between_which_anything_moves() -> None:
    def flows(*rows: tuple[int, int, int]) -> Flows:
        return Flows(*np.array(rows, np.int64).reshape(-1, 3).T)

    none = flows()
    moves = Moves(flows((0, 1, 8), (2, 0, 8)), none, none, none, flows((1, 1, 8)), flows((1, 0, 8)), flows((0, 1, 9)))
    found = find_peers(moves, cluster("h100", 2, 2))
    pairs = list(zip(*(column.tolist() for column in found[:3]), strict=True))
    assert pairs == [(1, 0, 0), (2, 0, 1), (0, 1, 0)]
    assert found.senders.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert len(find_peers(Moves(*[none] * 7), cluster("h100", 2, 2)).source) == 0


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        (126, [(0, 126, 2)]),
        (127, [(0, 127, 1)]),
        (128, [(0, 128, 1)]),
        (130, [(0, 128, 1), (128, 130, 2)]),
        (384, [(0, 256, 1), (256, 384, 2)]),
        (1000, [(0, 512, 1), (512, 1000, 2)]),
    ],
)
def test_pieces_are_cut_at_the_nearest_tile(tokens: int, parts: list[tuple[int, int, int]]) -> None:
    pieces = Pieces(*np.array([[0, 1, 0, tokens, 0, 1, 0]]).T)
    found, stage, _ = cut_into_stages(pieces, equal_borders(np.array([2, 2])), cluster("h100", 2, 1))
    assert list(zip(found.start.tolist(), found.stop.tolist(), stage.tolist(), strict=True)) == parts


@pytest.mark.parametrize(
    ("across", "amounts"),
    [
        ((0, 600, 1200), [(1, 1, 2048), (2, 2, 2048), (3, 3, 2048)]),
        ((0, 900, 1200), [(1, 1, 2048), (2, 2, 2048), (3, 2, 1024), (3, 3, 1024)]),
    ],
)
def test_inside_first_has_the_nodes_own_keys_in_its_first_stage_and_the_others_by_their_borders(
    across: tuple[int, ...], amounts: list[tuple[int, int, int]]
) -> None:
    rows = [(0, owner, 0, 1024, 0, 2, 0) for owner in (1, 2, 3)]
    borders = equal_borders(np.full(4, 3))
    found, stage, piece = cut_into_stages(Pieces(*np.array(rows).T), borders, cluster("h100", 2, 2), across)
    assert sorted(zip(found.owner.tolist(), stage.tolist(), found.amount.tolist(), strict=True)) == amounts
    assert found.owner.tolist() == [rows[number][1] for number in piece]


def way(contended_ns: int, inside_first: bool = False, others: tuple[Stages, ...] = ()) -> Stages:
    one = np.ones(2, np.int64)
    borders = (0, 1200) * inside_first
    return Stages(one, 0 * one, one, one[:, None], across_borders=borders, contended_ns=contended_ns, others=others)


def test_another_way_is_taken_up_to_a_time() -> None:
    thin = way(9_000)
    plain = way(1_000, others=(thin,))
    taken = faster_way(plain, way(1_012, True), 1012)
    assert taken.inside_first and [other.contended_ns for other in taken.others] == [1_000, 9_000]
    assert not taken.others[0].others
    left = faster_way(plain, way(1_013, True), 1012)
    assert not left.inside_first and [other.inside_first for other in left.others] == [True, False]
    next_best = faster_way(plain, way(1_000, True, others=(way(1_001, True),)))
    assert [other.contended_ns for other in next_best.others] == [1_001, 1_000, 9_000]


def test_the_fastest_other_way_is_simulated_if_it_is_close() -> None:
    assert worth_simulating(way(1_000)) is None
    for other, worth in ((stages.UNSURE_PERMILLE, True), (stages.UNSURE_PERMILLE + 1, False)):
        found = worth_simulating(way(1_000, others=(way(9_000), way(other))))
        assert (found is not None and found.contended_ns == other) == worth
    same = worth_simulating(way(1_000, others=(way(1_000), way(1_001))))
    assert same is not None and same.contended_ns == 1_001
