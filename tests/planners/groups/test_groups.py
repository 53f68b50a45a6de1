"""Proves the ``groups`` planner: groups of any size, short documents kept whole, teams (ranks that split heads), nodes,
settings, and the cap on tokens.

The dealing loops are tested by the invariants they must keep; promises about compute are checked against the placement.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import flexcp
from flexcp.batch import MaskLike, make_batch
from flexcp.clusters import Cluster, cluster
from flexcp.cost import CostModel, Model
from flexcp.data.lengths import draw_lengths
from flexcp.masks import causal, causal_blockwise, full, lambda_, prefix, shared_question, window
from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan
from flexcp.planners.groups.compiled_dealing import (
    ATTENTION,
    BIN,
    COLUMNS,
    DOC,
    EXTRA,
    HI,
    HUGE,
    LO,
    LOAD,
    PACE,
    SHARED,
    deal,
    group_sizes,
    least_limit,
    needed_bins,
    tokens_with,
)
from flexcp.planners.groups.compiled_team import split_by_heads
from flexcp.planners.groups.groups import (
    FEW_RANKS,
    all_groupings,
    groups,
    searched_settings,
    team_sizes,
)
from flexcp.planners.groups.priced_documents import price_documents
from flexcp.planners.groups.rows import CLOSE_TO_EVEN, Pieces, _zigzag, tokens_to_level
from flexcp.planners.groups.search import _joined
from flexcp.planners.request import Refused, Request
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Kind, Shape

Ints = NDArray[np.int64]
SHAPE = Shape(8, 2, 64, 64)
ATTENTION_ONLY = CostModel(row_tile_pairs=0, model=Model("none", 1, 1, 1))
"""A cost model in which tokens cost next to nothing, so that a document's load is its area."""
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
    """Return the ranks that keep tokens of each document."""
    found: list[set[int]] = [set() for _ in range(placement.batch.documents)]
    runs = placement.runs
    index, document, _, _ = placement.batch.split_by_document(runs.start, runs.stop)
    for i, d in zip(index, document, strict=True):
        found[int(d)].add(int(runs.rank[i]))
    return found


def degrees(placement: Placement) -> list[int]:
    return [len(ranks) for ranks in keepers(placement)]


# --- dealing ----------------------------------------------------------------------------------------------------------


def table_of(tokens: list[int], attention: list[int], linear: int = 3) -> Ints:
    """Return whole documents as items to deal."""
    items = np.zeros((len(tokens), COLUMNS), np.int64)
    items[:, DOC], items[:, HI], items[:, ATTENTION] = np.arange(len(tokens)), tokens, attention
    items[:, LOAD] = items[:, ATTENTION] + linear * items[:, HI]
    return items


