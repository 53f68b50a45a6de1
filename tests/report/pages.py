"""Pages for the tests of the HTML report: small ones with every kind of section, and a large one."""

from __future__ import annotations

from pathlib import Path

import flexcp
from flexcp.arrays.totals import imbalance
from flexcp.cli.shared.reports import timed_plan
from flexcp.plan.plan import Plan
from flexcp.report.page import write_report
from flexcp.report.sections import Section, code_section, lines_section, table_section, words_section
from flexcp.report.strategies_table import StrategyTime, strategies_section
from flexcp.schedule.predict import predict

LENGTHS = [24_000, 3_000, 2_000, 700, 300, 41, 1]
HEADS = {"heads": 8, "kv_heads": 2, "head_dim": 64}


def two_masks(strategy: str = "blocks") -> Plan:
    """A plan on 2 nodes of 4 ranks for a model with full and window layers."""
    planner = flexcp.Planner(**HEADS, cluster=flexcp.cluster("h100", 2, 4), strategy=strategy)
    return planner(LENGTHS, masks={"full": (flexcp.causal(), 8), "window": (flexcp.window(511, 0), 24)})


def head_groups() -> Plan:
    """A plan that splits heads: ulysses over 2 of 4 ranks."""
    return flexcp.Planner(**HEADS, cluster=flexcp.cluster("h100", 1, 4), strategy="ulysses:2")([900, 31, 1])


def trees() -> Plan:
    """A plan of a tree, a shared question and a plain document on 4 ranks."""
    masks = [
        flexcp.tree([-1, 0, 1, 1, 0], [400, 200, 100, 300, 250]),
        flexcp.masks.shared_question([60, 40], 100),
        flexcp.causal(),
    ]
    return flexcp.Planner(**HEADS, cluster=flexcp.cluster("h100", 1, 4), strategy="blocks")([1250, 200, 90], masks)


def strategy_times(names: tuple[str, ...] = ("dp", "zigzag", "allgather", "blocks", "groups")) -> list[StrategyTime]:
    found = []
    for name in names:
        plan = two_masks(name)
        prediction = predict(plan.placement, plan.shape, plan.cluster, plan.cost)
        parts = prediction.breakdown
        size, balance = int(plan.bytes().sum()), imbalance(plan.work())
        mark = "proposed" if name == "blocks" else ""
        found.append(StrategyTime(name, parts["attention"], parts["exposed"], parts["linear"], size, balance, mark))
    return found


def every_kind() -> list[Section]:
    """One section of every kind."""
    return [
        words_section("In short", ["Words with <b>signs</b> & \u201cquotes\u201d."], [("figure", "1.5 x")]),
        timed_plan(two_masks()),
        timed_plan(head_groups(), "Heads split"),
        strategies_section(strategy_times(), "Predicted for one batch."),
        lines_section(
            "Loss", [1, 2, 3, 4], {"one process": [3.0, 2.5, 2.2, 2.1], "blocks": [3.0, 2.5, 2.2, 2.1]}, "Loss."
        ),
        table_section("Micro-batches", ["micro-batch", "tokens"], [[0, 10], [1, 9], [2, 300]], "Two of them."),
        code_section("Code", [("PyTorch", "step = flexcp.bind(plan)  # </script>")]),
        timed_plan(trees(), "Trees"),
    ]


def write_every_kind(path: Path) -> int:
    return write_report(path, every_kind(), "Every kind of section", "for the tests")


def write_example(path: Path) -> int:
    """Write the page whose pictures are in the docs: a long-tailed batch on 2 nodes of 4 ranks."""
    from flexcp.data.lengths import draw_lengths

    lengths, machine = draw_lengths("web", 131_072, 0), flexcp.cluster("h100", 2, 4)
    found: list[StrategyTime] = []
    plans = {}
    for name in ("dp", "ring", "zigzag", "allgather", "ulysses", "blocks", "groups"):
        plan = plans[name] = flexcp.Planner(32, 8, 128, cluster=machine, strategy=name)(lengths)
        parts = predict(plan.placement, plan.shape, plan.cluster, plan.cost).breakdown
        size, balance = int(plan.bytes().sum()), imbalance(plan.work())
        found.append(StrategyTime(name, parts["attention"], parts["exposed"], parts["linear"], size, balance))
    sections = [
        timed_plan(plans["blocks"]),
        strategies_section(found, "Predicted step time of one layer, forward and backward."),
    ]
    return write_report(path, sections, "web, 131,072 tokens on 2 nodes of 4 H100", "made by the tests' browser run")


def write_few_rows(path: Path) -> int:
    """Write a page with every kind of section, with a plan on two ranks so that tables have few rows."""
    plan = flexcp.Planner(**HEADS, cluster=flexcp.cluster("h100", 2, 1), strategy="blocks")([900, 31])
    kinds = every_kind()
    return write_report(path, [kinds[0], timed_plan(plan), *kinds[3:]], "Few rows")


def write_advice(path: Path) -> None:
    """Write the page of ``flexcp advise`` for passes that differ, so that no pass takes their mean time."""
    from typer.testing import CliRunner

    from flexcp.cli.main import app

    lengths = path.with_suffix(".txt")
    lengths.write_text("\n".join(["9000", "3000", "100", "50", *["700"] * 16, *["2000"] * 6]))
    words = ["advise", str(lengths), "--ranks", "4", "--max-tokens-per-rank", "4k", "--today", "ring"]
    words += ["--html", str(path)]
    CliRunner().invoke(app, words, catch_exceptions=False)
