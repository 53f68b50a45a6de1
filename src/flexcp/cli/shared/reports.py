"""What ``--html FILE`` writes: the sections of each command's report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flexcp.cli.shared.progress import compiling, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexcp.plan.plan import Plan
    from flexcp.report.markup import Cell
    from flexcp.report.plan_time import PlanTime
    from flexcp.report.sections import Section
    from flexcp.train.loop import StepReport, TrainConfig


def report_plan(path: Path, plan: Plan, time: PlanTime | None = None) -> None:
    """One plan, with the time of its simulation where there was one."""
    with compiling("simulating and drawing the plan"):
        sections = [timed_plan(plan, time=time)]
    write(path, sections, f"{plan.label} on {plan.cluster}", about(plan))


def report_training(path: Path, steps: Sequence[StepReport], config: TrainConfig) -> None:
    """What a training run said of its steps."""
    from flexcp.report.sections import lines_section, table_section, words_section

    numbers = [s.step for s in steps]
    seconds = sum(s.measured_ms for s in steps) / 1000
    figures = [
        ("steps", f"{len(steps)}"),
        ("loss, first to last", f"{steps[0].loss:.4f} to {steps[-1].loss:.4f}"),
        ("tokens a second", f"{sum(s.tokens for s in steps) / seconds:,.0f}"),
        ("worst compute, max / mean", f"{max(s.compute_imbalance for s in steps):.3f}"),
        ("bytes a step", f"{sum(s.bytes for s in steps) / len(steps) / 1e6:,.1f} MB"),
    ]
    headers = [
        "step",
        "loss",
        "documents",
        "tokens",
        "planning ms",
        "measured ms",
        "predicted ms",
        "bytes",
        "compute",
        "token balance",
    ]
    rows: list[list[Cell]] = [
        [
            s.step,
            s.loss,
            s.documents,
            s.tokens,
            s.planning_ms,
            s.measured_ms,
            s.predicted_ms,
            s.bytes,
            s.compute_imbalance,
            s.token_imbalance,
        ]
        for s in steps
    ]
    times = {"measured ms": [s.measured_ms for s in steps], "predicted ms": [s.predicted_ms for s in steps]}
    balance = {"compute": [s.compute_imbalance for s in steps], "tokens": [s.token_imbalance for s in steps]}
    sections = [
        words_section("The run", ["Measured on the ranks it ran on; predictions are the cost model's."], figures),
        lines_section("Loss", numbers, {"loss": [s.loss for s in steps]}, "Of all ranks together."),
        lines_section("Time of a step", numbers, times, "Without planning."),
        lines_section("Balance", numbers, balance, "Max / mean over ranks; 1 is perfect."),
        table_section("All steps", headers, rows, "Everything that was said of every step."),
    ]
    about = (
        f"{config.model} on {config.data}, {config.tokens:,} tokens a step, strategy {config.strategy}, {config.dtype}"
    )
    write(path, sections, "A training run", about)


def timed_plan(plan: Plan, title: str | None = None, time: PlanTime | None = None) -> Section:
    """A plan with the simulated timeline of a layer; ``time`` is what a simulation of the plan took, else it is predicted."""
    from flexcp.report.layer_timeline import layer_timeline
    from flexcp.report.plan_section import plan_section

    timeline = layer_timeline(plan)
    return plan_section(plan, title, timeline.bars, timeline.says, time)


def about(plan: Plan) -> str:
    """A plan's batch in one line."""
    batch, shape = plan.batch, plan.shape
    masks = ", ".join(f"{m.rules[0]}" if len(m.rules) == 1 else "one mask per document" for m in batch.masks)
    return (
        f"{batch.documents:,} documents, {batch.tokens:,} tokens, {masks}; {shape.heads} query and {shape.kv_heads} KV heads of "
        f"{shape.head_dim}, {shape.dtype}; plan {plan.hash[:12]}"
    )


def write(path: Path, sections: Sequence[Section], title: str, subtitle: str) -> None:
    """Write the page and say where it is."""
    from flexcp.report.page import write_report

    size = write_report(path, sections, title, subtitle)
    say(f"report: {path} ({size / 1e6:.2f} MB)")
