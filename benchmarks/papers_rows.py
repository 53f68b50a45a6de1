"""Rows of the page of the three papers: a figure's cell, as published, with the published planner and with ``auto``.

A row may have a *verdict*: ``auto`` against the published planner, better, same or worse, in time, bytes, balance or
planning. One comparison (the same batches, the same planner, the same quantity) often stands in several rows, over
another baseline or in another figure; it is judged in the first of them, and the others say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from papers_runs import OverStatic

HEADS = (
    "figure",
    "what",
    "theirs",
    "their planner here",
    "`auto` here",
    "`auto` against their planner",
    "`auto` over static of each batch",
    "over one fixed",
    "batches",
    "how",
)
SAME = 0.05
"""Two values are the same when they differ by no more than this part."""
SIMULATED, MEASURED, COUNTED = "simulated", "measured", "counted in plans"
TIME, BYTES, BALANCE, PLANNING = "time", "bytes", "balance", "planning"
ASPECTS = (TIME, BYTES, BALANCE, PLANNING)
"""What a verdict may be about."""
NONE, AGAIN = "-", "as above"
"""No verdict, and one that an earlier row of the same comparison has."""
Show = Callable[[float], str]


@dataclass(frozen=True)
class Row:
    """One cell: what the paper says (a number or words), what its planner and ``auto`` reach here,
    and whether more is better.

    ``kind`` is how the last two were found, or why they are missing. ``static``, where times are compared, sets
    ``auto`` beside static methods of any degree. ``aspect`` is what a verdict is about, None where there is none. Rows
    of one ``comparison`` (the cell's words where it is empty) share a verdict. ``part`` tells rows of a figure apart in
    the summary. ``base_off`` is how far the baseline of a ratio is from its published time.
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
    aspect: str | None = TIME
    comparison: str = ""
    part: str = ""
    batches: int = 1
    base_off: float | None = None

    def cells(self, verdict: str | None = None) -> list[str]:
        """The row as the page prints it, with another verdict than its own where one is given."""
        theirs = self.theirs if isinstance(self.theirs, str) else self.show(self.theirs)
        planner, auto = (NONE if value is None else self.show(value) for value in (self.planner, self.auto))
        over = [NONE, NONE] if self.static is None else [f"{ratio:.2f}" for ratio in self.static]
        batches = NONE if self.planner is None and self.auto is None else str(self.batches)
        return [self.figure, self.cell, theirs, planner, auto, verdict or self.verdict, *over, batches, self.kind]

    @property
    def verdict(self) -> str:
        """``auto`` against the published planner, both found here."""
        if self.aspect is None or self.planner is None or self.auto is None:
            return NONE
        return beside(self.auto, self.planner, self.more_is_better)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """The verdict of every row, each comparison's once."""
    seen: set[tuple[str | None, str]] = set()
    found = []
    for row in rows:
        key = (row.aspect, row.comparison or f"{row.figure}: {row.cell}")
        found.append(AGAIN if row.verdict != NONE and key in seen else row.verdict)
        if row.verdict != NONE:
            seen.add(key)
    return found


def counts(rows: Sequence[Row]) -> dict[str, Counter[str]]:
    """How many comparisons of each aspect are better, same and worse."""
    found: dict[str, Counter[str]] = {aspect: Counter() for aspect in ASPECTS}
    for row, verdict in zip(rows, verdicts(rows), strict=True):
        if verdict not in (NONE, AGAIN):
            assert row.aspect is not None
            found[row.aspect][verdict] += 1
    return {aspect: of for aspect, of in found.items() if of}


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


def span(values: Sequence[float], show: Show = "{:.2f}".format) -> str:
    """The least and the largest of some values, or the one there is."""
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"
