"""Proves auto: it takes what its rules say, as if it had tried everything, and says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp.batch import make_batch
from flexcp.clusters import Cluster, cluster
from flexcp.cost import CostModel
from flexcp.masks import causal, from_slices, full, lambda_, prefix, shared_question, window
from flexcp.plan.check import check_plan
from flexcp.plan.placement import Placement
from flexcp.planners.auto import CLOSE_TO_PERFECT, HIGH_EFFORT, _Scored, _Search, auto
from flexcp.planners.blocks.blocks import blocks
from flexcp.planners.groups.groups import groups
from flexcp.planners.request import Request
from flexcp.planners.static.bounds import StaticBounds, StaticMethod, static_methods
from flexcp.planners.strategies import STRATEGIES
from flexcp.planners.token_runs import user_layout
from flexcp.schedule.predict import lower_bound, predict
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Shape

SHAPE = Shape(8, 4, 64, 64)
MODULE = "flexcp.planners.auto"
COST = CostModel()


def request(lengths: list[int], mask: Any = None, machine: Cluster | None = None, **options: Any) -> Request:
    machine = machine or cluster("h100", 2, 4)
    return Request(
        make_batch(lengths, mask or causal()),
        options.pop("shape", SHAPE),
        machine,
        options.pop("cost", COST),
        **options,
    )


def ns_of(asked: Request, place: Callable[[Request], Placement], argument: str = "") -> int | None:
    """Predicted time, or None where the strategy refuses."""
    try:
        placement = place(replace(asked, argument=argument))
    except ValueError:
        return None
    return predict(placement, asked.shape, asked.cluster, asked.cost).total_ns


def static_times(asked: Request) -> list[int]:
    times = [ns_of(asked, m.place, m.argument) for m in static_methods(asked)]
    return [t for t in times if t is not None]


# --- random requests ----------------------------------------------------------------------------------------------------

lengths = st.lists(st.integers(1, 400) | st.integers(1000, 30_000), min_size=1, max_size=14)
masks = st.sampled_from([causal(), full(), window(99, 0), lambda_(16, 256), shared_question(3, 0.2), prefix(300)])
layered = st.dictionaries(st.sampled_from("ab"), st.tuples(masks, st.integers(1, 4)), min_size=1)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    nodes, each = draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (1, 3), (3, 2), (2, 5)]))
    speeds = draw(st.none() | st.lists(st.sampled_from([0.8, 1.0, 1.1]), min_size=nodes * each, max_size=nodes * each))
    machine = cluster(draw(st.sampled_from(["a100", "h100", "cpu"])), nodes, each, speeds=speeds)
    batch = make_batch(draw(lengths), masks=draw(layered))
    shape = replace(SHAPE, dtype=draw(st.sampled_from(["bfloat16", "float32"])))
    layout = user_layout(draw(st.sampled_from(["free", "free", "contiguous"])), batch.tokens, machine.ranks)
    equal = layout is None and draw(st.booleans())
    return Request(batch, shape, machine, COST, layout=layout, equal_tokens=equal)


@settings(max_examples=150, deadline=None)
@given(requests())
def test_bounds_hold_for_every_static_method(asked: Request) -> None:
    methods = static_methods(asked)
    bounds = StaticBounds(asked)
    for method, loose, close in zip(methods, bounds.loose(methods), bounds.close(methods), strict=True):
        ns = ns_of(asked, method.place, method.argument)
        assert ns is None or (loose <= ns and close <= ns), method.name


def test_the_busiest_part_is_the_same_rank_under_every_mask() -> None:
    """A causal and a full mask have other busiest ranks: no rank has the sum of both."""
    batch = make_batch([4741, 1061], masks={"a": (causal(), 1), "b": (full(), 1)})
    asked = Request(batch, SHAPE, cluster("a100", 1, 2), COST)
    methods = [m for m in static_methods(asked) if m.name == "allgather"]
    ns = ns_of(asked, methods[0].place, methods[0].argument)
    assert ns is not None and StaticBounds(asked).close(methods)[0] <= ns


@settings(max_examples=60, deadline=None)
@given(requests())
def test_the_answer_is_that_of_trying_everything(asked: Request) -> None:
    asked = replace(asked, effort=HIGH_EFFORT - 1)  # which blocks searches by, too
    placement = auto(asked)
    found = predict(placement, asked.shape, asked.cluster, asked.cost).total_ns
    statics = static_times(asked)
    dynamics = [ns_of(asked, place) for place in ([blocks, groups] if asked.layout is None else [blocks])]
    dynamic = min(t for t in dynamics if t is not None)
    if not statics or min(statics) * 1000 > dynamic * (1000 + COST.error_permille):
        perfect = lower_bound(asked.batch, asked.shape, asked.cluster, asked.cost)
        assert found == dynamic or found * CLOSE_TO_PERFECT < perfect * (
            CLOSE_TO_PERFECT + 1
        )  # close enough to perfect to ask nobody else
    else:
        assert found == min(statics)
    assert all(found <= t for t in statics)
    assert placement.note and auto(asked).note == placement.note


@settings(max_examples=40, deadline=None)
@given(requests(), st.sampled_from([None, 0, 2, 3]))
def test_any_effort_gives_a_right_plan(asked: Request, effort: int | None) -> None:
    plan = make_plan(auto(replace(asked, effort=effort)), asked.shape, asked.cluster, asked.cost, "auto")
    check_plan(plan)
    assert plan.strategy.partition(":")[0] in STRATEGIES


# --- the rules ----------------------------------------------------------------------------------------------------------


def test_equal_lengths_stay_static() -> None:
    placement = auto(request([4096] * 8))
    assert (
        placement.note.startswith("dp: ")
        and "is not better by more than the cost model's error of 8 %" in placement.note
    )


def test_a_long_document_among_short_ones_is_worth_leaving_static() -> None:
    asked = request([30_000, *[8000] * 5, *[200] * 200])
    placement = auto(asked)
    assert placement.note.startswith(("blocks", "groups"))
    assert "static one" in placement.note
    statics = static_times(asked)
    found = predict(placement, asked.shape, asked.cluster, asked.cost).total_ns
    assert found * (1000 + COST.error_permille) < min(statics) * 1000


def test_a_model_that_trusts_itself_less_stays_static_longer() -> None:
    asked = request([30_000, *[8000] * 5, *[200] * 200], cost=replace(COST, error_permille=5000))
    placement = auto(asked)
    assert not placement.note.startswith(("blocks", "groups"))
    assert predict(placement, asked.shape, asked.cluster, asked.cost).total_ns == min(static_times(asked))


def test_a_fixed_layout_stays_where_it_is() -> None:
    asked = request([9000, 300, 50, 2000])
    maps = user_layout("contiguous", asked.batch.tokens, 8)
    placement = auto(replace(asked, layout=maps))
    assert maps is not None
    assert placement.tokens.tolist() == [len(m) for m in maps]
    assert {m.degree for m in static_methods(replace(asked, layout=maps))} == {8}


def test_a_static_method_within_the_tolerances_may_win() -> None:
    asked = request([2048] * 16, causal(), compute_tolerance=0.05, token_tolerance=0.05)
    assert auto(asked).note.startswith("dp: ")


def test_tolerances_are_kept_by_whatever_wins() -> None:
    for tolerance, mask in product((0.05, 0.3), (causal(), lambda_(16, 512))):
        asked = request([20_000, 9000, *[350] * 40], mask, compute_tolerance=tolerance, token_tolerance=tolerance)
        placement = auto(asked)
        work, tokens = placement.work(0), placement.tokens
        assert work.max() <= work.mean() * (1 + tolerance) + 20_000 * SHAPE.heads
        assert tokens.max() <= tokens.mean() * (1 + tolerance) + 1


def test_the_cap_is_kept_by_whatever_wins() -> None:
    asked = request([4096, *[512] * 8], max_tokens_per_rank=1100)
    assert auto(asked).tokens.max() <= 1100


def test_heads_that_no_rank_count_divides_leave_the_other_methods() -> None:
    asked = request([500, 30], shape=Shape(3, 1, 64, 64))
    names = {m.strategy for m in static_methods(asked)}
    assert names == {"dp", "ring", "zigzag", "allgather"}
    assert auto(asked).note


def test_methods_are_few_and_can_run() -> None:
    asked = request([100_000] * 4, machine=cluster("h100", 32, 8), shape=Shape(64, 8, 128, 128))
    methods = static_methods(asked)
    assert len({m.name for m in methods}) == len(methods) < 40
    for strategy in ("dp", "ring", "zigzag", "allgather", "usp"):
        assert any(m.strategy == strategy and m.degree in (1, 256) for m in methods)
    small = request([100] * 4, machine=cluster("h100", 3, 4))
    assert None not in [ns_of(small, m.place, m.argument) for m in static_methods(small)]


# --- effort -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the candidates that auto places, as it places them."""
    found: list[str] = []
    search = import_module(MODULE)._Search
    placed = search._scored

    def recorded(self: Any, name: str, *rest: Any) -> Any:
        found.append(name)
        return placed(self, name, *rest)

    monkeypatch.setattr(search, "_scored", recorded)
    return found


