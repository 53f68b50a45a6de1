"""Proves the planners after published systems: each deals documents as its system does, and moves what that system
moves.

Examples by hand give exact counts and bytes; random batches give the properties that hold for all.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexcp.arrays.totals import imbalance
from flexcp.batch import MaskLike, make_batch
from flexcp.clusters import Cluster, cluster
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.masks import causal, causal_blockwise, full, lambda_, shared_question, window
from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.planners.published.dhp import dhp
from flexcp.planners.published.fcp import fcp
from flexcp.planners.published.hdp import hdp
from flexcp.planners.published.minheap import minheap
from flexcp.planners.published.pow2 import pow2
from flexcp.planners.published.ranges import refuse_tiny_parts
from flexcp.planners.published.wlb import wlb
from flexcp.planners.request import Refused, Request
from flexcp.schedule import analysis
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Shape

Ints = NDArray[np.int64]
Strategy = Callable[[Request], Placement]
SHAPE = Shape(8, 2, 64, 64)
KV_BYTES = 2 * 2 * (64 + 64)
"""Bytes of one token's keys and values: two KV heads in bfloat16."""
RIVALS: list[Strategy] = [dhp, fcp, minheap, pow2, hdp, wlb]
DEALERS = [strategy for strategy in RIVALS if strategy is not fcp]
"""The planners that place tokens themselves, and so refuse a layout."""


def asked(
    lengths: list[int], ranks: int, mask: MaskLike | None = None, nodes: int = 1, masks: Any = None, **more: Any
) -> Request:
    batch = make_batch(lengths, None if masks else mask or causal(), masks)
    return Request(batch, SHAPE, cluster("h100", nodes, ranks // nodes), CostModel(), **more)


def planned(strategy: Strategy, request: Request) -> Plan:
    plan = make_plan(strategy(request), request.shape, request.cluster, request.cost, strategy.__name__)
    plan.check()
    return plan


def kept(placement: Placement) -> Ints:
    """Return ``[document, rank]`` counts of tokens."""
    found = np.zeros((placement.batch.documents, placement.ranks), np.int64)
    runs = placement.runs
    index, document, q0, q1 = placement.batch.split_by_document(runs.start, runs.stop)
    np.add.at(found, (document, runs.rank[index]), q1 - q0)
    return found


# --- all planners -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", RIVALS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_plans_are_right(strategy: Strategy, data: st.DataObject) -> None:
    ranks, nodes = data.draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (5, 1), (6, 2), (8, 2)]))
    lengths = data.draw(st.lists(st.one_of(st.integers(1, 30), st.integers(1, 900)), min_size=1, max_size=9))
    rules = st.sampled_from([causal(), full(), window(9, 3), lambda_(2, 8), shared_question(), causal_blockwise(8, 2)])
    masks = {"a": (data.draw(rules), 2), "b": (data.draw(rules), 1)} if data.draw(st.booleans()) else None
    equal = data.draw(st.booleans())
    pad_to = data.draw(st.sampled_from([1, 8])) if equal else 1
    arguments = {minheap: ["", "7", "64", "7,relay"], fcp: ["", "7", "64"]}.get(strategy, [""])
    argument = data.draw(st.sampled_from(arguments))
    request = asked(
        lengths, ranks, data.draw(rules), nodes, masks, equal_tokens=equal, pad_to=pad_to, argument=argument
    )
    placement = planned(strategy, request).placement
    if equal:
        assert len(set(placement.tokens.tolist())) == 1 and int(placement.tokens[0]) % pad_to == 0


@pytest.mark.parametrize("strategy", DEALERS)
def test_refusals_of_a_layout(strategy: Strategy) -> None:
    layout = (np.arange(30), np.arange(30, 60))
    with pytest.raises(ValueError, match=f"{strategy.__name__} places tokens itself.*use blocks"):
        strategy(asked([10, 50], 2, layout=layout))


@pytest.mark.parametrize("strategy", RIVALS)
def test_refusals_of_a_cap(strategy: Strategy) -> None:
    with pytest.raises(
        ValueError, match=r"(keeps \d+ tokens on rank \d, over|need \d ranks with) max_tokens_per_rank=20"
    ):
        strategy(asked([10, 50], 2, max_tokens_per_rank=20))


