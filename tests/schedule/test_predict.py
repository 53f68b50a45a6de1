"""Proves the closed-form predictions of time: their bytes are the plan's, their work is the mask's, and their times
follow the documented formulas.

Times are compared with :func:`by_hand`, which counts pairs in dense masks and bytes in the plan's own transfers, and
shares nothing with :mod:`flexcp.schedule.predict` except the cost model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexcp.batch import make_batch
from flexcp.clusters import Cluster, cluster
from flexcp.cost import CostModel, Model
from flexcp.masks import causal, causal_blockwise, from_slices, full, lambda_, prefix, shared_question, window
from flexcp.plan.placement import Placement, Regions, Runs, Traffic
from flexcp.plan.plan import Plan
from flexcp.plan.user_layouts import user_layout
from flexcp.planners.blocks.blocks import blocks
from flexcp.planners.request import Request
from flexcp.planners.static import static
from flexcp.schedule import rings as ring_counts
from flexcp.schedule.predict import Prediction, lower_bound, milliseconds, predict
from flexcp.schedule.rings import hop_work, rings_of
from flexcp.schedule.transfers import make_plan
from flexcp.shape import OUTPUTS, Kind, Shape

Ints = NDArray[np.int64]
SHAPE = Shape(8, 4, 16, 16)
COST = CostModel()
PLACES: dict[str, Callable[[Request], Placement]] = {
    "dp": static.dp,
    "ring": static.ring,
    "zigzag": static.zigzag,
    "allgather": static.allgather,
    "ulysses": static.ulysses,
    "usp": static.usp,
    "blocks": blocks,
}


# --- random placements ------------------------------------------------------------------------------------------------

masks = st.sampled_from(
    [causal(), full(), window(9, 3), lambda_(4, 16), shared_question(3, 0.2), causal_blockwise(16, 1), prefix(20)]
)
layers = st.dictionaries(st.sampled_from("abc"), st.tuples(masks, st.integers(1, 5)), min_size=1, max_size=2)
batches = st.builds(
    lambda lengths, named: make_batch(lengths, masks=named),
    st.lists(st.integers(1, 300), min_size=1, max_size=8),
    layers,
)


def arguments(name: str, ranks: int) -> list[str]:
    """Return the degrees that a strategy accepts on so many ranks with the heads of SHAPE."""
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    if name in ("ring", "zigzag", "allgather"):
        return ["", *map(str, divisors)]
    if name == "ulysses":
        return [str(d) for d in divisors if d in (1, 2, 4, 8)]
    if name == "usp":
        return [f"{u},{r}" for u in (1, 2, 4, 8) for r in divisors if ranks % (u * r) == 0]
    return [""]


@st.composite
def machines(draw: st.DrawFn) -> Cluster:
    nodes, each = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    preset = draw(st.sampled_from(["a100", "h100", "cpu"]))
    speeds = draw(
        st.none() | st.lists(st.sampled_from([0.5, 0.93, 1.0, 1.2]), min_size=nodes * each, max_size=nodes * each)
    )
    return cluster(preset, nodes, each, speeds=speeds)


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, Shape, Cluster]:
    """Draw a placement of any strategy, with layouts and pads, or one of arbitrary rectangles of work on arbitrary
    ranks.
    """
    machine, batch = draw(machines()), draw(batches)
    shape = replace(SHAPE, dtype=draw(st.sampled_from(["bfloat16", "float64"])))
    name = draw(st.sampled_from([*PLACES, "any"]))
    if name == "any":
        return draw(rectangles(machine.ranks)), shape, machine
    request = Request(batch, shape, machine, COST, draw(st.sampled_from(arguments(name, machine.ranks))))
    layout = draw(st.sampled_from(["free", "free", "contiguous", "zigzag", "scattered"]))
    if layout == "free" or name == "dp" or (name != "blocks" and (request.argument or layout == "scattered")):
        equal = draw(st.booleans())
        return PLACES[name](replace(request, equal_tokens=equal, pad_to=8 if equal else 1)), shape, machine
    scattered = [np.arange(r, batch.tokens, machine.ranks) for r in range(machine.ranks)]
    maps = user_layout(layout if layout != "scattered" else scattered, batch.tokens, machine.ranks)
    if name == "usp" and machine.ranks % 2:
        name = "ring"
    try:
        return PLACES[name](replace(request, layout=maps)), shape, machine
    except ValueError:  # tiny batches are scattered in every layout
        return static.dp(request), shape, machine


@st.composite
def rectangles(draw: st.DrawFn, ranks: int) -> Placement:
    """Draw one document cut into a grid of rows, keys and heads whose cells are on random ranks; tokens are dealt
    separately.
    """
    n, named = draw(st.integers(2, 60)), draw(layers)
    batch = make_batch([n], masks=named)

    def borders(end: int, most: int) -> list[int]:
        return sorted({0, end, *draw(st.lists(st.integers(1, max(1, end - 1)), max_size=most))})

    q, k, h, t = borders(n, 3), borders(n, 3), borders(SHAPE.heads, 2), borders(n, 6)
    rank = st.integers(0, ranks - 1)
    cells = [
        (draw(rank), 0, q0, q1, k0, k1, h0, h1)
        for q0, q1 in pairwise(q)
        for k0, k1 in pairwise(k)
        for h0, h1 in pairwise(h)
    ]
    runs = sorted((draw(rank), a, b) for a, b in pairwise(t))
    regions = Regions(*np.array(cells, np.int64).T)
    return Placement(batch, ranks, 0, Runs(*np.array(runs, np.int64).T), (regions,) * len(batch.masks))


# --- bytes ------------------------------------------------------------------------------------------------------------


def levels(machine: Cluster) -> list[NDArray[np.bool_]]:
    node = np.arange(machine.ranks) // machine.ranks_per_node
    across = node[:, None] != node[None, :]
    return [~across, across]


@settings(max_examples=80, deadline=None)
@given(placements())
def test_bytes_are_those_of_the_plan(case: tuple[Placement, Shape, Cluster]) -> None:
    placement, shape, machine = case
    found = predict(placement, shape, machine, COST)
    plan = make_plan(placement, shape, machine, COST, "any")
    for mask in range(len(placement.batch.masks)):
        for backward in (False, True):
            moved = plan.bytes(backward, mask)
            for level, where in enumerate(levels(machine)):
                assert found.sent[mask, int(backward), level].tolist() == (moved * where).sum(axis=1).tolist()
                assert found.received[mask, int(backward), level].tolist() == (moved * where).sum(axis=0).tolist()


# --- times, from dense masks and the plan's transfers -----------------------------------------------------------------


def pairs_by_hand(placement: Placement, mask: int, position: list[int]) -> tuple[Ints, Ints]:
    """Return pairs x heads of each rank, separately for pairs whose row and key are both kept at its position, and
    others.
    """
    keeper = np.full(placement.stream, -1)
    for rank, start, stop in zip(placement.runs.rank, placement.runs.start, placement.runs.stop, strict=True):
        keeper[start:stop] = position[rank]
    own, rest = np.zeros(placement.ranks, np.int64), np.zeros(placement.ranks, np.int64)
    batch, rules = placement.batch, placement.batch.masks[mask].rules
    for rank, document, q0, q1, k0, k1, h0, h1 in placement.regions[mask].matrix().T:
        rule = rules[document if len(rules) > 1 else 0]
        seen = rule.dense(int(batch.lengths[document]))[q0:q1, k0:k1]
        kept = keeper[batch.starts[document] : batch.starts[document + 1]] == position[rank]
        mine = int((seen & kept[q0:q1, None] & kept[None, k0:k1]).sum()) * int(h1 - h0)
        mine = 0 if placement.assemble_own else mine
        own[rank] += mine
        rest[rank] += int(seen.sum()) * int(h1 - h0) - mine
    return own, rest


def exchange_by_hand(plan: Plan, transfers: Any, cost: CostModel) -> Ints:
    """Return each rank's time for one grouped exchange, from its transfers."""
    machine, ranks = plan.cluster, plan.ranks
    moved = np.zeros((ranks, ranks), np.int64)
    np.add.at(moved, (transfers.source, transfers.target), transfers.bytes(plan.shape))
    mbps = (machine.intra_mbps, machine.inter_mbps)

    def port(axis: int) -> Ints:
        return np.maximum(
            *(cost.link_ns((moved * w).sum(axis=axis), m) for w, m in zip(levels(machine), mbps, strict=True))
        )

    leaving, arriving = port(1), port(0)
    found = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        senders, receivers = np.flatnonzero(moved[:, rank]), np.flatnonzero(moved[rank])
        peers = max(len(senders), len(receivers))
        if peers:
            busiest = max(leaving[rank], arriving[rank], *leaving[senders], 0)
            found[rank] = busiest + machine.latency_ns + cost.message_ns * (peers - 1)
    return found


