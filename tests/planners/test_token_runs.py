"""Proves by hand the runs of tokens that ranks keep, and that tolerances are checked for each rank, by its speed, and
only where they apply.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flexcp
from flexcp.batch import make_batch
from flexcp.clusters import cluster
from flexcp.compare.compare import compare
from flexcp.cost import CostModel
from flexcp.masks import causal, from_slices, full
from flexcp.plan.placement import Runs
from flexcp.planners.auto.auto import _Search
from flexcp.planners.auto.candidates import Candidate
from flexcp.planners.request import Refused, Request
from flexcp.planners.static import static
from flexcp.planners.static.bounds import static_methods
from flexcp.planners.token_runs import (
    SCATTERED_RUN,
    check_cap,
    check_queries_stay,
    check_tolerances,
    equalised,
    even_borders,
    head_regions,
    is_scattered,
    runs_of_maps,
)
from flexcp.shape import Shape

SHAPE = Shape(4, 2, 32, 32)


def request_of(lengths: list[int], speeds: list[float] | None = None, **others: Any) -> Request:
    return Request(make_batch(lengths, causal()), SHAPE, cluster("h100", 1, 2, speeds), CostModel(), **others)


def test_uneven_work_is_refused_with_the_rank_and_the_way_out() -> None:
    asked = request_of([4000], compute_tolerance=0.05)
    placement = static.ring(replace(asked, compute_tolerance=None))  # rank 1 has the later half, three times the work
    with pytest.raises(Refused, match=r"on rank 1, but compute_tolerance=0\.05 allows \d+; raise it"):
        check_tolerances(asked, placement)
    check_tolerances(replace(asked, compute_tolerance=0.51), placement)


def test_uneven_tokens_are_refused_unless_their_counts_are_given() -> None:
    asked = request_of([3000, 1000], token_tolerance=0.1)
    placement = static.dp(replace(asked, token_tolerance=None))
    with pytest.raises(Refused, match=r"3000 tokens on rank 0, but token_tolerance=0\.1 allows 2200"):
        check_tolerances(asked, placement)
    check_tolerances(replace(asked, equal_tokens=True), placement)


def test_a_faster_rank_may_have_more_work() -> None:
    batch = make_batch([3000, 1500], full())
    even = request_of([3000, 1500], compute_tolerance=0.05)
    uneven = request_of([3000, 1500], speeds=[1.6, 0.4], compute_tolerance=0.05)
    placement = static.dp(replace(even, batch=batch, compute_tolerance=None))
    check_tolerances(replace(uneven, batch=batch), placement)
    with pytest.raises(Refused, match="on rank 0"):
        check_tolerances(replace(even, batch=batch), placement)


def test_a_token_and_a_row_more_than_the_tolerances_allow_are_forgiven() -> None:
    """Of two documents rank 1 keeps or computes slightly more than half."""
    asked = request_of([100, 100], token_tolerance=0.0)
    placement = static.dp(replace(asked, token_tolerance=None))
    for moved, refused in ((1, False), (2, True)):
        runs = Runs(*np.array([[0, 0, 100 - moved], [1, 100 - moved, 200]]).T)
        uneven = replace(placement, runs=runs)
        if refused:
            with pytest.raises(Refused, match=f"keeps {100 + moved} tokens on rank 1, but .* allows 100; raise it"):
                check_tolerances(asked, uneven)
        else:
            check_tolerances(asked, uneven)
    strict = replace(asked, token_tolerance=None, compute_tolerance=0.0)
    row = 100 * SHAPE.heads
    for lengths, refused in (([100, 99], False), ([100, 60], True)):
        batch = make_batch(lengths, full())
        mine = static.dp(replace(strict, batch=batch, compute_tolerance=None))
        over = max(mine.work(0)) - sum(mine.work(0)) // 2
        assert (over > row) == refused, "the case is on the side it is meant for"
        if refused:
            with pytest.raises(Refused, match="on rank 0, but compute_tolerance=0 allows"):
                check_tolerances(replace(strict, batch=batch), mine)
        else:
            check_tolerances(replace(strict, batch=batch), mine)


def test_runs_of_maps_keep_the_order_of_the_maps() -> None:
    maps = [np.array([5, 6, 7, 2, 3]), np.zeros(0, np.int64), np.array([0, 1, 9, 10, 4])]
    assert runs_of_maps(maps).matrix().T.tolist() == [[0, 5, 8], [0, 2, 4], [2, 0, 2], [2, 9, 11], [2, 4, 5]]


def test_many_short_runs_are_scattered() -> None:
    """Runs are scattered if they are short on average and more than four for each rank."""

    def runs(count: int, length: int) -> Runs:
        start = np.arange(count) * 2 * length
        return Runs(np.arange(count) % 2, start, start + length)

    assert is_scattered(runs(9, SCATTERED_RUN - 1))
    assert not is_scattered(runs(9, SCATTERED_RUN)) and not is_scattered(runs(8, SCATTERED_RUN - 1))


def test_pads_fill_every_rank_to_the_same_multiple() -> None:
    runs = Runs(*np.array([[0, 0, 5], [1, 5, 7], [1, 9, 10], [3, 7, 9]]).T)
    found, pads = equalised(runs, 4, 10, 4)
    assert pads == 3 + 5 + 8 + 6
    assert found.matrix().T.tolist() == [
        *([0, 0, 5], [0, 10, 13], [1, 5, 7], [1, 9, 10], [1, 13, 18], [2, 18, 26], [3, 7, 9], [3, 26, 32])
    ]
    even = Runs(*np.array([[0, 0, 4], [1, 4, 8]]).T)
    assert equalised(even, 2, 8, 4)[1] == 0 and len(equalised(even, 2, 8, 4)[0]) == 2


def test_a_cap_counts_all_runs_of_a_rank() -> None:
    runs = Runs(*np.array([[0, 0, 5], [1, 5, 7], [1, 9, 13]]).T)
    check_cap(runs, request_of([6, 7]))
    check_cap(runs, request_of([6, 7], max_tokens_per_rank=6))
    with pytest.raises(Refused, match="keeps 6 tokens on rank 1, over max_tokens_per_rank=5"):
        check_cap(runs, request_of([6, 7], max_tokens_per_rank=5))


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([7, 2, 4], "or cut the batch into micro-batches"),
        ([6, 7], "or cut the batch into micro-batches"),
        ([2, 11], "document 1 alone has 6 tokens there, so micro-batches do not help: raise the cap, .* cut the doc"),
    ],
)
def test_micro_batches_are_named_only_where_they_help(lengths: list[int], says: str) -> None:
    """Rank 1 keeps 6 tokens, over a cap of 5: all of one document, or of two that micro-batches may separate."""
    runs = Runs(*np.array([[0, 0, 5], [1, 9, 13], [1, 5, 7]]).T)
    with pytest.raises(Refused, match=says):
        check_cap(runs, request_of(lengths, max_tokens_per_rank=5))


def test_rows_of_the_same_rank_and_heads_are_joined_inside_documents() -> None:
    batch = make_batch([6, 4], causal())
    column = np.array([[1, 0, 3, 0, 2], [1, 3, 8, 0, 2], [1, 3, 8, 2, 4], [0, 8, 10, 0, 4]]).T
    found = head_regions(batch, *column)
    names = ("rank", "document", "q0", "q1", "k0", "k1", "h0", "h1")
    assert sorted(zip(*(getattr(found, name).tolist() for name in names), strict=True)) == [
        (0, 1, 2, 4, 0, 4, 0, 4),
        (1, 0, 0, 6, 0, 6, 0, 2),
        (1, 0, 3, 6, 0, 6, 2, 4),
        (1, 1, 0, 2, 0, 4, 0, 2),
        (1, 1, 0, 2, 0, 4, 2, 4),
    ]


def test_even_borders_differ_by_one() -> None:
    assert even_borders(11, 4).tolist() == [0, 3, 6, 9, 11] and even_borders(2, 3).tolist() == [0, 1, 2, 2]


LATENT = Shape(4, 1, 32, 32, latent=48)


def test_latents_are_refused_where_heads_are_split_or_queries_move() -> None:
    asked = replace(request_of([4000, 30]), shape=LATENT)
    for plan_for in (static.ring, static.zigzag, static.allgather, static.dp):
        check_queries_stay(asked, plan_for(asked))
    split = static.ulysses(asked)
    with pytest.raises(Refused, match=r"moves queries or splits heads in this batch, .* use auto, blocks"):
        check_queries_stay(asked, split)
    check_queries_stay(replace(asked, shape=SHAPE), split)
    at_home = static.ring(asked)
    other_rank = replace(at_home.regions[0], rank=1 - at_home.regions[0].rank)
    with pytest.raises(Refused, match="moves queries"):
        check_queries_stay(asked, replace(at_home, regions=(other_rank,)))


def test_a_query_without_keys_does_not_move() -> None:
    """Rows before the 20th see nothing, so it does not matter which rank is to compute them."""
    mask = from_slices(40, [(20, 40, 0, 20, None, None)])
    asked = replace(request_of([40]), shape=LATENT, batch=make_batch([40], mask))
    at_home = static.ring(asked)
    regions = at_home.regions[0]
    assert regions.q1.tolist() == [20, 40]
    check_queries_stay(asked, replace(at_home, regions=(replace(regions, rank=np.array([1, 1])),)))
    with pytest.raises(Refused, match="moves queries"):
        check_queries_stay(asked, replace(at_home, regions=(replace(regions, rank=np.array([0, 0])),)))


@pytest.mark.parametrize("strategy, ranks", [("ulysses", (1, 4)), ("usp:2,2", (2, 2)), ("dcp:4096", (4, 8))])
def test_a_plan_that_latent_attention_cannot_run_is_refused_when_it_is_planned(
    strategy: str, ranks: tuple[int, int]
) -> None:
    planner = flexcp.Planner(16, 1, 32, latent=48, strategy=strategy, cluster=cluster("a100", *ranks))
    with pytest.raises(ValueError, match="latent attention computes all heads of a query where"):
        planner([60_000])


def test_comparisons_and_auto_leave_out_what_latent_attention_cannot_run() -> None:
    asked = replace(request_of([9000, 400, 300]), shape=LATENT)
    assert {method.strategy for method in static_methods(asked)} == {"dp", "ring", "zigzag", "allgather"}
    found = compare(asked, ["ulysses", "zigzag", "auto"])
    assert [row.refused is None for row in found.rows] == [False, True, True]
    assert found.best_static is not None and found.best_static.name == "zigzag"


def test_auto_drops_placements_that_latent_attention_cannot_run() -> None:
    asked = replace(request_of([9000, 400]), shape=LATENT)
    for place, dropped in ((static.ring, False), (static.ulysses, True)):
        search = _Search(asked, 2)
        found = search._priced(Candidate(place.__name__, place, asked, 0), place(asked))
        assert (found is None) == dropped == any("splits heads" in refusal for refusal in search.refusals)