@pytest.mark.parametrize("effort", [0, 1, 2])
def test_least_effort_is_blocks_and_one_static(tried: list[str], effort: int) -> None:
    auto(request([4096] * 7 + [100], effort=effort))
    assert tried[0] == "blocks" and len(tried) == 2 and "groups" not in tried


def test_more_effort_tries_more(tried: list[str]) -> None:
    auto(request([4096] * 7 + [100], effort=5))
    few = list(tried)
    tried.clear()
    auto(request([4096] * 7 + [100]))
    assert few[:2] == tried[:2] == ["blocks", "groups"] and len(few) <= 5 and len(few) <= len(tried) <= 16


def test_static_methods_that_cannot_win_are_not_placed(tried: list[str]) -> None:
    auto(request([50_000, *[700] * 90], machine=cluster("a100", 4, 8), shape=Shape(64, 8, 128, 128)))
    assert len(tried) < 8


def test_a_huge_static_placement_is_left_out_unless_effort_is_high(
    monkeypatch: pytest.MonkeyPatch, tried: list[str]
) -> None:
    monkeypatch.setattr(import_module(MODULE), "LARGE", 0)
    asked = request([4096] * 8)
    placement = auto(asked)
    assert tried == ["blocks", "groups"] or predict(placement, SHAPE, asked.cluster, COST).total_ns <= min(
        static_times(asked)
    )
    tried.clear()
    assert auto(replace(asked, effort=HIGH_EFFORT)).note.startswith("dp: ")


