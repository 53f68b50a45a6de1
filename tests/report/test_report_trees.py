"""Tests of how the report draws trees: every token once, at its place in the tree, with the rank that keeps it."""

from __future__ import annotations

import numpy as np
import pages
import pytest

import flexcp
from flexcp.report import trees
from flexcp.report.trees import tree_data, tree_figure


def test_every_token_is_drawn_once_with_its_keeper() -> None:
    plan = pages.trees()
    owner = np.repeat(plan.placement.kept.rank, plan.placement.kept.stop - plan.placement.kept.start)
    found = tree_data(plan)
    assert [tree["document"] for tree in found] == [0, 1]  # the third document has no branches
    for tree in found:
        start = int(plan.batch.starts[tree["document"]])
        begins = start + np.cumsum([0, *tree["tokens"]])
        kept, drawn = tree["kept"], []
        for segment, rank, first, last in zip(
            *(kept[name] for name in ("segment", "rank", "first", "last")), strict=True
        ):
            tokens = np.arange(begins[segment] + first, begins[segment] + last)
            assert set(owner[tokens].tolist()) == {rank}
            drawn += tokens.tolist()
        assert sorted(drawn) == list(range(start, int(plan.batch.starts[tree["document"] + 1])))
    first = found[0]
    assert (
        first["lane"] == [0, 0, 0, 1, 2] and first["lanes"] == [3, 2, 1, 1, 1] and first["sequences"] == [3, 2, 1, 1, 1]
    )
    assert first["depth"] == [0, 400, 600, 600, 400]


def test_trees_of_too_many_segments_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MOST_SEGMENTS", 5)
    plan = pages.trees()
    assert [tree["document"] for tree in tree_data(plan)] == [0]
    assert "Not drawn, for their many segments: 1 more." in tree_figure(plan, 0)
    assert tree_data(flexcp.Planner(**pages.HEADS, strategy="blocks", cluster=flexcp.cluster("h100", 1, 2))([90])) == []
