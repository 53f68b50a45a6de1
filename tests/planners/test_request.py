"""Proves refusals: a strategy raises ``Refused`` for requests that do not suit it, a user's mistake is another error,
and ``auto`` goes on after a refusal but never hides a bug.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from flexcp.batch import make_batch
from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.masks import Mask, causal, window
from flexcp.plan.placement import Placement
from flexcp.planners.microbatch import split
from flexcp.planners.request import MOST_PAIRS, Refused, Request, refuse_over_cap
from flexcp.planners.strategies import STRATEGIES, find_strategy, split_names
from flexcp.shape import Shape

AUTO = import_module("flexcp.planners.auto.candidates")
SCATTERED = tuple(np.arange(r, 200, 4) for r in range(4))
HALVES = tuple(np.array_split(np.arange(200), 4))


def place(strategy: str, lengths: tuple[int, ...] = (150, 50), **options: Any) -> Placement:
    """Place a batch on 4 ranks with a strategy, with 8 query and 2 KV heads unless a shape is given."""
    found, argument = find_strategy(strategy)
    shape = options.pop("shape", Shape(8, 2, 16, 16))
    batch = make_batch(lengths, causal())
    return found(Request(batch, shape, cluster("h100", 1, 4), CostModel(), argument, **options))


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    # A cap on tokens: no placement can keep it, or this strategy's does not.
    **{f"{name} over the cap": ({"strategy": name, "max_tokens_per_rank": 20}, "=20") for name in STRATEGIES},
    "dp's longest document": ({"strategy": "dp", "max_tokens_per_rank": 100}, "keeps 150 tokens on rank 0"),
    # Tolerances for strategies that balance by their own rule.
    **{
        f"{name} with a tolerance": ({"strategy": name, "compute_tolerance": 0.1}, "takes no tolerances")
        for name in STRATEGIES
        if name not in ("auto", "blocks", "hypergraph")
    },
    # Layouts.
    **{
        f"{name} in a layout": ({"strategy": name, "layout": HALVES}, "fixed layout")
        for name in ("dp", "ring:2", "groups", "dhp", "dcp", "minheap", "pow2", "hdp", "wlb")
    },
    **{
        f"{name} scattered": ({"strategy": name, "layout": SCATTERED}, "scatters tokens")
        for name in ("ring", "zigzag", "allgather", "ulysses", "usp", "hypergraph")
    },
    # Divisibility.
    "degree": ({"strategy": "zigzag:3"}, "does not divide the 4 ranks"),
    "usp's degrees": ({"strategy": "usp:3,2"}, "must divide the 4 ranks"),
    "query heads": ({"strategy": "ulysses", "shape": Shape(6, 6, 16, 16)}, "6 query heads"),
    "KV heads": ({"strategy": "ulysses", "shape": Shape(12, 3, 16, 16)}, "3 KV heads"),
    # Budgets.
    "pow2's budget": ({"strategy": "pow2:10"}, "raise the budget"),
    "dhp's budget": ({"strategy": "dhp:10"}, "raise it"),
    "hdp's budget": ({"strategy": "hdp:10"}, "raise the budget"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_suit_a_strategy_is_refused(name: str) -> None:
    options, words = REFUSALS[name]
    if options["strategy"] in ("hypergraph", "dcp"):
        pytest.importorskip("mtkahypar")
    with pytest.raises(Refused) as caught:
        place(**options)
    assert words in str(caught.value)


WRONG_ARGUMENTS = ["dp:2", "ring:two", "zigzag:x", "usp:4", "usp:a,b", "blocks:2", "groups:2", "hypergraph:0", "auto:2"]
WRONG_ARGUMENTS += ["dhp:0", "fcp:x", "dcp:0", "minheap:0", "pow2:x", "hdp:-1", "wlb:2"]


@pytest.mark.parametrize("strategy", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_no_refusal(strategy: str) -> None:
    with pytest.raises(ValueError) as caught:
        place(strategy)
    assert not isinstance(caught.value, Refused)
    assert strategy in str(caught.value)


@pytest.mark.parametrize(
    ("lengths", "options", "words"),
    [
        ((41,), {"max_tokens_per_rank": 10}, "document 0 has 41 tokens, more than 4 ranks keep together"),
        ((41,), {"max_tokens_per_rank": 10}, "raise the cap to 11,"),
        ((41,), {"max_tokens_per_rank": 8, "equal_tokens": True, "pad_to": 8}, "raise the cap to 16,"),
        ((3, 41), {"max_tokens_per_rank": 10}, "document 1 has 41 tokens"),
        (
            (60, 41),
            {"max_tokens_per_rank": 10},
            "raise the cap to 26, which all 101 tokens of the batch need (15 if the batch is cut into micro-batches),",
        ),
        (
            (21, 20),
            {"max_tokens_per_rank": 8, "equal_tokens": True, "pad_to": 8},
            "41 tokens do not fit 4 ranks with max_tokens_per_rank=8 in multiples of pad_to=8: at least 16 a rank",
        ),
        (
            (21, 20),
            {"max_tokens_per_rank": 10},
            "41 tokens do not fit 4 ranks with max_tokens_per_rank=10: at least 11",
        ),
        (
            (40,),
            {"max_tokens_per_rank": 15, "equal_tokens": True, "pad_to": 8},
            "max_tokens_per_rank=15 in multiples of pad_to=8",
        ),
    ],
)
def test_a_cap_that_holds_nothing_names_what_would(lengths: Any, options: dict[str, Any], words: str) -> None:
    request = Request(make_batch(lengths, causal()), Shape(8, 2, 16, 16), cluster("h100", 1, 4), CostModel(), **options)
    with pytest.raises(Refused) as caught:
        refuse_over_cap(request)
    assert words in str(caught.value)


def test_the_cap_that_a_refusal_names_suffices() -> None:
    for lengths, cap in (((50, 39), 20), ((50,), 20), ((30, 30), 29), ((7, 7, 90), 3)):
        request = Request(make_batch(lengths, causal()), Shape(8, 2, 16, 16), cluster("h100", 1, 2), CostModel())
        with pytest.raises(Refused) as caught:
            refuse_over_cap(replace(request, max_tokens_per_rank=cap))
        [named] = re.findall(r"raise the cap to (\d+)|at least (\d+) a rank", str(caught.value))
        refuse_over_cap(replace(request, max_tokens_per_rank=int("".join(named))))


def test_a_cap_that_just_fits_is_no_refusal() -> None:
    for name in ("auto", "blocks", "groups", "ring", "minheap:1"):
        assert place(name, (40,), max_tokens_per_rank=10).tokens.tolist() == [10] * 4


def test_micro_batches_refuse_a_document_that_fits_none() -> None:
    with pytest.raises(Refused, match="document 1 has 41 tokens, more than all 4 ranks hold together"):
        split([3, 41], [1, 1], 4, 10)


def test_a_list_of_strategies_is_not_cut_inside_one() -> None:
    assert split_names("usp:8,2") == ["usp:8,2"]
    names = ["auto", "usp:8,2", "zigzag", "usp:2,4@load", "minheap:64,relay", "ring:2@load"]
    assert split_names(", ".join(names)) == split_names(",".join(names) + ",") == names
    assert split_names("auto,8") == ["auto", "8"], "what belongs to nothing is told by whoever looks it up"


# --- auto -------------------------------------------------------------------------------------------------------------


def failing(error: Exception) -> Any:
    def planner(request: Request) -> Placement:
        raise error

    return planner


def test_auto_goes_on_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AUTO, "blocks", failing(Refused("not today")))
    assert "not today" not in place("auto").note


@pytest.mark.parametrize("error", [ValueError("max() arg is an empty sequence"), IndexError("7"), AssertionError()])
@pytest.mark.parametrize("where", ["blocks", "all_groupings"])
def test_auto_hides_no_bug(where: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AUTO, where, failing(error))
    with pytest.raises(type(error)) as caught:
        place("auto")
    assert caught.value is error


def test_auto_names_the_first_refusal_when_all_refuse() -> None:
    with pytest.raises(Refused, match="no strategy can place this batch: blocks: document 0 has 41 tokens"):
        place("auto", (41,), max_tokens_per_rank=10)


@pytest.mark.parametrize(
    ("lengths", "mask", "heads", "layers", "refused"),
    [
        ([379_000_000], causal(), 32, 1, False),
        ([390_000_000], causal(), 32, 1, True),
        ([5, 1 << 29, 7], causal(), 8, 1, False),
        ([5, (1 << 30) - 1], causal(), 8, 1, True),
        ([5, (1 << 30) - 1], window(4096), 64, 100, False),
        ([190_000_000], causal(), 8, 128, True),
        ([1 << 27] * 300, causal(), 8, 1, True),
        ([1 << 27] * 20, causal(), 8, 1, False),
    ],
)
def test_batches_with_more_pairs_than_are_counted_are_refused(
    lengths: list[int], mask: Mask, heads: int, layers: int, refused: bool
) -> None:
    batch = make_batch(lengths, masks={"all": (mask, layers)})
    pairs = sum(n * (n + 1) // 2 for n in lengths) * max(heads, layers)
    assert refused == (pairs > MOST_PAIRS) or mask != causal()
    try:
        Request(batch, Shape(heads, 1, 16, 16), cluster("h100", 1, 4), CostModel())
    except ValueError as error:
        assert refused, error
        assert f"has {max(lengths):,} tokens; divide it" in str(error)
    else:
        assert not refused
