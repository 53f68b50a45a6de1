"""The output of ``flexcp train``: a line for every finished step, and a summary at the end."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from flexcp.io.sizes import size
from flexcp.io.terminal_text import visible
from flexcp.train.documents import Documents
from flexcp.train.loop import StepReport, TrainConfig

if TYPE_CHECKING:
    from rich.console import Console

HEADER = (
    f"{'step':>5} {'loss':>9} {'docs':>5} {'tokens/s':>9} {'measured':>10} {'predicted':>10} {'bytes':>9}"
    "  compute  tokens"
)


class Table:
    """The table of ``flexcp train``: prints a line for every step on ``console``, and keeps the reports.

    Without a console (all ranks of torchrun but the first) it prints nothing.
    """

    def __init__(self, console: Console | None, config: TrainConfig) -> None:
        self.console, self.config = console, config
        self.reports: list[StepReport] = []
        if console is not None:
            console.print(
                visible(f"{config.model} on {config.data}, {config.tokens} tokens a step, {config.strategy}"),
                highlight=False,
                markup=False,
            )
            documents = Documents(config.data, config.tokens, vocabulary=256)
            for told in (documents.repeats(config.steps), documents.cut(config.steps)):
                if told is not None:
                    console.print(told, highlight=False)
            self.status = console.status("starting ranks")
            self.status.start()

    def add(self, report: StepReport) -> None:
        """Add the report of a finished step and print its line."""
        self.reports.append(report)
        if self.console is None:
            return
        if len(self.reports) == 1:
            self.console.print(HEADER, highlight=False)
        self.console.print(line(report), highlight=False)
        self.status.update(f"step {report.step + 1} of {self.config.steps}")

    def close(self) -> None:
        """Stop the progress display."""
        if self.console is not None:
            self.status.stop()

    def summary(self) -> str:
        """Return a summary of the run; the first step warms up and is left out of the times if there are others."""
        timed = self.reports[1:] or self.reports
        measured, predicted = (median(getattr(r, n) for r in timed) for n in ("measured_ms", "predicted_ms"))
        return (
            f"loss {self.reports[0].loss:.4f} -> {self.reports[-1].loss:.4f}; "
            f"{median(r.tokens_per_second for r in timed):,.0f} tokens/s; {measured:.1f} ms a step measured, "
            f"{predicted:.1f} ms predicted for {self.config.preset} ({measured / predicted:.2f} x); planning "
            f"{median(r.planning_ms for r in timed):.1f} ms (medians)"
        )


def line(r: StepReport) -> str:
    """Return one step as a line of text, under the columns of ``HEADER``."""
    return (
        f"{r.step:>5} {r.loss:>9.5f} {r.documents:>5} {r.tokens_per_second:>9,.0f} {r.measured_ms:>7.1f} ms "
        f"{r.predicted_ms:>7.1f} ms {size(r.bytes):>9}  {r.compute_imbalance:>7.2f} {r.token_imbalance:>7.2f}"
    )