def by_hand(plan: Plan, cost: CostModel) -> Ints:
    """Return the time of each rank, computed stage by stage."""
    placement, total = plan.placement, np.zeros(plan.ranks, np.int64)
    rings = placement.traffic.groups if placement.traffic.kind == "ring" else ()
    row_of = {rank: row for grid in rings for row in grid for rank in row}
    position = [min(row_of.get(r, (r,))) for r in range(plan.ranks)]
    for mask, rule in enumerate(plan.batch.masks):
        own, rest = pairs_by_hand(placement, mask, position)
        for backward in (False, True):
            transfers = plan.programs[mask][backward].transfers
            hop = np.array(
                [position[s] != position[t] for s, t in zip(transfers.source, transfers.target, strict=True)], bool
            )
            hop &= bool(rings)
            output = np.isin(transfers.kind, OUTPUTS)
            there, home = (exchange_by_hand(plan, transfers.take(x & ~hop), cost) for x in (~output, output))
            first = cost.attention_ns(own, plan.shape, plan.cluster, backward) + cost.kernel_ns * (own > 0)
            then = cost.attention_ns(rest, plan.shape, plan.cluster, backward)
            if rings and any(each not in (causal(), full()) for each in rule.rules):
                layer = there + turned_unevenly(plan, mask, backward, transfers.take(hop), position, cost) + home
            elif rings:
                hops = transfers.take(hop)
                layer = (
                    there + np.array([turned(plan, hops, r, first, then, rest, cost) for r in range(plan.ranks)]) + home
                )
            elif placement.traffic.kind == "gather":
                layer = np.maximum(first, there) + then + cost.kernel_ns * (rest > 0) + home
            else:
                grads = transfers.kind == Kind.DKV
                again = (transfers.kind == Kind.KV) & (transfers.source != transfers.owner)
                returned = grads & (transfers.target != transfers.owner)
                times = [there] + [
                    exchange_by_hand(plan, transfers.take(x), cost) for x in (again, grads, returned, output & ~grads)
                ]
                then = then + cost.kernel_ns * (rest > 0)
                if placement.assemble_own:
                    layer = first + then + there + times[2] + times[4]
                else:
                    keys = (transfers.kind == Kind.KV) & ~again
                    reads = set(transfers.target[keys].tolist())
                    works = [(int(first[r]), int(then[r]), [int(x[r]) for x in times]) for r in range(plan.ranks)]
                    peers = set(zip(transfers.source.tolist(), transfers.target.tolist(), strict=True))
                    layer = staged(works, reads, peers, plan, cost)
            # No rank goes on before it has the results that others computed for it.
            results = transfers.take(output & (transfers.source != transfers.target))
            waits = layer.copy()
            np.maximum.at(waits, results.target, layer[results.source])
            total += rule.layers * waits
        total += rule.layers * cost.linear_ns(placement.tokens, plan.shape, plan.cluster)
    return total


