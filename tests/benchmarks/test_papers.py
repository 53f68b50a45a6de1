"""Proves the page of the three papers: verdicts, the baselines' degrees, and that every row has its cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

import papers_dcp
import papers_dhp
import papers_fcp
from flexcp.data.lengths import draw_lengths
from flexcp.simulator.passes import Rules
from papers_rows import HEADS, Row, absent
from papers_runs import Runs, attention_ns


@pytest.mark.parametrize(
    ("planner", "auto", "more", "verdict"),
    [(1.0, 1.04, True, "same"), (1.0, 1.2, True, "better"), (1.0, 1.2, False, "worse"), (10.0, 8.0, False, "better")],
)
def test_verdicts_compare_auto_with_the_published_planner(
    planner: float, auto: float, more: bool, verdict: str
) -> None:
    assert Row("1", "x", "words", planner, auto, "simulated", more).verdict == verdict


def test_a_figure_that_is_not_here_says_why() -> None:
    found = absent("20", "loss", "the same", "not here").cells()
    assert found == ["20", "loss", "the same", *["-"] * 5, "not here"]


@pytest.mark.parametrize(
    ("longest", "scale", "ranks"), [(65_536, 0.5, 8), (65_536, 1.0, 16), (65_536, 4.0, 32), (262_144, 0.5, 32)]
)
def test_baselines_have_the_degrees_of_dcps_code(longest: int, scale: float, ranks: int) -> None:
    """Data parallelism is the largest power of two of the data set's longest documents that fit the tokens, for the whole run."""
    assert papers_dcp.degree(longest, scale) == ranks
    assert papers_dcp.baselines(ranks, causal=True) == [f"ring:{ranks}", f"zigzag:{ranks}", f"usp:2,{ranks // 2}"]
    assert papers_dcp.baselines(ranks, causal=False) == [f"usp:2,{ranks // 2}"], (
        "TransformerEngine alone has other masks"
    )


def test_end_to_end_batches_are_as_long_as_their_longest_document_may_be() -> None:
    for cap in (16_384, 131_072):
        lengths = papers_dcp.capped("longalign", cap, 0)
        assert sum(lengths) == cap and max(lengths) <= cap


def test_fixed_methods_have_ulysses_and_usp() -> None:
    found = papers_dhp.fixed_methods(16)
    assert {"dp", "zigzag:16"} <= set(found["Megatron-LM"]) and {"dp", "ulysses:8"} <= set(found["DeepSpeed"])
    assert {*found["Megatron-LM"], *found["DeepSpeed"], "usp:8,2", "usp:2,8"} <= set(found["any fixed"])
    assert not any(name.startswith("usp") for whose in ("Megatron-LM", "DeepSpeed") for name in found[whose])


def test_no_ratio_is_over_magiattention() -> None:
    assert not any("minheap" in rival for rival in papers_fcp.RIVALS)


def test_plans_are_made_once_and_static_baselines_are_of_the_batch_and_of_the_run() -> None:
    where, runs = papers_fcp._where(8), Runs()
    batches = [draw_lengths("web", 8 * 2048, seed) for seed in range(2)]
    found = runs.over_static(where, batches, "auto", attention_ns)
    assert found.of_one_fixed >= found.of_each_batch >= 0.9, "the best of a batch is never behind the one of the run"
    first = runs.plan(where, batches[0], "auto")
    assert first is not None and runs.plan(where, batches[0], "auto") is first
    rules = replace(where, rules=Rules(in_line=True))
    assert runs.run(rules, batches[0], "auto").plan is first.plan, "rules are not the planner's"


def test_every_paper_has_rows_for_what_is_not_here() -> None:
    for module in (papers_dcp, papers_fcp, papers_dhp):
        for row in module.rest():
            assert len(row.cells()) == len(HEADS)
            assert row.verdict == "-"
