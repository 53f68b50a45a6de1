"""Tests of ``Planner``: every wrong input is refused with the offending value and the way out, and a plan is a pure
function of its input.

The same input gives the same hash in this process, in another one, under another PYTHONHASHSEED, and on another
machine, x86 or ARM. The golden hashes are in ``golden_hashes.json`` (of placements and transfers) and in
``golden_plan_hashes.json`` (also of how plans are executed). After an intended change of planning, write them again
with

    python tests/test_planner.py --write
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexcp
from flexcp.cost import CostModel
from flexcp.data.lengths import parse_lengths
from flexcp.plan.file import version_1_hash
from flexcp.plan.plan import Plan
from flexcp.planners.strategies import STRATEGIES

GOLDEN = Path(__file__).parent / "golden_hashes.json"
GOLDEN_PLANS = Path(__file__).parent / "golden_plan_hashes.json"
LENGTHS = [700, 3, 1, 260, 90, 31]


def planner(ranks: int = 4, heads: int = 8, kv_heads: int | None = 4, **options: Any) -> flexcp.Planner:
    where = options.pop("cluster", None) or flexcp.cluster("h100", 1, ranks)
    return flexcp.Planner(heads, kv_heads, options.pop("head_dim", 64), cluster=where, **options)


# --- golden hashes ----------------------------------------------------------------------------------------------------


@cache
def golden_plans() -> dict[str, Plan]:
    """Return plans whose hashes are fixed, of many strategies, masks, layouts, limits, dtypes and clusters."""
    two_nodes = flexcp.cluster("h200", 2, 4)
    uneven = flexcp.cluster("a100", 2, 4, [1.0, 1.0, 0.5, 1.0, 1.0, 0.9, 1.0, 1.0])
    scattered = [list(range(rank, sum(LENGTHS), 8)) for rank in range(8)]
    slices = [flexcp.from_slices(n, [(n // 3, n, 0, n // 2, None, -1)]) for n in LENGTHS]
    window_and_full = {"window": (flexcp.window(100, 0), 3), "full": (flexcp.causal(), 1)}
    return {
        "dp, full, equal": planner(5, strategy="dp")(LENGTHS, flexcp.full(), tokens="equal", pad_to=32),
        "ring, window, float32": planner(3, strategy="ring", dtype="float32")(LENGTHS, flexcp.window(100, 20)),
        "zigzag:2, lambda": planner(4, strategy="zigzag:2")(LENGTHS, flexcp.masks.lambda_(8, 64)),
        "allgather, contiguous": planner(7, strategy="allgather")(
            LENGTHS, flexcp.masks.prefix(50), layout="contiguous"
        ),
        "ulysses, v_head_dim": planner(4, strategy="ulysses", v_head_dim=32)(LENGTHS, flexcp.causal()),
        "usp, two nodes, zigzag": planner(cluster=two_nodes, strategy="usp")(LENGTHS, layout="zigzag"),
        "blocks, two nodes": planner(cluster=two_nodes, strategy="blocks")(
            LENGTHS, flexcp.masks.causal_blockwise(64, 2)
        ),
        "blocks, two masks": planner(3, strategy="blocks")(LENGTHS, masks=window_and_full),
        "blocks, slices, tolerances": planner(4, strategy="blocks", compute_tolerance=0.05, token_tolerance=0.1)(
            LENGTHS, slices
        ),
        "blocks, web:65536:0": planner(cluster=two_nodes, strategy="blocks", token_tolerance=0.05)(
            parse_lengths("web:65536:0"), flexcp.masks.shared_question(4, 0.2)
        ),
        "groups, web:65536:1": planner(cluster=two_nodes, strategy="groups")(parse_lengths("web:65536:1")),
        "dhp": planner(6, strategy="dhp")(LENGTHS, masks=window_and_full),
        "fcp, two nodes, contiguous": planner(cluster=two_nodes, strategy="fcp:64")(LENGTHS, layout="contiguous"),
        "minheap": planner(4, strategy="minheap:64")(LENGTHS),
        "auto, web:65536:2": planner(cluster=two_nodes)(parse_lengths("web:65536:2")),
        "ulysses:4, more ranks than KV heads": planner(cluster=two_nodes, kv_heads=2, strategy="ulysses:4")(LENGTHS),
        "blocks, latents": planner(4, 8, 1, strategy="blocks", latent=96)([9000, 400, 300]),
        "blocks, equal": planner(cluster=two_nodes, strategy="blocks")(
            parse_lengths("web:65536:3"), tokens="equal", pad_to=16
        ),
        "blocks, zigzag": planner(cluster=two_nodes, strategy="blocks")(LENGTHS, layout="zigzag"),
        "blocks, scattered": planner(cluster=two_nodes, strategy="blocks")(LENGTHS, layout=scattered),
        "blocks, speeds, cap": planner(cluster=uneven, strategy="blocks", max_tokens_per_rank=9000)(
            parse_lengths("web:65536:4")
        ),
        "groups, speeds, equal, cap": planner(cluster=uneven, strategy="groups", max_tokens_per_rank=8256)(
            parse_lengths("web:65536:5"), flexcp.window(3000, 0), tokens="equal", pad_to=32
        ),
        "groups:team=1, relays": planner(cluster=two_nodes, kv_heads=8, strategy="groups:team=1")([65_536]),
        "groups:team=4+split=keys": planner(cluster=two_nodes, kv_heads=2, strategy="groups:team=4+split=keys")(
            [60_000, *parse_lengths("web:65536:6")], masks=window_and_full
        ),
        **{
            f"micro-batch {number}": plan
            for number, (_, plan) in enumerate(
                planner(2, strategy="dp", max_tokens_per_rank=3000).micro_batches(parse_lengths("images:12000:0"))
            )
        },
    }


def golden_hashes() -> dict[str, str]:
    return {name: plan.hash for name, plan in golden_plans().items()}


def golden_moves() -> dict[str, str]:
    """Return hashes of placements and transfers, which do not depend on how plans are executed."""
    return {name: version_1_hash(plan) for name, plan in golden_plans().items()}


@pytest.mark.parametrize(("path", "hashes"), [(GOLDEN, golden_moves), (GOLDEN_PLANS, golden_hashes)])
def test_golden_hashes_hold(path: Path, hashes: Callable[[], dict[str, str]]) -> None:
    found, golden = hashes(), json.loads(path.read_text())
    changed = {name: (golden.get(name), digest) for name, digest in found.items() if golden.get(name) != digest}
    assert not changed, f"plans changed (golden, found): {changed}; if wanted, run python tests/test_planner.py --write"
    assert set(found) == set(golden)


def test_golden_plans_keep_the_invariants() -> None:
    for plan in golden_plans().values():
        plan.check()


@pytest.mark.parametrize("seed", ["1", "2"])
def test_hashes_are_the_same_in_another_process(seed: str) -> None:
    result = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(result.stdout) == golden_hashes()


# --- one input, one plan ----------------------------------------------------------------------------------------------

MASKS = [
    flexcp.causal(),
    flexcp.full(),
    flexcp.window(7, 2),
    flexcp.masks.lambda_(3, 9),
    flexcp.masks.causal_blockwise(8, 1),
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=8),
    st.sampled_from(MASKS),
    st.sampled_from(["dp", "ring", "zigzag", "allgather", "ulysses", "usp", "blocks", "auto"]),
    st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 2), (2, 4)]),
    st.sampled_from(["free", "contiguous", "zigzag"]),
)
def test_equal_inputs_give_equal_plans(
    lengths: list[int], mask: flexcp.Mask, strategy: str, shape: tuple[int, int], layout: str
) -> None:
    def make(given: Any) -> Plan:
        one = planner(heads=8, kv_heads=8, cluster=flexcp.cluster("h100", *shape), strategy=strategy)
        return one(given, mask, layout="free" if strategy == "dp" else layout)

    first, second = make(lengths), make(np.array(lengths, np.int32))
    assert first.hash == second.hash
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second}) == 1


def variations() -> dict[str, Plan]:
    base = {"lengths": LENGTHS, "mask": flexcp.causal()}
    where = flexcp.cluster("h100", 1, 4)
    return {
        "base": planner()(**base),
        "mask": planner()(LENGTHS, flexcp.full()),
        "a mask of the same pairs": planner()(LENGTHS, flexcp.window(None, 0)),
        "mask per document": planner()(LENGTHS, [flexcp.causal()] * len(LENGTHS)),
        "layers": planner()(LENGTHS, masks={"mask": (flexcp.causal(), 2)}),
        "mask name": planner()(LENGTHS, masks={"other": (flexcp.causal(), 1)}),
        "dtype": planner(dtype="float16")(**base),
        "head_dim": planner(head_dim=32)(**base),
        "v_head_dim": planner(v_head_dim=32)(**base),
        "heads": planner(heads=16)(**base),
        "kv_heads": planner(kv_heads=2)(**base),
        "preset": planner(cluster=flexcp.cluster("a100", 1, 4))(**base),
        "nodes": planner(cluster=flexcp.cluster("h100", 2, 2))(**base),
        "link": planner(cluster=replace(where, inter_mbps=1))(**base),
        "cost": planner(cost=CostModel(linear_efficiency=1))(**base),
        "strategy": planner(strategy="ring")(**base),
        # A ring has the same placement whatever the cost model is, but its hash must still differ.
        "cost of a ring": planner(strategy="ring", cost=CostModel(linear_efficiency=1))(**base),
        "link of a ring": planner(strategy="ring", cluster=replace(where, inter_mbps=1))(**base),
        "degree": planner(strategy="ring:2")(**base),
        "order of documents": planner()(LENGTHS[::-1], flexcp.causal()),
        "pads": planner()(**base, tokens="equal", pad_to=64),
        "layout": planner()(**base, layout="contiguous"),
    }


def test_different_inputs_give_different_hashes() -> None:
    plans = variations()
    by_hash: dict[str, str] = {}
    for name, plan in plans.items():
        assert plan.hash not in by_hash, f"{name} and {by_hash[plan.hash]} have one hash"
        by_hash[plan.hash] = name
    assert len(set(plans.values())) == len(plans)
    assert plans["base"] != "a string"


# --- defaults ---------------------------------------------------------------------------------------------------------


def test_defaults_are_what_the_documentation_says() -> None:
    default = flexcp.Planner(8)
    plan = default([100, 20])
    assert (plan.requested, plan.ranks, str(plan.cluster)) == ("auto", 8, "h100:1x8")
    assert (plan.shape.heads, plan.shape.kv_heads, plan.shape.head_dim, plan.shape.v_head_dim) == (8, 8, 128, 128)
    assert plan.shape.dtype == "bfloat16"
    assert plan.cost == CostModel()
    assert plan == default([100, 20], flexcp.causal(), layout="free", tokens="priced", pad_to=None)
    assert planner(head_dim=48)([5]).shape.v_head_dim == 48


def test_a_multiple_may_be_an_integer_of_numpy() -> None:
    asked, multiple = planner(strategy="blocks"), cast(int, np.int64(64))
    assert asked(LENGTHS, tokens="equal", pad_to=multiple) == asked(LENGTHS, tokens="equal", pad_to=64)


@pytest.mark.parametrize("lengths", [[4096] * 8, [60_000, 300, 20, 7], [500, 1], [30_000, 29_000, 5_000, *[100] * 40]])
def test_a_plan_says_which_strategy_placed_it(lengths: list[int]) -> None:
    """A plan loaded from a file says so as well, and planning with that strategy gives the same placement."""
    asked = planner(strategy="auto")(lengths)
    chosen = planner(strategy=asked.strategy)(lengths)
    assert asked.requested == "auto" and asked.strategy.partition(":")[0] in set(STRATEGIES) - {"auto"}
    assert asked.placement.runs.matrix().tolist() == chosen.placement.runs.matrix().tolist()
    assert chosen.strategy == chosen.requested == asked.strategy
    again = flexcp.load_plan(flexcp.save_plan(asked))
    assert (again.requested, again.strategy, again.label) == ("auto", asked.strategy, f"auto: {asked.strategy}")


def test_a_torch_dtype_is_a_dtype() -> None:
    import torch

    assert planner(dtype=torch.float16)(LENGTHS) == planner(dtype="float16")(LENGTHS)  # type: ignore[arg-type]


def test_numpy_integers_are_integers() -> None:
    """Lengths and mask parameters are often elements of NumPy arrays."""
    masks = (flexcp.window(5, 1), flexcp.window(np.int64(5), np.int64(1)))  # type: ignore[arg-type]
    assert planner()(LENGTHS, masks[0]).hash == planner()(np.array(LENGTHS), masks[1]).hash
    counts = {"max_tokens_per_rank": 300, "effort": 3}
    given = {name: np.int64(value) for name, value in counts.items()}
    assert planner(**counts)(LENGTHS).hash == planner(**given)(LENGTHS).hash


# --- refusals: (how to ask for it, words of the message) --------------------------------------------------------------

REFUSED_PLANNERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no heads": ({"heads": 0}, ["heads", "got 0"]),
    "negative KV heads": ({"kv_heads": -2}, ["kv_heads", "got -2"]),
    "heads not a multiple of KV heads": (
        {"heads": 6, "kv_heads": 4},
        ["multiple of kv_heads", "6 heads", "4 KV heads"],
    ),
    "more KV heads than heads": ({"heads": 4, "kv_heads": 8}, ["4 heads", "8 KV heads"]),
    "head_dim": ({"head_dim": 0}, ["head_dim", "got 0"]),
    "fractional head_dim": ({"head_dim": 64.5}, ["head_dim", "64.5"]),
    "v_head_dim": ({"v_head_dim": -1}, ["v_head_dim", "got -1"]),
    "dtype": ({"dtype": "float8"}, ["float8", "bfloat16, float16"]),
    "cluster as a text": ({"cluster": "a100"}, ["flexcp.cluster('a100', nodes=1, ranks_per_node=8)", "got 'a100'"]),
    "cluster as a number": ({"cluster": 8}, ["flexcp.cluster('h100'", "got 8"]),
    "unknown strategy": ({"strategy": "zigzg"}, ["'zigzg'", "did you mean 'zigzag'?"]),
    "unknown strategy with degree": ({"strategy": "rings:4"}, ["'rings:4'", "did you mean 'ring'?"]),
    "strategy like no other": ({"strategy": "qqq"}, ["'qqq'", ", ".join(STRATEGIES)]),
    "negative compute tolerance": ({"compute_tolerance": -0.1}, ["compute_tolerance", "-0.1", "None"]),
    "negative token tolerance": ({"token_tolerance": -1}, ["token_tolerance", "-1"]),
    "NaN tolerance": ({"compute_tolerance": float("nan")}, ["compute_tolerance", "nan"]),
    "huge tolerance": ({"compute_tolerance": 10**400}, ["compute_tolerance", "0 or more"]),
    "infinite tolerance": ({"token_tolerance": float("inf")}, ["token_tolerance", "inf", "None"]),
    "tolerance as a text": ({"compute_tolerance": "0.1"}, ["compute_tolerance", "'0.1'", "0.05 is 5 %"]),
    "cap": ({"max_tokens_per_rank": 0}, ["max_tokens_per_rank", "got 0"]),
    "fractional cap": ({"max_tokens_per_rank": 100.5}, ["max_tokens_per_rank", "100.5"]),
    "negative effort": ({"effort": -1}, ["effort", "got -1"]),
    "fractional effort": ({"effort": 1.5}, ["effort", "got 1.5"]),
    "effort as a word": ({"effort": "high"}, ["effort", "'high'"]),
}


@pytest.mark.parametrize("name", REFUSED_PLANNERS)
def test_a_wrong_planner_is_refused(name: str) -> None:
    options, words = REFUSED_PLANNERS[name]
    with pytest.raises(ValueError) as caught:
        planner(**options)
    assert_names(caught.value, words)


REFUSED_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "empty batch": ({}, {"lengths": []}, ["non-empty", "[]"]),
    "length 0": ({}, {"lengths": [5, 0, 3]}, ["document 1", "length 0", "at least 1"]),
    "negative length": ({}, {"lengths": [-4]}, ["document 0", "length -4"]),
    "fractional length": ({}, {"lengths": [3.5]}, ["integers", "3.5"]),
    "nested lengths": ({}, {"lengths": [[3, 4]]}, ["[[3, 4]]"]),
    "huge length": ({}, {"lengths": [1 << 40]}, [str(1 << 40)]),
    "mask for another length": ({}, {"mask": flexcp.from_slices(9, [])}, ["9 tokens", "700", "one mask per document"]),
    "span outside": ({}, {"mask": flexcp.masks.modality([(0, 50)])}, ["(0, 50)", "document of 3"]),
    "too few masks": ({}, {"mask": [flexcp.causal()]}, ["1 masks for 6 documents"]),
    "mask as text": ({}, {"mask": "causal"}, ["'causal'", "flexcp.causal()"]),
    "mask and masks": ({}, {"mask": flexcp.causal(), "masks": {"a": (flexcp.full(), 1)}}, ["either mask= or masks="]),
    "no masks": ({}, {"masks": {}}, ["masks= is empty"]),
    "mask without layers": ({}, {"masks": {"a": flexcp.full()}}, ["masks['a']", "number of layers"]),
    "no layers": ({}, {"masks": {"a": (flexcp.full(), 0)}}, ["masks['a']", "got 0"]),
    "unknown layout": ({}, {"layout": "striped"}, ["'striped'", "'contiguous'", "'zigzag'"]),
    "layout for other ranks": ({}, {"layout": [[0], [1]]}, ["2 index arrays for 4 ranks"]),
    "token kept twice": ({}, {"lengths": [3], "layout": [[0, 1], [1], [2], []]}, ["token 1", "2 times"]),
    "token kept by nobody": ({}, {"lengths": [3], "layout": [[0], [1], [], []]}, ["token 2", "0 times"]),
    "token outside": ({}, {"lengths": [3], "layout": [[0, 1, 2], [7], [], []]}, ["token 7", "0..2"]),
    "negative token": ({}, {"lengths": [3], "layout": [[0, 1, 2], [-1], [], []]}, ["token -1"]),
    "unknown tokens": ({}, {"tokens": "same"}, ["'same'", "'priced'", "'equal'"]),
    "pad_to without equal": ({}, {"pad_to": 8}, ["pad_to=8", "tokens='equal'"]),
    "pad_to 0": ({}, {"tokens": "equal", "pad_to": 0}, ["pad_to=0", "at least 1"]),
    "pad_to a flag": ({}, {"tokens": "equal", "pad_to": True}, ["pad_to=True", "whole number"]),
    "equal with layout": ({}, {"tokens": "equal", "layout": "zigzag"}, ["layout", "tokens='equal'"]),
    "tolerance with equal": ({"token_tolerance": 0.1}, {"tokens": "equal"}, ["token_tolerance", "tokens='equal'"]),
    "tolerance with layout": ({"token_tolerance": 0.1}, {"layout": "zigzag"}, ["token_tolerance", "layout"]),
    "cap below the mean": ({"max_tokens_per_rank": 271}, {}, ["1085 tokens", "=271", "272 a rank", "micro-batches"]),
    "document over the cap": (
        {"max_tokens_per_rank": 174},
        {},
        ["document 0 has 700 tokens", "4 ranks", "=174", "cut the document"],
    ),
    "cap of a static strategy": (
        {"strategy": "dp", "max_tokens_per_rank": 400},
        {},
        ["700 tokens", "rank 0", "=400", "document 0 alone has 700", "micro-batches do not help", "cut the document"],
    ),
    "cap of a static strategy, no document above it": (
        {"strategy": "dp", "max_tokens_per_rank": 710},
        {"lengths": [600, 600, 600, 600, 400]},
        ["1000 tokens", "=710", "or cut the batch into micro-batches"],
    ),
    "cap and pads of a static strategy": (
        {"strategy": "ring", "max_tokens_per_rank": 400},
        {"tokens": "equal", "pad_to": 512},
        ["document 0 has 700 tokens", "=400 in multiples of pad_to=512"],
    ),
    "cap and pads": ({"max_tokens_per_rank": 400}, {"tokens": "equal", "pad_to": 512}, ["512", "400"]),
    "cap and layout": (
        {"max_tokens_per_rank": 4},
        {"lengths": [10], "layout": [list(range(10)), [], [], []]},
        ["10", "rank 0", "=4"],
    ),
    "degree not dividing": ({"strategy": "zigzag:3"}, {}, ["zigzag:3", "4 ranks", "[1, 2, 4]"]),
    "degree 0": ({"strategy": "ring:0"}, {}, ["ring:0", "[1, 2, 4]"]),
    "degree over the ranks": ({"strategy": "allgather:8"}, {}, ["allgather:8", "4 ranks"]),
    "degree as a word": ({"strategy": "ring:two"}, {}, ["ring:two", "ring:4"]),
    "blocks with degree": ({"strategy": "blocks:2"}, {}, ["blocks:2", "no degree"]),
    "dp with degree": ({"strategy": "dp:2"}, {}, ["dp:2", "no degree"]),
    "usp with one degree": ({"strategy": "usp:4"}, {}, ["usp:4", "two degrees", "usp:4,2"]),
    "usp not dividing": ({"strategy": "usp:2,3"}, {}, ["usp:2,3", "6 ranks", "4 ranks"]),
    "usp of no ranks": ({"strategy": "usp:0,4"}, {}, ["usp:0,4"]),
    "ulysses over query heads": (
        {"strategy": "ulysses", "heads": 6, "kv_heads": 6},
        {},
        ["ulysses:4", "6 query heads", "4 ranks", "zigzag"],
    ),
    "ulysses over KV heads": (
        {"strategy": "ulysses", "heads": 12, "kv_heads": 3},
        {},
        ["ulysses:4", "3 KV heads", "4 ranks", "usp"],
    ),
    "usp over heads": ({"strategy": "usp:4,1", "heads": 6, "kv_heads": 6}, {}, ["usp:4,1", "6 query heads"]),
    "groups under a fixed layout": (
        {"strategy": "ring:2"},
        {"layout": "zigzag"},
        ["fixed layout", "all 4 ranks", "blocks"],
    ),
    "dp under a fixed layout": ({"strategy": "dp"}, {"layout": "contiguous"}, ["fixed layout", "blocks"]),
    "scattered layout": (
        {"strategy": "ring"},
        {"lengths": [80], "layout": [list(range(r, 80, 4)) for r in range(4)]},
        ["scatters", "blocks"],
    ),
}


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_wrong_batch_is_refused(name: str) -> None:
    options, call, words = REFUSED_CALLS[name]
    with pytest.raises(ValueError) as caught:
        planner(**options)(**{"lengths": LENGTHS, **call})
    assert_names(caught.value, words)


def test_wrong_slices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"share a \(query, key\) pair"):
        flexcp.from_slices(10, [(0, 10, 0, 5, None, None), (5, 10, 4, 10, None, 0)])
    with pytest.raises(ValueError, match=r"\(0, 11, 0, 5, None, None\) lies outside its document of 10 tokens"):
        flexcp.from_slices(10, [(0, 11, 0, 5, None, None)])


def test_a_wrong_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'h10'.*did you mean 'h100'\?.*a100"):
        flexcp.cluster("h10")
    with pytest.raises(ValueError, match=r"nodes of at least 1; got 0"):
        flexcp.cluster("h100", nodes=0)
    with pytest.raises(ValueError, match=r"ranks_per_node of at least 1; got -8"):
        flexcp.cluster("h100", ranks_per_node=-8)
    with pytest.raises(ValueError, match=r"\(4 nodes of 0 ranks\)"):
        flexcp.cluster("h100", nodes=4, ranks_per_node=2 // 4)  # 2 ranks over 4 nodes would be 0 a node
    with pytest.raises(ValueError, match=r"speed factor of rank 1 is nan"):
        flexcp.cluster("h100", 1, 2, speeds=[1.0, float("nan")])
    with pytest.raises(ValueError, match=r"3 speed factors for 1 nodes x 2 ranks"):
        flexcp.cluster("h100", 1, 2, speeds=[1.0, 1.0, 1.0])


@pytest.mark.parametrize("cap", [272, 300])
def test_a_cap_that_fits_is_kept(cap: int) -> None:
    plan = planner(max_tokens_per_rank=cap)(LENGTHS)
    plan.check()
    assert plan.placement.tokens.max() <= cap


def assert_names(error: Exception, words: list[str]) -> None:
    missing = [w for w in words if w not in str(error)]
    assert not missing, f"{missing} not in: {error}"


if __name__ == "__main__":
    text = json.dumps(golden_hashes(), indent=2) + "\n"
    if sys.argv[1:] == ["--write"]:
        GOLDEN.write_text(json.dumps(golden_moves(), indent=2) + "\n")
        GOLDEN_PLANS.write_text(text)
    else:
        print(text, end="")