def slots_by_hand(work: tuple[int, int, list[int]], count: int, plan: Plan, cost: CostModel) -> list[tuple[int, int]]:
    """Return (work, time of what travels beside it) of one rank, slot by slot.

    ``work`` ends with the times of inputs, relays, gradients, gradients of relayed keys, and outputs.
    """
    own, rest, times = work
    start = plan.cluster.latency_ns if count > 1 else 0
    into, again, back, returned = (math.ceil(Fraction(x, count)) + (start if x else 0) for x in times[:4])
    part = math.ceil(Fraction(rest + (count - 1) * cost.kernel_ns, count))
    end = back + returned + times[4] - (plan.cluster.latency_ns if back and times[4] else 0)
    held = 1000 * end // max(1, into + again + end)
    waits = own * held // 1000
    travelling = [[into + again], *([into] for _ in range(count - 1)), [0], [end]]
    for slot in range(2, count + 1):  # the previous stage's gradients leave during this slot
        travelling[slot].append(back)
    computing = [own - waits, *[part] * count, waits]
    return [(work, max(moving)) for work, moving in zip(computing, travelling, strict=True)]


def staged(
    works: list[tuple[int, int, list[int]]], reads: set[int], peers: set[tuple[int, int]], plan: Plan, cost: CostModel
) -> Ints:
    """Return the time of each rank with the number of stages that is best for it alone.

    The number is capped for all ranks where fewer stages make all of them together faster by 6 %.
    """
    counts = []
    for rank, work in enumerate(works):
        times = [sum(max(slot) for slot in slots_by_hand(work, n, plan, cost)) for n in range(1, 5)]
        best = 0
        for more in range(1, 4 if rank in reads else 0):
            best = more if times[more] * 1000 < times[best] * 990 else best
        counts.append(best + 1)
    found: list[list[int]] = []
    for cap in range(max(counts), 0, -1):
        slots = [slots_by_hand(work, min(count, cap), plan, cost) for work, count in zip(works, counts, strict=True)]
        begin = [0] * plan.ranks
        for number in range(max(map(len, slots))):
            then = []
            for rank, mine in enumerate(slots):
                work, travelling = mine[number] if number < len(mine) else (0, 0)
                senders = [begin[source] for source, target in peers if target == rank]
                then.append(max(begin[rank] + work, max([begin[rank], *senders]) + travelling if travelling else 0))
            begin = then
        found.append(begin)
    least = min(map(max, found))
    return np.array(next(times for times in found if max(times) * 1000 <= least * 1060), np.int64)


