"""The sections of a report: a title, words and tables as HTML, and the numbers that the section's pictures draw.

Sections of any content are made here: words (:func:`words_section`), code to copy (:func:`code_section`), a table
(:func:`table_section`), lines over steps (:func:`lines_section`). Sections with columns of their own have their own
files, which ``report/__init__.py`` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from flexcp.report.markup import figure, folded, paragraphs, table, tiles


@dataclass(frozen=True)
class Section:
    """One section of a page.

    ``body(number)`` returns the HTML below the title, for the section's number on the page; ``data`` is what its
    pictures draw, as JSON values.
    """

    title: str
    body: Callable[[int], str]
    data: Mapping[str, Any]


KEYS = '<p class="tools">{}</p>'.format(
    "".join(
        f'<span class="key"><i style="background:var(--{kind})"></i>{text}</span>'
        for kind, text in (
            ("attention", "attention"),
            ("exposed", "waiting for others"),
            ("linear", "the rest: projections, feed-forward, gradient sync"),
        )
    )
)
"""The legend of the colours of a rank's time."""


def words_section(title: str, texts: Sequence[str], figures: Sequence[tuple[str, str]] = ()) -> Section:
    """Return a section of paragraphs, with key figures, (name, value) pairs, below them."""
    return Section(title, lambda _: paragraphs(texts) + (tiles(figures) if figures else ""), {})


def code_section(title: str, blocks: Sequence[tuple[str, str]]) -> Section:
    """Return a section of code blocks; ``blocks`` are (heading, code) pairs."""
    inside = "".join(
        f'<h3>{escape(name)}</h3><pre tabindex="0"><code>{escape(code)}</code></pre>' for name, code in blocks
    )
    return Section(title, lambda _: f'<div class="words">{inside}</div>', {})


def table_section(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str | int | float]], says: str
) -> Section:
    """Return a section with one table below the sentence ``says``."""
    return Section(title, lambda _: paragraphs([says]) + table(headers, rows, title), {})


def lines_section(
    title: str, steps: Sequence[int], series: Mapping[str, Sequence[float]], says: str, unit: str = "step"
) -> Section:
    """Return a section with a line chart, one line for each name of ``series``, and its table.

    ``steps`` are the values of the horizontal axis, which is called ``unit``; ``says`` is the caption. Raises
    ValueError if a line does not have a value for each step.
    """
    for name, values in series.items():
        if len(values) != len(steps):
            raise ValueError(f"line {name!r} has {len(values)} values for {len(steps)} steps")
    rows = [[int(step), *(float(values[i]) for values in series.values())] for i, step in enumerate(steps)]
    ends = "; ".join(
        f"{name} from {values[0]:.4g} to {values[-1]:.4g}" for name, values in series.items() if len(values)
    )

    def body(number: int) -> str:
        behind = folded("As a table", table([unit, *series], rows, title))
        return figure("lines", number, title=title, says=ends, caption=says, behind=behind)

    data = {"x": list(steps), "unit": unit, "series": [{"name": n, "values": list(v)} for n, v in series.items()]}
    return Section(title, body, data)
