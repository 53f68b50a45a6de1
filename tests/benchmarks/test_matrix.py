"""Proves invariant 6 on real processes: the pairwise matrix of strategies, masks and clusters equals dense float64 attention.

Every verdict also holds that the bytes counted on the wire are the plan's. ``make verify-all`` runs the full product.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from flexcp.measure.ranks import RankPool
from lib.matrix import CLUSTERS, DTYPES, HEADS, MASKS, STRATEGIES, Case, pairwise_matrix, verify_cases

CHUNK = 6
RANK_COUNTS = sorted({nodes * each for nodes, each in CLUSTERS})


@cache
def cases() -> list[Case]:
    return list(pairwise_matrix())


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_pairwise_matrix_on_ranks(pool: RankPool, ranks: int) -> None:
    mine = [case for case in cases() if case.plan.ranks == ranks]
    assert len(mine) >= len(STRATEGIES)
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
    found = cases()
    clusters = [f"{nodes}x{each}" for nodes, each in CLUSTERS]
    assert len(found) == 126
    assert {(c.strategy, c.mask) for c in found} == set(product(STRATEGIES, MASKS))
    assert {(c.strategy, c.cluster) for c in found} == set(product(STRATEGIES, clusters))
    assert {(c.mask, c.cluster) for c in found} == set(product(MASKS, clusters))


def test_pairwise_matrix_reaches_the_corners() -> None:
    """Head arrangements, dtypes, pads, scattered layouts, ranks without tokens, rows without keys, only length-1 documents."""
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
    assert any(c.mask == "slices" for c in cases())
    for extra in ({c.options.softcap for c in cases()}, {c.options.kernel for c in cases()}):
        assert len(extra) == 2
