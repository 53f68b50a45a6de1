"""Rows of the page of the three papers: a figure's cell, as published, with the published planner and with ``auto``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from papers_runs import OverStatic

HEADS = (
    "figure",
    "what",
    "theirs",
    "their planner here",
    "`auto` here",
    "`auto` beside it",
    "`auto` over static of each batch",
    "over one fixed",
    "how",
)
SAME = 0.05
"""Two values are the same when they differ by no more than this part."""
SIMULATED, MEASURED, FROM_PLANS = "simulated", "measured", "from plans"
Show = Callable[[float], str]


@dataclass(frozen=True)
class Row:
    """One cell: what the paper says (a number or words), what its planner and ``auto`` reach here, and whether more is better.

    ``kind`` is how the last two were found, or why they are missing. ``static``, where times are compared, sets ``auto`` beside static
    methods of any degree.
    """

    figure: str
    cell: str
    theirs: float | str
    planner: float | None
    auto: float | None
    kind: str
    more_is_better: bool = True
    show: Show = "{:.2f}".format
    static: OverStatic | None = None

    def cells(self) -> list[str]:
        """The row as the page prints it."""
        theirs = self.theirs if isinstance(self.theirs, str) else self.show(self.theirs)
        planner, auto = ("-" if value is None else self.show(value) for value in (self.planner, self.auto))
        over = ["-", "-"] if self.static is None else [f"{ratio:.2f}" for ratio in self.static]
        return [self.figure, self.cell, theirs, planner, auto, self.verdict, *over, self.kind]

    @property
    def verdict(self) -> str:
        """``auto`` beside the published planner, both found here."""
        if self.planner is None or self.auto is None:
            return "-"
        return beside(self.auto, self.planner, self.more_is_better)


def beside(value: float, other: float, more_is_better: bool) -> str:
    """better, same or worse."""
    if abs(value - other) <= SAME * abs(other):
        return "same"
    return "better" if (value > other) == more_is_better else "worse"


def absent(figure: str, cell: str, theirs: str, why: str) -> Row:
    """A figure that cannot be had here."""
    return Row(figure, cell, theirs, None, None, why)


def whole(value: float) -> str:
    """Without decimals."""
    return f"{value:,.0f}"


def percent(value: float) -> str:
    """As a percentage."""
    return f"{value:.1%}"
