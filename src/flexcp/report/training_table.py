"""The report of a training run: key figures, lines over steps, and a table with a row for every step.

A new column needs an attribute of :class:`TrainedStep` and an entry of ``COLUMNS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flexcp.report.markup import Cell
from flexcp.report.sections import Section, lines_section, table_section, words_section


class TrainedStep(Protocol):
    """The numbers of one step that the tables show; :class:`flexcp.train.loop.StepReport` has them."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def documents(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def planning_ms(self) -> float: ...
    @property
    def measured_ms(self) -> float: ...
    @property
    def predicted_ms(self) -> float: ...
    @property
    def bytes(self) -> int: ...
    @property
    def compute_imbalance(self) -> float: ...
    @property
    def token_imbalance(self) -> float: ...


COLUMNS: dict[str, Callable[[TrainedStep], Cell]] = {
    "step": lambda s: s.step,
    "loss": lambda s: s.loss,
    "documents": lambda s: s.documents,
    "tokens": lambda s: s.tokens,
    "planning ms": lambda s: s.planning_ms,
    "measured ms": lambda s: s.measured_ms,
    "predicted ms": lambda s: s.predicted_ms,
    "bytes": lambda s: s.bytes,
    "compute": lambda s: s.compute_imbalance,
    "token balance": lambda s: s.token_imbalance,
}


def training_sections(steps: Sequence[TrainedStep]) -> list[Section]:
    """Return the sections that show a training run of at least one step."""
    numbers = [s.step for s in steps]
    seconds = sum(s.measured_ms for s in steps) / 1000
    figures = [
        ("steps", f"{len(steps)}"),
        ("loss, first to last", f"{steps[0].loss:.4f} to {steps[-1].loss:.4f}"),
        ("tokens a second", f"{sum(s.tokens for s in steps) / seconds:,.0f}"),
        ("worst compute, max / mean", f"{max(s.compute_imbalance for s in steps):.3f}"),
        ("bytes a step", f"{sum(s.bytes for s in steps) / len(steps) / 1e6:,.1f} MB"),
    ]
    rows = [[cell(s) for cell in COLUMNS.values()] for s in steps]
    times = {"measured ms": [s.measured_ms for s in steps], "predicted ms": [s.predicted_ms for s in steps]}
    balance = {"compute": [s.compute_imbalance for s in steps], "tokens": [s.token_imbalance for s in steps]}
    return [
        words_section("The run", ["Measured on the ranks it ran on; predictions are the cost model's."], figures),
        lines_section("Loss", numbers, {"loss": [s.loss for s in steps]}, "Of all ranks together."),
        lines_section("Time of a step", numbers, times, "Without planning."),
        lines_section("Balance", numbers, balance, "Max / mean over ranks; 1 is perfect."),
        table_section("All steps", list(COLUMNS), rows, "Everything that was said of every step."),
    ]
