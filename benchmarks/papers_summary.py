"""The summary of the page of the three papers: a line for each figure of a paper, made from its rows,
and the counts of verdicts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from papers_rows import AGAIN, NONE, Row, counts, how_found, span, verdicts
from simulated import table

HEADS = (
    "figure",
    "rows",
    "theirs",
    "their planner here, median (range)",
    "`auto` here",
    "`auto` against their planner",
    "`auto` over static of each batch, median",
    "over one fixed, median",
    "how",
)


def summary(rows: Sequence[Row]) -> list[str]:
    """Return a table with a line for every figure, or part of a figure, that has numbers here."""
    figures: dict[tuple[str, str], list[tuple[Row, str]]] = {}
    for row, verdict in zip(rows, verdicts(rows), strict=True):
        if row.planner is not None or row.auto is not None:
            figures.setdefault((row.figure, row.part), []).append((row, verdict))
    return table(HEADS, [_line(*name, found) for name, found in figures.items()])


def told(rows: Sequence[Row]) -> str:
    """Return the counts of verdicts in words, by aspect, with how the compared values were found."""
    judged = [row for row, verdict in zip(rows, verdicts(rows), strict=True) if verdict not in (NONE, AGAIN)]
    return "; ".join(
        f"{aspect} ({_how([row for row in judged if row.aspect == aspect])}): {found['better']} better, "
        f"{found['same']} the same, {found['worse']} worse"
        for aspect, found in counts(rows).items()
    )


def _how(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(how_found(row.kind) for row in rows))


def _line(figure: str, part: str, found: Sequence[tuple[Row, str]]) -> list[str]:
    rows = [row for row, _ in found]
    judged = [verdict for _, verdict in found if verdict not in (NONE, AGAIN)]
    again = any(verdict == AGAIN for _, verdict in found)
    words = ", ".join(f"{judged.count(each)} {each}" for each in ("better", "same", "worse") if each in judged)
    static = [row.static for row in rows if row.static is not None]
    over = [f"{statistics.median(ratios):.2f}" for ratios in zip(*static, strict=True)] if static else [NONE, NONE]
    here = [_middle(rows, [getattr(row, name) for row in rows]) for name in ("planner", "auto")]
    name = f"{figure}, {part}" if part else figure
    return [name, str(len(rows)), _theirs(rows), *here, words or (AGAIN if again else NONE), *over, _how(rows)]


def _theirs(rows: Sequence[Row]) -> str:
    """Return published numbers as a range, and published words, each once."""
    numbers = [row.theirs for row in rows if not isinstance(row.theirs, str)]
    texts = [row.theirs for row in rows if isinstance(row.theirs, str)]
    words = list(dict.fromkeys(part for text in texts for part in text.split("; ")))
    return "; ".join([*([span(numbers, rows[0].show)] if numbers else []), *words])


def _middle(rows: Sequence[Row], values: Sequence[float | None]) -> str:
    some = [value for value in values if value is not None]
    if not some:
        return NONE
    show = rows[0].show
    middle, around = show(statistics.median(some)), span(some, show)
    return middle if middle == around else f"{middle} ({around})"
