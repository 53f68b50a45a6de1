"""Tests of the baseline of a run: the static method and degree with the least simulated total time over a sample of
batches, with documents dealt to groups by tokens or by load.
"""

from __future__ import annotations

import pytest

import flexcp
from flexcp.batch import make_batch
from flexcp.compare.compare import STATIC, compare, compare_batches
from flexcp.compare.static_choice import choose_static, first_of_fastest, fixed_static, spread_over
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from flexcp.planners.request import Request
from flexcp.planners.static.dealing import method_of
from flexcp.shape import Shape
from flexcp.simulator.step_parts import Training

LLAMA = find_model("llama3-8b")
WHERE = flexcp.cluster("h100", 2, 4)
SETTING = {"heads": 8, "kv_heads": 4, "head_dim": 64, "cluster": WHERE}
DATA = [n for seed in range(6) for n in draw_lengths("web", 28_672, seed)]
REQUESTS = [
    Request(make_batch(lengths, flexcp.causal()), Shape(8, 4, 64, 64), WHERE, CostModel())
    for lengths in ([9000, 800, 800, 31], [400] * 40, [3000, 2500, 700, 90])
]


@pytest.mark.parametrize("dealing", ["tokens", "load"])
def test_the_choice_is_the_least_total_of_all_methods(dealing: str) -> None:
    found = choose_static(DATA, max_tokens_per_rank=4096, batches=2, dealing=dealing, **SETTING)
    assert found.batches == 2 and {method_of(name) for name in found.times_ns} <= set(STATIC)
    assert all(name.endswith("@load") == (dealing == "load") for name in found.times_ns)
    assert found.times_ns[found.strategy] * 999 <= 1000 * min(found.times_ns.values())
    assert found.words == f"{found.strategy}, the best static method fixed for the run, documents dealt by {dealing}"
    flexcp.Planner(**SETTING, strategy=found.strategy, max_tokens_per_rank=4096)(DATA[:10]).check()


def test_of_the_batch_is_no_slower_than_fixed_for_the_run() -> None:
    fixed = fixed_static(REQUESTS)
    rows = compare_batches(REQUESTS, STATIC)[fixed.strategy]
    assert sum(row.ns for row in rows) == fixed.times_ns[fixed.strategy]
    oracle = [compare(request, STATIC).best_static for request in REQUESTS]
    assert all(best is not None for best in oracle)
    assert sum(best.ns for best in oracle if best is not None) < 1.01 * fixed.times_ns[fixed.strategy]
    assert len({row.name for row in rows}) == 1 < len({best.name for best in oracle if best is not None}), (
        "a test of nothing"
    )


def test_both_baselines_stand_beside_each_other() -> None:
    """One long document and many short ones are dealt to two groups. Dealt by load instead of tokens, the group of the
    long document gets fewer tokens, and the step is faster.
    """
    batch = make_batch([16_000, *([500] * 100)], masks={"mask": (flexcp.causal(), LLAMA.model.layers)})
    request = Request(batch, LLAMA.shape, WHERE, CostModel(model=LLAMA.model), training=Training(LLAMA))
    names = ["zigzag:4", "ulysses:4", "zigzag:4@load", "ulysses:4@load"]
    found = compare(request, names)
    rows = {row.name: row for row in found.rows}
    by_tokens, by_load = found.best_static, found.best_static_by_load
    assert by_tokens is not None and by_load is not None
    assert (
        by_tokens.ns
        == min(rows[name].ns for name in names[:2])
        > by_load.ns
        == min(rows[name].ns for name in names[2:])
    )
    assert found.speed_up(by_load) == by_tokens.ns / by_load.ns > 1
    assert found.speed_up(by_tokens, by_load=True) == by_load.ns / by_tokens.ns


def test_a_document_that_fits_no_run_is_refused() -> None:
    with pytest.raises(
        ValueError, match="a document of 40,000 tokens is more than 8 ranks keep with max_tokens_per_rank=4096"
    ):
        choose_static([40_000], max_tokens_per_rank=4096, **SETTING)
    with pytest.raises(ValueError, match="dealing is how documents go to groups, 'tokens' or 'load'; got 'chance'"):
        choose_static([400], max_tokens_per_rank=4096, dealing="chance", **SETTING)
    with pytest.raises(ValueError, match="choose_static chooses the strategy; drop strategy='dp'"):
        choose_static([400], max_tokens_per_rank=4096, strategy="dp", **SETTING)
    for lengths in (3, None, ["8"], []):
        with pytest.raises(ValueError, match="lengths must be"):
            choose_static(lengths, max_tokens_per_rank=64, heads=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"max_tokens_per_rank is how many tokens .*; got None"):
        choose_static([8], max_tokens_per_rank=None, heads=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1; got 0"):
        choose_static([400], max_tokens_per_rank=4096, batches=0, **SETTING)


def test_of_nearly_equal_ones_the_first_is_taken() -> None:
    assert first_of_fastest({"a": 10_000, "b": 9_995, "c": 9_990}) == "a"
    assert first_of_fastest({"a": 10_000, "b": 9_000}) == "b"
    assert spread_over([[i] for i in range(10)], 4) == [[0], [2], [5], [7]]
