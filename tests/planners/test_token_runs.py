"""Proves that tolerances are judged by rank, by speed, and only where they apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flexcp.batch import make_batch
from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.masks import causal, full
from flexcp.planners.request import Refused, Request
from flexcp.planners.static import static
from flexcp.planners.token_runs import check_tolerances
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
