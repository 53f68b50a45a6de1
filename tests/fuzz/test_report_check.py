"""Tests of the fuzzer's check of HTML reports: it accepts correct pages, also of plans too large to draw in full, and
detects wrong ones.
"""

from __future__ import annotations

from typing import Any

import pytest

from flexcp.clusters import cluster
from flexcp.fuzz.report_check import check_report
from flexcp.fuzz.token_machine import Wrong
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.report import plan_data
from flexcp.report.plan_data import drawn_documents


def planned() -> Plan:
    return Planner(2, 1, 8, cluster=cluster("h100", 1, 4), strategy="zigzag")([70, 40, 7], tokens="equal")


def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit pages to one row, so that only the longest document is drawn."""
    for module in ("flexcp.report.plan_data", "flexcp.fuzz.report_check"):
        monkeypatch.setattr(f"{module}.MOST_ROWS", 1)


def test_pages_of_all_documents_and_of_some_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned()
    assert plan.placement.pads > 0
    check_report(plan)
    few_rows(monkeypatch)
    assert drawn_documents(plan).tolist() == [0]
    check_report(plan)


def test_a_small_plan_is_drawn_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexcp.report.plan_data.MOST_ROWS", 1)
    with pytest.raises(Wrong, match=r"leaves out documents \[1, 2\] of a small plan"):
        check_report(planned())


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("wrong", ["left out", "doubled", "on another rank"])
@pytest.mark.parametrize("column", ["start", "q0"])
def test_wrong_runs_and_regions_are_found(column: str, wrong: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    right = plan_data._columns

    def changed(table: Any, *names: str) -> dict[str, list[int]]:
        found = right(table, *names)
        if column in names:
            if wrong == "on another rank":
                found["rank"][0] += 1
            for values in found.values() if wrong != "on another rank" else ():
                values[len(values) - (wrong == "left out") :] = values[-1:] if wrong == "doubled" else []
        return found

    if few:
        few_rows(monkeypatch)
    monkeypatch.setattr(plan_data, "_columns", changed)
    with pytest.raises(Wrong, match="runs" if column == "start" else "regions"):
        check_report(planned())
