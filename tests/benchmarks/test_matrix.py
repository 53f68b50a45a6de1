"""Proves on real processes that distributed attention equals dense float64 attention, for half of the pairwise matrix
of strategies, masks and clusters.

Every verdict also requires that the bytes sent are those of the plan. ``make verify-all`` runs the full product,
in which every strategy meets every mask on every cluster; here every strategy meets half of the masks and half of the
clusters.
"""

from __future__ import annotations

import importlib
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from flexcp.measure.ranks import RankPool
from flexcp.measure.verify import Verdict
from lib.matrix import (
    CLUSTERS,
    DTYPES,
    EXTRAS,
    HEADS,
    LAYOUTS,
    LONG,
    LOW_PRECISION,
    MASKS,
    STRATEGIES,
    Case,
    Cell,
    case_of,
    drawn,
    full_matrix,
    low_precision_matrix,
    pairwise_matrix,
    sampled,
    verify_cases,
)

CHUNK = 6
RANK_COUNTS = sorted({nodes * each for nodes, each in CLUSTERS})


def chosen() -> list[Cell]:
    """Every second cell of the pairwise matrix, as the white squares of a chessboard of strategies and masks."""
    return pairwise_matrix()[1::2]


@cache
def cases() -> list[Case]:
    return [case_of(cell) for cell in chosen()]


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_the_chosen_half_on_ranks(pool: RankPool, ranks: int) -> None:
    mine = [case for case in cases() if case.plan.ranks == ranks]
    assert len(mine) >= 7
    failed = []
    for first in range(0, len(mine), CHUNK):
        chunk = mine[first : first + CHUNK]
        for case, verdict in zip(chunk, pool.run(verify_cases, chunk, ranks=ranks)[0], strict=True):
            assert set(verdict.errors) >= {"out", "lse", "dq", "dk", "dv"}, case.name
            assert ("dsinks" in verdict.errors) == case.options.sinks, case.name
            if case.plan.shape.dtype == "float64":
                assert set(verdict.allowed.values()) == {1e-10}, case.name
            if not verdict.passed:
                failed.append(f"{case.name}: {verdict}")
    assert not failed, "\n".join(failed)


def test_pairwise_matrix_lets_every_two_factors_meet() -> None:
    found = pairwise_matrix()
    clusters = [f"{nodes}x{each}" for nodes, each in CLUSTERS if (nodes, each) != (1, 6)]
    assert len(found) == 171
    assert {(c.strategy, c.mask) for c in found} == set(product(STRATEGIES, MASKS))
    assert {(c.strategy, c.cluster) for c in found} == set(product(STRATEGIES, clusters))
    assert {(c.mask, c.cluster) for c in found} == set(product(MASKS, clusters))


def test_the_chosen_half_has_everything_several_times() -> None:
    for strategy in STRATEGIES:
        found = [cell for cell in chosen() if cell.strategy == strategy]
        assert len({c.mask for c in found}) >= 4 and len({c.cluster for c in found}) >= 4
    for mask in MASKS:
        found = [cell for cell in chosen() if cell.mask == mask]
        assert len({c.strategy for c in found}) >= 9 and len({c.cluster for c in found}) >= 7


def test_the_chosen_half_reaches_the_corners() -> None:
    """The half includes all head arrangements and dtypes, padding, scattered layouts, ranks without tokens, rows
    without keys (the mask ``slices``), and a batch of documents of length 1 only.
    """
    plans = [c.plan for c in cases()]
    shapes = [p.shape for p in plans]
    ratio = {"MHA": any(s.heads == s.kv_heads > 1 for s in shapes)}
    ratio["GQA"] = any(s.heads > s.kv_heads > 1 for s in shapes)
    ratio["MQA"] = any(s.heads > s.kv_heads == 1 for s in shapes)
    assert set(ratio) == set(HEADS)
    assert all(ratio.values())
    assert {s.dtype for s in shapes} == set(DTYPES)
    assert {s.head_dim < s.v_head_dim for s in shapes} == {s.head_dim > s.v_head_dim for s in shapes} == {True, False}
    assert any(p.placement.pads for p in plans)
    assert any(p.placement.assemble_own for p in plans)
    assert any(0 in p.placement.tokens for p in plans)
    assert any(set(p.batch.lengths.tolist()) == {1} for p in plans)
    assert any(c.cell.mask == "slices" for c in cases())
    for extra in ({c.options.softcap for c in cases()}, {c.options.kernel for c in cases()}):
        assert len(extra) == 2


