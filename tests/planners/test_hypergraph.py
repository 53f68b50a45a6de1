"""Proves ``hypergraph``: its nets weigh exactly what moves, its moves are judged exactly, and its answer keeps both balances and never
moves more bytes than ``blocks``.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp.batch import make_batch
from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.masks import (
    causal,
    causal_blockwise,
    from_slices,
    full,
    lambda_,
    prefix,
    shared_question,
    window,
)
from flexcp.pieces import Shape
from flexcp.plan import Placement, Plan, imbalance
from flexcp.planners.blocks import blocks
from flexcp.planners.hypergraph import DEFAULT_TOLERANCE, hypergraph
from flexcp.planners.layouts import user_layout
from flexcp.planners.request import Request
from flexcp.schedule import make_plan

# The package's name of the same is the strategy itself.
module = importlib.import_module("flexcp.planners.hypergraph")

pytest.importorskip("mtkahypar")

LONGTAIL = [5787, 4139, 11299, 5632, 2449, 7864, 26774, 16834, 1968, 948, 2185]
LONGTAIL += [5186, 239, 3698, 972, 1897, 2422, 3257, 8392, 19058, 72]
SINGLE = [131_072]
"""The two batches of the yardstick, DCP's own planner's."""

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


def request_for(lengths: list[int], mask: Any = None, nodes: int = 1, ranks: int = 4, **others: Any) -> Request:
    """A request with a small attention layer unless told."""
    batch = make_batch(lengths, **(mask if isinstance(mask, dict) else {"mask": mask or causal()}))
    layout = others.pop("layout", "free")
    machine = cluster("h100", nodes, ranks, others.pop("speeds", None))
    return Request(
        batch,
        others.pop("shape", Shape(8, 2, 16, 16)),
        machine,
        CostModel(),
        layout=user_layout(layout, batch.tokens, machine.ranks),
        **others,
    )


def planned(request: Request, placement: Placement) -> Plan:
    return make_plan(placement, request.shape, request.cluster, request.cost, "hypergraph")


def start_of(request: Request) -> Placement:
    """What ``blocks`` does under the tolerances that ``hypergraph`` assumes."""
    tolerances = {
        name: DEFAULT_TOLERANCE if getattr(request, name) is None else getattr(request, name)
        for name in ("compute_tolerance", "token_tolerance")
    }
    return blocks(replace(request, argument="", effort=None, **tolerances))


def forward_bytes(plan: Plan) -> int:
    """Of all layers."""
    return sum(mask.layers * int(plan.bytes(mask=i).sum()) for i, mask in enumerate(plan.batch.masks))


def work(plan: Plan) -> Any:
    """Of each rank in all layers, relative to its share by speed."""
    total = sum(mask.layers * plan.work(i) for i, mask in enumerate(plan.batch.masks))
    return total / np.array(plan.cluster.rank_speeds) * sum(plan.cluster.rank_speeds)


# --- the answer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "mask", "nodes", "gain"),
    [
        (LONGTAIL, causal(), 4, 0.03),
        (LONGTAIL, lambda_(), 4, 0.03),
        (LONGTAIL, shared_question(), 1, 0.0),
        (SINGLE, causal(), 1, 0.03),
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
    """Small batches, any mask, machine, tolerance and wish about tokens."""
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


# --- the hypergraph ------------------------------------------------------------------------------------------------------


def shuffled(request: Request, seed: int) -> Any:
    """The hypergraph of a request with some blocks and tiles on random ranks, and the bundles' search over it."""
    first = module._candidate(request, start_of(request), 40)
    partition, random = first.partition, np.random.default_rng(seed)
    for column in (partition.owner, partition.worker):
        away = random.random(len(column)) < 0.3
        column[away] = random.integers(0, request.ranks, int(away.sum()))
    partition.count()
    limits = module._limits(replace(request, compute_tolerance=0.1, token_tolerance=0.1), first)
    return module._Search(partition, limits)


CASES = [
    (request_for([600, 170, 40], causal(), nodes=2, ranks=3), 1),
    (request_for([600, 170, 40], lambda_(10, 70), nodes=2, ranks=3), 2),
    (request_for([500, 60], causal_blockwise(32, 2), ranks=5), 3),
    (request_for([300, 260], {"masks": {"a": (causal(), 2), "b": (window(50), 3)}}, ranks=4), 4),
]


@pytest.mark.parametrize(("request_", "seed"), CASES)
def test_nets_weigh_what_moves(request_: Request, seed: int) -> None:
    search = shuffled(request_, seed)
    placement = module._placement(request_, start_of(request_), search.partition, search.limits)
    plan = planned(request_, placement)
    plan.check()
    assert search.partition.bytes() == forward_bytes(plan)
    assert np.array_equal(search.partition.tokens, placement.tokens)
    assert np.array_equal(search.partition.loads, sum(m.layers * plan.work(i) for i, m in enumerate(plan.batch.masks)))


@pytest.mark.parametrize(("request_", "seed"), CASES)
def test_moves_are_judged_exactly(request_: Request, seed: int) -> None:
    search, random = shuffled(request_, seed), np.random.default_rng(seed)
    partition = search.partition
    for bundles in list(search._kinds(None)):
        changes, before = search._changes(bundles), partition.bytes()
        for i in random.integers(0, len(bundles.name), 6):
            one, target = bundles.take(np.array([i])), int(random.integers(request_.ranks))
            trial = partition.copy()
            trial.owner[bundles.block_label == one.name] = target
            trial.worker[bundles.tile_label == one.name] = target
            trial.count()
            assert trial.bytes() - before == changes[i, target]
            search._move(one, target)
            for name in ("counts", "reads", "readers", "loads", "tokens", "owner", "worker"):
                assert np.array_equal(getattr(partition, name), getattr(trial, name)), name
            search._move(replace(one, source=np.array([target])), int(one.source[0]))


def test_repair_brings_ranks_back_within_limits() -> None:
    search = shuffled(CASES[0][0], 5)
    search.most_load = np.full_like(search.most_load, int(search.mean_load * 1.1))
    search.most_tokens = np.full_like(search.most_tokens, int(search.mean_tokens * 1.1))
    assert search.partition.loads.max() > search.most_load[0]
    assert search.repair(search.partition.bytes())
    assert search.partition.loads.max() <= search.most_load[0]
    assert search.partition.tokens.max() <= search.most_tokens[0]


def test_climbing_only_saves_and_keeps_limits() -> None:
    search = shuffled(CASES[1][0], 6)
    partition = search.partition
    search.most_load = np.maximum(search.most_load, partition.loads)
    search.most_tokens = np.maximum(search.most_tokens, partition.tokens)
    before = partition.bytes()
    search.climb()
    assert partition.bytes() < before
    assert (partition.loads <= search.most_load).all()
    assert (partition.tokens <= search.most_tokens).all()


# --- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["abc", "0", "-3", "1.5", "4,2"])
def test_bad_block_size(argument: str) -> None:
    with pytest.raises(ValueError, match=f"tokens of a block, as in hypergraph:1024; got 'hypergraph:{argument}'"):
        hypergraph(request_for([100], argument=argument))


def test_scattered_layout_is_refused() -> None:
    maps = [np.arange(r, 400, 4) for r in range(4)]
    with pytest.raises(ValueError, match="scatters tokens in runs too short for token blocks; use blocks"):
        hypergraph(request_for([250, 150], layout=maps))


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    module._partitioner.cache_clear()
    monkeypatch.setitem(sys.modules, "mtkahypar", None)
    with pytest.raises(ValueError, match=r"pip install flexcp\[hypergraph\]"):
        hypergraph(request_for([100]))
