"""Proves the planner after the FCP paper: blocks of equal work, balanced work and tokens, as many rounds as the largest
degree, and a reshuffle on entry where the layout is fixed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp.arrays.totals import imbalance
from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.plan.file import load_plan, save_plan
from flexcp.plan.plan import Plan
from flexcp.plan.rounds import plan_rounds
from flexcp.planner import Planner
from flexcp.planners.published.fcp import ROUNDS_PER_CALL, cut_into_blocks
from flexcp.shape import Kind


def planned(lengths: list[int], ranks: int, strategy: str = "fcp", nodes: int = 1, **call: Any) -> Plan:
    planner = Planner(8, 2, 64, cluster=cluster("h100", nodes, ranks // nodes), strategy=strategy)
    plan = planner(lengths, **call)
    plan.check()
    return plan


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_blocks_are_pairs_of_long_documents_and_packs_of_short_ones(lengths: list[int], size: int) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    block, start, stop = cut_into_blocks(np.array(lengths), starts, size)
    order = np.argsort(start, kind="stable")
    order = order[stop[order] > start[order]]
    assert start[order[0]] == 0 and (stop[order[:-1]] == start[order[1:]]).all() and stop[order[-1]] == sum(lengths)
    assert np.bincount(block, stop - start).max() <= size + 1, "a pair of rounded parts may have one token more"
    document = np.searchsorted(starts, start, side="right") - 1
    for one, length in enumerate(lengths):
        mine = np.isin(block, block[(document == one) & (stop > start)])
        assert len(set(block[mine].tolist())) == -(-length // size), "as few blocks as hold it"
        if length > size:
            assert set(document[mine & (stop > start)].tolist()) == {one}, "of its own"


def test_causal_blocks_of_a_document_have_equal_work() -> None:
    block, start, stop = cut_into_blocks(np.array([64_000]), np.array([0, 64_000]), 4096)
    pairs = np.bincount(block, (stop * (stop + 1) - start * (start + 1)) // 2)
    assert len(pairs) == 16 and np.ptp(pairs) == 0


@pytest.mark.parametrize("name", ["lognormal16k", "bimodal"])
def test_both_shares_are_balanced(name: str) -> None:
    """The paper reports an imbalance, (max - mean) / max, of 1.7 to 3.4 % from 16 GPUs on; here it is below 8 %."""
    plan = planned(draw_lengths(name, 16 * 32_768, 0), 16, nodes=2)
    for share in (plan.work(), plan.placement.tokens):
        assert 1 - 1 / imbalance(share) < 0.08


@given(st.lists(st.integers(1, 3_000), min_size=1, max_size=8), st.sampled_from([(2, 1), (3, 1), (8, 1), (8, 2)]))
@settings(max_examples=25, deadline=None)
def test_there_are_as_many_rounds_as_the_largest_degree(lengths: list[int], machine: tuple[int, int]) -> None:
    """The graph's edges are the blocks of keys that one rank sends another; no rank sends or receives
    twice in a round.
    """
    plan = planned(lengths, machine[0], "fcp:256", machine[1])
    block_bytes = 256 * 2 * int(plan.shape.bytes_per_token_head()[Kind.KV, 0])
    for program in plan.programs[0]:
        found = plan_rounds(program, plan.shape, plan.cluster, block_bytes)
        chunks = found.chunks
        for exchange in range(len(found.exchanges)):
            mine = chunks.take(chunks.exchange == exchange)
            degree = max(np.bincount(mine.source).max(), np.bincount(mine.target).max())
            assert found.exchanges.rounds[exchange] == degree
            for end in (mine.source, mine.target):
                assert len(set(zip(mine.round.tolist(), end.tolist(), strict=True))) == len(mine)
        assert (program.execution.rounds_per_call == ROUNDS_PER_CALL).all(), "coalesced"


def test_rounds_survive_a_plan_file() -> None:
    plan = planned([3_000, 200, 100], 4, "fcp:256")
    again = load_plan(save_plan(plan))
    assert again.hash == plan.hash
    assert (again.programs[0][0].execution.rounds_per_call == ROUNDS_PER_CALL).all()


def test_a_fixed_layout_is_reshuffled_at_the_door() -> None:
    """Tokens stay where they are, the same ranks compute the same rows as under a free layout, and results return to
    the tokens' owners.
    """
    lengths = [3_000, 700, 650, 90]
    free, kept = planned(lengths, 4, "fcp:256"), planned(lengths, 4, "fcp:256", layout="contiguous")
    assert kept.placement.tokens.tolist() == [1_110] * 4
    assert (kept.work() == free.work()).all()
    kinds = set(kept.programs[0][0].transfers.kind.tolist())
    assert {int(Kind.Q), int(Kind.KV), int(Kind.O)} <= kinds
    assert int(Kind.Q) not in set(free.programs[0][0].transfers.kind.tolist())
