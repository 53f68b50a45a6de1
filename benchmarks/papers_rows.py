"""Rows of the page of the three papers: a cell of a figure as published, with the published planner, and with ``auto``.

A row may have a *verdict*: ``auto`` is better than, the same as or worse than the published planner, in time, waiting,
bytes, balance or planning. The same comparison (same batches, planner and quantity) may occur in several rows, with
another baseline or in another figure; it is judged in the first of them, and the others refer to it.
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
"""Two values are the same if they differ by no more than this share."""
SIMULATED, MEASURED, COUNTED = "simulated", "measured", "counted in plans"
TIME, WAITING, BYTES, BALANCE, PLANNING = "time", "waiting", "bytes", "balance", "planning"
BOX_TIME = "time in the box"
ASPECTS = (TIME, BOX_TIME, WAITING, BYTES, BALANCE, PLANNING)
"""The quantities that a verdict may be about."""
NONE, AGAIN = "-", "as above"
"""No verdict, and a verdict given in an earlier row of the same comparison."""
Show = Callable[[float], str]


@dataclass(frozen=True)
class Row:
    """One cell: the published value (a number or words), the values of its planner and of ``auto`` here,
    and whether more is better.

    ``kind`` says how the last two were found, or why they are missing. ``static``, for times, are speed-ups of ``auto``
    over static methods of any degree. ``aspect`` is what the verdict is about, None if there is none. Rows of one
    ``comparison`` (by default the cell's words) share a verdict. ``part`` distinguishes rows of a figure in the
    summary. ``chose`` are the strategies that ``auto`` chose, one for each batch, in one of the rows about them. Texts
    use two more numbers: ``base_off``, the error of a ratio's baseline against its published time, and ``aside``,
    which the function that makes the row describes.
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
    chose: tuple[str, ...] = ()
    base_off: float | None = None
    aside: float | None = None

    def cells(self, verdict: str | None = None) -> list[str]:
        """Return the row as the page prints it, with ``verdict`` instead of its own if given."""
        theirs = self.theirs if isinstance(self.theirs, str) else self.show(self.theirs)
        planner, auto = (NONE if value is None else self.show(value) for value in (self.planner, self.auto))
        over = [NONE, NONE] if self.static is None else [f"{ratio:.2f}" for ratio in self.static]
        batches = NONE if self.planner is None and self.auto is None else str(self.batches)
        return [self.figure, self.cell, theirs, planner, auto, verdict or self.verdict, *over, batches, self.kind]

    @property
    def verdict(self) -> str:
        """The verdict on ``auto`` against the published planner, both as found here."""
        if self.aspect is None or self.planner is None or self.auto is None:
            return NONE
        return beside(self.auto, self.planner, self.more_is_better)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return the verdict of every row, each comparison judged once."""
    seen: set[tuple[str | None, str]] = set()
    found = []
    for row in rows:
        key = (row.aspect, row.comparison or f"{row.figure}: {row.cell}")
        found.append(AGAIN if row.verdict != NONE and key in seen else row.verdict)
        if row.verdict != NONE:
            seen.add(key)
    return found


def how_found(kind: str) -> str:
    """Return how the values of a row were found, in a word or two, without conditions and reasons."""
    return kind.partition(",")[0]


def counts(rows: Sequence[Row]) -> dict[str, Counter[str]]:
    """Return how many comparisons of each aspect are better, the same and worse."""
    found: dict[str, Counter[str]] = {aspect: Counter() for aspect in ASPECTS}
    for row, verdict in zip(rows, verdicts(rows), strict=True):
        if verdict not in (NONE, AGAIN):
            assert row.aspect is not None
            found[row.aspect][verdict] += 1
    return {aspect: of for aspect, of in found.items() if of}


def beside(value: float, other: float, more_is_better: bool) -> str:
    """Return "better", "same" or "worse"."""
    if abs(value - other) <= SAME * abs(other):
        return "same"
    return "better" if (value > other) == more_is_better else "worse"


def absent(figure: str, cell: str, theirs: str, why: str) -> Row:
    """Return the row of a figure that cannot be made here."""
    return Row(figure, cell, theirs, None, None, why)


def whole(value: float) -> str:
    """Format a number without decimals."""
    return f"{value:,.0f}"


def percent(value: float) -> str:
    """Format a number as a percentage."""
    return f"{value:.1%}"


def span(values: Sequence[float], show: Show = "{:.2f}".format) -> str:
    """Return the range from the least to the largest value, or a single value if both are shown the same."""
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"
