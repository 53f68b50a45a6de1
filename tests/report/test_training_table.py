"""Tests of the tables of a training run in a report: every column of every step, and the key figures."""

from __future__ import annotations

from typing import Any

from flexcp.report.training_table import COLUMNS, training_sections
from flexcp.train.loop import StepReport


def steps() -> list[StepReport]:
    """Return two steps whose numbers are all different."""
    names = list(StepReport.__dataclass_fields__)
    values: list[dict[str, Any]] = [{name: 10 * n + at for at, name in enumerate(names)} for n in (1, 2)]
    return [StepReport(**each) for each in values]


def test_every_number_of_a_step_is_in_the_table() -> None:
    found = training_sections(steps())
    assert [section.title for section in found] == ["The run", "Loss", "Time of a step", "Balance", "All steps"]
    shown = found[-1].body(4)
    for step in steps():
        for name, cell in COLUMNS.items():
            assert f">{name}<" in shown and f">{cell(step)}<" in shown, name


def test_tokens_a_second_are_those_of_all_steps() -> None:
    run = steps()
    seconds = sum(step.measured_ms for step in run) / 1000
    assert f"{sum(step.tokens for step in run) / seconds:,.0f}" in training_sections(run)[0].body(0)
