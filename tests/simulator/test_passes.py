"""Proves the event simulator: in any plan no port carries two messages at once, nothing happens too early, and no port
idles while it could work; small passes take exactly the nanoseconds counted by hand.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexcp
from flexcp.clusters import Cluster
from flexcp.plan.execution import one_call_ahead
from flexcp.plan.program import Program, Transfers
from flexcp.simulator.copies import Copies
from flexcp.simulator.messages import TimedChunks
from flexcp.simulator.passes import TRACKS, Pass, PassModel, Rules, pass_model, run_pass
from flexcp.simulator.training import simulate

LATENCY = 5
CALM = Rules(contention=False)


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def hand_made(
    ns: list[list[int]],
    chunks: list[tuple[int, int, int, int]],
    rules: Rules = CALM,
    slow: int = 1000,
    link: int = 1000,
    copies: Any = 0,
) -> PassModel:
    """Return a pass with compute ``[rank][slot]`` and chunks (stage, source, target, time), all inside one node.

    ``copies`` are times ``[packing or unpacking][rank][stage]``.
    """
    stage, source, target, time = np.array(chunks, np.int64).reshape(-1, 4).T
    zero = np.zeros_like(stage)
    work = np.array(ns, np.int64)
    messages = TimedChunks(stage, zero, source, target, time * 7, time, zero)
    program = rules.applied(Program(Transfers.join([]), 0, work.shape[1], execution=one_call_ahead(work.shape[1])))
    paces = (np.full_like(work, slow), np.full_like(work, link))
    moved = Copies(*np.broadcast_to(np.array(copies, np.int64), (2, *work.shape)))
    how = program.execution
    return PassModel("all forward", len(ns), False, work, messages, rules, LATENCY, how, *paces, moved)


def test_a_message_hides_behind_compute_or_is_waited_for() -> None:
    # Rank 1 gets 100 ns of keys for its slot 1; both ranks post at 0, so the keys are there at 105.
    ran = run_pass(hand_made([[30, 0], [40, 50]], [(1, 0, 1, 100)]), ints(0, 0))
    assert ran.begin.tolist() == [[0, 105], [0, 105]] and ran.end.tolist() == [[30, 105], [40, 155]]
    assert (ran.chunk_begin.tolist(), ran.chunk_end.tolist()) == ([5], [105])
    assert ran.done.tolist() == [105, 155]  # rank 0 waits until its message has left
    assert ran.compute_ns.tolist() == [30, 90] and ran.wait_ns.tolist() == [75, 65]
    # A sender that begins late makes the receiver wait; a receiver with work for 200 ns hides the transfer completely.
    assert run_pass(hand_made([[30, 0], [40, 50]], [(1, 0, 1, 100)]), ints(20, 0)).begin[1, 1] == 125
    assert run_pass(hand_made([[30, 0], [200, 50]], [(1, 0, 1, 100)]), ints(0, 0)).done[1] == 250


def test_a_slot_waits_for_what_its_rank_sends_in_its_stage() -> None:
    # Rank 0 receives nothing in stage 1, but its call ends only when rank 1 has its message, at 105; stage 2 is posted
    # then.
    ran = run_pass(hand_made([[30, 20, 0], [40, 50, 0]], [(1, 0, 1, 100), (2, 0, 1, 10)]), ints(0, 0))
    assert ran.begin[0].tolist() == [0, 105, 125] and ran.chunk_begin.tolist() == [5, 110]
    # A message that it sends in a later stage delays nobody before that.
    late = run_pass(hand_made([[30, 20, 0], [40, 50, 0]], [(2, 0, 1, 100)]), ints(0, 0))
    assert late.begin[0].tolist() == [0, 30, 145]


def test_what_is_packed_leaves_later_and_what_came_is_taken_in_before_work() -> None:
    # Rank 0 packs for 20 ns, so its message leaves at 25 and its own work ends at 50; rank 1 unpacks for 7 ns before
    # its slot 1.
    copies = [[[0, 20], [0, 0]], [[0, 0], [0, 7]]]
    ran = run_pass(hand_made([[30, 0], [40, 50]], [(1, 0, 1, 100)], copies=copies), ints(0, 0))
    assert ran.chunk_begin.tolist() == [25] and ran.end.tolist() == [[50, 125], [40, 182]]
    assert ran.compute_ns.tolist() == [50, 97]
    # Without overlap the message is packed after the work of slot 0: it leaves at 30 + 20 + 5.
    turns = Rules(contention=False, ahead=0)
    ran = run_pass(hand_made([[30, 0], [40, 50]], [(1, 0, 1, 100)], turns, copies=copies), ints(0, 0))
    assert ran.chunk_begin.tolist() == [55] and ran.end.tolist() == [[30, 155], [40, 212]]


def test_ports_take_turns_and_both_directions_go_at_once() -> None:
    both = [(1, 0, 1, 100), (1, 1, 0, 60)]
    assert run_pass(hand_made([[0, 1], [0, 1]], both), ints(0, 0)).done.tolist() == [106, 106]
    # Two senders to one receiver take turns; the chunk to rank 3 goes at the same time.
    crowd = [(1, 0, 2, 100), (1, 1, 2, 50), (1, 1, 3, 50)]
    ran = run_pass(hand_made([[0, 0]] * 4, crowd), ints(0, 0, 0, 0))
    assert ran.chunk_begin.tolist() == [5, 105, 5]


def test_neighbours_share_a_network_port() -> None:
    # Ranks 0 and 1 send to ranks 2 and 3 on another node: at the same time through two ports, one after the other
    # through one.
    both = [(1, 0, 2, 100), (1, 1, 3, 60)]
    for sharing, begins in ((1, [5, 5]), (2, [5, 105])):
        model = hand_made([[0, 0]] * 4, both, Rules(ranks_per_nic=sharing))
        model = replace(model, chunks=model.chunks._replace(across=ints(1, 1)))
        assert run_pass(model, ints(0, 0, 0, 0)).chunk_begin.tolist() == begins


def test_in_line_a_sender_waits_for_its_first_receiver() -> None:
    crowd = [(1, 0, 2, 100), (1, 1, 2, 50), (1, 1, 3, 50)]
    ran = run_pass(hand_made([[0, 0]] * 4, crowd, Rules(contention=False, in_line=True)), ints(0, 0, 0, 0))
    assert ran.chunk_begin.tolist() == [5, 105, 155]


def test_a_stage_is_posted_when_the_slot_before_begins() -> None:
    # Keys of stage 2 leave when both ranks have entered slot 1, rank 0 at 80 and rank 1 at 10.
    ran = run_pass(hand_made([[80, 10, 0], [10, 20, 30]], [(2, 0, 1, 40)]), ints(0, 0))
    assert ran.chunk_begin[0] == 85 and ran.begin[1, 2] == 125
    # Without overlap they leave after rank 0 has computed slot 1, at 90.
    turns = run_pass(
        hand_made([[80, 10, 0], [10, 20, 30]], [(2, 0, 1, 40)], Rules(contention=False, ahead=0)), ints(0, 0)
    )
    assert turns.chunk_begin[0] == 95 and turns.begin[1, 2] == 135 and turns.end[1, 2] == 165


def test_compute_and_transfers_slow_each_other() -> None:
    # 100 ns of transfer at 80 % run from 5 to 130. In these 125 ns rank 1's compute, slowed by 1.25, does 100 of its
    # 300 ns; 5 ns were done before and 195 remain.
    ran = run_pass(hand_made([[0, 0], [300, 0]], [(1, 0, 1, 100)], slow=1250, link=800), ints(0, 0))
    assert ran.chunk_end[0] == 130 and ran.end[1, 0] == 325
    # Rank 2 has no transfers, so its compute is not slowed.
    alone = run_pass(hand_made([[0, 0], [300, 0], [300, 0]], [(1, 0, 1, 100)], slow=1250), ints(0, 0, 0))
    assert alone.end[:, 0].tolist() == [0, 320, 300]


def judge(ran: Pass) -> None:
    """Check every rule of the simulator on a finished timeline."""
    model, c = ran.model, ran.model.chunks
    ranks, slots = ran.begin.shape
    arrived = np.zeros((ranks, slots), np.int64)
    for end in (c.source, c.target):
        np.maximum.at(arrived, (end, c.stage), ran.chunk_end)
    how, (pack, take_in) = model.execution, model.copies
    beside = how.ahead > 0
    # Without overlap a stage is packed after the previous slot's work; otherwise stages are packed one after the other
    # at the beginning of the slot that posts them.
    before = np.concatenate([ran.start[:, None], ran.end[:, :-1]], axis=1)
    before[:, 1:] += (pack * ~beside)[:, 1:]
    np.testing.assert_array_equal(ran.begin, np.maximum(before, arrived))
    copied = take_in.copy()
    posted = before.copy()
    for stage in range(1, slots):
        if beside[stage]:
            copied[:, how.posted[stage]] += pack[:, stage]
            posted[:, stage] = (ran.begin + copied)[:, how.posted[stage]]
    posted += model.latency_ns
    ready = np.maximum(posted[c.source, c.stage], posted[c.target, c.stage])
    assert (ran.chunk_begin >= ready).all()
    assert (ran.chunk_end - ran.chunk_begin == c.ns).all() or model.rules.contention
    ports = defaultdict(list)
    for i in range(len(c.ns)):
        ports["out", int(c.across[i]), int(c.source[i])].append((int(ran.chunk_begin[i]), int(ran.chunk_end[i]), i))
        ports["in", int(c.across[i]), int(c.target[i])].append((int(ran.chunk_begin[i]), int(ran.chunk_end[i]), i))
    ends = {}
    for name, busy in ports.items():
        busy.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(busy)), f"{name} carries two chunks at once"
        ends[name] = {b[1] for b in busy}
    # The calls of a rank run one after the other: a chunk of a stage begins after all chunks of earlier stages.
    earlier = np.concatenate([np.zeros((ranks, 1), np.int64), np.maximum.accumulate(arrived, axis=1)[:, :-1]], axis=1)
    done = np.maximum(earlier[c.source, c.stage], earlier[c.target, c.stage])
    assert (ran.chunk_begin >= done).all()
    if not model.rules.in_line:  # a chunk waits only for its post, for earlier calls or a port
        for i in range(len(c.ns)):
            freed = ends["out", int(c.across[i]), int(c.source[i])] | ends["in", int(c.across[i]), int(c.target[i])]
            assert int(ran.chunk_begin[i]) in {int(ready[i]), int(done[i]), *freed}
    busy, wanted = ran.end - ran.begin, model.ns + copied
    if not model.rules.contention:
        np.testing.assert_array_equal(busy, wanted)
    else:
        assert (busy >= wanted).all() and (busy * 1000 <= wanted * model.slow + 10**4).all()


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=6),
    st.sampled_from(["blocks", "ring", "zigzag:2", "allgather", "ulysses:2", "usp:2,2", "minheap:512"]),
    st.sampled_from([flexcp.causal(), flexcp.masks.causal_blockwise(64, 1)]),
    st.booleans(),
    st.builds(
        Rules,
        st.booleans(),
        st.just(1),
        st.sampled_from([None, 0, 1, 3]),
        st.sampled_from([None, 0, 1, 3]),
        st.booleans(),
        st.sampled_from([None, 0, 200]),
    ),
)
def test_any_plan_keeps_the_rules(
    lengths: list[int], strategy: str, mask: flexcp.Mask, backward: bool, rules: Rules
) -> None:
    machine = Cluster("slow", 2, 2, gflops=100_000, intra_mbps=3000, inter_mbps=500, latency_ns=700)
    plan = flexcp.Planner(8, 4, 32, cluster=machine, strategy=strategy)(lengths, mask)
    model = pass_model(plan, 0, backward, plan.cost, rules)
    ran = run_pass(model, ints(0, 1000, 0, 50_000))
    judge(ran)
    again = run_pass(model, ints(0, 1000, 0, 50_000))
    np.testing.assert_array_equal(ran.chunk_begin, again.chunk_begin)
    assert model.chunks.size.sum() == plan.bytes(backward).sum()


def test_a_timeline_accounts_for_all_time_and_bytes() -> None:
    machine = flexcp.cluster("a100", 2, 2)
    plan = flexcp.Planner(8, 4, 32, cluster=machine, strategy="blocks")([5000, 900, 31])
    ran = run_pass(pass_model(plan, 0, True, plan.cost, Rules()), ints(0, 0, 0, 0))
    events = list(ran.events())
    assert {e.track for e in events} <= set(TRACKS)
    for rank in range(4):
        mine = [e for e in events if e.rank == rank]
        busy = sum(e.end - e.begin for e in mine if e.track in ("compute", "wait"))
        assert busy == ran.done[rank] and sum(e.end - e.begin for e in mine if e.track == "wait") == ran.wait_ns[rank]
        assert sum(e.size for e in mine if e.track.startswith("send")) == plan.bytes(True)[rank].sum()
        across = sum(e.size for e in mine if e.track == "receive across")
        assert across == plan.bytes(True)[[r for r in range(4) if r // 2 != rank // 2], rank].sum()


def test_measured_compute_takes_the_models_place() -> None:
    plan = flexcp.Planner(4, 4, 32, cluster=flexcp.cluster("h100", 1, 2), strategy="zigzag")([1000])
    slots = plan.programs[0][0].stages
    model = pass_model(plan, 0, False, plan.cost, Rules(contention=False), np.full((2, slots), 10**9))
    assert run_pass(model, ints(0, 0)).done.min() >= slots * 10**9
    with pytest.raises(ValueError, match=r"\[rank, slot\] = \(2, 2\).*got an array of \(2, 3\)"):
        pass_model(plan, 0, False, plan.cost, Rules(), np.zeros((2, 3), np.int64))


def test_a_pass_of_minutes_is_on_a_coarser_clock() -> None:
    """Nine minutes do not fit the clock of events, so longer passes use a coarser clock."""
    work, chunks, long = [[40, 30], [10, 90]], [(1, 0, 1, 25), (1, 1, 0, 60)], 1 << 36
    short = run_pass(replace(hand_made(work, chunks), latency_ns=0), ints(0, 3))
    scaled = [[ns * long for ns in row] for row in work], [(*chunk[:3], chunk[3] * long) for chunk in chunks]
    found = run_pass(replace(hand_made(*scaled), latency_ns=0), ints(0, 3 * long))
    assert short.done.min() > 0 and np.array_equal(found.done, short.done * long)
    assert np.array_equal(found.wait_ns, short.wait_ns * long) and np.array_equal(
        found.compute_ns, short.compute_ns * long
    )


def test_a_long_pass_of_a_plan_is_no_faster_than_its_bound() -> None:
    """A document of 600,000 tokens on slow ranks."""
    plan = flexcp.Planner(8, 8, 128, cluster=flexcp.cluster("cpu", 1, 2), strategy="zigzag")([600_000])
    found = simulate(plan)
    for backward in (False, True):
        assert found.pass_ns(backward) > 1 << 39 and found.pass_optimality(backward) >= 1
    assert min(int(p.wait_ns.min()) for p in found.passes[0]) >= 0
