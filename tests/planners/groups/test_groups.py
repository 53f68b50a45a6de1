"""Proves flexible groups: degrees as brute force finds them, the token cap, whole short documents, nodes, and the stated gap.

Times are the planner's own unit (pairs); what they promise about compute is checked against the placement's rows.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexcp.batch import MaskLike, make_batch
from flexcp.clusters import Cluster, cluster
from flexcp.cost import CostModel, Model
from flexcp.masks import causal, causal_blockwise, full, lambda_, prefix, shared_question, window
from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan
from flexcp.planners.groups.groups import _packed, best_degrees, gap, groups, ranks_of_groups
from flexcp.planners.groups.priced_documents import CLOSE_TO_BEST, price_documents
from flexcp.planners.request import Request
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Shape

Ints = NDArray[np.int64]
SHAPE = Shape(8, 2, 64, 64)
ATTENTION_ONLY = CostModel(row_tile_pairs=0, model=Model("none", 1, 1, 1))
"""Tokens cost next to nothing, so that a document's load is its area."""
MASKS = [
    causal(),
    full(),
    window(9, 0),
    window(5, 7),
    lambda_(2, 8),
    shared_question(),
    causal_blockwise(8, 2),
    prefix(5),
]


def asked(
    lengths: list[int],
    where: Cluster,
    mask: MaskLike | None = None,
    shape: Shape = SHAPE,
    cost: CostModel | None = None,
    masks: Any = None,
    **more: Any,
) -> Request:
    batch = make_batch(lengths, None if masks else mask or causal(), masks)
    return Request(batch, shape, where, cost or CostModel(), **more)


def planned(request: Request) -> Plan:
    plan = make_plan(groups(request), request.shape, request.cluster, request.cost, "groups")
    plan.check()
    return plan


def keepers(placement: Placement) -> list[set[int]]:
    """The ranks that keep tokens of each document."""
    found: list[set[int]] = [set() for _ in range(placement.batch.documents)]
    runs = placement.runs
    index, document, _, _ = placement.batch.split_by_document(runs.start, runs.stop)
    for i, d in zip(index, document, strict=True):
        found[int(d)].add(int(runs.rank[i]))
    return found


def degrees(placement: Placement) -> list[int]:
    return [len(ranks) for ranks in keepers(placement)]


# --- degrees ----------------------------------------------------------------------------------------------------------