# --- what make verify-all runs ----------------------------------------------------------------------------------------


def factors(cells: list[Cell]) -> dict[str, set[object]]:
    names = ("strategy", "mask", "shape", "heads", "dtype", "layout")
    return {name: {getattr(cell, name) for cell in cells} for name in names}


@pytest.mark.parametrize("one_in", [1, 2, 3, 5, 9, 10, 16])
@pytest.mark.parametrize(("matrix", "dtypes"), [(full_matrix, ["float64"]), (low_precision_matrix, LOW_PRECISION)])
def test_every_value_of_every_factor_occurs_in_a_sample(matrix: Any, dtypes: list[str], one_in: int) -> None:
    drawn = sampled(matrix(), one_in)
    assert len(drawn) == -(-len(matrix()) // one_in)
    assert factors(drawn) == {
        "strategy": set(STRATEGIES),
        "mask": set(MASKS),
        "shape": set(CLUSTERS),
        "heads": set(HEADS),
        "dtype": set(dtypes),
        "layout": set(LAYOUTS),
    }
    assert any(cell.lengths == LONG for cell in drawn)


def test_every_two_factors_meet_in_both_matrices() -> None:
    for cells in (full_matrix(), low_precision_matrix()):
        assert {(c.strategy, c.mask, c.shape) for c in cells} == set(product(STRATEGIES, MASKS, CLUSTERS))
        assert {(c.strategy, c.heads) for c in cells} == set(product(STRATEGIES, HEADS))
        assert {(c.shape, c.heads) for c in cells} == set(product(CLUSTERS, HEADS))
        assert {c.strategy for c in cells if c.lengths == LONG} == set(STRATEGIES)
    for factor, values in (("strategy", STRATEGIES), ("mask", MASKS), ("shape", CLUSTERS), ("heads", HEADS)):
        met = {(getattr(c, factor), c.dtype) for c in low_precision_matrix()}
        assert met == set(product(values, LOW_PRECISION)), factor


@pytest.mark.parametrize("matrix", [full_matrix, low_precision_matrix])
def test_every_extra_meets_every_value_of_every_factor(matrix: Any) -> None:
    """A cell's number determines its factors by remainders. If an extra (such as the softcap) were also chosen by a
    remainder, it would always come with the same cluster.
    """
    cells = matrix()
    for extra, count in EXTRAS.items():
        for factor in ("strategy", "mask", "shape", "heads", "dtype"):
            met = {(getattr(c, factor), drawn(c.number, extra)) for c in cells}
            assert met == set(product({getattr(c, factor) for c in cells}, range(count))), (extra, factor)
    for shape, heads in product(CLUSTERS, HEADS):
        lengths = {drawn(c.number, "lengths") for c in cells if (c.shape, c.heads) == (shape, heads)}
        assert len(lengths) == EXTRAS["lengths"], (shape, heads)


def test_a_cell_that_did_not_run_is_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    module = importlib.import_module("verify_all")
    results = [("lower", low_precision_matrix()[0], Verdict({"out": 0.5}, {"out": 2.0}, True))]
    page = module.table(results, [module.Part("one machine", 60.0, results), module.Part("one machine", 120.0, [])])
    row = next(
        line for line in page.split("error / allowed error, by strategy and cluster")[1].splitlines() if "auto" in line
    )
    assert row == "| auto | 0.25 " + "| - " * (len(CLUSTERS) - 1) + "|"
    assert "0.00" not in page and "(one machine: 2 minutes): 1 of 1 cases passed" in page
