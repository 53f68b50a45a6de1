"""Proves ``hypergraph``: its plans keep both balances (work and tokens) and never move more bytes than those of
``blocks``, and it refuses requests that it cannot plan.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypergraphs import forward_bytes, planned, request_for, start_of
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp.arrays.totals import imbalance
from flexcp.clusters import cluster
from flexcp.masks import causal, causal_blockwise, from_slices, full, lambda_, prefix, shared_question, window
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.planners.blocks.blocks import blocks
from flexcp.planners.hypergraph.hypergraph import DEFAULT_TOLERANCE, hypergraph
from flexcp.planners.hypergraph.mt_kahypar import initialised
from flexcp.planners.request import Request
from flexcp.shape import Shape

pytest.importorskip("mtkahypar")

LONGTAIL = [5787, 4139, 11299, 5632, 2449, 7864, 26774, 16834, 1968, 948, 2185]
LONGTAIL += [5186, 239, 3698, 972, 1897, 2422, 3257, 8392, 19058, 72]
SINGLE = [131_072]
"""LONGTAIL and SINGLE are the two batches on which bytes are compared with the DCP paper's planner."""

MASKS = [
    causal(),
    full(),
    window(20, 0),
    window(5, 9),
    lambda_(4, 16),
    shared_question(3, 0.25),
    causal_blockwise(16, 1),
    prefix(30),
]