def slowest_by_brute_force(times: Ints, least: Ints, ranks: int, filling: int = 0) -> int:
    best = None
    for chosen in product(*(range(int(low), ranks + 1) for low in least)):
        if sum(chosen) > ranks:
            continue
        taken = [int(row[d - 1]) for row, d in zip(times, chosen, strict=True)]
        shared = -(-(sum(d * t for d, t in zip(chosen, taken, strict=True)) + filling) // ranks)
        tau = max(*taken, shared) if filling else max(taken)
        best = tau if best is None else min(best, tau)
    assert best is not None
    return best


@st.composite
def degree_problems(draw: st.DrawFn) -> tuple[Ints, Ints, int]:
    """Times that rise and fall as they like, and least degrees that fit."""
    ranks = draw(st.integers(1, 7))
    count = draw(st.integers(1, min(4, ranks)))
    times = draw(st.lists(st.lists(st.integers(1, 40), min_size=ranks, max_size=ranks), min_size=count, max_size=count))
    least = [1] * count
    for _ in range(draw(st.integers(0, ranks - count))):
        least[draw(st.integers(0, count - 1))] += 1
    return np.array(times, np.int64), np.array(least, np.int64), ranks


@given(degree_problems())
@settings(max_examples=300, deadline=None)
def test_degrees_equal_brute_force(problem: tuple[Ints, Ints, int]) -> None:
    times, least, ranks = problem
    chosen = best_degrees(times, least, ranks)
    assert int(chosen.sum()) <= ranks
    assert np.all(chosen >= least)
    assert int(times[np.arange(len(times)), chosen - 1].max()) == slowest_by_brute_force(times, least, ranks)


@st.composite
def filling_problems(draw: st.DrawFn) -> tuple[Ints, Ints, int, int]:
    """Times of which more ranks never save rank time (communication only grows), and filling."""
    ranks = draw(st.integers(1, 6))
    count = draw(st.integers(1, min(3, ranks)))
    times = []
    for _ in range(count):
        row = [draw(st.integers(1, 60))]
        for d in range(2, ranks + 1):
            row.append(-(-row[-1] * (d - 1) // d) + draw(st.sampled_from([0, 0, 0, 1, 5])))
        times.append(row)
    return np.array(times, np.int64), np.ones(count, np.int64), ranks, draw(st.integers(1, 200))


@given(filling_problems())
@settings(max_examples=200, deadline=None)
def test_degrees_beside_filling_equal_brute_force(problem: tuple[Ints, Ints, int, int]) -> None:
    times, least, ranks, filling = problem
    chosen = best_degrees(times, least, ranks, filling)
    taken = times[np.arange(len(times)), chosen - 1]
    tau = max(int(taken.max()), -(-(int((chosen * taken).sum()) + filling) // ranks))
    assert int(chosen.sum()) <= ranks
    assert tau == slowest_by_brute_force(times, least, ranks, filling)


def test_too_few_ranks_for_the_least_degrees_are_refused() -> None:
    with pytest.raises(ValueError, match="need 5 ranks and there are 4"):
        best_degrees(np.ones((2, 4), np.int64), np.array([3, 2]), 4)


def test_degrees_are_any_integers() -> None:
    lengths = [10_000, 7_746, 4_472]  # areas as 5 : 3 : 1
    plan = planned(asked(lengths, cluster("h100", 1, 9), cost=ATTENTION_ONLY, shape=Shape(64, 8, 128, 128)))
    assert degrees(plan.placement) == [5, 3, 1]
    work = plan.work()
    assert work.max() * 9 <= work.sum() * 101 // 100


def test_few_documents_share_more_ranks() -> None:
    """Three equal documents on four ranks: none is left idle, though no degree of one document alone could do that."""
    request = asked([30_000] * 3, cluster("h100", 1, 4), cost=ATTENTION_ONLY, shape=Shape(64, 8, 128, 128))
    work = planned(request).work()
    assert work.max() * 4 <= work.sum() * 103 // 100


# --- what every plan keeps --------------------------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn) -> Request:
    nodes, per_node = draw(st.sampled_from([(1, 1), (1, 2), (1, 5), (1, 8), (2, 3), (2, 4), (3, 7)]))
    ranks = nodes * per_node
    length = st.one_of(st.integers(1, 40), st.integers(1, 400), st.sampled_from([1, 5_000, 20_000]))
    lengths = draw(st.lists(length, min_size=1, max_size=14))
    mask = st.sampled_from(MASKS)
    masks = {"a": (draw(mask), 3), "b": (draw(mask), 1)} if draw(st.booleans()) else None
    speeds = draw(st.lists(st.sampled_from([1.0, 0.9, 1.3, 0.5]), min_size=ranks, max_size=ranks))
    even = -(-sum(lengths) // ranks)
    equal = draw(st.booleans())
    pad_to = draw(st.sampled_from([1, 8])) if equal else 1
    cap = draw(st.sampled_from([None, 0, even // 8, even]))
    return asked(
        lengths,
        cluster(
            draw(st.sampled_from(["h100", "a100", "cpu"])), nodes, per_node, speeds if draw(st.booleans()) else None
        ),
        draw(mask),
        masks=masks,
        equal_tokens=equal,
        pad_to=pad_to,
        max_tokens_per_rank=None if cap is None else -(-(even + cap) // pad_to) * pad_to,
    )


@given(requests())
@settings(max_examples=80, deadline=None)
def test_plans_are_right_and_keep_caps_and_bounds(request: Request) -> None:
    plan = planned(request)
    tokens = plan.placement.tokens
    if request.max_tokens_per_rank is not None:
        assert int(tokens.max()) <= request.max_tokens_per_rank
    if request.equal_tokens:
        assert len(set(tokens.tolist())) == 1
    slowest, bound = gap(request)
    assert bound <= slowest
    if not request.equal_tokens:  # which also weighs pads
        work = price_documents(request)
        aim = bound + bound // CLOSE_TO_BEST
        one_group = _packed(work, tuple(range(request.ranks)), list(range(request.batch.documents)), aim)
        assert slowest <= max(aim, one_group.time)


@given(requests())
@settings(max_examples=20, deadline=None)
def test_the_same_request_gives_the_same_plan(request: Request) -> None:
    assert planned(request).hash == planned(request).hash


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=40), st.sampled_from([(1, 8), (2, 4), (4, 3)]))
@settings(max_examples=40, deadline=None)
def test_compute_is_within_the_stated_gap(lengths: list[int], nodes: tuple[int, int]) -> None:
    """Links that cost nothing leave nothing to hide: every rank's load is within 1/64 of the bound, which is the mean."""
    fast = Cluster("fast", *nodes, gflops=100, intra_mbps=10**9, inter_mbps=10**9, latency_ns=0)
    request = asked(lengths, fast, cost=CostModel(row_tile_pairs=0, message_ns=0))
    placement = groups(request)
    slowest, bound = gap(request)
    load = placement.work(0) // SHAPE.heads + request.cost.pairs_per_token(SHAPE) * placement.tokens
    one_token = request.cost.pairs_per_token(SHAPE) + max(lengths)
    assert slowest <= bound + bound // CLOSE_TO_BEST + one_token
    # The rows of a document are not all equally heavy, so a share's load is its tokens' only on average.
    assert int(load.max()) <= slowest + slowest // 50 + one_token


def test_the_last_resort_is_one_group_of_all_ranks() -> None:
    """With slow links groups stay small; with fast ones the same documents share all ranks."""
    lengths = [120_000] * 5
    where = cluster("h100", 1, 7)
    slow = Cluster("slow", 1, 7, where.gflops, intra_mbps=1, inter_mbps=1, latency_ns=10**9)
    assert degrees(groups(asked(lengths, slow))) == [1] * 5
    slowest, bound = gap(asked(lengths, where, cost=ATTENTION_ONLY, shape=Shape(64, 8, 128, 128)))
    assert slowest <= bound + bound // CLOSE_TO_BEST


# --- short documents, nodes, speeds, masks ----------------------------------------------------------------------------


def test_short_documents_stay_whole_beside_a_long_one() -> None:
    lengths = [100_000, *[2_000] * 40]
    plan = planned(asked(lengths, cluster("h100", 1, 8), shape=Shape(64, 8, 128, 128)))
    found = degrees(plan.placement)
    assert found[0] > 1
    assert found[1:] == [1] * 40
    shared = keepers(plan.placement)[0]
    beside = [ranks for ranks in keepers(plan.placement)[1:] if ranks <= shared]
    assert beside, "the long document's group takes short ones too"
    # Only the long document's keys move.
    moved = plan.programs[0][0].transfers
    assert {int(r) for r in moved.target} <= shared


def test_groups_that_fit_a_node_stay_in_it() -> None:
    # Four nodes of eight; areas for degrees 5 and 3 in each node.
    lengths = [30_000, 23_238] * 4
    plan = planned(asked(lengths, cluster("h100", 4, 8), cost=ATTENTION_ONLY, shape=Shape(64, 8, 128, 128)))
    assert Counter(degrees(plan.placement)) == {5: 4, 3: 4}
    assert plan.inter_node_bytes() == 0 and plan.inter_node_bytes(backward=True) == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from([(1, 8), (2, 8), (4, 3), (3, 5)]))
@settings(max_examples=100, deadline=None)
def test_ranks_of_groups(sizes: list[int], nodes: tuple[int, int]) -> None:
    where = cluster("h100", *nodes)
    while sum(sizes) > where.ranks:
        sizes.pop()
    found = ranks_of_groups(sizes, where)
    assert [len(ranks) for ranks in found] == sizes
    taken = [rank for ranks in found for rank in ranks]
    assert len(set(taken)) == len(taken) and all(0 <= rank < where.ranks for rank in taken)
    free = [where.ranks_per_node] * where.nodes
    for ranks in sorted(found, key=lambda ranks: -len(ranks)):
        used = Counter(where.node_of(rank) for rank in ranks)
        assert len(used) == 1 or max(free) < len(ranks), "a group spans nodes though one has room for it"
        for node, count in used.items():
            free[node] -= count


def test_a_slow_rank_gets_less() -> None:
    speeds = [1.0, 1.0, 0.5, 1.0]
    plan = planned(asked([40_000], cluster("h100", 1, 4, speeds), cost=ATTENTION_ONLY, shape=Shape(64, 8, 128, 128)))
    times = plan.work() / np.array(speeds)
    assert times.max() <= times.mean() * 1.02


@pytest.mark.parametrize("mask", [causal_blockwise(), prefix(8_000), shared_question(), lambda_(), causal()], ids=str)
def test_one_document_is_level_under_every_mask(mask: MaskLike) -> None:
    request = asked([60_000], cluster("h100", 1, 8), mask, shape=Shape(64, 8, 128, 128))
    plan = planned(request)
    price = request.cost.pairs_per_token(request.shape) + request.cost.row_tile_pairs // 128
    load = plan.work() // 64 + price * plan.placement.tokens
    kept = load[plan.placement.tokens > 0]
    assert kept.max() * len(kept) <= kept.sum() * 103 // 100


def test_windows_cut_freely_where_full_masks_would_wait() -> None:
    """What moves under a window is the window, so a slow link does not forbid cutting."""
    where = Cluster("slow", 1, 4, gflops=989_000, intra_mbps=5_000, inter_mbps=5_000, latency_ns=1_000)
    assert degrees(groups(asked([60_000], where, window(255, 0)))) == [4]
    few = planned(asked([60_000], where, window(255, 0))).bytes().sum()
    all_keys = planned(asked([60_000], where, full(), max_tokens_per_rank=15_000)).bytes().sum()
    assert few * 20 < all_keys


def test_equal_tokens_pads_little() -> None:
    lengths = [50_000, *[700] * 60]
    placement = groups(asked(lengths, cluster("h100", 2, 4), equal_tokens=True, pad_to=16))
    assert len(set(placement.tokens.tolist())) == 1
    assert placement.pads * 8 <= sum(lengths) + 8 * 16 * 8


def test_the_note_says_degrees_and_gap() -> None:
    note = groups(asked([100_000, 10, 10], cluster("h100", 1, 3))).note
    assert re.fullmatch(r"groups of 3 ranks; the slowest takes \d\.\d % longer than perfectly divided work would", note)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_tight_cap_is_met_exactly() -> None:
    placement = groups(asked([66, 66, 66, 2], cluster("h100", 1, 2), max_tokens_per_rank=100))
    assert placement.tokens.tolist() == [100, 100]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"argument": "4"}, "finds its degrees itself; got 'groups:4'"),
        ({"layout": (np.arange(30), np.arange(30, 60))}, "cannot keep a fixed layout; use blocks"),
        ({"compute_tolerance": 0.05}, r"no tolerances.*compute_tolerance=0\.05, use blocks"),
        ({"token_tolerance": 0.1}, r"token_tolerance=0\.1"),
        (
            {"max_tokens_per_rank": 20},
            "document 1 has 50 tokens, more than 2 ranks keep together with max_tokens_per_rank=20",
        ),
        (
            {"max_tokens_per_rank": 29},
            "60 tokens do not fit 2 ranks with max_tokens_per_rank=29: at least 30 a rank are needed.*micro-batches",
        ),
        ({"max_tokens_per_rank": 31, "equal_tokens": True, "pad_to": 8}, "in multiples of pad_to=8"),
    ],
)
def test_refusals(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups(asked([10, 50], cluster("h100", 1, 2), **more))