@st.composite
def dealings(draw: st.DrawFn) -> tuple[Ints, Ints, int, bool, int]:
    tokens = draw(st.lists(st.one_of(st.integers(1, 30), st.integers(1, 5_000)), min_size=1, max_size=30))
    density = draw(st.lists(st.integers(0, 4_000), min_size=len(tokens), max_size=len(tokens)))
    bins = draw(st.integers(1, 9))
    pace = draw(st.lists(st.sampled_from([PACE, PACE // 2, PACE * 5 // 4]), min_size=bins, max_size=bins))
    items = table_of(tokens, [n * d for n, d in zip(tokens, density, strict=True)])
    return items, np.array(pace), draw(st.sampled_from([8, 50])), draw(st.booleans()), draw(st.sampled_from([0, 500]))


@given(dealings(), st.sampled_from([0, 7]), st.sampled_from([1, 3]))
@settings(max_examples=60, deadline=None)
def test_dealing_keeps_every_token_and_all_load(
    problem: tuple[Ints, Ints, int, bool, int], extra: int, times: int
) -> None:
    items, pace, slack, poured, room = problem
    items[:, EXTRA] = extra * (1 + items[:, DOC] % 2)
    found = deal(items, pace, slack, poured, room, times)
    assert np.all((found[:, BIN] >= 0) & (found[:, BIN] < len(pace)))
    for item in items:
        parts = found[found[:, DOC] == item[DOC]]
        parts = parts[np.argsort(parts[:, LO])]
        assert parts[0, LO] == 0 and parts[-1, HI] == item[HI] and np.all(parts[1:, LO] == parts[:-1, HI])
        assert np.all(parts[:, LO] < parts[:, HI])
        more = times * item[EXTRA] * item[HI] if len(parts) > 1 else 0
        assert parts[:, LOAD].sum() == item[LOAD] + more and parts[:, ATTENTION].sum() == item[ATTENTION] + more
        assert np.all(parts[:, SHARED] == (len(parts) > 1))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_the_least_limit_is_the_one_brute_force_finds(loads: list[int], bins: int) -> None:
    items = table_of([1] * len(loads), loads, linear=0)
    total = sum(loads)
    found = least_limit(items, 1, total + 1, bins)
    # Loads within the limit need no bin of their own.
    needs = [sum(-(-load // limit) for load in loads if load > limit) for limit in range(1, total + 2)]
    assert found == 1 + next(i for i, need in enumerate(needs) if need <= bins)
    assert needed_bins(items, found) <= bins


def test_long_documents_have_bins_of_their_own() -> None:
    items = table_of([100, 100, 10, 10], [5_000_000, 3_000_000, 500_000, 500_000], linear=0)
    found = deal(items, np.full(9, PACE), 50, False, 0, 0)
    bins = [set(found[found[:, DOC] == d, BIN].tolist()) for d in range(4)]
    assert [len(mine) for mine in bins] == [5, 3, 1, 1]
    assert not bins[0] & bins[1]
    assert bins[2] == bins[3] == set(range(9)) - bins[0] - bins[1]


def test_poured_documents_share_a_bin_where_whole_ones_leave_some_late() -> None:
    items = table_of([100] * 3, [1_000_000] * 3, linear=0)
    whole, poured = (deal(items, np.full(5, PACE), 50, how, 0, 0) for how in (False, True))
    latest = [np.bincount(found[:, BIN], found[:, LOAD], minlength=5).max() for found in (whole, poured)]
    assert latest[0] == 1_000_000
    assert latest[1] <= 620_000


def test_what_cutting_costs_counts_in_the_mean_from_which_bins_may_differ() -> None:
    """The long document is cut and then has three times its load. Then both bins are above what they might have taken
    without cuts, but within half of their mean, so nothing else is cut.
    """
    items = table_of([1000, 10], [10_000, 2_000], linear=0)
    items[:, EXTRA] = 10
    found = deal(items, np.full(2, PACE), 2, False, 0, 2)
    assert sorted(found[:, LOAD].tolist()) == [2_000, 15_000, 15_000]


@pytest.mark.parametrize(
    "loads, limit, bins, sizes",
    [
        ([1000], 500, 5, [5]),  # nothing else needs a bin
        ([1000, 100], 500, 5, [4, 0]),  # the last bin is for the other
        ([1000, 700], 500, 5, [3, 2]),  # 333 and 350 a bin instead of 500 and 350
        ([1000, 490, 490], 500, 4, [2, 0, 0]),  # a third bin would leave 980 for one
        ([1000, 490, 200], 500, 4, [2, 0, 0]),  # 690 for one, more than the 500 of the long one
        ([1000, 300, 100], 500, 4, [3, 0, 0]),
        ([100, 200], 500, 4, [0, 0]),
    ],
)
def test_long_items_get_bins_that_nothing_else_needs(loads: list[int], limit: int, bins: int, sizes: list[int]) -> None:
    items = table_of([1000] * len(loads), loads, linear=0)
    assert group_sizes(items, limit, bins).tolist() == sizes


def test_no_rank_is_idle_beside_a_long_document() -> None:
    """The long document needs half of both nodes' ranks by its slack, and nothing else is on its node."""
    request = asked([60_000, *[9_000] * 24], cluster("h100", 2, 8), shape=Shape(8, 1, 128, 128), cost=ATTENTION_ONLY)
    placement = groups(replace(request, argument="team=1+slack=25+long=whole+level=no"))
    work = np.bincount(placement.regions[0].rank, minlength=16)
    assert np.all(work > 0)


def test_teams_split_as_little_as_they_need() -> None:
    alike = table_of([100] * 8, [10_000] * 8)
    assert sorted(split_by_heads(alike, np.full(4, PACE), 3, 1, 50).tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    one_long = table_of([400, *[100] * 8], [160_000, *[10_000] * 8])
    assert split_by_heads(one_long, np.full(4, PACE), 3, 1, 50).tolist()[0] == 4
    assert np.all(split_by_heads(one_long, np.full(4, PACE), 3, 1, 50)[1:] < 4)
    alike[3, SHARED] = 1
    assert split_by_heads(alike, np.full(4, PACE), 3, 1, 50)[3] == 4


def test_degrees_are_any_integers() -> None:
    lengths = [10_000, 7_746, 4_472]  # areas as 5 : 3 : 1
    plan = planned(asked(lengths, cluster("h100", 1, 9), cost=ATTENTION_ONLY, shape=Shape(64, 8, 128, 128)))
    assert degrees(plan.placement) == [5, 3, 1]
    work = plan.work()
    assert work.max() * 9 <= work.sum() * 101 // 100


def test_few_documents_share_more_ranks() -> None:
    """Three equal documents on four ranks: no rank is idle, which a group for each document alone could not achieve."""
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
@settings(max_examples=30, deadline=None)
def test_plans_are_right_and_keep_caps(request: Request) -> None:
    plan = planned(request)
    tokens = plan.placement.tokens
    if request.max_tokens_per_rank is not None:
        assert int(tokens.max()) <= request.max_tokens_per_rank
    if request.equal_tokens:
        assert len(set(tokens.tolist())) == 1


@given(requests())
@settings(max_examples=20, deadline=None)
def test_the_same_request_gives_the_same_plan(request: Request) -> None:
    assert planned(request).hash == planned(request).hash


@pytest.mark.parametrize("name", ["web", "longtail", "libra256k"])
def test_load_is_level_where_links_cost_nothing(name: str) -> None:
    fast = Cluster("fast", 2, 4, gflops=100, intra_mbps=10**9, inter_mbps=10**9, latency_ns=0)
    request = asked(draw_lengths(name, 8 * 8192, 0), fast, cost=CostModel(row_tile_pairs=0, message_ns=0))
    placement = groups(request)
    load = placement.work(0) // SHAPE.heads + request.cost.pairs_per_token(SHAPE) * placement.tokens
    assert load.max() * 8 <= load.sum() * 1.08  # copies of split documents still cost something


def test_slow_links_cut_nothing() -> None:
    where = cluster("h100", 1, 7)
    slow = Cluster("slow", 1, 7, where.gflops, intra_mbps=1, inter_mbps=1, latency_ns=10**9)
    assert degrees(groups(asked([120_000] * 5, slow))) == [1] * 5


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


def test_documents_that_fit_a_node_stay_in_it() -> None:
    """Four nodes of eight ranks; pairs of documents that share a node, one on five ranks and the other on three."""
    lengths = [30_000, 23_238] * 4
    plan = planned(asked(lengths, cluster("h100", 4, 8), cost=ATTENTION_ONLY, shape=Shape(64, 8, 128, 128)))
    assert plan.inter_node_bytes() == 0 and plan.inter_node_bytes(backward=True) == 0
    nodes = [{rank // 8 for rank in ranks} for ranks in keepers(plan.placement)]
    assert all(len(mine) == 1 for mine in nodes)
    work = plan.work()
    assert work.max() * 32 <= work.sum() * 1.03


def test_a_long_document_crosses_the_fewest_nodes() -> None:
    """Two nodes are enough for the long document, so the other two nodes receive nothing from outside."""
    lengths = [60_000, *[20_000] * 15]  # areas of 9 and 1, 6 to a node
    plan = planned(asked(lengths, cluster("h100", 4, 4), cost=ATTENTION_ONLY, shape=Shape(64, 8, 128, 128)))
    moved = plan.bytes()
    node = np.arange(16) // 4
    across = np.where(node[:, None] != node, moved, 0)
    assert len(set(node[across.sum(axis=0) > 0].tolist())) == 2


def test_heads_are_split_inside_nodes_only() -> None:
    request = asked([60_000, 9_000, 500], cluster("h100", 2, 4), shape=Shape(8, 8, 64, 64))
    regions = planned(request).placement.regions[0]
    split = regions.h1 - regions.h0 < 8
    assert split.any()
    for document, q0 in {(int(d), int(q)) for d, q in zip(regions.document[split], regions.q0[split], strict=True)}:
        mine = split & (regions.document == document) & (regions.q0 == q0)
        assert len({int(rank) // 4 for rank in regions.rank[mine]}) == 1


def test_teams_move_less_than_rows_where_there_are_heads_for_them() -> None:
    request = asked([60_000], cluster("h100", 2, 8), shape=Shape(32, 8, 128, 128))
    teams, rows = (planned(replace(request, argument=f"team={u}")).bytes(backward=True).sum() for u in (8, 1))
    assert teams * 2 < rows


def test_latents_split_no_heads_and_move_no_queries() -> None:
    latent = Shape(8, 1, 64, 64, latent=96)
    request = asked([9_000, 400, 300], cluster("h100", 1, 4), shape=latent, max_tokens_per_rank=2_500)
    assert team_sizes(request) == [1]
    plan = planned(request)
    assert set(plan.programs[0][0].transfers.kind.tolist()) == {Kind.KV}


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
    """Under a window only the window's keys move, so a slow link does not forbid cutting."""
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


def test_pads_of_equal_tokens_cost_no_more_than_an_excess_of_load_that_is_accepted() -> None:
    """Dealing by load alone would give ranks very different numbers of tokens, and so many pads."""
    request = asked([20_000, *[200] * 300], cluster("h100", 1, 4), equal_tokens=True, argument="team=1")
    placement, priced = groups(request), price_documents(request, [1])
    assert placement.pads > 0, "a test of nothing"
    assert placement.pads * priced.linear * CLOSE_TO_EVEN <= priced.load.sum()


def test_the_note_says_degrees_and_the_settings_that_give_the_same_again() -> None:
    request = asked([100_000, 50_000, 10, 10], cluster("h100", 1, 3))
    for found in all_groupings(request):
        settings = found.note.partition(": ")[0]
        again = groups(replace(request, argument=settings))
        assert again.note == found.note and (again.runs.matrix() == found.runs.matrix()).all()
    levels = ["level=yes" in found.note for found in all_groupings(request)]
    assert any(levels) and not all(levels)
    assert groups(request).note.endswith(": 3 of 4 documents on one rank, others on 3 ranks")
    assert groups(asked([10, 10], cluster("h100", 1, 3))).note.endswith(": 2 of 2 documents on one rank")


# --- settings ---------------------------------------------------------------------------------------------------------


def test_groups_of_every_team_size_are_what_groups_chooses_from() -> None:
    request = asked([30_000, 4_000, 700, 700, 41], cluster("h100", 2, 4), shape=Shape(8, 2, 64, 64))
    assert team_sizes(request) == [1, 2, 4]
    each = {planned(replace(request, argument=f"team={u}")).placement.runs.stop.tobytes() for u in (1, 2, 4)}
    assert planned(request).placement.runs.stop.tobytes() in each


@pytest.mark.parametrize(
    ("heads", "kv_heads", "per_node", "teams"),
    [(32, 8, 8, {8}), (8, 1, 8, {1, 8}), (32, 8, 6, {1, 2}), (6, 6, 4, {1, 2}), (32, 4, 8, {1, 4, 8})],
)
def test_teams_suit_heads_and_nodes(heads: int, kv_heads: int, per_node: int, teams: set[int]) -> None:
    request = asked([100], cluster("h100", 1, per_node), shape=Shape(heads, kv_heads, 64, 64))
    assert set(team_sizes(request)) == teams


def test_a_team_that_suits_neither_is_refused() -> None:
    with pytest.raises(Refused, match=r"teams of 3 do not suit 8 query heads"):
        groups(asked([100], cluster("h100", 1, 6), argument="team=3"))


def test_teams_may_split_everything() -> None:
    request = asked([3_000, *[500] * 12], cluster("h100", 1, 4), shape=Shape(8, 4, 64, 64))
    few, everything = (planned(replace(request, argument=f"team=4+slack=2+split={how}")) for how in ("few", "all"))
    assert (few.placement.regions[0].document > 0).sum() < 4 * 12
    regions = everything.placement.regions[0]
    assert np.all(regions.h1 - regions.h0 == 2)
    assert everything.work().max() == everything.work().min()


def test_more_slack_cuts_less() -> None:
    lengths = draw_lengths("longtail", 8 * 8192, 1)
    request = asked(lengths, cluster("h100", 8, 1))
    little, much = (sum(degrees(groups(replace(request, argument=f"slack={n}+long=whole")))) for n in (1, 60))
    assert much < little


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_tight_cap_is_met_exactly() -> None:
    placement = groups(asked([66, 66, 66, 2], cluster("h100", 1, 2), max_tokens_per_rank=100))
    assert placement.tokens.tolist() == [100, 100]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"argument": "4"}, "finds the sizes of groups itself; got 'groups:4'"),
        ({"argument": "team=x"}, "team is a whole number from 1 to 1000.*'groups:team=x'"),
        ({"argument": "slack=1001"}, "slack is a whole number from 0 to 1000.*'groups:slack=1001'"),
        ({"argument": "long=cut"}, "long is whole or poured.*'groups:long=cut'"),
        ({"argument": "team=4"}, r"teams of 4 do not suit.*nodes of 2 ranks; sizes that do: \[1, 2\]"),
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


def test_the_note_counts_documents_that_a_cap_cut() -> None:
    """Documents that are cut only to keep ``max_tokens_per_rank`` are counted too."""
    lengths = [
        867,
        2250,
        1712,
        147,
        181,
        482,
        425,
        2056,
        5423,
        524,
        101,
        207,
        2616,
        1687,
        355,
        3330,
        466,
        1246,
        18336,
        315,
        2488,
        3392,
    ]
    lengths += [621, 256, 7291]
    model = flexcp.Model("m", 3072, 28, 4096)
    options: Any = {"cluster": flexcp.cluster("a100:2x2"), "strategy": "groups:team=1", "model": model}
    plan = flexcp.Planner(12, 3, 128, **options, max_tokens_per_rank=16_384)(lengths)
    runs, starts = plan.placement.runs, plan.batch.starts
    owners = [
        len(np.unique(runs.rank[(runs.start < start + n) & (runs.stop > start)]))
        for start, n in zip(starts, lengths, strict=False)
    ]
    assert f"{owners.count(1)} of {len(lengths)} documents on one rank" in plan.placement.note
    assert owners.count(1) < len(lengths) - 1, "a test of nothing"


@pytest.mark.parametrize("prices", [[5], [5, 3], [3, 5], [4, 2, 9]])
def test_of_the_settings_left_open_the_fastest_is_taken(prices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("flexcp.planners.groups.groups")
    monkeypatch.setattr(module, "all_groupings", lambda request: prices)
    monkeypatch.setattr(module, "price_ns", lambda request, placement: placement)
    assert groups(asked([100], cluster("h100", 1, 4))) == min(prices)


def test_teams_are_one_rank_those_with_keys_of_their_own_and_the_largest() -> None:
    for heads, kv_heads, ranks, sizes in (
        (8, 4, 8, [1, 4, 8]),
        (8, 1, 4, [1, 4]),
        (8, 8, 4, [4]),
        (12, 6, 4, [1, 2]),
    ):
        assert team_sizes(asked([100], cluster("h100", 1, ranks), shape=Shape(heads, kv_heads, 64, 64))) == sizes


def test_neighbouring_pieces_of_a_document_on_the_same_ranks_are_one() -> None:
    """Pieces are (first rank, ranks, document, from, to).

    From the third to the sixth, each piece differs in one way from the piece before, so that only the others are
    joined.
    """
    pieces = [(0, 1, 0, 0, 10), (0, 1, 0, 10, 20), (0, 1, 0, 25, 30), (1, 1, 0, 30, 40), (1, 2, 0, 40, 50)]
    pieces += [(1, 2, 1, 50, 60), (1, 2, 1, 60, 70)]
    found = _joined(Pieces(*np.array(pieces).T)).matrix().T.tolist()
    assert found == [[0, 1, 0, 0, 20], *map(list, pieces[2:5]), [1, 2, 1, 50, 70]]


@pytest.mark.parametrize("nodes", [1, 2])
def test_for_attention_alone_documents_of_a_node_are_also_cut_by_rows_over_several_nodes(nodes: int) -> None:
    request = asked([2048] * 8 + [32_768], cluster("h100", nodes, 8), shape=Shape(32, 8, 128, 128), cost=ATTENTION_ONLY)
    assert team_sizes(request) == [8]
    assert searched_settings(request) == ["team=8", *(["team=8+slack=0+split=shared"] if nodes > 1 else [])]


def test_without_slack_ranks_are_more_even_than_with_little() -> None:
    request = asked([12_000] * 9, cluster("h100", 2, 4), cost=ATTENTION_ONLY)
    most = []
    for slack in (0, 25):
        placement = groups(replace(request, argument=f"team=1+slack={slack}"))
        pairs = np.zeros(placement.ranks, np.int64)
        regions = placement.regions[0]
        np.add.at(pairs, regions.rank, (regions.q1 - regions.q0) * (regions.q0 + regions.q1 + 1) // 2)
        most.append(pairs.max() / pairs.mean())
    assert most[0] < 1.01 < 1.02 < most[1]


@pytest.mark.parametrize(
    "cost, always, if_few",
    [
        (CostModel(), [], "team=1+slack=0"),
        (ATTENTION_ONLY, ["team=8+slack=0+split=shared"], "team=1+slack=2"),
    ],
    ids=["whole step", "attention"],
)
def test_one_rank_is_searched_if_the_heaviest_document_needs_few(
    cost: CostModel, always: list[str], if_few: str
) -> None:
    """With documents of equal load, each needs 16 / documents ranks."""
    for documents in (16 // FEW_RANKS, 16 // FEW_RANKS - 1):
        request = asked([4096] * documents, cluster("h100", 2, 8), shape=Shape(32, 8, 128, 128), cost=cost)
        few = documents == 16 // FEW_RANKS
        assert searched_settings(request) == ["team=8", *always, *([if_few] if few else [])]


def test_teams_that_split_only_what_they_share_cut_other_documents_by_rows() -> None:
    """The long document needs both nodes. The others are three for the eight ranks of a node, so some of them are cut,
    but inside a node and not by heads.
    """
    request = asked([40_000, *[9_000] * 6], cluster("h100", 2, 8), shape=Shape(32, 8, 128, 128), cost=ATTENTION_ONLY)
    placement = groups(replace(request, argument="team=8+slack=0+split=shared"))
    regions = placement.regions[0]
    by_heads = regions.h1 - regions.h0 < 32
    assert set(regions.document[by_heads].tolist()) == {0}
    ranks = [set(regions.rank[regions.document == d].tolist()) for d in range(7)]
    assert ranks[0] == set(range(16))
    assert any(len(mine) > 1 for mine in ranks[1:]) and all(len({r // 8 for r in mine}) == 1 for mine in ranks[1:])
    work = placement.work(0)
    assert work.max() < 1.01 * work.mean()
    few = groups(replace(request, argument="team=8+slack=1+split=few")).regions[0]
    assert len(set(few.document[few.h1 - few.h0 < 32].tolist())) > 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 40))
def test_ranks_of_a_team_fill_up_from_the_emptiest(held: list[int], tokens: int) -> None:
    """The result is the same as giving each token to the rank that then has the fewest."""
    by_hand = list(held)
    for _ in range(tokens):
        by_hand[by_hand.index(min(by_hand))] += 1
    given_to_each = tokens_to_level(np.array(held), tokens)
    assert given_to_each.min() >= 0 and sorted((np.array(held) + given_to_each).tolist()) == sorted(by_hand)


def test_pieces_in_zigzag_pair_rows_from_the_front_with_rows_from_the_back() -> None:
    """A document of nine rows in pieces of five and four rows, and one of two rows in pieces of one row."""
    table = np.array([(0, 1, 0, 0, 5), (1, 1, 0, 5, 9), (0, 1, 1, 0, 1), (1, 1, 1, 1, 2)])
    first, last = _zigzag(make_batch([9, 2], causal()), Pieces(*table.T))
    ranges = list(zip(first.tolist(), last.tolist(), strict=True))
    assert ranges == [(0, 2), (6, 9), (2, 4), (4, 6), (0, 0), (1, 2), (0, 1), (1, 1)]


@given(st.integers(0, 1 << 49), st.integers(1, 1 << 31), st.integers(0, 1 << 49))
def test_tokens_with_a_load_are_counted_within_64_bits(load: int, tokens: int, more: int) -> None:
    """Loads are rounded to 30 bits at worst."""
    whole = max(1, load + more)
    found, exact = tokens_with(load, tokens, whole), tokens * load // whole
    assert abs(found - exact) <= (0 if load * tokens <= HUGE else 1 + (exact >> 28))


def test_documents_of_ten_million_tokens_are_divided_evenly() -> None:
    request = asked([10_000_000] * 11, cluster("h100", 2, 8), cost=ATTENTION_ONLY)
    work = groups(replace(request, argument="team=1+slack=1+long=poured")).work(0)
    assert work.max() < 1.02 * work.mean()
