"""The reports of ``--html FILE``: the sections of each command's page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flexcp.cli.shared.progress import compiling, say
from flexcp.io.sizes import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexcp.plan.plan import Plan
    from flexcp.report.plan_time import PlanTime
    from flexcp.report.sections import Section
    from flexcp.train.loop import StepReport, TrainConfig


def report_plan(path: Path, plan: Plan, time: PlanTime | None = None) -> None:
    """Write the HTML page of one plan to ``path``.

    ``time`` is the simulated time that the page shows. By default all attention layers of the plan are simulated, with
    neither the vocabulary projection nor the sum of gradients.
    """
    with compiling("simulating and drawing the plan"):
        sections = [timed_plan(plan, time=time)]
    write(path, sections, f"{plan.label} on {plan.cluster}", about(plan))


def report_training(path: Path, steps: Sequence[StepReport], config: TrainConfig) -> None:
    """Write the page of a training run to ``path``."""
    from flexcp.report.training_table import training_sections

    about = (
        f"{config.model} on {config.data}, {config.tokens:,} tokens a step, strategy {config.strategy}, {config.dtype}"
    )
    write(path, training_sections(steps), "A training run", about)


def timed_plan(plan: Plan, title: str | None = None, time: PlanTime | None = None) -> Section:
    """Return the page section of a plan, with the simulated timeline of a layer.

    ``time`` is the plan's simulated time; by default all layers of the plan are simulated.
    """
    from flexcp.report.layer_timeline import layer_timeline
    from flexcp.report.plan_tables import plan_section

    timeline = layer_timeline(plan)
    return plan_section(plan, title, timeline.bars, timeline.says, time)


def about(plan: Plan) -> str:
    """Describe a plan's batch and attention shape in one line."""
    batch, shape = plan.batch, plan.shape
    masks = ", ".join(f"{m.rules[0]}" if len(m.rules) == 1 else "one mask per document" for m in batch.masks)
    return (
        f"{count_of(batch.documents, 'document')}, {count_of(batch.tokens, 'token')}, {masks}; "
        f"{shape.heads} query and {shape.kv_heads} KV heads of {shape.head_dim}, {shape.dtype}; plan {plan.hash[:12]}"
    )


def write(path: Path, sections: Sequence[Section], title: str, subtitle: str) -> None:
    """Write a page of these sections to ``path``, and say on stderr where it is and how large."""
    from flexcp.report.page import write_report

    size = write_report(path, sections, title, subtitle)
    say(f"report: {path} ({size / 1e6:.2f} MB)")