@pytest.mark.parametrize(
    ("bound", "winner"), [(96, "zigzag"), (97, "blocks"), (99, "blocks"), (100, "zigzag"), (None, "zigzag")]
)
def test_a_static_one_left_out_never_beats_the_answer(bound: int | None, winner: str) -> None:
    """Within the error auto stays static, unless a static one that was not made may be faster than it and no faster than the dynamic."""
    asked = request([4096] * 8)
    search = _Search(asked, 4)
    search.static, search.dynamic = (_Scored(name, blocks(asked), ns) for name, ns in (("zigzag", 100), ("blocks", 97)))
    search.untried = None if bound is None else (bound, "usp:8,16")
    note = search.answer().note
    assert note.startswith(winner)
    assert ("usp:8,16 at least" in note) == (winner == "blocks")


# --- refusals -----------------------------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="auto takes no degree"):
        auto(request([10], argument="4"))
    with pytest.raises(ValueError, match="effort must be 0 or more"):
        auto(request([10], effort=-1))


def test_a_batch_that_nothing_can_place_says_why() -> None:
    with pytest.raises(ValueError, match="no strategy can place this batch: blocks: "):
        auto(request([5000], max_tokens_per_rank=10))


def test_rows_without_keys() -> None:
    asked = request([900, 40], [from_slices(900, []), causal()])
    plan = make_plan(auto(asked), asked.shape, asked.cluster, asked.cost, "auto")
    check_plan(plan)
    assert int(plan.work().sum()) == asked.shape.heads * 40 * 41 // 2


def test_a_static_method_knows_its_size() -> None:
    asked = request([1000] * 20)
    for method in static_methods(asked):
        placement = method.place(replace(asked, argument=method.argument))
        assert len(placement.regions[0]) <= method.regions(asked) + asked.ranks * method.split
    assert isinstance(static_methods(asked)[0], StaticMethod)
    assert np.all(np.array([m.columns[3] for m in static_methods(asked)]) >= 1)
