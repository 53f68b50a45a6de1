"""Report check: the page of a plan shows the plan's numbers, and stays valid HTML with any names in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html.parser import HTMLParser

import numpy as np

from flexcp.fuzz.token_machine import require
from flexcp.plan.plan import Plan
from flexcp.report.page import page
from flexcp.report.plan_data import MOST_ROWS
from flexcp.report.plan_tables import plan_section

HOSTILE = '</script><!--<script>"&\u2028'
"""A title that would break a page without escaping."""


class _Page(HTMLParser):
    """Collects the text of the data element and of the heading."""

    def __init__(self) -> None:
        super().__init__()
        self.data, self.inside, self.headings = "", False, ""
        self.last = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.last = tag
        self.inside = tag == "script" and ("id", "data") in attrs

    def handle_endtag(self, tag: str) -> None:
        self.inside, self.last = False, ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.data += data
        if self.last == "h1":
            self.headings += data


def check_report(plan: Plan) -> None:
    """Check that the lengths, runs, regions and bytes in a plan's page are the plan's; raise ``Wrong`` if not.

    For a plan with many parts, only the runs and regions of the documents that the page draws are there.
    """
    reader = _Page()
    reader.feed(page([plan_section(plan)], HOSTILE))
    require(reader.headings == HOSTILE, f"the page's title is {reader.headings!r}")
    (shown,) = json.loads(reader.data)
    require(shown["lengths"] == plan.batch.lengths.tolist(), "the report has other lengths")
    require(shown["ranks"] == plan.ranks, "the report has other ranks")
    documents = shown["drawn"]
    _check_drawn(plan, documents)
    runs = list(zip(*(shown["runs"][name] for name in ("rank", "start", "stop")), strict=True))
    require(runs == _runs_of(plan, documents), "the report's runs are not what ranks keep")
    for mask, pair in enumerate(plan.programs):
        drawn = shown["masks"][mask]
        columns = plan.placement.regions[mask]
        columns = columns.take(np.isin(columns.document, documents))
        require(
            all(values == getattr(columns, name).tolist() for name, values in drawn["regions"].items()),
            "the report's regions are not the plan's",
        )
        for backward, program in enumerate(pair):
            counted = np.zeros((plan.ranks, plan.ranks), np.int64)
            np.add.at(
                counted, (program.transfers.source, program.transfers.target), program.transfers.bytes(plan.shape)
            )
            traffic, found = drawn["bytes"][backward], np.zeros((plan.ranks, plan.ranks), np.int64)
            found[traffic["source"], traffic["target"]] = traffic["bytes"]
            require(bool((found == counted).all()), "the report's traffic is not what transfers carry")


def _check_drawn(plan: Plan, documents: list[int]) -> None:
    """Check that all documents are drawn if their parts fit into a page, otherwise the longest ones."""
    lengths, rows = plan.batch.lengths.tolist(), [len(_runs_of(plan, range(plan.batch.documents)))]
    rows += [len(regions) for regions in plan.placement.regions]
    left = sorted(set(range(len(lengths))) - set(documents))
    require(len(documents) > 0, "the report draws no document")
    # A run over several documents counts as a row of each.
    require(not left or sum(rows) + len(lengths) > MOST_ROWS, f"the report leaves out documents {left} of a small plan")
    shortest = min(lengths[d] for d in documents)
    require(all(lengths[d] <= shortest for d in left), "the report leaves out a longer document than it draws")


def _runs_of(plan: Plan, documents: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (rank, start, stop) of the runs with tokens of these documents.

    If these are all documents, the runs of pads are included.
    """
    runs, starts = plan.placement.runs, plan.batch.starts
    wanted = np.zeros(plan.placement.stream, bool)
    for d in documents:
        wanted[starts[d] : starts[d + 1]] = True
    wanted[plan.batch.tokens :] = len(documents) == plan.batch.documents
    rows = zip(runs.rank.tolist(), runs.start.tolist(), runs.stop.tolist(), strict=True)
    return [row for row in rows if wanted[row[1] : row[2]].any()]