@pytest.mark.parametrize(
    ("strategy", "argument", "message"),
    [
        (minheap, "0", "minheap takes a number of tokens in a chunk of at least 1, as in minheap:512; got 'minheap:0'"),
        (minheap, "big", "got 'minheap:big'"),
        (
            minheap,
            "8,once",
            "after a chunk's tokens minheap takes only 'relay', as in minheap:1024,relay; got 'minheap:8,once'",
        ),
        (pow2, "-4", "pow2 takes a number of tokens a rank of at least 1, as in pow2:8192; got 'pow2:-4'"),
        (
            pow2,
            "24",
            "document 1 has 50 tokens, more than the largest group of 2 ranks holds with pow2:24; raise the budget",
        ),
        (hdp, "x", "got 'hdp:x'"),
        (hdp, "16", "document 1 has 50 tokens, more than 3 ranks of hdp:16; raise the budget"),
        (wlb, "2", "wlb takes no argument; got 'wlb:2'"),
    ],
)
def test_refused_arguments(strategy: Strategy, argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategy(asked([10, 50], 3, argument=argument))


# --- minheap ----------------------------------------------------------------------------------------------------------


def test_minheap_with_a_relay_crosses_to_a_node_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With relays the same ranks compute the same rows, and fewer bytes cross nodes: at most all keys once."""
    monkeypatch.setattr(analysis, "FLATTERED_RELAYS_PERMILLE", 0)
    plans = {text: planned(minheap, asked([4096], 8, nodes=2, argument=text)) for text in ("256", "256,relay")}
    node = np.arange(8) // 4
    across = {text: int(plan.bytes()[node[:, None] != node].sum()) for text, plan in plans.items()}
    assert (plans["256"].work() == plans["256,relay"].work()).all()
    assert across["256,relay"] <= 4096 * KV_BYTES < across["256"]


def test_minheap_deals_by_area_and_fetches_exact_keys() -> None:
    # Chunks of 4 rows have 10, 26, 42 and 58 pairs: rank 0 takes the last and the first, rank 1 the two in the middle.
    plan = planned(minheap, asked([16], 2, argument="4"))
    runs = plan.placement.runs
    assert list(zip(runs.rank, runs.start, runs.stop, strict=True)) == [(0, 0, 4), (0, 12, 16), (1, 4, 12)]
    assert plan.work().tolist() == [68 * 8, 68 * 8]
    # Rank 0's last rows read the eight middle keys, rank 1's rows the first four.
    assert plan.bytes().tolist() == [[0, 4 * KV_BYTES], [8 * KV_BYTES, 0]]


@given(st.lists(st.integers(1, 3_000), min_size=1, max_size=30), st.integers(1, 9), st.sampled_from([1, 16, 100, 1024]))
@settings(max_examples=60, deadline=None)
def test_minheap_gives_every_rank_as_many_chunks(lengths: list[int], ranks: int, chunk: int) -> None:
    lengths = lengths[: 3 if chunk == 1 else None]
    placement = minheap(asked(lengths, ranks, argument=str(chunk)))
    owner = np.zeros(sum(lengths), np.int64)
    for rank, start, stop in zip(placement.runs.rank, placement.runs.start, placement.runs.stop, strict=True):
        owner[start:stop] = rank
    chunks = owner[::chunk]
    assert np.array_equal(owner, np.repeat(chunks, chunk)[: len(owner)]), "a chunk is cut"
    counts = np.bincount(chunks, minlength=ranks)
    assert counts.max() - counts.min() <= (len(chunks) % ranks > 0)


def test_minheap_is_level_on_web_packs() -> None:
    plan = planned(minheap, asked(draw_lengths("web", 8 * 8192, 0), 8))
    assert plan.placement.tokens.tolist() == [8192] * 8
    assert imbalance(plan.work()) < 1.05
    default = minheap(asked(draw_lengths("web", 8 * 8192, 0), 8, argument="1024"))
    assert np.array_equal(default.runs.matrix(), plan.placement.runs.matrix())


# --- pow2 -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 4_000), min_size=1, max_size=25), st.integers(1, 13))
@settings(max_examples=60, deadline=None)
def test_pow2_groups_are_aligned_powers_of_two(lengths: list[int], ranks: int) -> None:
    placement = pow2(asked(lengths, ranks))
    sizes = [len(grid) for grid in placement.traffic.groups]
    assert sum(sizes) == ranks
    assert all(size & (size - 1) == 0 for size in sizes)
    members = [[rank for (rank,) in grid] for grid in placement.traffic.groups]
    assert all(ranks[0] % len(ranks) == 0 for ranks in members)
    assert [rank for group in members for rank in group] == list(range(ranks))
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    budget = -(-sum(lengths) // ranks)
    for document, row in enumerate(kept(placement)):
        groups = set(group_of[np.flatnonzero(row)].tolist())
        assert len(groups) == 1, "a document is in two groups"
        size = sizes[groups.pop()]
        assert lengths[document] <= budget * size or size == 1 << (ranks.bit_length() - 1)


def test_pow2_rounds_degrees_up_and_passes_keys_round() -> None:
    # With 1,000 tokens a rank, 2,500 tokens need 4 of 8 ranks (3 would hold them), 1,500 need 2, the others 1.
    plan = planned(pow2, asked([2_500, 1_500, 900, 800], 8, argument="1000"))
    assert [len(grid) for grid in plan.placement.traffic.groups] == [4, 2, 1, 1]
    assert (kept(plan.placement) > 0).sum(axis=1).tolist() == [4, 2, 1, 1]
    moved = plan.bytes().sum()
    assert moved == KV_BYTES * (3 * 2_500 + 1 * 1_500), "every key visits every other rank of its group"


def test_pow2_fills_empty_ranks_by_doubling() -> None:
    placement = pow2(asked([4_000, 1_000], 6, argument="4000"))
    assert [len(grid) for grid in placement.traffic.groups] == [4, 2]
    assert (kept(placement) > 0).sum(axis=1).tolist() == [4, 2]


def test_pow2_joins_a_larger_group_when_no_rank_is_free() -> None:
    placement = pow2(asked([4_000, 4_000, 500], 8, argument="1000"))
    assert [len(grid) for grid in placement.traffic.groups] == [4, 4]
    assert (kept(placement)[2] > 0).sum() == 4, "the short document inherits the degree of its bin"


# --- hdp --------------------------------------------------------------------------------------------------------------


def test_hdp_cuts_over_just_enough_ranks() -> None:
    plan = planned(hdp, asked([2_500, 900, 800, 700, 600], 8, argument="1000"))
    tokens = kept(plan.placement)
    assert (tokens > 0).sum(axis=1).tolist() == [3, 1, 1, 1, 1]
    assert sorted(tokens[0][tokens[0] > 0].tolist()) == [833, 833, 834]
    assert np.ptp(np.flatnonzero(tokens[0])) == 2, "neighbouring ranks"
    # Zig-zag over three ranks: the rank with the first and last parts reads everything, the others up to the end of
    # their later part.
    assert plan.bytes().sum() <= KV_BYTES * 2 * 2_500


@given(st.lists(st.integers(1, 2_000), min_size=1, max_size=40), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_hdp_keeps_short_documents_whole(lengths: list[int], ranks: int) -> None:
    budget = -(-sum(lengths) // ranks)
    spread = (kept(hdp(asked(lengths, ranks))) > 0).sum(axis=1)
    for length, degree in zip(lengths, spread, strict=True):
        assert degree <= -(-length // budget)


def test_hdp_counts_differ_where_time_does_not() -> None:
    placement = hdp(asked([4_000, *[200] * 150], 4, argument="8000"))
    tokens = placement.tokens
    assert tokens.max() > tokens.min()
    load = placement.work(0) // SHAPE.heads + CostModel().pairs_per_token(SHAPE) * tokens
    assert load.max() * 4 <= load.sum() * 21 // 20


# --- wlb --------------------------------------------------------------------------------------------------------------


def test_wlb_cuts_long_documents_each() -> None:
    plan = planned(wlb, asked([6_000, 2_000], 4))
    assert plan.placement.note.startswith("sharded per document")
    assert kept(plan.placement).tolist() == [[1_500] * 4, [500] * 4]
    assert imbalance(plan.work()) < 1.01
    assert plan.bytes().sum() == KV_BYTES * 3 * 8_000, "all keys to all"


def test_wlb_leaves_many_short_documents_together() -> None:
    placement = wlb(asked([64] * 256, 4))
    assert placement.note.startswith("sharded per sequence")
    assert (kept(placement) > 0).sum(axis=1).max() == 1


@given(st.lists(st.integers(1, 6_000), min_size=1, max_size=12), st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_wlb_takes_the_faster(lengths: list[int], ranks: int) -> None:
    """Recompute by hand the cost of both ways: the area of every fragment plus one tile of 128 x 128 for it."""
    batch = make_batch(lengths, causal())

    def slowest(sequences: list[tuple[int, int]]) -> int:
        totals = [0] * ranks
        for begin, length in sequences:
            borders = [begin + length * i // (2 * ranks) for i in range(2 * ranks + 1)]
            parts = list(pairwise(borders))
            for i in range(ranks):
                mine = [parts[i], parts[2 * ranks - 1 - i]]
                if mine[0][1] == mine[1][0]:
                    mine = [(mine[0][0], mine[1][1])]  # the two middle parts are adjacent: one fragment
                for a, b in mine:
                    _, _, q0, q1 = batch.split_by_document(np.array([a]), np.array([b]))
                    totals[i] += sum(
                        int(y * (y + 1) - x * (x + 1)) // 2 + 128 * 128 for x, y in zip(q0, q1, strict=True)
                    )
        return max(totals)

    per_document = slowest(list(zip(batch.starts[:-1].tolist(), lengths, strict=True)))
    per_sequence = slowest([(0, sum(lengths))])
    note = wlb(asked(lengths, ranks)).note
    assert note.startswith("sharded per document" if per_document < per_sequence else "sharded per sequence")


@pytest.mark.parametrize("name", ["minheap", "fcp"])
def test_parts_of_a_document_that_are_too_many_to_count_are_refused_with_a_size_that_works(name: str) -> None:
    """Chunks of one token of a long document would need 32 GB (found by ``flexcp fuzz``)."""
    where = cluster("cpu", 1, 8)
    with pytest.raises(Refused, match=rf"291213 parts of 1; take at least (\d+) tokens, as in {name}:\1") as found:
        Planner(2, cluster=where, strategy=f"{name}:1")([291_213])
    least = int(str(found.value).rpartition(":")[2])
    refuse_tiny_parts(request_of([291_213], where), name, least)
    with pytest.raises(Refused):
        refuse_tiny_parts(request_of([291_213], where), name, least - 1)
    assert Planner(2, cluster=where, strategy=f"{name}:1")([40]).ranks == 8


def request_of(lengths: list[int], where: Cluster) -> Request:
    return Request(make_batch(lengths, causal()), SHAPE, where, CostModel())