def turned(plan: Plan, hops: Any, rank: int, first: Ints, then: Ints, rest: Ints, cost: CostModel) -> int:
    """Return the time of one rank in a ring: in every stage the slower of its group's slowest link and its own work."""
    grid = next(g for g in plan.placement.traffic.groups if any(rank in row for row in g))
    count = len(grid) - 1
    if count == 0:
        return int(first[rank] + then[rank])

    each = -(-int(then[rank] + cost.kernel_ns * count * (rest[rank] > 0)) // count)
    work = [int(first[rank]), *[each] * count]
    backward = bool(np.isin(hops.kind, Kind.DKV).any())
    total = 0
    for stage in range(1, count + 3):  # during slot stage - 1
        kinds = [Kind.KV] * (stage <= count) + [Kind.DKV] * (backward and stage >= 3)
        travelling = hop_ns(plan, hops, grid, kinds, cost) if kinds else 0
        total += max(work[stage - 1] if stage <= count + 1 else 0, travelling)
    return total


def hop_ns(plan: Plan, hops: Any, grid: tuple[tuple[int, ...], ...], kinds: list[Kind], cost: CostModel) -> int:
    """Return the time of the slowest link of a ring for one hop of these kinds."""
    found = [0]
    for source, target in {(a, b) for c, row in enumerate(grid) for a, b in zip(grid[c - 1], row, strict=True)}:
        mine = (hops.source == source) & (hops.target == target) & np.isin(hops.kind, kinds)
        size = -(-int(hops.bytes(plan.shape)[mine].sum()) // (len(grid) - 1))
        near = plan.cluster.node_of(source) == plan.cluster.node_of(target)
        mbps = plan.cluster.intra_mbps if near else plan.cluster.inter_mbps
        found.append(int(cost.link_ns(np.array([size]), mbps)[0]) + plan.cluster.latency_ns if size else 0)
    return max(found)


def turned_unevenly(plan: Plan, mask: int, backward: bool, hops: Any, position: list[int], cost: CostModel) -> Ints:
    """Return the time of each rank in a ring whose work differs between hops.

    A slot begins when the work before it is done and the previous rank has sent the slot's keys.
    """
    placement, batch = plan.placement, plan.batch
    keeper = np.full(placement.stream, -1)
    for rank, start, stop in zip(placement.runs.rank, placement.runs.start, placement.runs.stop, strict=True):
        keeper[start:stop] = position[rank]
    pairs: dict[tuple[int, int], int] = {}  # by rank and by the position that keeps the keys
    rules = batch.masks[mask].rules
    for rank, document, q0, q1, k0, k1, h0, h1 in placement.regions[mask].matrix().T:
        seen = rules[document if len(rules) > 1 else 0].dense(int(batch.lengths[document]))[q0:q1, k0:k1]
        kept = keeper[batch.starts[document] : batch.starts[document + 1]][k0:k1]
        for where in set(kept.tolist()):
            amount = int(seen[:, kept == where].sum()) * int(h1 - h0)
            pairs[int(rank), where] = pairs.get((int(rank), where), 0) + amount

    def work(rank: int, amount: int) -> int:
        amounts = np.zeros(plan.ranks, np.int64)
        amounts[rank] = amount
        return int(cost.attention_ns(amounts, plan.shape, plan.cluster, backward)[rank]) + cost.kernel_ns * (amount > 0)

    found = np.zeros(plan.ranks, np.int64)
    for grid in placement.traffic.groups:
        count = len(grid) - 1
        begin = {rank: 0 for row in grid for rank in row}
        before = {rank: grid[c - 1][j] for c, row in enumerate(grid) for j, rank in enumerate(row)}
        for slot in range(count + 1):
            stage = slot + 1
            kinds = [Kind.KV] * (stage <= count) + [Kind.DKV] * (backward and stage >= 3)
            travelling = hop_ns(plan, hops, grid, kinds, cost) if kinds else 0
            ends = {}
            for c, row in enumerate(grid):
                for rank in row:
                    done = begin[rank] + work(rank, pairs.get((rank, position[grid[c - slot][0]]), 0))
                    came = max(begin[rank], begin[before[rank]]) + travelling if travelling else 0
                    ends[rank] = max(done, came)
            begin = ends
        last = hop_ns(plan, hops, grid, [Kind.DKV], cost) if backward and count else 0
        for rank in begin:
            found[rank] = (max(begin[rank], begin[before[rank]]) if last else begin[rank]) + last
    return found


@settings(max_examples=60, deadline=None)
@given(placements())
def test_times_follow_the_formula(case: tuple[Placement, Shape, Cluster]) -> None:
    placement, shape, machine = case
    cost = replace(COST, row_tile_pairs=0)
    found = predict(placement, shape, machine, cost)
    assert found.rank_ns.tolist() == by_hand(make_plan(placement, shape, machine, cost, "any"), cost).tolist()


def test_very_large_rings_are_spread_as_under_a_causal_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([700, 300], lambda_(16, 128))
    request = Request(batch, SHAPE, cluster("h100", 1, 4), COST, argument="4")
    placement = static.ring(request)
    rings = rings_of(placement)
    found = hop_work(placement, batch.masks[0], placement.regions[0], rings, COST)
    assert found is not None and len(set(found[3, 1:].tolist())) > 1  # a window's work is in the first hops
    counted = predict(placement, SHAPE, request.cluster, COST).total_ns
    monkeypatch.setattr(ring_counts, "MOST_HOP_PARTS", 3)
    assert hop_work(placement, batch.masks[0], placement.regions[0], rings, COST) is None
    assert predict(placement, SHAPE, request.cluster, COST).total_ns < counted


@settings(max_examples=50, deadline=None)
@given(placements())
def test_parts_add_up_and_no_placement_beats_perfect_division(case: tuple[Placement, Shape, Cluster]) -> None:
    placement, shape, machine = case
    found = predict(placement, shape, machine, COST)
    for part in (found.attention_ns, found.exposed_ns, found.linear_ns):
        assert part.dtype == np.int64 and part.min() >= 0
    assert (
        found.total_ns == sum(found.breakdown.values()) == int(found.rank_ns[found.slowest]) == int(found.rank_ns.max())
    )
    assert lower_bound(placement.batch, shape, machine, COST) <= found.total_ns
    again = predict(placement, shape, machine, COST)
    assert again.rank_ns.tolist() == found.rank_ns.tolist()


@settings(max_examples=50, deadline=None)
@given(placements())
def test_a_better_machine_is_never_predicted_slower(case: tuple[Placement, Shape, Cluster]) -> None:
    placement, shape, machine = case
    now = predict(placement, shape, machine, COST).total_ns
    better = [
        replace(machine, intra_mbps=2 * machine.intra_mbps, inter_mbps=2 * machine.inter_mbps),
        replace(machine, latency_ns=0),
        replace(machine, gflops=2 * machine.gflops),
        replace(machine, speeds=tuple(s + 100 for s in machine.rank_speeds)),
    ]
    assert all(predict(placement, shape, m, COST).total_ns <= now for m in better)


# --- by hand ----------------------------------------------------------------------------------------------------------

SIMPLE = Cluster("simple", 1, 2, gflops=1, intra_mbps=1000, inter_mbps=1000, latency_ns=100)
ONE_HEAD = Shape(1, 1, 1, 1, "float32")
PLAIN = CostModel(
    "plain",
    forward_efficiency=2000,  # float32 runs at half the peak, so one FLOP a nanosecond
    backward_efficiency=2000,
    linear_efficiency=2000,
    link_efficiency=1000,
    row_tile_pairs=0,
    kernel_ns=0,
    message_ns=0,
    model=Model("tiny", hidden=1, layers=1, feed_forward=1),
)


def request(lengths: list[int], mask: Any, machine: Cluster = SIMPLE, argument: str = "") -> Request:
    return Request(make_batch(lengths, mask), ONE_HEAD, machine, PLAIN, argument)


def test_data_parallel_is_attention_and_linear_of_the_fuller_rank() -> None:
    placement = static.dp(request([10, 6], causal()))
    found = predict(placement, ONE_HEAD, SIMPLE, PLAIN)
    # 55 and 21 pairs with 4 FLOPs forward and 10 backward; 2 * (4 + 3) FLOPs a token, times three for both passes.
    assert found.attention_ns.tolist() == [55 * 14, 21 * 14]
    assert found.linear_ns.tolist() == [10 * 42, 6 * 42]
    assert found.exposed_ns.tolist() == [0, 0]
    assert found.breakdown == {"attention": 770, "exposed": 0, "linear": 420}
    assert str(found) == "0.001 ms on rank 0 (attention 0.001 + exposed 0.000 + linear 0.000)"
    assert milliseconds(1_234_567) == "1.235"


def test_fixed_prices_come_on_top() -> None:
    cost = replace(PLAIN, row_tile_pairs=1000, kernel_ns=5)
    found = predict(static.dp(request([10, 6, 129], full())), ONE_HEAD, SIMPLE, cost)
    # The long document needs two row tiles, each short one a tile of its own.
    assert found.attention_ns.tolist() == [(129 * 129 + 2000) * 14 + 10, (100 + 36 + 2000) * 14 + 10]


def test_layers_and_pads_count() -> None:
    batch = make_batch([10], masks={"full": (full(), 2), "window": (window(0, 0), 3)})
    asked = Request(batch, ONE_HEAD, SIMPLE, PLAIN, equal_tokens=True)
    found = predict(static.dp(asked), ONE_HEAD, SIMPLE, PLAIN)
    assert found.attention_ns.tolist() == [(2 * 100 + 3 * 10) * 14, 0]
    assert found.linear_ns.tolist() == [5 * 420, 5 * 420]  # the second rank holds ten pads


def test_a_ring_hides_each_hop_behind_work() -> None:
    machine = replace(SIMPLE, ranks_per_node=4)
    found = predict(static.ring(request([8], full(), machine)), ONE_HEAD, machine, PLAIN)
    # Two tokens a rank; four steps of 4 pairs: 16 ns forward, 40 ns backward. A hop takes 100 ns plus 2 tokens x 8
    # bytes (float32 k and v) of keys, and as much for gradients: at one byte a nanosecond always longer than the work.
    forward = 3 * 116 + 16
    backward = 116 + 116 + 132 + 116 + 116
    assert found.attention_ns.tolist() == [4 * 16 + 4 * 40] * 4
    assert (found.attention_ns + found.exposed_ns).tolist() == [forward + backward] * 4


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    placement = static.ring(request([8], full(), replace(SIMPLE, ranks_per_node=4)))
    inside = replace(SIMPLE, ranks_per_node=4)
    across = replace(SIMPLE, nodes=2, ranks_per_node=2, inter_mbps=100)
    fast, slow = (predict(placement, ONE_HEAD, m, PLAIN) for m in (inside, across))
    hop, slow_hop = 100 + 16, 100 + 160
    assert int(slow.exposed_ns[0] - fast.exposed_ns[0]) == 3 * (slow_hop - hop) + 2 * (slow_hop - hop) + (
        420 - 132
    ) + 2 * (slow_hop - hop)
    assert slow.exposed_ns.tolist() == [int(slow.exposed_ns[0])] * 4


def test_work_on_own_keys_hides_what_arrives() -> None:
    batch = make_batch([4], full())
    regions = Regions(*np.array([(0, 0, 0, 2, 0, 4, 0, 1), (1, 0, 2, 4, 0, 4, 0, 1)]).T)
    placement = Placement(batch, 2, 0, Runs(*np.array([(0, 0, 2), (1, 2, 4)]).T), (regions,))
    slow = replace(SIMPLE, gflops=1, latency_ns=3)
    found = predict(placement, ONE_HEAD, slow, PLAIN)
    # Each rank fetches 2 tokens x 8 bytes in 3 + 16 ns, hidden behind 4 pairs of own work: 16 ns forward, 40 backward.
    # Backward returns 2 tokens x 8 bytes of partial gradients in 19 ns: half of the own work is held back to hide them.
    assert found.exposed_ns.tolist() == [19 - 16] * 2
    slower = predict(placement, ONE_HEAD, replace(slow, latency_ns=9), PLAIN)
    # In one stage backward would take 25 + 40 + 25 ns; in two, each half travels 13 + 9 ns beside 20 ns of work, four
    # times.
    assert slower.exposed_ns.tolist() == [(25 - 16) + (4 * 22 - 80)] * 2
    fast = predict(replace(placement, assemble_own=True), ONE_HEAD, slow, PLAIN)
    assert fast.exposed_ns.tolist() == [19 + 19 + 19] * 2


def test_a_hot_sender_holds_up_those_who_wait_for_it() -> None:
    batch = make_batch([30], full())
    machine = replace(SIMPLE, ranks_per_node=4, gflops=1_000_000)  # no work that could hide transfers
    # Rank 0 keeps all tokens; ranks 1, 2 and 3 compute ten rows each and need all keys.
    regions = Regions(*np.array([(r, 0, 10 * r - 10, 10 * r, 0, 30, 0, 1) for r in (1, 2, 3)]).T)
    placement = Placement(batch, 4, 0, Runs(*np.array([(0, 0, 30)]).T), (regions,))
    found = predict(placement, ONE_HEAD, machine, PLAIN)
    sent = 3 * (10 * 4 + 30 * 8)  # q and kv of float32 to each
    home = 3 * 10 * (4 + 4)  # o with its LSE
    again = 3 * (10 * (4 + 12) + 30 * 8)  # q, do with LSE and delta, kv
    grads = 3 * (10 * 4 + 30 * 8)  # dq, and dkv of several ranks
    # Every rank waits at least as long as rank 0's port needs: for inputs as its receivers, for outputs rank 0 alone.
    # Rank 0 also waits for the others' work, a nanosecond for each pass.
    assert int(found.exposed_ns[0]) == sent + home + again + grads + 400 + 2
    assert found.exposed_ns[1:].tolist() == [sent + home // 3 + again + grads // 3 + 400] * 3


def test_rings_of_different_sizes_and_idle_ranks() -> None:
    batch = make_batch([12, 5], causal())
    runs = Runs(*np.array([(0, 0, 4), (1, 4, 8), (2, 8, 12), (3, 12, 17)]).T)
    whole = [(0, 0, 0, 4), (1, 0, 4, 8), (2, 0, 8, 12), (3, 1, 0, 5)]
    regions = Regions(*np.array([(r, d, a, b, 0, 12 if d == 0 else 5, 0, 1) for r, d, a, b in whole]).T)
    traffic = Traffic("ring", (((0,), (1,), (2,)), ((3,),)))
    placement = Placement(batch, 5, 0, runs, (regions,), traffic)
    found = predict(placement, ONE_HEAD, replace(SIMPLE, ranks_per_node=5), PLAIN)
    assert found.exposed_ns[3:].tolist() == [0, 0] and found.rank_ns[4] == 0
    assert found.exposed_ns[:3].min() > 0


def test_rows_without_keys_and_unequal_masks_are_fine() -> None:
    lengths = [20, 8]
    batch = make_batch(lengths, [from_slices(20, []), causal()])
    placement = blocks(Request(batch, ONE_HEAD, SIMPLE, PLAIN))
    assert int(predict(placement, ONE_HEAD, SIMPLE, PLAIN).attention_ns.sum()) == 36 * 14


def test_years_of_work_do_not_overflow() -> None:
    shape, machine = Shape(128, 8, 256, 256), cluster("cpu", 1, 2)
    batch = make_batch([2**24], causal())
    found = predict(static.zigzag(Request(batch, shape, machine, COST)), shape, machine, COST)
    work = 2**47 * 128 // 2 * 7 * 512  # pairs x heads of a rank, times the FLOPs of both directions
    assert found.total_ns >= lower_bound(batch, shape, machine, COST) > work // 30


def test_numbers_are_the_same_on_every_machine() -> None:
    machine = cluster("h100", 2, 4, speeds=[1, 1, 0.93, 1, 1, 1, 1.02, 1])
    shape = Shape(16, 4, 128, 128)
    batch = make_batch([9000, 4000, 1200, 800, 77, 1], masks={"full": (causal(), 2), "window": (window(1023, 0), 3)})
    found: dict[str, Prediction] = {
        name: predict(PLACES[name](Request(batch, shape, machine, COST, argument)), shape, machine, COST)
        for name, argument in (("dp", ""), ("zigzag", "4"), ("allgather", ""), ("usp", "4,2"))
    }
    assert {name: p.total_ns for name, p in found.items()} == GOLDEN


GOLDEN = {"dp": 27_988_146, "zigzag": 8_466_740, "allgather": 14_170_300, "usp": 8_344_034}
