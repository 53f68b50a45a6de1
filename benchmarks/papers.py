"""The three papers figure by figure: published, ours with their planner, ours with ``auto``.
``make papers`` writes docs/results/papers.md.

It takes under an hour on two cores; ``--quick`` draws fewer batches and sizes, ``--only dcp`` (or fcp, dhp) makes one
part. The docstrings of ``papers_dcp.py``, ``papers_fcp.py`` and ``papers_dhp.py`` say how settings differ from the
papers'. Plans and simulations are kept for the whole run (``papers_runs.py``). Texts are in ``papers_words.py``; the
summary is made from the rows (``papers_summary.py``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from rich.console import Console

import papers_dcp
import papers_dhp
import papers_fcp
import papers_words
from papers_rows import HEADS, Row, verdicts
from papers_runs import Runs
from papers_summary import summary, told
from simulated import table


@dataclass(frozen=True)
class Paper:
    """A part of the page: the function that makes its rows, and the function that makes its texts from the rows."""

    title: str
    rows: Callable[[bool, Runs], list[Row]]
    words: Callable[[Sequence[Row]], list[str]]


PAPERS = {
    "dcp": Paper("DCP (arXiv 2510.10620)", papers_dcp.rows, papers_words.dcp),
    "fcp": Paper("FCP (arXiv 2605.08524)", papers_fcp.rows, papers_words.fcp),
    "dhp": Paper("DHP, flexible groups (arXiv 2602.21788)", papers_dhp.rows, papers_words.dhp),
}


def page(quick: bool, only: str | None = None) -> str:
    """Return the page, or the part of one paper."""
    begin, console, runs = time.process_time(), Console(stderr=True), Runs(papers_dcp.MAKERS)
    found: dict[str, list[Row]] = {}
    for name, paper in PAPERS.items():
        if only in (None, name):
            started = time.monotonic()
            with console.status(paper.title):
                found[name] = paper.rows(quick, runs)
            console.print(f"{paper.title}: {len(found[name])} rows, {(time.monotonic() - started) / 60:.1f} minutes")
    return written(found, quick, (time.process_time() - begin) / 60)


def written(
    found: Mapping[str, Sequence[Row]], quick: bool, minutes: float, papers: Mapping[str, Paper] = PAPERS
) -> str:
    """Return the page made of rows by paper: summaries first, then every row."""
    lines = [
        "# The three papers, figure by figure",
        "",
        f"**Simulated** unless a row says otherwise, by `make papers{' QUICK=1' * quick}` on "
        f"{date.today().isoformat()} in {minutes:.0f} CPU minutes. {papers_words.intro()}",
        "",
        *papers_words.LEGEND,
        "",
        "What a reader of the papers would object to:",
        "",
        *papers_words.LIMITS,
        "",
        "## In short",
        "",
    ]
    for name, rows in found.items():
        title = papers[name].title
        lines += [f"**{title}**, `auto` against its planner: {told(rows)}.", "", *summary(rows)]
    for name, rows in found.items():
        lines += [f"## {papers[name].title}", ""]
        for paragraph in papers[name].words(rows):
            lines += [paragraph, ""]
        lines += table(HEADS, [row.cells(verdict) for row, verdict in zip(rows, verdicts(rows), strict=True)])
    return "\n".join(lines)


def main() -> None:
    """Make the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=tuple(PAPERS), help="one paper's part")
    asked = parser.parse_args()
    text = page(asked.quick, asked.only)
    print(text)
    if asked.write:
        asked.write.write_text(text)


if __name__ == "__main__":
    main()