def work(plan: Plan) -> Any:
    """Return the work of each rank in all layers, relative to the rank's share by speed."""
    total = sum(mask.layers * plan.work(i) for i, mask in enumerate(plan.batch.masks))
    return total / np.array(plan.cluster.rank_speeds) * sum(plan.cluster.rank_speeds)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "mask", "nodes", "gain"),
    [
        (LONGTAIL, causal(), 4, 0.03),
        (LONGTAIL, lambda_(), 4, 0.03),
        (LONGTAIL, shared_question(), 1, 0.0),
        (SINGLE, causal(), 1, 0.01),
        (SINGLE, causal_blockwise(), 4, 0.0),
    ],
    ids=[
        "longtail-causal-4x8",
        "longtail-lambda-4x8",
        "longtail-question-1x8",
        "single-causal-1x8",
        "single-blockwise-4x8",
    ],
)
def test_yardstick_keeps_both_balances_and_moves_no_more_than_blocks(
    lengths: list[int], mask: Any, nodes: int, gain: float
) -> None:
    tight = {"compute_tolerance": 0.05, "token_tolerance": 0.05}
    request = request_for(lengths, mask, nodes, 8, shape=Shape(8, 2, 128, 128), effort=4, **tight)
    plan, rival = (planned(request, place(request)) for place in (hypergraph, blocks))
    plan.check()
    assert imbalance(plan.work()) <= 1.05
    assert imbalance(plan.placement.tokens) <= 1.05
    assert forward_bytes(plan) <= (1 - gain) * forward_bytes(rival)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Draw small batches with any mask, machine, tolerance and constraint on tokens."""
    lengths = draw(st.lists(st.integers(1, 250), min_size=1, max_size=8))
    one = st.sampled_from(MASKS)
    mask: Any = draw(st.one_of(one, st.lists(one, min_size=len(lengths), max_size=len(lengths))))
    if draw(st.booleans()):
        mask = {"masks": {"some": (mask, 2), "others": (draw(one), 3)}}
    nodes, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    others: dict[str, Any] = {"compute_tolerance": draw(st.sampled_from([None, 0.0, 0.05, 0.3]))}
    wish = draw(st.sampled_from(["", "tolerance", "equal", "contiguous", "zigzag", "cap"]))
    if wish == "tolerance":
        others["token_tolerance"] = draw(st.sampled_from([0.0, 0.05, 0.3]))
    elif wish == "equal":
        others |= {"equal_tokens": True, "pad_to": draw(st.integers(1, 4))}
    elif wish == "cap":
        others["max_tokens_per_rank"] = -(-sum(lengths) // (nodes * ranks)) + 2
    elif wish:
        others["layout"] = wish
    if draw(st.booleans()):
        others["speeds"] = draw(
            st.lists(st.sampled_from([0.5, 1.0, 1.2]), min_size=nodes * ranks, max_size=nodes * ranks)
        )
    heads, kv_heads = draw(st.sampled_from([(8, 2), (12, 4), (6, 6)]))
    others["shape"] = Shape(heads, kv_heads, 16, 32, draw(st.sampled_from(["bfloat16", "float64"])))
    return request_for(lengths, mask, nodes, ranks, argument=draw(st.sampled_from(["16", "40"])), effort=2, **others)


@settings(max_examples=60, deadline=None)
@given(requests())
def test_any_request(request: Request) -> None:
    plan, rival = planned(request, hypergraph(request)), planned(request, start_of(request))
    plan.check()
    assert forward_bytes(plan) <= forward_bytes(rival)
    mean = sum(mask.layers * int(plan.work(i).sum()) for i, mask in enumerate(plan.batch.masks)) + 1
    tolerance = DEFAULT_TOLERANCE if request.compute_tolerance is None else request.compute_tolerance
    one_pair_of_each_rank = max(request.cluster.rank_speeds) * request.ranks
    assert work(plan).max() <= max((1 + tolerance) * mean + one_pair_of_each_rank, work(rival).max())
    tokens, others = plan.placement.tokens, rival.placement.tokens
    if request.layout is not None:
        assert np.array_equal(plan.placement.runs.matrix(), rival.placement.runs.matrix())
    elif request.equal_tokens:
        assert np.array_equal(tokens, others)
        assert len(set(tokens.tolist())) == 1
    else:
        tolerance = DEFAULT_TOLERANCE if request.token_tolerance is None else request.token_tolerance
        even = -(-request.batch.tokens // request.ranks)
        assert tokens.max() <= max(even, request.batch.tokens / request.ranks * (1 + tolerance))
        assert tokens.max() <= (request.max_tokens_per_rank or request.batch.tokens)


def test_the_note_says_the_exact_bytes() -> None:
    request = request_for([700, 350, 90, 20], causal(), nodes=2, ranks=4)
    placement = hypergraph(request)
    said = f"{forward_bytes(planned(request, placement))} bytes forward where blocks moves "
    assert placement.note.startswith(said + str(forward_bytes(planned(request, start_of(request)))))


def test_same_plan_twice_and_silent(capfd: pytest.CaptureFixture[str]) -> None:
    request = request_for([900, 350, 90, 20], lambda_(8, 100), nodes=2, ranks=4)
    first, second = (planned(request, hypergraph(request)) for _ in range(2))
    assert first.hash == second.hash
    assert capfd.readouterr() == ("", "")


def test_effort_counts_rounds() -> None:
    request = request_for([900, 350, 90, 20], causal(), nodes=2, ranks=4)
    none, start = hypergraph(replace(request, effort=0)), start_of(request)
    assert np.array_equal(none.runs.matrix(), start.runs.matrix())
    assert np.array_equal(none.regions[0].matrix(), start.regions[0].matrix())
    moved = [forward_bytes(planned(request, hypergraph(replace(request, effort=n)))) for n in (0, 1, 3)]
    assert moved == sorted(moved, reverse=True)


@pytest.mark.parametrize("lengths", [[1], [5, 1, 1], [300]])
def test_nothing_to_compute(lengths: list[int]) -> None:
    masks = [from_slices(n, []) for n in lengths]
    plan = planned(request := request_for(lengths, masks, ranks=3), hypergraph(request))
    plan.check()
    assert forward_bytes(plan) == 0


def test_one_rank() -> None:
    plan = planned(request := request_for([300, 20], ranks=1), hypergraph(request))
    plan.check()
    assert forward_bytes(plan) == 0


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["abc", "0", "-3", "1.5", "4,2"])
def test_bad_block_size(argument: str) -> None:
    with pytest.raises(ValueError, match=f"tokens of a block, as in hypergraph:1024; got 'hypergraph:{argument}'"):
        hypergraph(request_for([100], argument=argument))


def test_scattered_layout_is_refused() -> None:
    maps = [np.arange(r, 400, 4) for r in range(4)]
    with pytest.raises(ValueError, match="scatters tokens in runs too short for token blocks; use blocks"):
        hypergraph(request_for([250, 150], layout=maps))


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    initialised.cache_clear()
    monkeypatch.setitem(sys.modules, "mtkahypar", None)
    with pytest.raises(ValueError, match=r"pip install flexcp\[hypergraph\]"):
        hypergraph(request_for([100]))


@pytest.mark.parametrize("strategy", ["hypergraph:16", "dcp:16"])
def test_blocks_too_small_for_memory_are_refused_with_the_size_that_fits(strategy: str) -> None:
    """A million tokens in blocks of 16 would make billions of tiles, hundreds of GiB."""

    def planner(strategy: str) -> Planner:
        return Planner(8, 8, 8, cluster=cluster("gb200", 1, 8), strategy=strategy)

    with pytest.raises(ValueError, match=r"more than 16777216; take blocks of (\d+) tokens") as refused:
        planner(strategy)([930_000, 160_000])
    least = int(str(refused.value).split("take blocks of ")[1].split()[0])
    assert 16 < least <= 1024
