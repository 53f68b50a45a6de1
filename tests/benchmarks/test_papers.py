"""Proves the page of the three papers: verdicts, the baselines' degrees, and that every row has its cells."""

from __future__ import annotations

import pytest

import papers
import papers_dcp
import papers_dhp
import papers_fcp
from papers_rows import Row, absent


@pytest.mark.parametrize(
    ("planner", "auto", "more", "verdict"),
    [(1.0, 1.04, True, "same"), (1.0, 1.2, True, "better"), (1.0, 1.2, False, "worse"), (10.0, 8.0, False, "better")],
)
def test_verdicts_compare_auto_with_the_published_planner(
    planner: float, auto: float, more: bool, verdict: str
) -> None:
    assert Row("1", "x", "words", planner, auto, "simulated", more).verdict == verdict


def test_a_figure_that_is_not_here_says_why() -> None:
    assert absent("20", "loss", "the same", "not here").cells() == ["20", "loss", "the same", "-", "-", "-", "not here"]


@pytest.mark.parametrize(
    ("longest", "ranks", "degree"),
    [(16_384, 16, 2), (32_768, 16, 4), (65_536, 16, 8), (131_072, 16, 16), (3_000, 32, 1)],
)
def test_baselines_have_the_degrees_of_dcps_code(longest: int, ranks: int, degree: int) -> None:
    """Data parallelism is the largest power of two of documents that fit the tokens."""
    rest = 131_072 - longest
    lengths = [longest, *([1_000] * (rest // 1_000)), *([rest % 1_000] * (rest % 1_000 > 0))]
    assert papers_dcp.degrees(lengths, 131_072, ranks) == degree
    assert f"zigzag:{degree}" in papers_dcp.baselines(lengths, ranks, every=False)


def test_fixed_methods_have_ulysses_and_usp() -> None:
    found = papers_dhp.fixed_methods(16)
    assert {"dp", "zigzag:16", "ulysses:8", "usp:8,2", "usp:2,8"} <= set(found)


def test_every_paper_has_rows_for_what_is_not_here() -> None:
    for module in (papers_dcp, papers_fcp, papers_dhp):
        for row in module.rest():
            assert len(row.cells()) == len(papers.HEADS)
            assert row.verdict == "-"
