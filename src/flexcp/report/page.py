"""A report as one HTML file that needs nothing else.

Scripts, styles and numbers are inside, and its security policy forbids the network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from flexcp.io.atomic_files import write_whole
from flexcp.report.sections import Section
from flexcp.version import __version__

SCRIPTS = (
    "numbers.js",
    "colours.js",
    "view.js",
    "stream.js",
    "matrix.js",
    "tree.js",
    "ranks.js",
    "charts.js",
    "boot.js",
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
KEYS = (
    "Arrow keys move a cursor over a picture and read out what is under it; "
    "plus and minus zoom, 0 shows all, Escape ends."
)


def write_report(path: str | Path, sections: Sequence[Section], title: str, subtitle: str = "") -> int:
    """Write the sections as one page, completely or not at all, and return the size of the file in bytes.

    Raises ValueError if the file cannot be written or there are no sections.
    """
    text = page(sections, title, subtitle).encode()
    target = Path(path)
    try:
        write_whole(target, text)
    except OSError as error:
        raise ValueError(f"cannot write the report to {target}: {error.strerror}") from None
    return len(text)


def page(sections: Sequence[Section], title: str, subtitle: str = "") -> str:
    """Return the HTML of a page with these sections; raise ValueError if there are none."""
    if not sections:
        raise ValueError("a report needs at least one section")
    links = "".join(f'<li><a href="#s{i}">{escape(s.title)}</a></li>' for i, s in enumerate(sections))
    bodies = "".join(
        f'<section id="s{i}" aria-labelledby="t{i}"><h2 id="t{i}">{escape(s.title)}</h2>{s.body(i)}</section>'
        for i, s in enumerate(sections)
    )
    # "</script" would end the script element early, and "<!--<script" would keep it from ending. json.dumps itself
    # escapes what is not ASCII.
    data = json.dumps([dict(s.data) for s in sections], separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html><html lang="en" data-theme="light"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="generator" content="flexcp '
        f'{__version__}">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head><body>"
        f'<a class="skip" href="#main">Skip to the content</a>'
        f'<header class="page"><div><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></div>'
        f'<button type="button" id="theme">Dark</button></header>'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav><main id="main"><p class="unseen" '
        f'id="keys">{KEYS}</p>{bodies}</main><div id="tip" role="tooltip" hidden></div><div id="live" class="unseen" '
        f'aria-live="polite"></div><script type="application/json" id="data">{data}</script>'
        f'<script>"use strict";{"".join(_asset(name) for name in SCRIPTS)}</script></body></html>'
    )


def _asset(name: str) -> str:
    return files("flexcp.report").joinpath("page", name).read_text()
