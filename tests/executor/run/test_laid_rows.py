"""Proves that results of own rows that arrive complete are found and copied, and that nothing uses their sums.

On real ranks, results equal, bit for bit, those of the same program without laid results, while the sums and the
finished tensors of laid results begin as NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import flexcp
from flexcp.executor.run import executor, message_layout, rank_program
from flexcp.executor.run.laid_rows import NO_AREAS, Ints, cover_all, joined_areas, other_areas
from flexcp.executor.run.message_layout import types_of
from flexcp.executor.run.rank_program import Shelf
from flexcp.measure.ranks import RankPool
from flexcp.plan.memory import KEYS, QUERIES
from flexcp.plan.plan import Plan
from flexcp.shape import Kind, Shape

LENGTHS = [33, 1, 50, 2, 8]
HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM = 4, 2, 8, 6
PLANS = [("ulysses", 2), ("usp:2,2", 4), ("groups:team=2", 4), ("blocks", 3), ("ring", 3)]


def plan_for(ranks: int, strategy: str, dtype: str = "bfloat16") -> Plan:
    where = flexcp.cluster("cpu", 1, ranks)
    planner = flexcp.Planner(HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, dtype, where, strategy=strategy)
    return planner(LENGTHS)


def flags_of(areas: Ints, heads: int, rows: int) -> np.ndarray:
    """Return how often areas cover each head and row."""
    found = np.zeros((heads, rows), int)
    for h0, h1, first, last in areas.tolist():
        found[h0:h1, first:last] += 1
    return found


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.sets(st.integers(0, 9), min_size=1)), max_size=5))
def test_areas_are_disjoint_and_hold_what_rectangles_hold(rectangles: list[tuple[int, int, set[int]]]) -> None:
    heads, rows = 8, 10
    wanted = np.zeros((heads, rows), int)
    for h0, more, at in rectangles:
        wanted[h0 : h0 + more, sorted(at)] = 1
    areas = joined_areas([(h0, h0 + more, np.array(sorted(at))) for h0, more, at in rectangles], rows)
    others = other_areas(areas, heads, rows)
    assert np.array_equal(flags_of(areas, heads, rows), wanted)
    assert np.array_equal(flags_of(others, heads, rows), 1 - wanted)
    assert cover_all(areas, heads, rows) == bool(wanted.all())
    assert cover_all(np.concatenate([areas, others]), heads, rows)


def test_areas_of_neighbouring_heads_are_joined() -> None:
    areas = joined_areas([(0, 2, slice(0, 5)), (2, 3, slice(0, 5)), (3, 4, slice(7, 9))], 10)
    assert areas.tolist() == [[0, 3, 0, 5], [3, 4, 7, 9]]
    assert not cover_all(np.zeros((0, 4), np.int64), 4, 0), "without rows there is nothing to cover"


@pytest.mark.parametrize(("strategy", "ranks"), PLANS)
@pytest.mark.parametrize("backward", [False, True])
def test_results_that_arrive_complete_are_laid(strategy: str, ranks: int, backward: bool) -> None:
    plan = plan_for(ranks, strategy)
    transfers = plan.programs[0][backward].transfers
    for rank in range(ranks):
        program = rank_program.rank_program(plan, rank, 0, backward)
        for side, kind, heads in ((QUERIES, Kind.DQ if backward else Kind.O, HEADS), (KEYS, Kind.DKV, KV_HEADS)):
            mine = transfers.take((transfers.kind == kind) & (transfers.target == rank) & (transfers.owner == rank))
            complete = np.zeros((heads, int(plan.placement.tokens[rank])), int)
            for start, stop, h0, h1, partial in zip(mine.start, mine.stop, mine.h0, mine.h1, mine.partial, strict=True):
                complete[h0:h1, start:stop] += 1 - partial
            assert np.array_equal(flags_of(program.laid[side], *complete.shape), complete)
            if strategy == "ulysses" and (backward or side == QUERIES):
                assert complete.sum() == complete.size // 2, "each of two ranks computes half of the heads"


def both_ways(group: dist.ProcessGroup, plan: Plan, sinks: bool) -> dict[str, Any]:
    """Return results with laid ones whose sums begin as NaN, results without laid ones, and how many areas are laid."""
    made, laid = message_layout.new_own_results, list[int]()

    def spoilt(shelf: Any, backward: bool, shape: Any, types: Any, areas: Ints, *how: bool) -> dict[str, Any]:
        found = made(shelf, backward, shape, types, areas, *how)
        laid.append(len(areas))
        for h0, h1, first, last in areas.tolist():
            for x in found.values():
                x[first:last, h0:h1] = torch.nan
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "new_own_results", spoilt)
        found = results(flexcp.bind(plan, group), sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_program, "_mark_laid", lambda shelves, slots: (NO_AREAS, NO_AREAS))
        plain = results(flexcp.bind(plan, group), sinks)
    return {"found": found, "plain": plain, "laid": laid}


def results(step: Any, sinks: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, V_HEAD_DIM))
    dtype = getattr(torch, step.plan.shape.dtype)
    streams = [torch.randn(step.plan.batch.tokens, *size, generator=generator).to(dtype) for size in sizes]
    rows = [step.shard(stream).requires_grad_() for stream in streams]
    more = {"sinks": torch.linspace(-1, 1, HEADS)} if sinks else {}
    out, lse = flexcp.attention(*rows, step, return_lse=True, **more)
    (out.float().square().sum() + lse.sum()).backward()
    return [out.detach(), lse.detach(), *(x.grad for x in rows if x.grad is not None)]


@pytest.mark.parametrize(("strategy", "ranks"), PLANS)
@pytest.mark.parametrize(("dtype", "sinks"), [("bfloat16", False), ("bfloat16", True), ("float64", False)])
def test_results_are_those_of_sums(pool: RankPool, strategy: str, ranks: int, dtype: str, sinks: bool) -> None:
    for rank in pool.run(both_ways, plan_for(ranks, strategy, dtype), sinks, ranks=ranks):
        assert len(rank["found"]) == 5
        assert all(torch.equal(a, b) for a, b in zip(rank["found"], rank["plain"], strict=True))
        assert any(rank["laid"]) == (strategy != "ring")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_sums_are_the_results_only_where_nothing_changes_them(dtype: torch.dtype) -> None:
    shape, types = Shape(2, 1, 8, 8, str(dtype).removeprefix("torch.")), types_of(torch.zeros(1, dtype=dtype))
    half, every = np.array([[0, 1, 0, 5]]), np.array([[0, 2, 0, 5]])
    dq = Shelf(QUERIES, 5, 0, 2, 0)
    for opens in (False, True):
        found = message_layout.new_own_results(dq, True, shape, types, half, False, opens)
        assert found["finished"].dtype == dtype and not found["dq"].any()
        assert (found["finished"] is found["dq"]) == (dtype == torch.float64 and not opens)
    assert set(message_layout.new_own_results(dq, True, shape, types, NO_AREAS, False, False)) == {"dq"}
    assert "finished" in message_layout.new_own_results(dq, True, shape, types, every, False, False)
