"""The HTML elements that a report is made of, with every text escaped.

Headings, words and tables are written here, so that a page can be read, printed and searched without scripts; the
scripts only draw pictures. A figure is a canvas with buttons and, folded away below it, a table of the same data.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

Cell = str | int | float
"""A cell of a table: numbers are aligned right and sorted as numbers."""


def paragraphs(texts: Sequence[str]) -> str:
    """Return each text as a paragraph."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Return key figures, (name, value) pairs, as boxes."""
    boxes = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    return f'<dl class="tiles">{boxes}</dl>'


def table(headers: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str) -> str:
    """Return a table that scrolls inside itself and sorts on a click on a header.

    Numbers are aligned right and sorted as numbers.
    """
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button" class="sort">{escape(h)}</button></th>'
        for h in headers
    )
    body = "".join(f"<tr>{''.join(_cell(c) for c in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="group" tabindex="0" aria-label="{escape(caption, quote=True)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
    return f'<td class="number" data-value="{value}">{text}</td>'


def folded(summary: str, inside: str) -> str:
    """Return an element that shows only ``summary`` until it is unfolded; ``inside`` is HTML."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def choice(name: str, label: str, options: Sequence[tuple[Any, str]]) -> str:
    """Return a labelled drop-down list with (value, text) options for a figure; scripts find it by ``name``."""
    items = "".join(f'<option value="{escape(str(v), quote=True)}">{escape(t)}</option>' for v, t in options)
    return f'<label>{escape(label)} <select data-choice="{escape(name, quote=True)}">{items}</select></label>'


def figure(
    picture: str,
    section: int,
    *,
    title: str,
    says: str,
    caption: str,
    behind: str,
    tools: str = "",
    zoom: bool = True,
    half: bool = False,
) -> str:
    """Return a figure with a canvas that the script named ``picture`` draws, from the data of section ``section``.

    ``section`` is the section's number on the page. ``says`` describes the picture in words, for screen readers.
    ``behind`` is the HTML below it (a table of the same data), ``tools`` that of its controls. ``zoom`` adds buttons
    for zooming. Two ``half`` figures stand side by side.
    """
    buttons = "".join(
        f'<button type="button" data-zoom="{way}" aria-label="{name}: {escape(title, quote=True)}">{sign}</button>'
        for way, name, sign in (("in", "Zoom in", "+"), ("out", "Zoom out", "\u2212"), ("all", "Show all", "all"))
    )
    label = f"Tools of {title}"
    inside = (buttons if zoom else "") + tools
    bar = f'<div class="tools" role="group" aria-label="{escape(label, quote=True)}">{inside}</div>' if inside else ""
    return (
        f'<figure{" class=half" if half else ""} data-picture="{picture}" '
        f'data-section="{section}"><h3>{escape(title)}</h3><p class="caption">{escape(caption)}</p>'
        f'{bar}<canvas tabindex="0" role="application" aria-roledescription="picture" aria-describedby="keys" '
        f'aria-label="{escape(title + ": " + says, quote=True)}"></canvas>{behind}</figure>'
    )
