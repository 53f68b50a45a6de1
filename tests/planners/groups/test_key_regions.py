"""Proves teams that divide keys: every pair is computed once, ranks of a team have equal work, a key crosses to a team
once, and real ranks get the result of one rank.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexcp
from flexcp.batch import MaskLike, make_batch
from flexcp.clusters import Cluster, cluster
from flexcp.cost import CostModel, Model
from flexcp.masks import area, causal, causal_blockwise, full, lambda_, prefix, shared_question, window
from flexcp.measure.ranks import RankPool
from flexcp.measure.verify import Options, verify_on
from flexcp.plan.placement import Placement, Regions
from flexcp.planners.auto.auto import DEFAULT_EFFORT, auto_plan, step_ns
from flexcp.planners.auto.candidates import find_candidates
from flexcp.planners.groups.groups import all_groupings, groups, searched_by_keys, team_sizes_by_keys
from flexcp.planners.groups.priced_documents import million_pairs_ns, price_documents
from flexcp.planners.groups.rows import Pieces, place_pieces
from flexcp.planners.request import Refused, Request
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Kind, Shape
from flexcp.simulator.copies import copy_mbps

ALONE = CostModel(row_tile_pairs=0, model=Model("none", 1, 1, 1))
"""A cost model in which tokens cost next to nothing and rows no tiles, so that work is (query, key) pairs."""
ONE, TWO = Shape(8, 1, 128, 128), Shape(8, 2, 128, 128)
MASKS = [causal(), full(), window(9, 0), window(5, 7), lambda_(2, 8), shared_question(), causal_blockwise(8, 2)]


def asked(
    lengths: list[int], where: Cluster, shape: Shape = ONE, mask: MaskLike | None = None, argument: str = "split=keys"
) -> Request:
    return Request(make_batch(lengths, mask or causal()), shape, where, ALONE, argument=argument)


def split(request: Request, rows: list[tuple[int, int, int, int, int]]) -> Placement:
    """Place pieces given as (first rank, ranks, document, from, to), with teams that divide keys."""
    teams = sorted({size for _, size, *_ in rows})
    pieces = Pieces(*np.array(rows, np.int64).T)
    return place_pieces(request, price_documents(request, teams, by_keys=True), pieces, by_keys=True)


def pairs(placement: Placement, mask: int = 0) -> np.ndarray:
    """Return the (query, key) pairs of each region."""
    regions = placement.regions[mask]
    found, slices = placement.batch.masks[mask].cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
    return np.bincount(found, area(slices), len(regions))


def keys_of(regions: Regions, rank: int, document: int) -> set[tuple[int, int]]:
    """Return the ranges of keys with which a rank computes rows of a document."""
    mine = regions.take((regions.rank == rank) & (regions.document == document))
    return set(zip(mine.k0.tolist(), mine.k1.tolist(), strict=True))


def test_the_ranks_of_a_team_compute_all_its_rows_with_other_keys() -> None:
    """Two teams of two ranks share a document of 80 tokens, and rank 3 has a short one besides."""
    request = asked([80, 6], cluster("a100", 2, 2), mask=full())
    placement = split(request, [(0, 2, 0, 0, 40), (2, 2, 0, 40, 80), (3, 1, 1, 0, 6)])
    regions = placement.regions[0]
    # Each rank keeps half of its team's rows, and gets half of the keys of the other team.
    assert [keys_of(regions, rank, 0) for rank in range(3)] == [
        {(0, 20), (40, 60)},
        {(20, 40), (60, 80)},
        {(0, 20), (40, 60)},
    ]
    assert keys_of(regions, 3, 0) == {(20, 40), (60, 80)} and keys_of(regions, 3, 1) == {(0, 6)}
    rows = {(r, q0, q1) for r, d, q0, q1, *_ in regions.matrix().T.tolist() if d == 0}
    assert rows == {(0, 0, 40), (1, 0, 40), (2, 40, 80), (3, 40, 80)}
    assert regions.rank.tolist() == sorted(regions.rank.tolist())


def test_with_two_kv_heads_four_ranks_have_two_head_groups_of_two_parts_each() -> None:
    request = asked([160], cluster("a100", 2, 4), TWO, full())
    regions = split(request, [(0, 4, 0, 0, 80), (4, 4, 0, 80, 160)]).regions[0]
    heads = {rank: {(h0, h1) for r, *_, h0, h1 in regions.matrix().T.tolist() if r == rank} for rank in range(4)}
    assert heads == {0: {(0, 4)}, 1: {(0, 4)}, 2: {(4, 8)}, 3: {(4, 8)}}
    keys = [keys_of(regions, rank, 0) for rank in range(4)]
    # Rank 0 keeps tokens 0 to 20 and rank 2 tokens 40 to 60; the keys of the other team are 80 to 160.
    assert keys[0] == keys[2] == {(0, 20), (40, 60), (80, 120)}
    assert keys[1] == keys[3] == {(20, 40), (60, 80), (120, 160)}


@pytest.mark.parametrize("mask", [causal(), full(), window(3000, 0), shared_question()])
@pytest.mark.parametrize("shape, team", [(ONE, 2), (ONE, 4), (TWO, 4)])
def test_the_ranks_of_a_team_have_the_same_work(shape: Shape, team: int, mask: MaskLike) -> None:
    request = asked([50_000, 900], cluster("a100", 2, 4), shape, mask)
    rows = [(first, team, 0, first * 6250, (first + team) * 6250) for first in range(0, 8, team)]
    placement = split(request, [*rows, (7, 1, 1, 0, 900)])
    regions = placement.regions[0]
    work = pairs(placement) * (regions.h1 - regions.h0) * (regions.document == 0)
    each = np.bincount(regions.rank, work).reshape(-1, team)
    assert (each.max(axis=1) < 1.002 * each.min(axis=1)).all()


def test_the_ranks_of_a_team_have_work_in_proportion_to_their_speeds() -> None:
    where = replace(cluster("a100", 2, 2), speeds=(1000, 500, 800, 1000))
    placement = split(asked([40_000], where, mask=full()), [(0, 2, 0, 0, 20_000), (2, 2, 0, 20_000, 40_000)])
    work = np.bincount(placement.regions[0].rank, pairs(placement))
    np.testing.assert_allclose(work[[0, 2]] / work[[1, 3]], [2, 0.8], rtol=0.01)


def test_a_rank_computes_with_its_own_keys_only_as_far_as_they_are_its_share() -> None:
    """Under a narrow window nearly all pairs are with own keys, and the slow rank keeps half of the tokens."""
    where = replace(cluster("a100", 2, 2), speeds=(900, 100, 1000, 1000))
    placement = split(asked([4000], where, mask=window(9, 0)), [(0, 2, 0, 0, 2000), (2, 2, 0, 2000, 4000)])
    (slow,) = keys_of(placement.regions[0], 1, 0)
    assert slow[0] == 1000 and 1195 <= slow[1] <= 1205
    work = np.bincount(placement.regions[0].rank, pairs(placement))
    np.testing.assert_allclose(work / work.sum(), [0.45, 0.05, 0.25, 0.25], atol=0.002)
    make_plan(placement, ONE, where, ALONE, "groups").check()


@pytest.mark.parametrize("slow", range(40, 60))
def test_parts_do_not_overlap_beside_one_that_has_more_than_its_share(slow: int) -> None:
    """A part cannot have a fraction of a key, so a slow rank keeps a little more than its share."""
    where = replace(cluster("a100", 2, 3), speeds=(1000, slow, 1000) * 2)
    placement = split(asked([600], where, mask=full()), [(0, 3, 0, 0, 300), (3, 3, 0, 300, 600)])
    assert np.bincount(placement.regions[0].rank, pairs(placement)).sum() == 600 * 600
    make_plan(placement, ONE, where, ALONE, "groups").check()


def test_a_token_that_a_team_divides_by_keys_costs_all_its_queries_and_partial_results() -> None:
    request = asked([9000, 20], cluster("a100", 2, 2))
    request = replace(request, cost=CostModel())
    queries, results = 8 * (2 * 256 + 264), 8 * (516 + 512)  # bytes of a token, of which half come from the other rank
    travelling, copied = (queries + results) // 2, (4 * queries + 5 * results) // 2
    link = int(request.cost.link_ns(np.array([travelling * 1_000_000]), request.cluster.intra_mbps)[0])
    ns = link + copied * 1_000_000 * 1000 // copy_mbps(request.cluster)
    found = price_documents(request, [2], by_keys=True).exchange[2]
    assert found == pytest.approx(ns / sum(million_pairs_ns(request)), abs=1)


@pytest.mark.parametrize("team", [2, 4])
def test_a_key_crosses_to_a_team_once(team: int) -> None:
    where = cluster("a100", 4, team)
    plan = make_plan(groups(asked([60_000, *[500] * 20], where)), ONE, where, ALONE, "groups")
    plan.check()
    assert len({r // team for r in plan.placement.regions[0].rank[plan.placement.regions[0].document == 0]}) == 4
    t = plan.programs[0][0].transfers
    t = t.take((t.kind == Kind.KV) & (t.source // team != t.target // team))
    assert len(t)
    for node in range(4):
        mine = t.take(t.target // team == node)
        order = np.lexsort((mine.start, mine.owner))
        owner, start, stop = (column[order] for column in (mine.owner, mine.start, mine.stop))
        same = owner[1:] == owner[:-1]
        assert (start[1:][same] >= stop[:-1][same]).all()


@st.composite
def requests(draw: st.DrawFn) -> Request:
    nodes, ranks = draw(st.sampled_from([(2, 2), (3, 2), (2, 4), (2, 3), (1, 4), (2, 6)]))
    lengths = draw(st.lists(st.one_of(st.integers(1, 20), st.integers(100, 400)), min_size=1, max_size=5))
    shape = Shape(*draw(st.sampled_from([(1, 1), (4, 2), (6, 3), (4, 4)])), 16, 16)
    names = draw(st.sampled_from([("one",), ("one", "two")]))
    masks = {name: (draw(st.sampled_from([*MASKS, prefix(5)])), 1) for name in names}
    where = cluster("a100", nodes, ranks)
    if draw(st.booleans()):
        speeds = st.lists(st.sampled_from([500, 1000, 1100]), min_size=where.ranks, max_size=where.ranks)
        where = replace(where, speeds=tuple(draw(speeds)))
    cap = draw(st.sampled_from([None, -(-sum(lengths) // where.ranks) + 5]))
    argument = draw(st.sampled_from(["split=keys", "slack=0+split=keys", "slack=2+long=poured+split=keys"]))
    batch = make_batch(lengths, masks=masks)
    equal = draw(st.booleans())
    return Request(batch, shape, where, ALONE, argument=argument, max_tokens_per_rank=cap, equal_tokens=equal)


@settings(max_examples=60, deadline=None)
@given(requests())
def test_every_pair_is_computed_once(request: Request) -> None:
    try:
        placements = all_groupings(request)
    except Refused as refusal:
        assert "max_tokens_per_rank" in str(refusal)
        return
    for placement in placements:
        plan = make_plan(placement, request.shape, request.cluster, request.cost, "groups")
        plan.check()
        for number, mask in enumerate(placement.batch.masks):
            regions = placement.regions[number]
            lengths = placement.batch.lengths
            zero = np.zeros_like(lengths)
            whole = area(mask.cuts(np.arange(len(lengths)), zero, lengths, zero, lengths)[1]).sum()
            assert (pairs(placement, number) * (regions.h1 - regions.h0)).sum() == whole * request.shape.heads


def test_sizes_of_teams_have_several_parts() -> None:
    assert team_sizes_by_keys(asked([9], cluster("a100", 2, 8))) == [2, 8]
    assert team_sizes_by_keys(asked([9], cluster("a100", 2, 8), TWO)) == [4, 8]
    assert team_sizes_by_keys(asked([9], cluster("a100", 2, 2), TWO)) == [1]
    assert team_sizes_by_keys(asked([9], cluster("a100", 2, 3))) == [3]
    latent = replace(ONE, latent=64, head_dim=64, v_head_dim=32)
    assert team_sizes_by_keys(asked([9], cluster("a100", 2, 8), latent)) == [1]
    with pytest.raises(Refused, match=r"teams of 5 do not suit .* sizes that do: \[1, 2, 4, 8\]"):
        groups(asked([9], cluster("a100", 2, 8), argument="team=5+split=keys"))


def test_auto_searches_teams_that_divide_keys_on_several_nodes_with_few_kv_heads() -> None:
    for nodes, ranks, shape, expected in [
        (2, 4, ONE, ["team=2+split=keys", "team=4+split=keys"]),
        (2, 4, TWO, ["team=4+split=keys"]),
        (1, 4, ONE, []),
        (4, 1, ONE, []),
        (2, 2, TWO, []),
    ]:
        assert searched_by_keys(asked([9000, 20], cluster("a100", nodes, ranks), shape)) == expected


def test_auto_expects_teams_that_divide_keys_to_be_farther_from_perfect() -> None:
    """So they are not even placed where something else is nearly perfect."""
    found = find_candidates(asked([65_536], cluster("a100", 2, 2), argument=""), DEFAULT_EFFORT)
    least = {one.name: one.least_ns for one in found}
    assert least["groups:team=2+split=keys"] > 1.07 * least["groups:team=1"]


def test_auto_takes_teams_that_divide_keys_where_keys_that_cross_nodes_are_slowest() -> None:
    request = asked([65_536, *[1024] * 64], cluster("a100", 8, 2), argument="")
    request = replace(request, cost=replace(CostModel(), model=ALONE.model))
    plan = auto_plan(request)
    assert plan.strategy.endswith("+split=keys")
    rows = make_plan(groups(replace(request, argument="team=1")), ONE, request.cluster, request.cost, "groups")
    assert step_ns(plan) < 0.9 * step_ns(rows)


@pytest.mark.parametrize("nodes, ranks, heads", [(2, 2, (2, 1)), (2, 3, (3, 1)), (2, 4, (4, 2))])
def test_real_ranks_compute_what_dense_attention_does(
    pool: RankPool, nodes: int, ranks: int, heads: tuple[int, int]
) -> None:
    where, strategy = cluster("a100", nodes, ranks), f"groups:team={ranks}+split=keys"
    planner = flexcp.Planner(*heads, 8, dtype="float64", cluster=where, cost=ALONE, strategy=strategy)
    plan = planner([900, 40, 64], flexcp.causal())
    regions = plan.placement.regions[0]
    assert (regions.k1 - regions.k0 < 900).any() and len(set(regions.rank[regions.document == 0].tolist())) > ranks
    verdict = pool.run(verify_on, plan, Options(softcap=3.0, sinks=True, lse_gradient=True), ranks=plan.ranks)[0]
    assert verdict.passed and verdict.bytes_match, str(verdict)
