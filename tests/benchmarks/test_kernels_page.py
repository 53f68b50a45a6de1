"""Proves that measured rows replace those of the page's tables, and that the page has a table for each kind of row."""

from __future__ import annotations

from typing import Any

import pytest

import kernels_page

PLANS = {
    "data": "web",
    "ranks": 8,
    "forward": 522.4,
    "backward": 457.0,
    "dense forward": 622.0,
    "dense backward": 574.0,
    "forward share": 0.8388,
    "backward share": 0.7960,
}
WAYS = {
    "work": "web",
    "ranks": 8,
    "forward": {"ours": 538.1, "blocks": 393.5, "blocks merged": 386.7, "varlen": 399.6, "varlen merged": 388.6},
    "backward": {"ours": 482.7, "blocks": 254.5, "blocks merged": 255.3},
    "forward ratio": 1.345,
    "backward ratio": 1.976,
    "forward ratio merged": 1.41,
    "backward ratio merged": 1.977,
}
MASK = {"work": "lambda", "forward": {"ours": 600.0, "blocks": 500.0}, "backward": {"ours": 450.0, "blocks": 300.0}}


def result(contender: str, workload: str, forward: float | None) -> dict[str, Any]:
    backward = None if forward is None else forward / 2
    return {"contender": contender, "workload": workload, "tokens": 4096, "forward": forward, "backward": backward}


def test_a_row_is_replaced_or_added_and_the_others_stay() -> None:
    page = "text\n\n<!-- measured: a -->\n| x | y | rate | day |\n| --- | --- | --- | --- |\n| 1 | p | 5 | then |\n"
    page += "| 2 | p | 6 | then |\n<!-- end -->\nmore\n"
    new = kernels_page.filled(page, {"a": [["2", "p", "7"], ["2", "q", "8"]]}, "now")
    rows = ["| 1 | p | 5 | then |", "| 2 | p | 7 | now |", "| 2 | q | 8 | now |"]
    assert new == page.replace("| 1 | p | 5 | then |\n| 2 | p | 6 | then |", "\n".join(rows))
    with pytest.raises(ValueError, match="measured: b"):
        kernels_page.filled(page, {"b": [["2", "p", "7"]]}, "now")
    with pytest.raises(ValueError, match="3 cells does not fit a table of 4"):
        kernels_page.filled(page, {"a": [["2", "p"]]}, "now")


def test_rows_have_rates_and_ratios() -> None:
    assert kernels_page.plans_row(PLANS) == ["web", "8", "0.839", "0.796", "522 / 457", "622 / 574"]
    cells = ["web", "8", "538 / 483", "394 / 254", "387 / 255", "400", "389", "1.34 / 1.98", "1.41 / 1.98"]
    assert kernels_page.ways_row(WAYS) == cells
    mask = ["16,384", "lambda 64 + 4,096", "600 / 450", "500 / 300", "1.20 / 1.50"]
    assert kernels_page.block_lists_row(MASK) == mask
    dense = [result(who, "window", rate) for who, rate in (("cute", 610.0), ("op", 600.0), ("fa4", 500.0))]
    masks = [result(who, "docs64", 100.0 + i) for i, who in enumerate(("cute", "op", "fa4", "flex", "flexfa4"))]
    found = kernels_page.bench_rows([{"matrix product": 700.0}, *dense, result("cudnn", "window", None), *masks])
    assert found["dense"] == [["4,096", "window 4,096", "610 / 305", "600 / 300", "500 / 250", "-", "1.20 / 1.20"]]
    row = ["4,096", "64 random documents", "100 / 50", "101 / 50", "103 / 52", "104 / 52", "102 / 51", "0.97 / 0.97"]
    assert found["masks"] == [row]


def test_the_page_has_every_table() -> None:
    rows = {"plans": [kernels_page.plans_row(PLANS)], "ways": [kernels_page.ways_row(WAYS)]}
    rows["block lists"] = [kernels_page.block_lists_row(MASK)]
    dense = [result(who, "causal", 100.0) for who in kernels_page.CONTENDERS["dense"]]
    masks = [result(who, "docs64", 100.0) for who in kernels_page.CONTENDERS["masks"]]
    page = kernels_page.filled(kernels_page.PAGE.read_text(), rows | kernels_page.bench_rows(dense + masks), "today")
    assert page.count("| today |") == 5
