"""Report check: the page of a plan shows the plan's numbers, and is a page whatever the names in it."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import numpy as np

from flexcp.fuzz.token_machine import require
from flexcp.plan.plan import Plan
from flexcp.report.page import page
from flexcp.report.plan_tables import plan_section

HOSTILE = '</script><!--<script>"&\u2028'
"""A title as nobody would choose it."""


class _Page(HTMLParser):
    """Collects the data element, and cells of tables."""

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
    """Bytes, runs, regions and lengths in the page are those of the plan's tables."""
    reader = _Page()
    reader.feed(page([plan_section(plan)], HOSTILE))
    require(reader.headings == HOSTILE, f"the page's title is {reader.headings!r}")
    (shown,) = json.loads(reader.data)
    require(shown["lengths"] == plan.batch.lengths.tolist(), "the report has other lengths")
    require(shown["ranks"] == plan.ranks, "the report has other ranks")
    kept = np.zeros(plan.ranks, np.int64)
    for rank, start, stop in zip(*(shown["runs"][name] for name in ("rank", "start", "stop")), strict=True):
        kept[rank] += stop - start
    require(kept.tolist() == plan.placement.tokens.tolist(), "the report's runs are not what ranks keep")
    for mask, pair in enumerate(plan.programs):
        drawn = shown["masks"][mask]
        columns = plan.placement.regions[mask]
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
